"""`stateroom top` in a real terminal of 80×24 (tmux), before a real daemon with a tiny model."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.conftest import RunningDaemon, StartDaemon
from tests.system.conftest import ConnectTo, Restart

from stateroom.client import DecodeResult, Session

TMUX = shutil.which("tmux")
COLUMNS, ROWS = 80, 24
SEEN_S = 30.0  # for something to appear on the screen
STEP_S = 0.05
COMMAND = f"{sys.executable} -m stateroom.daemon.cli top"
SHELL = "sh-ready$ "
FIRST_ROW = 7  # below the head and the table's headings
SLOW_TOKENS = 16_000
WHOLE = ("stateroom ", "ENGINE ", "KV budget [", "KV ladder device ", " every 1s", "SESSION ", "q quit ")

pytestmark = [pytest.mark.system]
in_tmux = pytest.mark.skipif(TMUX is None, reason="no tmux")


def test_tmux_is_there_where_it_must_be() -> None:
    """Other tests skip without one; where all of them are to run, that would be a failure unseen."""
    assert TMUX or not os.environ.get("STATEROOM_TESTS_NEED_GXX")


OpenScreen = Callable[[RunningDaemon], "Screen"]


class Screen:
    """A terminal of its own, in which a shell runs. `kept`: where screens are written."""

    def __init__(self, env: dict[str, str], kept: Path) -> None:
        self._kept = kept
        self._env = env | {"TERM": "xterm-256color", "ESCDELAY": "25"}
        self._folder = Path(tempfile.mkdtemp(prefix="sr-", dir="/tmp"))  # the paths of sockets are limited
        # A server of its own: another one's would have another environment.
        self._tmux = [str(TMUX), "-S", str(self._folder / "tmux.sock"), "-f", "/dev/null"]

    def start(self) -> None:
        self._run("new-session", "-d", "-x", str(COLUMNS), "-y", str(ROWS), "sh")
        self._run("set-option", "-g", "escape-time", "0")
        self.until(str.strip)  # it has a prompt
        self.type(f"PS1='{SHELL}'; clear\n")
        self.until(lambda text: text.startswith(SHELL.strip()))

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], capture_output=True, timeout=20)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._tmux, *arguments], env=self._env, capture_output=True, text=True, timeout=20
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def text(self) -> str:
        return self._run("capture-pane", "-p")

    def press(self, *keys: str) -> None:
        self._run("send-keys", *keys)

    def type(self, text: str) -> None:
        self._run("send-keys", "-l", text)

    def programs(self) -> list[psutil.Process]:
        """Those that the shell runs."""
        shell = psutil.Process(int(self._run("display-message", "-p", "#{pane_pid}")))
        return shell.children()

    def tty(self) -> str:
        return self._run("display-message", "-p", "#{pane_tty}").strip()

    def resize(self, columns: int, rows: int) -> None:
        self._run("resize-window", "-x", str(columns), "-y", str(rows))

    def until(self, holds: Callable[[str], object], name: str = "") -> str:
        """Waits until something is so of the screen, and gives that; it's written to a file of that name."""
        deadline = time.monotonic() + SEEN_S
        while not holds(text := self.text()):
            assert time.monotonic() < deadline, f"it did not appear:\n{text}"
            time.sleep(STEP_S)
        if name:
            (self._kept / f"{name}.txt").write_text(text)
        return text


@pytest.fixture
def open_screen(tmp_path: Path) -> Iterator[OpenScreen]:
    opened: list[Screen] = []

    def open_one(daemon: RunningDaemon) -> Screen:
        opened.append(Screen(daemon.env, tmp_path))
        opened[-1].start()
        return opened[-1]

    yield open_one
    for screen in opened:
        screen.close()


@pytest.fixture
def screen(open_screen: OpenScreen, tiny_daemon: RunningDaemon) -> Screen:
    return open_screen(tiny_daemon)


def names(text: str) -> list[str]:
    """The sessions on the screen, from above."""
    return [line[1:].split()[0] for line in text.splitlines()[FIRST_ROW : ROWS - 1] if line.strip()]


def length_of(text: str, name: str) -> int:
    (row,) = (line for line in text.splitlines() if line[1:].startswith(f"{name} "))
    return int(row[1:].split()[3])


class Slow:
    """A long decode of a session, in a thread."""

    def __init__(self, session: Session) -> None:
        self._stream = session.decode(max_tokens=SLOW_TOKENS, ignore_eos=True)
        self.result: DecodeResult | None = None
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        for _ in self._stream:
            pass
        self.result = self._stream.result

    def join(self) -> DecodeResult:
        self._thread.join(SEEN_S)
        assert self.result is not None, "the decode goes on"
        return self.result


@in_tmux
def test_it_is_watched_and_driven_by_keys(
    screen: Screen, tiny_daemon: RunningDaemon, connect_to: ConnectTo
) -> None:
    editor, agents = connect_to(tiny_daemon, app="editor"), connect_to(tiny_daemon, app="agents")
    editor.open(tokens=[1] * 300, name="buffer")
    plan = agents.open(tokens=[2] * 20, name="plan")

    # It appears, and all of it fits.
    screen.type(f"{COMMAND} --interval 0.3\n")
    first = screen.until(lambda text: "buffer" in text and "plan" in text, "appears")
    lines = first.splitlines()
    assert re.match(r"stateroom \d\S*  up \S+  ipc://\S+$", lines[0]), lines[0]
    assert lines[1].split() == ["ENGINE", "STATE", "ROWS", "DECODE/S", "PREFILL/S", "STEP", "MS", "QUEUE"]
    assert lines[2].split()[:2] == ["tiny", "ready"]
    assert re.match(r"KV budget \[[#=.]+\] \S+ held, \S+ granted of \S+  memory enough$", lines[3]), lines[3]
    assert lines[4].startswith("KV ladder device 2 (")
    assert lines[5].startswith("2 sessions  3 clients  requests 0 open, 0 queued")
    assert lines[6].split() == [
        "SESSION",
        "OWNER",
        "C",
        "LEN",
        "PRIV",
        "SHRD",
        "KV",
        "ON",
        "TOK/S",
        "STATE↓",
        "IDLE",
    ]
    assert length_of(first, "buffer") == 300
    assert lines[-1].startswith("q quit  ? help")

    # What happens meanwhile appears, too.
    late = agents.open(tokens=[3] * 7, name="late")
    screen.until(lambda text: "late" in names(text))
    late.prefill(tokens=[3] * 40)
    screen.until(lambda text: length_of(text, "late") == 47)
    slow = Slow(plan)
    running = screen.until(lambda text: re.search(r"plan +agents.* \d+\.\d decode", text), "updates")
    assert names(running)[0] == "plan"  # what is busy stands above
    screen.until(lambda text: length_of(text, "plan") > length_of(running, "plan"))
    screen.until(lambda text: re.search(r"^tiny +ready +1 +\d+\.\d", text, re.MULTILINE))

    # By length, and turned round; then by words.
    screen.press("s", "s", "s")
    sorted_ = screen.until(lambda text: "LEN↓" in text, "sorts")
    assert names(sorted_) == sorted(names(sorted_), key=lambda name: -length_of(sorted_, name))
    screen.press("r")
    screen.until(lambda text: "LEN↑" in text and names(text) == names(sorted_)[::-1])
    screen.type("/agents decode")
    screen.until(lambda text: text.splitlines()[-1].startswith("Filter: agents decode"))
    screen.press("Enter")
    screen.until(lambda text: names(text) == ["plan"] and "1 of 3 have: agents decode" in text, "filters")

    # The details name the request as `trace` does; it is cancelled, but not before a yes.
    screen.press("Enter")
    details = screen.until(lambda text: f"session {plan.id}" in text and "REQUEST" in text, "details")
    assert re.search(rf"^ *\d+ decode +running +\d+/{SLOW_TOKENS} +\d+\.\d +\d+s", details, re.MULTILINE), (
        details
    )
    screen.press("k")
    screen.until(lambda text: "Cancel what runs in plan of agents? y or n" in text)
    screen.press("n")
    screen.until(lambda text: "Left as it is." in text)
    assert slow.result is None
    screen.press("k", "y")
    assert slow.join().finish == "cancelled"
    screen.until(lambda text: "What ran in plan was cancelled." in text, "kills")
    screen.until(lambda text: re.search(r"^ *\d+ decode +ok ", text, re.MULTILINE))
    screen.press("Escape")
    screen.until(lambda text: "SESSION" in text)
    screen.press("Escape")
    screen.until(lambda text: len(names(text)) == 3)

    # Parked it is on the disk, as everybody sees.
    screen.type("/buffer")
    screen.press("Enter")
    screen.until(lambda text: names(text) == ["buffer"])
    screen.press("p")
    screen.until(lambda text: "buffer is parked (disk)" in text)
    screen.until(lambda text: re.search(r"^>buffer .* disk ", text, re.MULTILINE), "parks")
    assert [session.tier for session in editor.list()] == ["disk"]

    # The help is two screens long, a pause is said; a wider terminal shows more.
    screen.press("?")
    screen.until(lambda text: "Keys and columns" in text, "help")
    screen.press("End")
    screen.until(lambda text: "gave way" in text)
    screen.press("q", "Space")
    screen.until(lambda text: "PAUSED" in text)
    screen.press("Space")
    screen.resize(160, 40)
    screen.until(lambda text: "WAITS FOR" in text and len(text.rstrip().splitlines()) == 40, "wide")

    # It leaves the terminal as it was.
    screen.press("q")
    screen.until(lambda text: SHELL.strip() in text and "ENGINE" not in text)
    screen.type("echo code=$?; stty -a | grep -wo -e -echo -e -icanon; echo end\n")
    left = screen.until(lambda text: "\nend" in text, "left")
    assert "code=0\nend" in left, left
    assert "Traceback" not in left


@in_tmux
def test_an_interrupt_leaves_at_once(screen: Screen, tiny_daemon: RunningDaemon) -> None:
    for how in ("C-c", "signal"):
        screen.type(f"clear; NO_COLOR=1 {COMMAND}; echo code=$?\n")
        screen.until(lambda text: "KV ladder" in text)
        if how == "signal":
            (program,) = screen.programs()
            program.terminate()
        else:
            screen.press(how)
        left = screen.until(lambda text: re.search(r"^code=\d+", text, re.MULTILINE))
        assert f"code={143 if how == 'signal' else 130}" in left
        assert "Traceback" not in left


@in_tmux
def test_it_is_whole_again_after_others_wrote_on_the_screen(screen: Screen) -> None:
    """`ctrl-z` and `fg`, as in any shell; and `ctrl-l`."""
    screen.type(f"{COMMAND}\n")
    screen.until(lambda text: "KV ladder" in text)
    screen.press("C-z")
    screen.until(lambda text: text.rstrip().endswith(SHELL.strip()) and "KV ladder" not in text)
    screen.type("fg\n")
    screen.until(lambda text: all(part in text for part in WHOLE), "again")
    Path(screen.tty()).write_text("\033[3;1HGARBAGE")
    screen.until(lambda text: "GARBAGE" in text)
    screen.press("C-l")
    screen.until(lambda text: "GARBAGE" not in text and all(part in text for part in WHOLE))
    screen.press("q")
    screen.until(lambda text: "KV ladder" not in text)


@in_tmux
def test_a_daemon_that_goes_away_is_told_and_is_there_again(
    start_daemon: StartDaemon,
    tiny_folder: Path,
    restart: Restart,
    connect_to: ConnectTo,
    open_screen: OpenScreen,
) -> None:
    daemon = start_daemon(model=tiny_folder)
    with connect_to(daemon, app="editor") as room:
        room.open(tokens=[1, 2], name="buffer")
    screen = open_screen(daemon)
    screen.type(f"{COMMAND} --interval 0.3\n")
    screen.until(lambda text: "buffer" in text)
    daemon.stop()
    gone = screen.until(lambda text: "trying again. No daemon answers" in text, "gone")
    assert "buffer" in gone  # what was there last still is
    restart(daemon).wait_until_answering()
    screen.until(lambda text: "trying again" not in text and "buffer" in text, "back")
    screen.press("q")
    screen.until(lambda text: "ENGINE" not in text)


def test_a_pipe_gets_text(tiny_daemon: RunningDaemon, connect_to: ConnectTo) -> None:
    with connect_to(tiny_daemon, app="pipes").open(tokens=[1] * 9, name="nine"):
        done = subprocess.run(
            [*COMMAND.split(), "--app", "pipes", "--interval", "0.2"],
            env=tiny_daemon.env, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert names(done.stdout) == ["nine"]
    assert length_of(done.stdout, "nine") == 9
    assert "\x1b" not in done.stdout
