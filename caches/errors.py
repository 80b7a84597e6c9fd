"""What caches refuse, by type. The engine maps these to the protocol's codes."""


class UnknownKind(ValueError):
    """A model's layer caches include a kind that isn't understood; `names` are its classes."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(f"cache kinds not understood: {', '.join(names)}")
        self.names = names


class CannotTrim(ValueError):
    """A layer can't forget exactly what was asked; nothing was changed."""


class NotShared(RuntimeError):
    """A model reads keys and values otherwise than through our attention: its rows can't share a trunk."""


class Mismatch(ValueError):
    """Rows of different models, geometry or dtype can't share a batch; nothing was changed."""


class Broken(RuntimeError):
    """A forward failed half-way through layers that can't be put back: recompute from the tokens."""
