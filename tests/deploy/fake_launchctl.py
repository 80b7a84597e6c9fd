"""A `launchctl` that records what it is told, fails where it is told to, and runs agents by `mini_launchd`.

Below `$FAKE_LAUNCHD`: `transcript` (a line a call, with the code it left with), `failures.json` (a list of
[verb, code], each used once), `domains` (those that there are), and a folder for each loaded agent.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = Path(os.environ["FAKE_LAUNCHD"])
START_S = 10.0


def left_with(code: int, words: str = "") -> int:
    if words:
        (sys.stderr if code else sys.stdout).write(words + "\n")
    return code


def scripted(verb: str) -> int | None:
    file = FOLDER / "failures.json"
    failures = json.loads(file.read_text()) if file.exists() else []
    for at, (of, code) in enumerate(failures):
        if of == verb:
            del failures[at]
            file.write_text(json.dumps(failures))
            return int(code)
    return None


def agent(target: str) -> Path:
    return FOLDER / "agents" / target.replace("/", "_")


def state_of(target: str) -> dict[str, int | None] | None:
    file = agent(target) / "state.json"
    return json.loads(file.read_text()) if file.exists() else None


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def printed(target: str) -> int:
    if target.count("/") == 1:
        known = (FOLDER / "domains").read_text().split()
        return left_with(0, f"{target} = {{") if target in known else left_with(112, "Could not find domain")
    state = state_of(target)
    if state is None:
        return left_with(113, f'Could not find service "{target}"')
    lines = [f"{target} = {{", f"\tstate = {'running' if state['pid'] else 'not running'}"]
    lines += [f"\tpid = {state['pid']}"] if state["pid"] else []
    lines += [f"\tlast exit code = {'(never exited)' if state['last'] is None else state['last']}", "}"]
    return left_with(0, "\n".join(lines))


def bootstrap(domain: str, plist: str) -> int:
    if domain not in (FOLDER / "domains").read_text().split():
        return left_with(125, "Bootstrap failed: 125: Domain does not support specified action")
    target = f"{domain}/{Path(plist).stem}"
    if state_of(target) is not None:
        return left_with(37, "Bootstrap failed: 37: Operation already in progress")
    agent(target).mkdir(parents=True)
    subprocess.Popen(
        [sys.executable, str(HERE / "mini_launchd.py"), plist, str(agent(target) / "state.json")],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + START_S
    while state_of(target) is None and time.monotonic() < until:
        time.sleep(0.02)
    return left_with(0)


def bootout(target: str) -> int:
    state = state_of(target)
    if state is None:
        return left_with(3, "Boot-out failed: 3: No such process")
    assert state["own"] is not None
    os.kill(state["own"], signal.SIGTERM)
    # As launchd does, this returns before it is gone; `sweep` notices when it is.
    (agent(target) / "ending").touch()
    return left_with(0)


def kickstart(*arguments: str) -> int:
    target = arguments[-1]
    state = state_of(target)
    if state is None:
        return left_with(113, f'Could not find service "{target}"')
    if "-k" in arguments and state["pid"]:
        os.kill(state["pid"], signal.SIGKILL)
    if not state["pid"]:
        (agent(target) / "kick").touch()
        until = time.monotonic() + START_S
        while not (state_of(target) or {}).get("pid") and time.monotonic() < until:
            time.sleep(0.02)
    return left_with(0)


def sweep() -> None:
    """Agents whose processes have ended since are gone."""
    for folder in (FOLDER / "agents").glob("*"):
        file = folder / "state.json"
        if (folder / "ending").exists() and not alive(json.loads(file.read_text())["own"]):
            for left in folder.iterdir():
                left.unlink()
            folder.rmdir()


def main() -> int:
    verb, *arguments = sys.argv[1:]
    sweep()
    code = scripted(verb)
    if code is not None:
        code = left_with(code, f"{verb} failed: {code}: as it was told to")
    else:
        verbs = {"print": printed, "bootstrap": bootstrap, "bootout": bootout, "kickstart": kickstart}
        code = verbs[verb](*arguments)
    with open(FOLDER / "transcript", "a") as transcript:
        transcript.write(f"{verb} {' '.join(arguments)} -> {code}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
