"""Sessions of several KV schemes in one daemon: side by side, forked, and over a worker's death."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import RunningDaemon, StartDaemon
from tests.system.conftest import ConnectTo, await_model
from tests.system.footprint import seconds_until
from tests.tiny import write_tiny_model

from stateroom.client import Session, connect
from stateroom.client.errors import EngineLost, Unsupported
from stateroom.client.protocol import KV

pytestmark = pytest.mark.system

SCHEMES = [
    KV(),
    KV(scheme="affine8"),
    KV(scheme="affine4", group_size=32),
    KV(scheme="turbo"),
    KV(scheme="affine8", quantise_after=20),
]
PROMPT = [(17 * k) % 250 for k in range(40)]
COUNT = 24
RECOVER_S = 30.0


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "lfm2"])
def wide_daemon(
    request: pytest.FixtureRequest, start_shared_daemon: StartDaemon, tmp_path_factory: pytest.TempPathFactory
) -> RunningDaemon:
    """Heads of 64, which every scheme fits."""
    folder = tmp_path_factory.mktemp("wide") / request.param
    daemon = start_shared_daemon(model=write_tiny_model(folder, request.param, width=256, context=2048))
    await_model(daemon)
    return daemon


def tokens_of(session: Session) -> list[int]:
    return session.decode(max_tokens=COUNT, ignore_eos=True).wait().tokens


def test_mixed_schemes_decode_as_if_alone(wide_daemon: RunningDaemon, connect_to: ConnectTo) -> None:
    """Quantised, windowed and hybrid sessions batch like dense ones, and never with another scheme's."""
    room = connect_to(wide_daemon)
    alone = [tokens_of(room.open(tokens=PROMPT, kv=kv)) for kv in SCHEMES]
    sessions = [room.open(tokens=PROMPT, kv=kv) for kv in SCHEMES for _ in range(2)]
    streams = [session.decode(max_tokens=COUNT, ignore_eos=True) for session in sessions]
    together: list[list[int]] = [[] for _ in streams]
    for stream, tokens in zip(streams, together, strict=True):
        tokens.extend(token for event in stream for token in event.tokens)
    for n, tokens in enumerate(together):
        assert tokens == alone[n // 2]
    for session in sessions:
        session.close()


def test_info_tells_kinds_and_bytes(wide_daemon: RunningDaemon, connect_to: ConnectTo) -> None:
    room = connect_to(wide_daemon)
    live = {}
    for kv in SCHEMES[:4]:
        session = room.open(tokens=PROMPT * 8, kv=kv)
        info = session.info()
        assert 0 < info.live_bytes <= info.private_bytes
        stored = {kind.scheme for kind in info.kinds if kind.kind in ("full", "window")}
        assert stored == {kv.scheme}
        assert {kind.scheme for kind in info.kinds if kind.kind == "state"} <= {"dense"}
        assert session.caps is not None
        assert session.caps.kv == info.kinds
        assert next(s for s in room.list() if s.session == session.id).kinds == info.kinds
        live[kv.scheme] = info.live_bytes
        session.close()
    assert max(live["affine4"], live["turbo"]) < live["affine8"] < live["dense"] / 1.7


def test_forks_and_a_recovery_keep_the_scheme(wide_daemon: RunningDaemon, connect_to: ConnectTo) -> None:
    room = connect_to(wide_daemon)
    session = room.open(tokens=PROMPT, kv=SCHEMES[2])
    (child,) = session.fork(1)
    expected = tokens_of(child)
    assert child.info().kinds == session.info().kinds
    (worker,) = wide_daemon.workers()
    os.kill(worker, signal.SIGKILL)
    seconds_until(lambda: worker not in wide_daemon.workers(), RECOVER_S, "the worker's end")
    with contextlib.suppress(EngineLost):  # the broker may not have noticed
        session.tokens()
    await_model(wide_daemon)
    assert tokens_of(session) == expected
    assert {kind.scheme for kind in session.info().kinds} <= {"affine4", "dense"}
    assert session.info().live_bytes == child.info().live_bytes or child.info().tier == "tokens"


@pytest.mark.parametrize(
    ("kv", "field"),
    [
        ({"scheme": "dense", "group_size": 32}, "kv"),
        ({"scheme": "dense", "quantise_after": 5}, "kv"),
        ({"scheme": "affine4", "group_size": 128}, "kv.group_size"),  # heads of 64
        ({"scheme": "turbo", "group_size": 64}, "kv.group_size"),
    ],
)
def test_what_does_not_fit_is_refused_at_open(
    wide_daemon: RunningDaemon, connect_to: ConnectTo, kv: dict[str, Any], field: str
) -> None:
    """B38, B39: never mid-request."""
    room = connect_to(wide_daemon)
    before = len(room.list())
    with pytest.raises(Unsupported) as refused:
        room.open(tokens=PROMPT, kv=KV(**kv))
    assert refused.value.field == field
    assert len(room.list()) == before


def test_narrow_heads_are_refused_with_what_is_possible(
    tiny_daemon: RunningDaemon, connect_to: ConnectTo
) -> None:
    """B39: heads of 8 hold no group."""
    room = connect_to(tiny_daemon)
    for scheme in ("affine4", "affine8", "turbo"):
        with pytest.raises(Unsupported, match="8"):
            room.open(kv=KV(scheme=scheme))  # type: ignore[arg-type]
    assert tokens_of(room.open(tokens=PROMPT))


def test_a_model_without_keys_has_nothing_to_quantise(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = start_daemon(model=write_tiny_model(tmp_path / "mamba", "mamba"))
    await_model(daemon)
    with connect(endpoint=daemon.endpoint) as room:
        with pytest.raises(Unsupported, match="keys and values"):
            room.open(kv=KV(scheme="affine8"))
        assert tokens_of(room.open(tokens=PROMPT))


def test_checkpoints_that_give_way_are_gone_from_info(start_daemon: StartDaemon, tmp_path: Path) -> None:
    """Memory that another session needs is made without asking, and told."""
    model = write_tiny_model(tmp_path / "mamba", "mamba", context=2048)
    probe = start_daemon(model=model)
    await_model(probe)
    with connect(endpoint=probe.endpoint) as room:
        info = room.open(tokens=PROMPT).info()
        rows = info.live_bytes
        assert info.private_bytes == 2 * rows, "the state, and a checkpoint of it"
    # Without a disk: else the oldest session goes there, to make room for the others' checkpoints.
    daemon = start_daemon(f"--kv-budget={3 * rows}", "--no-keep", model=model)
    await_model(daemon)
    with connect(endpoint=daemon.endpoint) as room:
        first = room.open(tokens=PROMPT)
        first.decode(max_tokens=5, ignore_eos=True).wait()
        assert first.info().checkpoints == [len(PROMPT)]
        for start in (1, 2):  # nothing that could be shared
            room.open(tokens=PROMPT[start:] + PROMPT[:start])
        info = first.info()
        assert (info.checkpoints, info.private_bytes) == ([], rows)
        assert first.trim(to=len(PROMPT), replay=True).receipt.reused == 0
