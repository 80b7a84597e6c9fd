"""Snapshots of every kind and codec: the same bytes, the same next logits, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tests.tiny import make_tiny_model

from stateroom.caches import snapshot
from stateroom.caches.attention import install
from stateroom.caches.blueprint import Blueprint
from stateroom.caches.codecs.scheme import Scheme
from stateroom.caches.errors import Mismatch
from stateroom.caches.session import SessionCache

SCHEMES = [
    Scheme(),
    Scheme("affine8"),
    Scheme("affine4", group_size=32),
    Scheme("turbo"),
    Scheme("affine8", quantise_after=12),
]
LENGTHS = [0, 1, 5, 30]  # the window of gemma3_text has eight
CASES = [(name, scheme) for name in ("llama", "gemma3_text", "lfm2", "falcon_h1") for scheme in SCHEMES]


@cache
def model_of(architecture: str) -> Any:
    model = make_tiny_model(architecture, width=256 if architecture != "mamba" else 32).model
    install(model)
    return model


@cache
def blueprints(architecture: str, scheme: Scheme) -> tuple[Blueprint, Blueprint]:
    made = SessionCache.create(model_of(architecture), scheme)
    return made.blueprint, Blueprint.of(model_of(architecture))


def empty(architecture: str, scheme: Scheme = SCHEMES[0]) -> SessionCache:
    wanted, dense = blueprints(architecture, scheme)
    # A session of another process has blueprints of its own; the layers are what counts.
    return SessionCache.empty(wanted, replace(dense))


def fed(architecture: str, scheme: Scheme, length: int) -> SessionCache:
    session = empty(architecture, scheme)
    for start in range(0, length, 7):
        tokens = [(11 * k) % 200 for k in range(start, min(start + 7, length))]
        session.forward(model_of(architecture), mx.array([tokens]))
        mx.eval(session.arrays())
    return session


def raw(taken: snapshot.Snapshot) -> dict[str, bytes]:
    return {name: bytes(memoryview(mx.view(a, mx.uint8))) for name, a in taken.arrays.items()}


@pytest.mark.parametrize(("architecture", "scheme"), [*CASES, ("mamba", SCHEMES[0])])
@pytest.mark.parametrize("length", LENGTHS)
def test_what_is_restored_is_what_was_taken(architecture: str, scheme: Scheme, length: int) -> None:
    """B41: every scalar comes back, wrapped or not, quantised or not yet."""
    session = fed(architecture, scheme, length)
    taken = snapshot.take(session)
    assert all(type(fact) in (int, bool, str) for fact in taken.facts.values())
    back = snapshot.restore(empty(architecture, scheme), taken)
    assert back.offsets == session.offsets
    assert back.quantised == session.quantised
    again = snapshot.take(back)
    assert (again.facts, raw(again)) == (taken.facts, raw(taken))
    more = mx.array([[3, 1, 4]])
    got, want = back.forward(model_of(architecture), more), session.forward(model_of(architecture), more)
    assert np.abs(np.array(got) - np.array(want)).max() <= 1e-5 * np.abs(np.array(want)).max()
    assert raw(snapshot.take(back)) == raw(snapshot.take(session))


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "lfm2"])
def test_it_holds_live_tokens_only(architecture: str) -> None:
    """B31: nothing of what was trimmed, and no spare capacity."""
    session, never = fed(architecture, SCHEMES[0], 30), fed(architecture, SCHEMES[0], 30)
    before = raw(snapshot.take(never))
    if session.speculative:
        session.forward(model_of(architecture), mx.array([[9, 9, 9]]))
        session.trim(0, 3)
    assert raw(snapshot.take(session)) == before
    assert sum(map(len, before.values())) <= session.nbytes_live


def test_a_snapshot_is_not_aliased() -> None:
    """B30."""
    session = fed("lfm2", SCHEMES[0], 9)
    taken = snapshot.take(session)
    before = raw(taken)
    one, other = (snapshot.restore(empty("lfm2"), taken) for _ in range(2))
    for n, each in enumerate((session, one, other)):
        each.forward(model_of("lfm2"), mx.array([[n]]))
        mx.eval(each.arrays())
    assert raw(taken) == before


def test_other_layers_codecs_and_formats_are_refused() -> None:
    """B47: by name, and the cache that was to take it is as it was."""
    taken = snapshot.take(fed("llama", SCHEMES[1], 20))
    for architecture, scheme in (("llama", SCHEMES[0]), ("llama", SCHEMES[2]), ("gemma3_text", SCHEMES[1])):
        target = empty(architecture, scheme)
        with pytest.raises(Mismatch):
            snapshot.restore(target, taken)
        assert target.offsets == (0,)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"format": "1"},
        {"length": True},
        {"length": 0},
        {"length": 21},
        {"length": -1},
        {"0.forgotten": "0"},
        {"0.forgotten": None},
        {"quantised": "True"},
        {"quantised": False},
    ],
)
def test_facts_that_are_not_what_they_were_are_refused(change: dict[str, Any]) -> None:
    """X4: a flag that comes back as text is true whatever it said."""
    taken = snapshot.take(fed("llama", SCHEMES[1], 20))
    with pytest.raises(Mismatch):
        snapshot.restore(empty("llama", SCHEMES[1]), replace(taken, facts=taken.facts | change))


def test_a_snapshot_with_missing_or_strange_arrays_is_refused() -> None:
    taken = snapshot.take(fed("lfm2", SCHEMES[0], 20))
    for broken in (
        dict(list(taken.arrays.items())[1:]),
        taken.arrays | {"9.0": mx.zeros(3)},
        {name: array[..., :-1] for name, array in taken.arrays.items()},
        {name: array.astype(mx.float16) for name, array in taken.arrays.items()},
    ):
        with pytest.raises(Mismatch):
            snapshot.restore(empty("lfm2"), replace(taken, arrays=broken))
