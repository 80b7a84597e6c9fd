"""A configuration file to begin with: every setting, its help and its default, as comments. Pure."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping

from stateroom.daemon.settings.known import Setting, known
from stateroom.daemon.settings.values import TABLES

COLUMNS = 100
HEAD = """\
# What `stateroom serve` and the other commands are started with: docs/configuration.md.
# Take away the # of a line to set it. `stateroom config check` says whether all is well, `stateroom config
# show` what holds and why: a variable like STATEROOM_ROWS_MAX overrides this file, an option overrides both.
"""
# Of those that have no default that could be written down.
EXAMPLES: Mapping[str, object] = {
    "model": ["demo"],
    "endpoint": "ipc:///run/user/1000/stateroom/stateroom.sock",
    "listen": "tcp://0.0.0.0:5555",
    "kv-budget": "8GiB",
    "disk": "32GiB",
    "disk-free": "4GiB",
    "gap-ms": 50.0,
    "verify-every": 24.0,
    "metrics-port": 9464,
}
TABLE_EXAMPLES = {
    "weight": "[weight]\neditor = 4",
    "quota": '[quota.editor]\nsessions = 9\nbytes = "2GiB"\n\n[quota.default]\nrequests = 100',
}


def template() -> str:
    """The file's text. Tables stand last: what follows a table's header belongs to it."""
    settings = sorted(known().values(), key=lambda setting: setting.name in TABLES)
    return HEAD + "".join(f"\n{part}" for part in _parts(settings))


def _parts(settings: list[Setting]) -> Iterator[str]:
    part = None
    for setting in settings:
        if setting.name not in TABLES and setting.part != part:
            part = setting.part
            yield f"# ---- {part}\n\n{_entry(setting)}"
        else:
            yield _entry(setting)


def _entry(setting: Setting) -> str:
    told = f"{setting.help} Default: {setting.default_words}."
    lines = textwrap.wrap(told, COLUMNS, break_long_words=False, break_on_hyphens=False)
    if setting.name in TABLES:
        lines += TABLE_EXAMPLES[setting.name].split("\n")
    else:
        value = EXAMPLES[setting.name] if setting.default is None else setting.default
        lines.append(f"{setting.name} = {json.dumps(value)}")
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)
