"""Build hook: an editable install sees the repository's folders as parts of one package.

A wheel maps ``client/`` to ``stateroom/client`` by itself. An editable install can only add a
folder to ``sys.path``, so this makes one, ``build/editable/stateroom``, whose entries are links to
the folders; files added later are found without a reinstall.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PARTS = ("client", "daemon", "caches", "kernels", "deploy")


class LinkHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            return
        root = Path(self.root)
        package = root / "build" / "editable" / "stateroom"
        package.mkdir(parents=True, exist_ok=True)
        for part in PARTS:
            link = package / part
            if link.is_symlink():
                link.unlink()
            link.symlink_to(root / part, target_is_directory=True)
