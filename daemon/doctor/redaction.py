"""Takes out of what is to be sent everything that somebody could have said or named. Pure.

What stays is what the program's own words are, and figures; every other text becomes a short hash, the same
for the same text within one bundle (and another in the next, so that nobody can look names up in a list).
Free text of the system's (why a model could not be loaded) stays, without the paths and names we know of.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from stateroom.client.protocol import OPERATIONS

HASH_CHARS = 8
LIST_MAX = 256
NAME_CHARS_MIN = 3  # of a user or a machine that is looked for in other text

# What holds a word of the program's, from a closed set.
WORDS = frozenset(
    {
        "level", "code", "finish", "state", "tier", "kind", "scheme", "class", "waiting", "field",
        "device", "dtype", "blas", "architecture", "timestamp", "incident", "version",
    }
)  # fmt: skip
OPS = ("op", "running")  # an operation, or what a client took for one
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:+ -]{0,63}")
KEY = re.compile(r"[a-z][a-z0-9_]{0,63}")
EVENT = re.compile(r"[a-z_]+( [a-z_]+){0,5}")
# Free text of ours or the system's, by the log entry that holds it: none of it comes from a client.
TEXTS = frozenset(
    {
        ("engine died", "reason"), ("engine stopped", "reason"), ("model not loaded", "reason"),
        ("journal not written", "reason"), ("no log file", "error"), ("no metrics page", "error"),
        ("few open files", "error"), ("slow linear algebra", "hint"), ("no models", "hint"),
        ("serving", "endpoint"),
    }
)  # fmt: skip
MODELS = ("model", "engine")  # names of models, which stay
FRAME = re.compile(r'\s*File "([^"]+)", line (\d+)(?:,)? in ([\w.<>]+)$')
STACK = re.compile(r"\s*(Traceback \(most.*\):|(?:Current t|T)hread 0x[0-9a-f]+ .*:|Fatal Python.*)$")
ERROR = re.compile(r"([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit))\b")


class Redactor:
    """Makes one bundle's texts.

    Args:
        salt: of this bundle.
        places: directories, by what stands for them, the innermost first.
        persons: names of the user and the machine.
        names: what clients called things, as far as it is known.
    """

    def __init__(
        self,
        salt: bytes,
        places: Mapping[str, str],
        persons: Iterable[str] = (),
        names: Iterable[str] = (),
    ) -> None:
        self._salt, self._places = salt, dict(places)
        self._persons = _any_of(name for name in persons if len(name) >= NAME_CHARS_MIN)
        self._names = _any_of(names)

    def name(self, text: str) -> str:
        """A short hash."""
        return "#" + hashlib.sha256(self._salt + text.encode()).hexdigest()[:HASH_CHARS]

    def text(self, text: str) -> str:
        """Text of the system's: without the user's directories, without names that we know."""
        for place, stands in self._places.items():
            text = text.replace(place, stands)
        if self._names is not None:
            text = self._names.sub(lambda found: self.name(found[0]), text)
        return text if self._persons is None else self._persons.sub("<name>", text)

    def value(self, value: Any, key: str = "") -> Any:
        """Figures as they are, words of ours, hashes of all others; of many numbers how many they are."""
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, str):
            ours = value in OPERATIONS if key in OPS else key in WORDS and WORD.fullmatch(value)
            return value if ours else self.name(value)
        if isinstance(value, Mapping):
            return {self.key(str(name)): self.value(inner, str(name)) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            if value and all(isinstance(each, int | float) for each in value):
                return f"{len(value)} numbers"
            return [self.value(each, key) for each in value[:LIST_MAX]]
        return type(value).__name__

    def key(self, name: str) -> str:
        """A figure's name, of which the part behind a dot may be an owner's."""
        kind, dot, rest = name.partition(".")
        if not KEY.fullmatch(kind):
            return self.name(name)
        return f"{kind}.{self.name(rest)}" if dot else kind

    def counters(self, counters: Mapping[str, int]) -> dict[str, int]:
        """Their names are ours, but for operations that a client made up."""
        made = {}
        for name, count in counters.items():
            kind, *rest = name.split(".")
            if rest and kind in ("requests", "own") and rest[0] not in OPERATIONS:
                rest[0] = self.name(rest[0])
            made[".".join((kind, *rest))] = count
        return made

    # ------------------------------------------------------------ logs

    def entry(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """One of the daemon's log: its figures, its own words, its stacks."""
        event = str(entry.get("event", ""))
        made: dict[str, Any] = {"event": event if EVENT.fullmatch(event) else self.name(event)}
        for key, value in entry.items():
            if key == "event" or key in ("asked", "answered"):  # content, where that is logged
                continue
            if isinstance(value, str) and (key in ("exception", "stack", "line")):
                made[key] = self.stack(value.splitlines())
            elif key == "stderr" and isinstance(value, list):
                made[key] = self.stack([str(line) for line in value])
            elif key == "models" and isinstance(value, list):
                made[key] = [self.text(str(model)) for model in value[:LIST_MAX]]
            elif isinstance(value, str) and (key in MODELS or (event, key) in TEXTS):
                made[key] = self.text(value)
            else:
                made[self.key(key)] = self.value(value, key)
        return made

    def stack(self, lines: list[str]) -> list[str]:
        """Where threads were, and the kinds of errors; not what those say, nor what else stands there."""
        made, left_out = [], 0
        for line in lines:
            if (frame := FRAME.match(line)) is not None:
                made.append(f"{_short(frame[1])}:{frame[2]} {frame[3]}")
            elif (stack := STACK.match(line)) is not None:
                made.append(stack[1])
            elif (error := ERROR.match(line)) is not None:
                made.append(f"{error[1]}: …")
            else:
                left_out += 1
        return [*made, f"({left_out} lines left out)"] if left_out else made


def _short(path: str) -> str:
    """A source file below the place where packages are; of others that there is one."""
    found = re.fullmatch(r".*/(?:site-packages|editable|lib/python[\d.]+)/([\w./-]+\.pyx?)", path)
    return found[1] if found else path if re.fullmatch(r"<frozen [\w.]+>", path) else "…"


def _any_of(names: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted({name for name in names if name}, key=len, reverse=True)
    if not longest_first:
        return None
    return re.compile(r"(?<![\w])(?:" + "|".join(map(re.escape, longest_first)) + r")(?![\w])")
