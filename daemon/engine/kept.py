"""A snapshot of the library in the broker's words. No mlx."""

from __future__ import annotations

from stateroom.caches.snapshots.library import Entry
from stateroom.daemon.link import Kept


def kept_of(entry: Entry) -> Kept:
    """As the broker knows it."""
    about = entry.about
    return Kept(
        entry.id,
        about.owner,
        about.session or "",
        about.name,
        entry.length,
        entry.nbytes,
        about.created_ms,
    )
