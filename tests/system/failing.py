"""A daemon whose worker, a real one, fails at a prefill that has the token `BAD`.

python failing.py FOLDER ENDPOINT MODEL
"""

from __future__ import annotations

import sys
from pathlib import Path

BAD = 249
AS_WORKER = "--endpoint"  # its first argument, by which it is known


def be_worker() -> None:
    import typer

    from stateroom.daemon.engine import worker
    from stateroom.daemon.engine.fill import Fill

    launch = Fill.launch

    def fails(fill: Fill, model: object, tokens: int) -> object:
        if BAD in fill.next(tokens):
            raise RuntimeError("the token that fails")
        return launch(fill, model, tokens)  # type: ignore[arg-type]

    Fill.launch = fails  # type: ignore[method-assign,assignment]
    typer.run(worker.main)


def be_daemon(folder: Path, endpoint: str, model: str) -> int:
    from stateroom.daemon.config import Config, ModelSpec
    from stateroom.daemon.log_file import log_path
    from stateroom.daemon.serve import serve

    config = Config(
        endpoint=endpoint,
        runtime_dir=folder,
        models_dir=folder / "models",
        models=(ModelSpec("tiny", model),),
        worker_command=(sys.executable, __file__),
        log_file=log_path(folder),
        log_format="json",
    )
    return serve(config)


if __name__ == "__main__":
    if sys.argv[1] == AS_WORKER:
        be_worker()
    else:
        sys.exit(be_daemon(Path(sys.argv[1]), *sys.argv[2:]))
