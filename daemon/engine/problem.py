"""What goes wrong when a model is loaded."""

from __future__ import annotations


class ModelError(Exception):
    """A model can't be loaded; the message is one sentence that names the thing.

    Attributes:
        permanent: trying again won't help (a bad path, an unknown architecture).
    """

    def __init__(self, message: str, *, permanent: bool) -> None:
        super().__init__(message)
        self.message = message
        self.permanent = permanent
