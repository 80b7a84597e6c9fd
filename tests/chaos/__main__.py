"""`python -m tests.chaos --minutes 5`: real clients while everything is killed, frozen, filled and corrupted.

`make chaos MINUTES=5`. At the end every session is compared with a fresh one. Leaves with 1 when anything was
wrong; `--seed` does the same things at about the same times.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from tests.chaos.daemon import Daemon
from tests.chaos.monkey import Monkey
from tests.chaos.run import run
from tests.tiny import write_tiny_model

CONTEXT = 16_384


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--acts", type=int, help="end after so many misfortunes instead")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", help="a kind of misfortune, like 'kill worker'")
    parser.add_argument("--keep", action="store_true", help="leave the folder there")
    asked = parser.parse_args()

    def enough(monkey: Monkey, seconds: float) -> bool:
        if asked.acts is not None:
            return monkey.done.total() >= asked.acts
        return seconds >= asked.minutes * 60

    folder = Path(tempfile.mkdtemp(prefix="sr-", dir="/tmp"))
    daemon = Daemon(folder, write_tiny_model(folder / "tiny", context=CONTEXT), small_disk=True)
    try:
        report = run(daemon, folder, clients=asked.clients, seed=asked.seed, enough=enough, kinds=asked.only)
    finally:
        daemon.clear()
        if asked.keep:
            print(f"kept {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    print(report.words())
    sys.exit(1 if report.complaints else 0)


if __name__ == "__main__":
    main()
