"""The command line against a real daemon with a tiny model."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import RunningDaemon
from tests.system.terminal import CTRL_C, CTRL_D, Terminal
from tests.tiny import write_tiny_model

from stateroom.client import connect
from stateroom.daemon.exits import CONFIG

pytestmark = pytest.mark.system

COMMAND = [sys.executable, "-m", "stateroom.daemon.cli"]
RUN_S = 60.0
NO_DAEMON = "Start one with `stateroom serve`"


def stateroom(env: dict[str, str], *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], env=env, input=text, capture_output=True, text=True, timeout=RUN_S
    )


def chat(daemon: RunningDaemon, name: str, *lines: str) -> list[str]:
    """What a chat without terminal prints for these lines."""
    done = stateroom(
        daemon.env, "chat", "--name", name, "--max-tokens", "4", text="".join(f"{line}\n" for line in lines)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def length_of(daemon: RunningDaemon, name: str) -> int | None:
    listed = json.loads(stateroom(daemon.env, "ps", "--json").stdout or "[]")
    return {session["name"]: session["length"] for session in listed}.get(name)


# ---------------------------------------------------------------- one-shot commands


def test_version(tiny_daemon: RunningDaemon) -> None:
    done = stateroom(tiny_daemon.env, "version")
    assert done.returncode == 0
    assert done.stdout.startswith("stateroom ")
    assert done.stdout.rstrip().endswith("protocol 1")


def test_generate_streams_an_answer_and_forgets_it(tiny_daemon: RunningDaemon) -> None:
    done = stateroom(tiny_daemon.env, "generate", "hello", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")
    assert len(done.stdout.strip()) > 0
    again = stateroom(tiny_daemon.env, "generate", "-", "--max-tokens", "8", text="hello")
    assert again.stdout == done.stdout
    assert "has no sessions" in stateroom(tiny_daemon.env, "ps").stderr


def test_ps_tells_that_other_apps_have_sessions(tiny_daemon: RunningDaemon) -> None:
    with connect(tiny_daemon.endpoint, app="elsewhere") as room, room.open(tokens=[1]) as session:
        told = stateroom(tiny_daemon.env, "ps", "--app", "nobody").stderr
        assert "nobody has no sessions. Other apps have " in told
        session.close()
        assert session.close().freed_bytes == 0  # again is harmless, and so is the end of `with`


def test_serve_of_a_model_that_is_nowhere_leaves_at_once(tiny_daemon: RunningDaemon) -> None:
    done = stateroom(tiny_daemon.env, "serve", "--model", "nosuch")
    assert done.returncode == CONFIG
    assert "There is no model 'nosuch'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_generate_raw_and_seeded(tiny_daemon: RunningDaemon) -> None:
    arguments = ("generate", "hello", "--raw", "--max-tokens", "16", "--temperature", "1.5", "--seed")
    first, same, other = (stateroom(tiny_daemon.env, *arguments, seed) for seed in ("1", "1", "2"))
    assert first.returncode == 0, first.stderr
    assert first.stdout == same.stdout
    assert first.stdout != other.stdout


def test_generate_with_a_wrong_option_is_a_usage_error(tiny_daemon: RunningDaemon) -> None:
    done = stateroom(tiny_daemon.env, "generate", "hello", "--max-tokens", "0")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("generate hello --raw --max-tokens 4 >&-", 0),
        ("generate - --raw --max-tokens 4 <&-", 1),  # no input: an empty prompt
        pytest.param(
            "generate hello --raw --max-tokens 4 >/dev/full",
            1,
            marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full"),
        ),
        ("ps --app [/x]", 0),
        ("ps --app [/x] >&- 2>&-", 0),
    ],
)
def test_odd_streams_and_words_bring_no_traceback(tiny_daemon: RunningDaemon, line: str, code: int) -> None:
    done = subprocess.run(
        f"{shlex.join(COMMAND)} {line}", shell=True, env=tiny_daemon.env, capture_output=True, timeout=RUN_S
    )
    assert done.returncode == code, done.stderr.decode()
    assert len(done.stderr.splitlines()) <= 1, done.stderr.decode()


def test_a_terminal_without_a_models_characters_gets_others(tiny_daemon: RunningDaemon) -> None:
    env = tiny_daemon.env | {"PYTHONIOENCODING": "ascii"}
    done = stateroom(
        env, "generate", "hello", "--raw", "--max-tokens", "64", "--temperature", "5", "--seed", "1"
    )
    assert done.returncode == 0, done.stderr
    assert "?" in done.stdout


def test_generate_with_an_unknown_model_says_so_in_one_line(tiny_daemon: RunningDaemon) -> None:
    done = stateroom(tiny_daemon.env, "generate", "hello", "--model", "nothing-of-the-kind")
    assert done.returncode == 1
    assert done.stderr.startswith("stateroom: ")
    assert len(done.stderr.splitlines()) == 1


def test_stats_and_doctor_tell_of_the_engine(tiny_daemon: RunningDaemon) -> None:
    stateroom(tiny_daemon.env, "generate", "hello", "--max-tokens", "2")
    stats = json.loads(stateroom(tiny_daemon.env, "stats", "--json").stdout)
    assert stats["counters"]["tokens_decoded"] >= 2
    assert stats["models"][0]["id"] == "tiny"
    assert "tokens_decoded" in stateroom(tiny_daemon.env, "stats").stdout
    doctor = stateroom(tiny_daemon.env, "doctor", "--json")
    checks = {check["name"]: check for check in json.loads(doctor.stdout)["checks"]}
    assert {"python", "packages", "mlx", "socket", "permissions", "disk", "models", "daemon"} <= set(checks)
    assert checks["daemon"]["state"] == "pass"
    assert checks["engine"]["finding"].startswith("tiny is ready")
    problems = [check for check in checks.values() if check["state"] == "problem"]
    assert doctor.returncode == (1 if problems else 0)
    assert {check["name"] for check in problems} <= {"blas"}


def test_models_are_listed_and_removed(tiny_daemon: RunningDaemon, tmp_path: Path) -> None:
    env = tiny_daemon.env | {"STATEROOM_HOME": str(tmp_path)}
    assert json.loads(stateroom(env, "model", "list", "--json").stdout) == []
    write_tiny_model(tmp_path / "models" / "mine")
    assert stateroom(env, "model", "list").stdout.startswith("mine ")
    assert stateroom(env, "model", "remove", "mine").returncode == 0
    assert not (tmp_path / "models" / "mine").exists()
    missing = stateroom(env, "model", "remove", "mine")
    assert missing.returncode == 1
    assert len(missing.stderr.splitlines()) == 1


def test_doctor_without_a_daemon_is_not_a_problem(tmp_path: Path) -> None:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "STATEROOM_RUNTIME_DIR": f"{tmp_path}/run"}
    done = stateroom(env, "doctor")
    assert NO_DAEMON in done.stdout.replace("\n", " ")
    assert "stateroom model add demo" in done.stdout


def test_doctor_sees_a_runtime_directory_that_others_can_write_to(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o777)
    (tmp_path / "run").chmod(0o777)
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "STATEROOM_RUNTIME_DIR": f"{tmp_path}/run"}
    done = stateroom(env, "doctor", "--json")
    (check,) = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "permissions"]
    assert check["state"] == "problem"
    assert "chmod 700" in check["advice"]
    assert done.returncode == 1


# ---------------------------------------------------------------- chat, without a terminal


def test_chat_keeps_its_session_and_goes_on(tiny_daemon: RunningDaemon) -> None:
    first = chat(tiny_daemon, "goes-on", "one")
    assert first[-1].startswith("0 tokens reused")
    length = length_of(tiny_daemon, "goes-on")
    assert length
    second = chat(tiny_daemon, "goes-on", "two")
    assert second[-1].startswith(f"{length} tokens reused")


def test_undo_takes_back_whole_exchanges_of_this_run(tiny_daemon: RunningDaemon) -> None:
    chat(tiny_daemon, "undo", "one")
    length = length_of(tiny_daemon, "undo")
    shown = chat(tiny_daemon, "undo", "two", "three", "/undo", "/undo", "/undo")
    assert length_of(tiny_daemon, "undo") == length
    assert shown[-1].startswith("Nothing said in this run")
    assert shown[-2].endswith(f"{length} left.")


def test_after_undo_the_same_question_gets_the_same_answer(tiny_daemon: RunningDaemon) -> None:
    shown = chat(tiny_daemon, "again", "one", "two", "/undo", "two")
    answers = "\n".join(shown).split("tokens in again")
    assert len(answers) == 4
    assert answers[1].splitlines()[1:-1] == answers[2].splitlines()[2:-1]


def test_trim_fork_save_as_switch_and_sessions(tiny_daemon: RunningDaemon) -> None:
    lines = ("one", "/save-as kept", "/fork", "two", "/fork named", "/trim 5", "/sessions", "/quit", "x")
    shown = chat(tiny_daemon, "base", *lines)
    base = length_of(tiny_daemon, "base")
    assert base
    assert length_of(tiny_daemon, "kept") == base
    forked = length_of(tiny_daemon, "base-2")
    assert forked is not None
    assert forked > base
    assert length_of(tiny_daemon, "named") == 5
    assert "→ named: 5 tokens" in shown
    assert f"  base: {base} tokens" in shown
    assert shown[-1].endswith("tokens")  # nothing after /quit was asked
    assert chat(tiny_daemon, "base", "/switch kept", "/trim 3")[-1].endswith("3 left.")
    assert length_of(tiny_daemon, "kept") == 3
    assert length_of(tiny_daemon, "base") == base


def test_a_conversation_cut_inside_a_message_says_so_and_can_start_afresh(tiny_daemon: RunningDaemon) -> None:
    shown = chat(tiny_daemon, "cut", "a longer question", "/trim 15", "another", "/trim 0", "another")
    assert any("ends inside a message" in line for line in shown)
    assert shown[-1].startswith("0 tokens reused")


def test_wrong_commands_say_what_is_wrong_and_the_chat_goes_on(tiny_daemon: RunningDaemon) -> None:
    wrong = ("/nonsense", "/trim", "/trim 100000", "/save-as", "/save-as wrong", "/switch gone")
    shown = chat(tiny_daemon, "wrong", "one", *wrong, "/help", "two")
    assert "/nonsense isn't a command; /help lists them." in shown
    assert any("already" in line or "taken" in line for line in shown)
    assert any(line.startswith("/save-as NAME") for line in shown)
    assert shown[-1].endswith("tokens in wrong")


# ---------------------------------------------------------------- chat, on a terminal


def test_ctrl_c_stops_the_answer_and_ctrl_d_the_program(tiny_daemon: RunningDaemon) -> None:
    command = [*COMMAND, "chat", "--name", "terminal", "--max-tokens", "3000"]
    with Terminal(command, tiny_daemon.env) as terminal:
        terminal.wait_for("> ")
        seen = len(terminal.shown)
        terminal.type("tell me all\n")
        terminal.wait_for_length(seen + 40)  # the answer is on its way
        terminal.type(CTRL_C)
        terminal.wait_for("tokens in terminal", seen)
        length = length_of(tiny_daemon, "terminal")
        assert length is not None
        assert 40 < length < 3000
        terminal.wait_for("> ", terminal.shown.index("tokens in terminal"))
        seen = len(terminal.shown)
        terminal.type(CTRL_C)  # at the prompt it gives up the line, not the program
        terminal.wait_for("> ", seen)
        terminal.type("/undo\n")
        terminal.wait_for("0 left.\r\n> ", seen)
        terminal.type(CTRL_D)
        assert terminal.leave() == 0
    assert "Traceback" not in terminal.shown
    assert length_of(tiny_daemon, "terminal") == 0


def test_ctrl_c_ends_generate_with_the_code_of_an_interrupt(tiny_daemon: RunningDaemon) -> None:
    with Terminal([*COMMAND, "generate", "hello", "--max-tokens", "3000"], tiny_daemon.env) as terminal:
        terminal.wait_for_length(20)
        terminal.type(CTRL_C)
        assert terminal.leave() == 130
    assert "Traceback" not in terminal.shown
    assert json.loads(stateroom(tiny_daemon.env, "stats", "--json").stdout)["gauges"]["running"] == 0
