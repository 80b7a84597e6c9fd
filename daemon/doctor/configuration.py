"""The configuration file: where it is, and whether it can be used."""

from __future__ import annotations

from collections.abc import Iterator

from stateroom.client.errors import BadConfig, BadEndpoint
from stateroom.daemon import settings
from stateroom.daemon.doctor.check import Check, noted, passed, problem

CHECK = "stateroom config check"


def configuration() -> Iterator[Check]:
    wrong = settings.problem()
    if wrong is not None:
        yield problem("configuration", wrong, CHECK)
        return
    path = settings.config_path()
    finding = str(path) if path.exists() else f"no {path}, and it needn't be there"
    strange = list(settings.strange_variables())
    if strange:
        yield noted("configuration", f"{finding}; {' '.join(strange)}", "Unset what you don't know.")
    else:
        yield passed("configuration", finding)


def models() -> list[str]:
    """Those that the file has the daemon load; none where it can't be used."""
    try:
        named = settings.load().values.get("model")
    except (BadConfig, BadEndpoint):
        return []
    return [str(each) for each in named] if isinstance(named, list | tuple) else []
