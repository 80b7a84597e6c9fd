"""What goes to disk when a worker is told to leave, and in which order."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tests.engine.harness import Bench
from tests.tiny import make_tiny_model

from stateroom.client import protocol as p
from stateroom.daemon.engine.disk_start import begin, contents, model_of
from stateroom.daemon.engine.parking import Candidate, order, park_all
from stateroom.daemon.link import Kept

MB = 2**20
candidates = st.lists(
    st.builds(
        Candidate,
        st.uuids().map(str),
        st.integers(1, 100_000),
        st.integers(0, 10**9),
        st.dictionaries(st.integers(1, 5), st.just(10**7)),
    ),
    unique_by=lambda each: each.id,
    max_size=12,
)


@given(candidates)
def test_everybody_stands_in_the_order_once(them: list[Candidate]) -> None:
    assert sorted(order(them)) == sorted(each.id for each in them)
    assert order(them) == order(reversed(them))


def test_what_saves_the_most_for_its_bytes_goes_first() -> None:
    long, short = Candidate("long", 4000, 160 * MB), Candidate("short", 40, 2 * MB)
    dense, packed = Candidate("dense", 1000, 40 * MB), Candidate("packed", 1000, 10 * MB)
    assert order([short, long]) == ["long", "short"]  # files and syncs cost, too
    assert order([dense, packed]) == ["packed", "dense"]


def test_a_trunk_is_paid_for_by_all_who_have_it() -> None:
    forks = [Candidate(f"fork {n}", 2000, 1 * MB, {7: 80 * MB}) for n in range(8)]
    alone = Candidate("alone", 2000, 81 * MB)
    assert order([alone, *forks])[-1] == "alone"


def test_sessions_are_parked_while_there_is_time(tmp_path: Path) -> None:
    """Each is told as soon as it is there, and begins with it in the next worker."""
    loaded = make_tiny_model()
    bench = Bench(loaded, folder=tmp_path)
    texts = {bench.open([(n * k) % 200 for k in range(100)]): n for n in range(1, 9)}
    tiny = bench.open([1, 2, 3])
    park_all(bench.engine, 0.0)
    assert not bench.shelved
    park_all(bench.engine, 60.0)
    assert bench.session(tiny).snapshot is None
    assert {kept.session for kept in bench.shelved.values()} == set(texts)
    told = {journal.session: journal.snapshot for journal in bench.asides}
    assert told == {session: bench.session(session).snapshot for session in texts}
    bench.close()
    other = Bench(loaded, folder=tmp_path)
    for session, n in texts.items():
        other.adopt(session, bench.journal[session], snapshot=told[session])
        body = other.call(p.Prefill(session=session, tokens=[n]))
        assert isinstance(body, p.LengthResult)
        assert (body.receipt.source, body.receipt.reused) == ("snapshot", 100)
        other.check_law(session)


def test_a_library_that_is_open_elsewhere_is_left_alone(tmp_path: Path) -> None:
    loaded = make_tiny_model()
    first, second = Bench(loaded), Bench(loaded)
    assert begin(first.engine, None) == "off: no place was given for them"
    assert begin(first.engine, tmp_path) == "on"
    assert begin(second.engine, tmp_path) == "off: another process has them open"
    assert second.engine.disk is None
    session = first.open(list(range(100)))
    body = first.call(p.Park(session=session))
    assert isinstance(body, p.ParkResult)
    kept, broken = contents(first.engine)
    assert ([type(each) for each in kept], broken) == ([Kept], [])
    assert first.call(p.Prefill(session=session, tokens=[5]))
    first.check_law(session)
    first.close()
    assert begin(second.engine, tmp_path) == "on"
    assert contents(second.engine) == (kept, [])
    second.close()
    assert model_of(loaded, tmp_path)().keys() == {"weights", "config", "tokenizer", "dtype"}
