"""Where the snapshots of a model lie below the state directory. Pure."""

from __future__ import annotations

import re
from hashlib import blake2b
from pathlib import Path

SHOWN_MAX = 40  # characters of the model's id, for people who look; the rest tells models apart
DIGEST_BYTES = 8


def library_of(state: Path, model: str) -> Path:
    """The folder of a model's library. Whatever the id is, it is one name, and no other id's."""
    shown = re.sub(r"[^A-Za-z0-9_]+", "-", model)[-SHOWN_MAX:].strip("-")
    digest = blake2b(model.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).hexdigest()
    return state / "snapshots" / f"{shown}-{digest}".lstrip("-")
