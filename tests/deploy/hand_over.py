"""`hand_over.py FD COMMAND...`: becomes the command, with the socket FD handed over as systemd does it."""

from __future__ import annotations

import os
import sys

from stateroom.daemon.activation import FIRST

descriptor, command = int(sys.argv[1]), sys.argv[2:]
os.dup2(descriptor, FIRST, inheritable=True)
os.environ |= {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid()), "LISTEN_FDNAMES": "stateroom.socket"}
os.execvp(command[0], command)
