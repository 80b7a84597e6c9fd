"""Entry point of the `stateroom` command. The commands themselves are in `daemon/commands/`."""

from __future__ import annotations

import sys

from stateroom.daemon.exits import INTERRUPTED

HINT = (
    "stateroom: only the client is installed here; the command needs: "
    "pip install 'stateroom[daemon]', or '.[daemon]' in a clone"
)


def main() -> None:
    """Runs the command line; without the daemon's packages it says in one line what to install."""
    try:
        from stateroom.daemon.commands import run
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "stateroom":
            raise
        sys.exit(HINT)
    sys.exit(run())


if __name__ == "__main__":
    main()
