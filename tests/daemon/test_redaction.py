"""What is taken out of what is to be sent: wherever it stands, only our own words and figures stay."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stateroom.daemon.doctor.redaction import TEXTS, WORDS, Redactor

SALT = b"salt"
SECRET = "Xyzzy"
# Where a client's words, or a person's, may stand in an entry of the log; the last are no part of it today.
PLACES = (
    "owner",
    "session",
    "client",
    "line",
    "exception",
    "asked",
    "answered",
    "error",
    "reason",
    "hint",
    "any",
)
EVENTS = ("request", "engine says", "engine link broken", "internal error", "verify failed", SECRET)


def redactor(**more: Any) -> Redactor:
    return Redactor(SALT, {"/home/someone": "~"}, **more)


secret = st.sampled_from([SECRET, f"{SECRET} and more", f"say\n{SECRET}", f'File "{SECRET}", line 1, in f'])
values = st.recursive(
    secret | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*PLACES, SECRET]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.sampled_from(EVENTS), st.dictionaries(st.sampled_from([*PLACES, SECRET]), values, max_size=5))
@example("engine says", {"line": f'File "/{SECRET}", line 1, in f'})
@example(SECRET, {SECRET: SECRET})
def test_nothing_that_was_said_stays_in_an_entry(event: str, fields: dict[str, Any]) -> None:
    shown = json.dumps(redactor().entry({"event": event, **fields}))
    assert SECRET not in shown.replace("\\n", "\n")


def test_what_an_entry_keeps() -> None:
    entry = {"event": "request", "op": "decode", "code": "ok", "ms": 1.5, "owner": "editor", "level": "info"}
    shown = redactor().entry(entry)
    assert {name: shown[name] for name in ("event", "op", "code", "ms", "level")} == {
        name: entry[name] for name in ("event", "op", "code", "ms", "level")
    }
    assert shown["owner"] == redactor().name("editor") != redactor().name("another")
    assert Redactor(b"other", {}).name("editor") != shown["owner"]
    assert redactor().entry({"event": "request", "op": "made-up"})["op"].startswith("#")


@pytest.mark.parametrize(("event", "key"), sorted(TEXTS))
def test_text_of_the_systems_is_shortened(event: str, key: str) -> None:
    text = "There is no model at /home/someone/models/x, says narwhal."
    shown = redactor(persons=["narwhal"]).entry({"event": event, key: text})
    assert shown[key] == "There is no model at ~/models/x, says <name>."


def test_stacks_stay_and_what_they_say_does_not() -> None:
    file = "/home/someone/x/site-packages/stateroom/daemon/work.py"
    exception = (
        f'Traceback (most recent call last):\n  File "{file}", line 12, in take\n    raise Bad({SECRET})\n'
        f"stateroom.daemon.work.BadError: {SECRET}\n"
    )
    shown = redactor().entry({"event": "internal error", "exception": exception})
    assert shown["exception"] == [
        "Traceback (most recent call last):",
        "stateroom/daemon/work.py:12 take",
        "stateroom.daemon.work.BadError: …",
        "(1 lines left out)",
    ]


def test_figures_by_owner_and_made_up_operations() -> None:
    gauges = redactor().value({"sessions": 3, "device_ms.editor": 1.5, "ids": [1, 2, 3]})
    assert gauges == {"sessions": 3, f"device_ms.{redactor().name('editor')}": 1.5, "ids": "3 numbers"}
    counted = redactor().counters({"requests": 2, "requests.open.ok": 1, "requests.xyzzy.unknown_op": 1})
    assert set(counted) == {"requests", "requests.open.ok", f"requests.{redactor().name('xyzzy')}.unknown_op"}


def test_names_that_are_known_go_from_any_text() -> None:
    known = redactor(names=["editor", "editor-2", ""])
    text = known.text("the session editor-2 of editor, and editors")
    assert text == f"the session {known.name('editor-2')} of {known.name('editor')}, and editors"


def test_only_words_are_words() -> None:
    """A key with a closed set behind it keeps a word, never a sentence."""
    for key in WORDS:
        assert redactor().value("dense", key) == "dense"
        assert redactor().value('a "quoted" sentence, with more', key).startswith("#")
