"""`stateroom doctor --bundle`: what somebody who helps needs to see, in one file, without content.

No prompt, answer or token is in it, and no name that a program or a person gave (`redaction.py`). It is made
of what the daemon tells and of the ends of its logs; nothing is sent anywhere.
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import secrets
import tarfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distributions, requires
from pathlib import Path
from typing import Any

from stateroom.client.wire import to_wire
from stateroom.daemon.doctor.check import Check
from stateroom.daemon.doctor.examine import told
from stateroom.daemon.doctor.gathered import (
    Running,
    ask,
    configured_names,
    key_names,
    log_lines,
    persons,
    places,
    service_lines,
)
from stateroom.daemon.doctor.redaction import Redactor
from stateroom.daemon.exits import FAILED, Leave
from stateroom.daemon.shown import short

MODE = 0o600
OURS = ("stateroom", "doctor", "default")  # names of owners that are no secret, and words of every text
# What each file has, as the bundle itself tells.
CONTENTS = {
    "doctor.json": "the findings of `stateroom doctor`",
    "versions.json": "the system, Python, and the packages that are needed, with their versions",
    "daemon.json": "figures of the daemon and its engines; sessions and requests as sizes, states and times",
    "configuration.json": "the settings, and where each comes from; paths and names shortened",
    "log.jsonl": "the end of the daemon's log: times, codes and figures",
    "service.jsonl": "the end of what a service manager caught: where a crash was",
}
SUMMARY = "findings, versions, figures, settings and the ends of the logs, without content and names"
QUOTED = re.compile(r"""(?<!\w)['"].*(?:['"]|…)""")  # greedy: what is quoted may hold quotes; or is cut off
QUOTING = ("configuration", "environment", "socket", "daemon")  # checks that quote what is wrong there
README = """\
Made by `stateroom doctor --bundle`, {when}.

{contents}

There are no prompts, answers or tokens in it. What programs and people named (apps, sessions, snapshots,
keys) are short hashes, which differ from bundle to bundle; your home directory is ~. Names of models are in
it, and which system this is.

Please look through it before you send it to anybody.
"""


def check_free(file: Path) -> None:
    """Raises Leave: there is such a file already."""
    if file.exists():
        raise taken(file)


def taken(file: Path) -> Leave:
    return Leave(FAILED, f"{file} exists; remove it, or take another name.")


def write(file: Path, found: Sequence[Check], settings: list[dict[str, Any]]) -> None:
    """Writes the bundle.

    Args:
        found: what the doctor found.
        settings: as `config show --json` tells them.

    Raises:
        Leave: there is such a file already.
        OSError: it can't be written; nothing of it is left.
    """
    content = parts(found, settings)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
    except FileExistsError:
        raise taken(file) from None
    try:
        with os.fdopen(descriptor, "wb") as stream, tarfile.open(fileobj=stream, mode="w:gz") as archive:
            for name, text in content.items():
                about = tarfile.TarInfo(f"stateroom-bundle/{name}")
                about.size, about.mode, about.mtime = len(text), MODE, int(time.time())
                archive.addfile(about, io.BytesIO(text))
    except BaseException as error:
        file.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(file)) from error
        raise


def parts(found: Sequence[Check], settings: list[dict[str, Any]]) -> dict[str, bytes]:
    """The files of the bundle, by name."""
    running = ask()
    redactor = Redactor(
        secrets.token_bytes(16),
        places(),
        persons(),
        (name for name in (*running.names(), *key_names(), *configured_names()) if name not in OURS),
    )
    when = time.strftime("%Y-%m-%d %H:%M:%S %z")
    contents = "\n".join(f"{name:20}{what}" for name, what in CONTENTS.items())
    made = {
        "doctor.json": _json(_findings(redactor, found)),
        "versions.json": _json(versions(redactor)),
        "daemon.json": _json(_daemon(redactor, running)),
        "configuration.json": _json([_setting(redactor, each) for each in settings]),
        "log.jsonl": _lines(_log(redactor, log_lines())),
        "service.jsonl": _lines(_log(redactor, service_lines())),
    }
    assert set(made) == set(CONTENTS)
    return {"README.txt": README.format(when=when, contents=contents).encode(), **made}


def versions(redactor: Redactor) -> dict[str, Any]:
    """Of what we need, and of what brings the models, at that."""
    needed = [each for name in ("stateroom", "mlx-lm", "mlx") for each in (name, *_requires(name))]
    wanted = {_plain(each) for each in needed}
    installed = {each.name: each.version for each in distributions() if _plain(each.name) in wanted}
    return {
        "python": platform.python_version(),
        "system": redactor.text(f"{platform.system()} {platform.release()} {platform.machine()}"),
        "mac": platform.mac_ver()[0],
        "packages": dict(sorted(installed.items())),
    }


def _requires(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:  # which is then what is wrong
        return []


def _plain(requirement: str) -> str:
    """The name of a package as all spell it."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


# ---------------------------------------------------------------- what is told of it


def _findings(redactor: Redactor, found: Sequence[Check]) -> dict[str, Any]:
    made = told(found)
    for check in made["checks"]:
        if check["name"] in QUOTING:
            check["finding"] = QUOTED.sub(lambda text: redactor.name(text[0]), check["finding"])
        check["finding"] = redactor.text(check["finding"])
        check["advice"] = None if check["advice"] is None else redactor.text(check["advice"])
    return made


def _daemon(redactor: Redactor, running: Running) -> dict[str, Any]:
    stats = running.stats
    return {
        "answers": running.failure or "yes",
        "version": running.version,
        "models": [_model(redactor, model) for model in running.models],
        "counters": redactor.counters(stats.get("counters", {})),
        "gauges": redactor.value(stats.get("gauges", {})),
        "engines": [_model(redactor, model) for model in stats.get("models", [])],
        "sessions": [_short_ids(redactor, to_wire(session)) for session in running.sessions],
        "requests": [_short_ids(redactor, to_wire(request)) for request in running.requests],
    }


def _model(redactor: Redactor, model: dict[str, Any]) -> dict[str, Any]:
    """With its name, and with why it doesn't run: neither is a client's."""
    made: dict[str, Any] = redactor.value(model)
    for key in ("id", "failure"):
        if isinstance(model.get(key), str):
            made[key] = redactor.text(model[key])
    return made


def _short_ids(redactor: Redactor, info: dict[str, Any]) -> dict[str, Any]:
    """As in the log, so that the same session has the same hash."""
    if isinstance(info.get("session"), str):
        info = {**info, "session": short(info["session"])}
    made: dict[str, Any] = redactor.value(info)
    if isinstance(info.get("model"), str):
        made["model"] = redactor.text(info["model"])
    return made


def _setting(redactor: Redactor, setting: dict[str, Any]) -> dict[str, Any]:
    """Names of apps are hashes; models and places are shortened; what else is text, is short or a size."""
    name, value = str(setting["name"]), setting["value"]
    if isinstance(value, list):
        shown = _of_app if name in ("weight", "quota") else Redactor.text
        value = [shown(redactor, str(each)) for each in value]
    elif isinstance(value, str):
        value = redactor.name(value) if name == "app" else redactor.text(value)
    where = redactor.text(str(setting["where"]))
    return {"name": name, "value": value, "origin": setting["origin"], "where": where}


def _of_app(redactor: Redactor, text: str) -> str:
    app, _, limits = str(text).rpartition("=")
    return f"{redactor.name(app)}={limits}"


def _log(redactor: Redactor, lines: Sequence[str]) -> Iterator[Any]:
    """Entries; of what is none, the stacks."""
    other: list[str] = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if isinstance(entry, dict):
            if other:
                yield {"lines": redactor.stack(other)}
                other = []
            yield redactor.entry(entry)
        else:
            other.append(line)
    if other:
        yield {"lines": redactor.stack(other)}


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=False).encode()


def _lines(entries: Iterator[Any]) -> bytes:
    return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries).encode()
