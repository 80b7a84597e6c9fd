"""`serve` with scripted workers: what `stateroom serve` does after it has read its options.

python run_daemon.py RUNTIME_DIR ENDPOINT [SCRIPT]...        ($STATE: its state directory; unset: none)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from stateroom.daemon.config import Config, ModelSpec
from stateroom.daemon.exits import Leave
from stateroom.daemon.serve import serve

WORKER = (sys.executable, str(Path(__file__).with_name("scripted_worker.py")))


def main(runtime_dir: str, endpoint: str, *scripts: str) -> int:
    config = Config(
        endpoint=endpoint,
        runtime_dir=Path(runtime_dir),
        models_dir=Path(runtime_dir) / "models",
        state_dir=Path(os.environ["STATE"]) if "STATE" in os.environ else None,
        models=tuple(ModelSpec(f"toy{number}", script) for number, script in enumerate(scripts)),
        worker_command=WORKER,
        log_format="json",
        insecure_loopback=True,
    )
    try:
        return serve(config)
    except Leave as leaving:
        sys.stderr.write(f"{leaving.message}\n")
        return leaving.code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
