"""Which models may be served, and under which id.

A client names a model by its id: one given at start, or one installed in the home's models directory. A path
or a Hugging Face id from the wire is served only by a daemon that was told to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from stateroom.client.errors import NotFound
from stateroom.daemon.config import ModelSpec, existing_path, looks_like_path, model_id
from stateroom.daemon.models import list_installed

_HUB_ID = r"[A-Za-z0-9._-]{1,96}/[A-Za-z0-9._-]{1,96}"


class Shelf:
    """Models by id. The first one given at start is the default, else the first one installed."""

    def __init__(self, given: tuple[ModelSpec, ...], models_dir: Path, allow_any: bool = False) -> None:
        self._given = {spec.id: spec for spec in given}
        self._models_dir = models_dir
        self._allow_any = allow_any
        self._remembered: dict[str, ModelSpec] = {}

    def all(self) -> list[ModelSpec]:
        """Given ones first, then installed ones by name."""
        installed = {spec.id: spec for spec in self._installed()}
        return list((self._given | installed | self._given).values())

    def find(self, reference: str | None) -> ModelSpec:
        """The model of that id; None is the default.

        Raises:
            NotFound: no such model here.
        """
        models = self.all()
        if reference is None:
            if not models:
                raise NotFound(
                    "No model is served here; install one (`stateroom model add demo`) or give `serve` one.",
                    field="model",
                )
            return models[0]
        for known in models:
            if reference in (known.id, known.spec):
                return known
        if self._allow_any:
            return self._anything(reference)
        raise NotFound(
            "There is no such model here; `hello` lists those there are, as `stateroom model list` does.",
            field="model",
        )

    def remember(self, specs: Iterable[ModelSpec]) -> None:
        """Models that sessions of a daemon before are of, as it had loaded them."""
        self._remembered |= {spec.id: spec for spec in specs}

    def recall(self, model: str) -> ModelSpec:
        """The model that a session is of, whether or not a client may name it.

        Raises:
            NotFound: it isn't here any more.
        """
        found = {spec.id: spec for spec in self.all()}.get(model) or self._remembered.get(model)
        if found is None:
            raise NotFound(
                f"The session's model, {model!r}, is not here any more: install it again, or give it to "
                "`serve`. The session keeps its tokens.",
                field="model",
            )
        return found

    def _anything(self, reference: str) -> ModelSpec:
        if looks_like_path(reference):
            path = existing_path(reference)
            if path is not None:
                return ModelSpec(str(path), str(path))
        elif re.fullmatch(_HUB_ID, reference):
            return ModelSpec(model_id(reference), reference)
        raise NotFound("There is no model at that path, and it is no Hugging Face id.", field="model")

    def _installed(self) -> list[ModelSpec]:
        return [ModelSpec(model.name, str(model.path)) for model in list_installed(self._models_dir)]
