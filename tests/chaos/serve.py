"""`stateroom serve`, but for one thing: a worker that is killed again and again starts again at once.

Otherwise a run would spend its time in the pauses that the daemon makes before it tries again.
"""

from __future__ import annotations

from dataclasses import replace

from stateroom.daemon import serve as module
from stateroom.daemon.cli import main
from stateroom.daemon.config import Config

PAUSE_S = 0.25

serve = module.serve


def impatient(config: Config) -> int:
    return serve(replace(config, patience=replace(config.patience, restart_most_s=PAUSE_S)))


if __name__ == "__main__":
    module.serve = impatient
    main()
