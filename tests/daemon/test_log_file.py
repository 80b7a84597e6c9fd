"""B81: a log of our own, in files that take turns; neither a reader nor a full disk harms the daemon."""

from __future__ import annotations

import io
import itertools
import json
import os
from pathlib import Path

import pytest

from stateroom.daemon.commands.following import coming
from stateroom.daemon.log_file import LogFile, log_path
from stateroom.daemon.logs import make_log

FILE_BYTES = 2_000
OLDER = 3


def test_a_hundred_thousand_warnings_take_no_more_room_than_some(tmp_path: Path) -> None:
    file = LogFile(log_path(tmp_path), FILE_BYTES, OLDER)
    log = make_log("json", "info", io.StringIO(), file)
    for n in range(2_000):
        log.warning("something", n=n)
    file.close()
    written = sorted(log_path(tmp_path).parent.iterdir())
    assert len(written) == 1 + OLDER
    assert all(path.stat().st_size <= FILE_BYTES for path in written)
    last = [json.loads(line) for line in log_path(tmp_path).read_text().splitlines()]
    assert last[-1]["n"] == 1_999
    assert [entry["n"] for entry in last] == list(range(2_000 - len(last), 2_000))


def test_both_get_every_entry(tmp_path: Path) -> None:
    file, stream = LogFile(tmp_path / "a" / "b.log"), io.StringIO()
    log = make_log("console", "info", stream, file)
    log.debug("not this one")
    try:
        raise ValueError("of old")
    except ValueError:
        log.exception("it went wrong", what="x", nothing=None)
    file.close()
    (entry,) = map(json.loads, (tmp_path / "a" / "b.log").read_text().splitlines())
    assert (entry["event"], entry["what"], entry["level"]) == ("it went wrong", "x", "error")
    assert "ValueError: of old" in entry["exception"]
    assert "nothing" not in entry
    assert "it went wrong" in stream.getvalue()
    assert "ValueError: of old" in stream.getvalue()


def test_it_is_its_owner_s_alone(tmp_path: Path) -> None:
    before = os.umask(0o077)  # as `serve` sets it
    try:
        LogFile(log_path(tmp_path)).close()
    finally:
        os.umask(before)
    assert log_path(tmp_path).stat().st_mode & 0o777 == 0o600
    assert log_path(tmp_path).parent.stat().st_mode & 0o777 == 0o700


def test_a_full_disk_costs_lines_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    file, stream = LogFile(Path("/dev/full")), io.StringIO()
    log = make_log("json", "info", stream, file)
    for _ in range(100):
        log.info("still here")
    assert file.dropped == 100
    assert len(stream.getvalue().splitlines()) == 100
    assert capfd.readouterr().err == ""
    file.close()  # what is left of the last line goes, too


def test_following_goes_on_in_the_next_file(tmp_path: Path) -> None:
    path = tmp_path / "one.log"
    file = LogFile(path, FILE_BYTES, OLDER)
    file.write_line("first")
    with open(path) as opened:
        lines = coming(path, opened)
        seen = [next(lines)]
        for n in range(100):
            file.write_line(f"{n} " + "x" * 50)
            seen.append(next(lines))
    file.close()
    assert [line.split()[0] for line in seen] == ["first", *map(str, range(100))]
    assert len(list(tmp_path.iterdir())) > 1, "the file was never replaced"


def test_half_a_line_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "one.log"
    path.write_text("whole\nha")
    with open(path) as opened:
        lines = coming(path, opened)
        assert next(lines) == "whole\n"
        assert opened.readline() == "ha"
        opened.seek(6)
        with open(path, "a") as writing:
            writing.write("lf\n")
        assert list(itertools.islice(lines, 1)) == ["half\n"]


def test_a_file_that_is_cut_off_in_place_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "service.log"
    path.write_text("one\ntwo\n")
    with open(path) as opened:
        lines = coming(path, opened)
        assert [next(lines), next(lines)] == ["one\n", "two\n"]
        os.truncate(path, 0)
        with open(path, "a") as writing:
            writing.write("new\n")
        assert next(lines) == "new\n"
