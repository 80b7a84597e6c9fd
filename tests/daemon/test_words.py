"""What the commands make of figures, in words."""

from __future__ import annotations

from typing import Any

import pytest

from stateroom.client.protocol import KindCaps, SessionInfo, SnapshotInfo, VerifyResult
from stateroom.daemon.commands import in_words
from stateroom.daemon.commands.ps import figure, state, stored_as
from stateroom.daemon.commands.sessions import verdict
from stateroom.daemon.commands.snapshots import table
from stateroom.daemon.commands.terminal import plain
from stateroom.daemon.doctor.running import journal, kv


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
        ("step_ms", 106.609, "106.609"),
        ("blas_switched", True, "True"),
        ("failure", None, ""),
        ("gauges", {}, ""),
    ],
)
def test_a_figure_of_stats(name: str, value: object, words: str) -> None:
    assert figure(name, value) == words
