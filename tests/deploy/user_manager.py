"""A systemd user manager of a test's own, where there is none: in a container, as root.

It gets a mount namespace in which the machine looks booted with systemd, and a control group of its own: a
manager takes in whatever is in its group when it starts, which must be nobody else's. The group is one
of version 2, and no other hierarchy is shown to it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

MANAGER = Path("/lib/systemd/systemd")
START_S, STOP_S = 20.0, 20.0
INSIDE = """
set -e
echo $$ > "$GROUP/cgroup.procs"
[ "$GROUPS_AT" = /sys/fs/cgroup ] || mount --bind "$GROUPS_AT" /sys/fs/cgroup
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system
exec env -i HOME="$FOLDER" XDG_RUNTIME_DIR="$XDG_RUNTIME_DIR" XDG_CONFIG_HOME="$XDG_CONFIG_HOME" \\
    PATH=/usr/bin:/bin "$MANAGER" --user --log-target=console --log-level=warning
"""


def groups_at() -> Path | None:
    """Where control groups of version 2 are mounted."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(where)
    return None


class UserManager:
    """Attributes: `env`: what `systemctl --user` needs to find it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runtime, self.config = folder / "xdg", folder / "config"
        self.env = {"XDG_RUNTIME_DIR": str(self.runtime), "XDG_CONFIG_HOME": str(self.config)}
        self._groups = groups_at() or Path("/nowhere")
        self._group = self._groups / f"stateroom-test-{os.getpid()}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> str | None:
        """Starts it; or why there can be none here."""
        if os.getuid() != 0 or shutil.which("unshare") is None or not MANAGER.exists():
            return "a systemd user manager of a test's own needs root, unshare and systemd"
        try:
            self._group.mkdir()
        except OSError as error:
            return f"no control group for a systemd user manager: {error.strerror}"
        self.runtime.mkdir(mode=0o700)
        (self.config / "systemd" / "user").mkdir(parents=True)
        told = {"GROUP": str(self._group), "GROUPS_AT": str(self._groups), "FOLDER": str(self.folder)}
        told |= {"MANAGER": str(MANAGER), **self.env}
        with (self.folder / "manager.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "--propagation", "private", "sh", "-c", INSIDE],
                env=os.environ | told,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        end = time.monotonic() + START_S
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > end:
                why = (self.folder / "manager.log").read_text(errors="replace")[-500:]
                self.stop()
                return f"no systemd user manager starts here: {why}"
            time.sleep(0.05)
        return None

    def answers(self) -> bool:
        asked = ["systemctl", "--user", "is-active", "default.target"]
        return subprocess.run(asked, env=os.environ | self.env, capture_output=True).returncode == 0

    def stop(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for _ in range(100):
            left = [
                int(pid) for file in self._group.rglob("cgroup.procs") for pid in file.read_text().split()
            ]
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            if not left:
                break
            time.sleep(0.05)
        for group in sorted(self._group.rglob("*/"), reverse=True):
            group.rmdir()
        if self._group.exists():
            self._group.rmdir()
