"""What the commands make of figures, in words."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from stateroom.client.protocol import (
    Event,
    KindCaps,
    ModelInfo,
    RequestInfo,
    SessionInfo,
    SnapshotInfo,
    StatsResult,
    VerifyResult,
)
from stateroom.daemon.commands import failed, in_words
from stateroom.daemon.commands.doctor import show as show_check
from stateroom.daemon.commands.logs import _show as show_entry
from stateroom.daemon.commands.ps import state, stored_as
from stateroom.daemon.commands.ps import table as sessions_table
from stateroom.daemon.commands.sessions import verdict
from stateroom.daemon.commands.snapshots import table
from stateroom.daemon.commands.stats import GROUPS, figure, grouped
from stateroom.daemon.commands.terminal import err, out, plain, say_if_loading
from stateroom.daemon.commands.trace import _write as write_trace
from stateroom.daemon.commands.trace import table as requests_table
from stateroom.daemon.commands.watch import WORDS, in_json
from stateroom.daemon.commands.watch import in_words as event_in_words
from stateroom.daemon.doctor.check import Check
from stateroom.daemon.doctor.running import journal, kv
from stateroom.daemon.families import GAUGES
from stateroom.daemon.metrics import NAMES, REASONS


def test_who_waits_for_a_model_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [ModelInfo(id="demo", loaded=False), ModelInfo(id="there", loaded=True)]
    say_if_loading(models, None)
    assert capsys.readouterr().err == ""  # no terminal: a program reads it
    monkeypatch.setattr(err, "_force_terminal", True)
    for model, said in ((None, "demo is being loaded …"), ("there", ""), ("none", "")):
        say_if_loading(models, model)
        assert said in (told := capsys.readouterr().err)
        assert bool(told) == bool(said)
    say_if_loading([], None)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("info", "word"),
    [
        ({}, "idle"),
        ({"tier": "disk"}, "disk"),
        ({"tier": "tokens"}, "tokens"),
        ({"tier": "disk", "running": "decode", "state": "running"}, "decode"),
        ({"tier": "tokens", "quarantined": "its engine died under it three times"}, "quarantined"),
    ],
)
def test_a_sessions_state_in_a_word(info: dict[str, Any], word: str) -> None:
    assert state(SessionInfo(session="s", **info)) == word


def test_how_a_session_is_stored() -> None:
    kinds = [
        KindCaps(kind="full", scheme="affine8", layers=2),
        KindCaps(kind="state", scheme="dense", layers=1),
    ]
    assert stored_as(SessionInfo(session="s", kinds=kinds)) == "affine8"
    assert stored_as(SessionInfo(session="s", kinds=kinds[1:])) == "dense"
    assert stored_as(SessionInfo(session="s")) == ""  # nobody has used it since the daemon started


def test_a_verification_in_words() -> None:
    figures: dict[str, Any] = {"max_abs_logit": 10.0, "argmax_agree": True, "length": 7, "bound": 0.001}
    assert verdict(VerifyResult(max_abs_logit_error=1e-5, **figures)) == (
        "logits differ by at most 1.0e-06 of the largest (1e-03 is allowed), "
        "the same token comes next, 7 tokens"
    )
    other = VerifyResult(max_abs_logit_error=5.0, **{**figures, "argmax_agree": False})
    assert "another token comes next" in verdict(other)
    cancelled = VerifyResult(max_abs_logit_error=0.0, **{**figures, "finish": "cancelled"})
    assert "cancelled" in verdict(cancelled)
    assert "0.0e+00" in verdict(VerifyResult(max_abs_logit_error=0.0, **{**figures, "max_abs_logit": 0.0}))


def test_snapshots_are_listed_the_newest_first() -> None:
    kept = [SnapshotInfo(snapshot="old[x]", age_s=90.0), SnapshotInfo(snapshot="new", age_s=2.0, bytes=2048)]
    columns = [list(column.cells) for column in table(kept).columns]
    assert columns[0] == ["new", "old\\[x]"]
    assert columns[4] == ["2.0 KiB", "0 B"]


def test_no_text_can_drive_the_terminal() -> None:
    assert plain("a\x1b[31mb\tc\nd\x9b") == "a�[31mb\tc\nd�"


EVIL = "a\x1b]0;b\x07\nc[red]:bomb:\x9b\u202e"  # what a client may call itself
TAMED = "a�]0;b� c[red]:bomb:��"


def test_no_name_drives_the_terminal_breaks_a_line_or_is_taken_for_markup(
    capsys: pytest.CaptureFixture[str],
) -> None:
    info = SessionInfo(session="s", owner=EVIL, model=EVIL)
    asked = RequestInfo(rid=1, op=EVIL, owner=EVIL, state="done", code="ok")
    snapshot = SnapshotInfo(snapshot="s", model=EVIL)
    for shown, times in (
        (sessions_table([info], owners=True), 2),
        (requests_table([asked]), 2),
        (table([snapshot]), 1),
    ):
        with out.capture() as printed:
            out.print(shown)
        assert printed.get().count(TAMED) == times
        assert len(printed.get().splitlines()) == 2  # the headings, and one
    with out.capture() as printed:
        show_check(Check("engine", "problem", EVIL, EVIL))
        show_entry(json.dumps({"timestamp": "now", "level": "info", "event": "hello", "app": EVIL}), False)
        show_entry(json.dumps({"level": "error", "event": "bug", "exception": "two\nlines"}), False)
    assert "\x1b" not in printed.get()
    assert printed.get().count(":bomb:") == 3
    assert 'app="a\\u001b]0;b\\u0007\\nc[red]:bomb:\\u009b\\u202e"' in printed.get()
    assert "exception=two\nlines" in printed.get()
    assert failed(EVIL, 1) == 1
    assert "\x1b" not in capsys.readouterr().err


def test_the_doctor_tells_of_memory() -> None:
    gauges = {
        "kv_held_bytes": 2**30,
        "kv_granted_bytes": 3 * 2**30,
        "kv_budget_bytes": 4 * 2**30,
        "memory_pressure": 0,
    }
    check = kv(gauges)
    assert (check.state, check.finding) == ("pass", "1.0 of 4.0 GiB of KV held, 3.0 granted to engines")
    assert kv(gauges | {"memory_pressure": 2}).state == "note"


@pytest.mark.parametrize(("lag_s", "wanted"), [(0.0, "pass"), (1.5, "pass"), (20.0, "problem")])
def test_the_doctor_tells_of_a_journal_that_is_behind(lag_s: float, wanted: str) -> None:
    found = journal({"journal_pending": 3.0, "journal_lag_s": lag_s})
    assert found.state == wanted
    assert ("20 s" in found.finding) is (wanted == "problem")


def test_a_trace_that_cannot_be_written_takes_no_file_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    there.write_text("another's")

    def refuse(path: Path, *_: Any, **__: Any) -> None:  # as of a file that is read-only, to all but root
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(PermissionError):
        write_trace(there, "{}")
    assert there.exists()


def test_what_the_system_says_of_a_file() -> None:
    assert (
        in_words(FileNotFoundError(2, "No such file or directory", "/nope"))
        == "/nope: No such file or directory"
    )
    assert in_words(OSError(28, "No space left on device")) == "No space left on device"
    assert in_words(OSError("of its own")) == "of its own"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("kv_bytes", 23_592_960, "22.5 MiB"),
        ("parameters", 134_515_008, "134,515,008"),
        ("pid", 32067, "32067"),
        ("step_ms", 106.609, "107 ms"),
        ("device_ms.an app", 12_345.6, "12.35 s"),
        ("uptime_s", 7260, "2 h"),
        ("journal_lag_s", 0.25, "0.25 s"),
        ("bytes_sent", 2048, "2.0 KiB"),
        ("bytes_per_token", 256.0, "256"),
        ("blas_switched", True, "True"),
        ("failure", None, ""),
        ("gauges", {}, ""),
    ],
)
def test_a_figure_of_stats(name: str, value: object, words: str) -> None:
    assert figure(name, value) == words


def test_stats_are_grouped_and_none_is_left_out() -> None:
    counters = dict.fromkeys(NAMES, 3) | {"requests.decode.ok": 2, "requests.open.busy": 1, "novel": 5}
    gauges = dict.fromkeys((*GAUGES, "requests_open", "sessions"), 1.0) | {"novel_bytes": 2048.0}
    made = dict(grouped(StatsResult(counters=counters, gauges=gauges, models=[])))
    assert list(made) == [*GROUPS, "others"]
    others = [(line.name, line.figure) for line in made["others"]]
    assert others == [("novel", "5"), ("novel_bytes", "2.0 KiB")]
    shown = {line.name: line for lines in made.values() for line in lines}
    assert shown["requests"].parts == "decode.ok 2, open.busy 1"
    assert shown["evicted"].figure == str(3 * len(REASONS))
    assert "memory 3" in shown["evicted"].parts
    parts = [part.split()[0] for line in shown.values() for part in line.parts.split(", ") if part]
    names = {name for name in (*counters, *gauges) if "." not in name}
    assert names - set(shown) - set(parts) == set()


NOON = datetime(2026, 1, 2, 12, 0, 1, 5000)


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            Event(event="session_opened", session="abcdefghijk", model="demo", details={"owner": "editor"}),
            "session abcdefgh of editor opened, on demo",
        ),
        (
            Event(event="session_moved", session="abcdefghijk", details={"tier": "disk", "reason": "memory"}),
            "session abcdefgh is on disk: memory",
        ),
        (
            Event(event="session_moved", session="abcdefghijk", details={"tier": "resident"}),
            "session abcdefgh is on the device",
        ),
        (
            Event(
                event="engine_lost",
                model="demo",
                details={"reason": "it was ended by SIGKILL", "sessions": 2, "requests": 1},
            ),
            "engine demo is lost: it was ended by SIGKILL; 2 sessions without KV; 1 request goes on",
        ),
        (Event(event="engine_ready", model="demo", details={"requests": 0}), "engine demo is ready"),
        (
            Event(event="snapshot_saved", details={"snapshot": "kept", "length": 7, "bytes": 2048}),
            "snapshot kept saved, 7 tokens, 2.0 KiB",
        ),
        (Event(event="novel", model="de\x1b[2Jmo", details={"n": 1}), "novel model=de\ufffd[2Jmo n=1"),
        (
            Event(event="engine_stopped", model="demo", details={"reason": "a\nb"}),
            "engine demo has stopped: a b",
        ),
    ],
)
def test_an_event_in_a_line(event: Event, line: str) -> None:
    assert event_in_words(event, NOON) == f"12:00:01  {line}"


def test_every_event_of_the_protocol_has_words_and_none_needs_its_details() -> None:
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    events = page.partition("## `watch`")[2].partition("Events:")[2].partition("There may be more")[0]
    named = set(re.findall(r"`((?:session|engine|trunk|snapshot|verify)_[a-z]+|pressure|stats)`", events))
    assert named == WORDS.keys()
    for name in WORDS:
        assert "\n" not in event_in_words(Event(event=name), NOON)


def test_an_event_in_json_is_a_line() -> None:
    line = in_json(Event(event="engine_ready", model="demo", details={"x": "a\nb"}), NOON)
    told = json.loads(line)
    assert "\n" not in line
    assert (told["event"], told["model"], told["details"]) == ("engine_ready", "demo", {"x": "a\nb"})
    assert datetime.fromisoformat(told["time"]).timestamp() == pytest.approx(NOON.timestamp(), abs=1e-3)
    assert "session" not in told
