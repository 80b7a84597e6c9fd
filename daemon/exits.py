"""The exit codes of the daemon, in one place. Below 64 they are the shell's and the usual ones."""

from __future__ import annotations

OK = 0  # stopped as asked
FAILED = 1  # anything without a code of its own
USAGE = 2  # what was typed isn't understood: an option that there isn't, say
INTERRUPTED = 130  # as a shell reports a program ended by Ctrl-C
CONFIG = 64  # an option or variable that can't work: a missing model file, a path that is too long
DAMAGED = 65  # the catalog is damaged, or of a newer version or another program; never reset in silence
RUNNING = 69  # another daemon holds this runtime directory or endpoint
FORBIDDEN = 77  # a directory or path that isn't ours, isn't private, or isn't a socket

PERMANENT = (USAGE, CONFIG, DAMAGED, RUNNING, FORBIDDEN)  # trying again can't help
# launchd starts again whatever didn't leave with 0, whatever its number; our plist says who starts us.
SERVICE_VARIABLE, LAUNCHD = "STATEROOM_SERVICE", "launchd"


class Leave(Exception):
    """The daemon can't start or go on; `message` is one sentence for whoever started it."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
