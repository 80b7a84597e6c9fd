"""A stand-in for launchd, as far as our plist goes: it runs the program of a plist as launchd documents it.

`mini_launchd.py PLIST STATE`: nothing but the plist's environment, its folder, its umask and limit of files;
started again unless it left with 0, no sooner than the throttle (shortened here); on SIGTERM the program gets
SIGTERM, and SIGKILL after `ExitTimeOut`. STATE is a JSON file that tells `fake_launchctl.py` how things are.

With `Sockets` it listens, and starts the program when somebody is there, or was kicked (a file `kick` beside
STATE); the program gets the socket by `launch_activate_socket`, of the library $MINI_LAUNCHD_LIBRARY. The
socket's file isn't removed, before or after: whether launchd does isn't said anywhere.
"""

from __future__ import annotations

import json
import os
import plistlib
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

THROTTLE_SHORTENED = 0.05  # of a second for each of the plist's


def listener(sockets: dict[str, dict[str, object]]) -> tuple[str, socket.socket]:
    ((name, asked),) = sockets.items()
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(asked["SockPathName"]))
    os.chmod(str(asked["SockPathName"]), int(str(asked["SockPathMode"])))
    made.listen()
    return name, made


def main() -> None:
    plist, state = plistlib.loads(Path(sys.argv[1]).read_bytes()), Path(sys.argv[2])
    ending = False
    process: subprocess.Popen[bytes] | None = None

    def end(_number: int, _frame: FrameType | None) -> None:
        nonlocal ending
        ending = True
        if process is not None:
            process.terminate()

    signal.signal(signal.SIGTERM, end)
    last: int | None = None
    starts = 0

    def tell(pid: int | None) -> None:
        staged = state.with_suffix(".new")
        staged.write_text(json.dumps({"own": os.getpid(), "pid": pid, "last": last, "starts": starts}))
        staged.replace(state)

    def prepare() -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = plist["SoftResourceLimits"]["NumberOfFiles"]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
        os.umask(plist["Umask"])

    environment, descriptors = dict(plist["EnvironmentVariables"]), ()
    listening: socket.socket | None = None
    if "Sockets" in plist:
        name, listening = listener(plist["Sockets"])
        descriptors = (listening.fileno(),)
        environment |= {"MINI_LAUNCHD_SOCKET": name, "MINI_LAUNCHD_FD": str(listening.fileno())}
        environment["LD_PRELOAD"] = os.environ["MINI_LAUNCHD_LIBRARY"]
    kick = state.with_name("kick")

    def wanted() -> bool:
        kicked = kick.exists()
        kick.unlink(missing_ok=True)
        return kicked or bool(select.select([listening], [], [], 0.02)[0])

    while not ending:
        if listening is not None:
            tell(None)
            while not ending and not wanted():
                pass
            if ending:
                break
        starts += 1
        with open(plist["StandardErrorPath"], "ab") as log:
            process = subprocess.Popen(
                plist["ProgramArguments"],
                env=environment,
                pass_fds=descriptors,
                cwd=plist["WorkingDirectory"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=prepare,
            )
        tell(process.pid)
        while process.poll() is None:
            if ending:
                try:
                    process.wait(plist["ExitTimeOut"])
                except subprocess.TimeoutExpired:
                    process.kill()
            time.sleep(0.02)
        last = process.returncode
        tell(None)
        if last == 0 and plist.get("KeepAlive") == {"SuccessfulExit": False}:
            while not ending:
                time.sleep(0.02)
        elif not ending:
            time.sleep(plist["ThrottleInterval"] * THROTTLE_SHORTENED)


if __name__ == "__main__":
    main()
