"""The fuzzers' property in every run of the tests: by seeded mutation, and by hypothesis, which shrinks."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fuzz.mutation import EDITS_MAX, Mutator, seeds
from tests.fuzz.target import REFUSALS, check

FRAMES = 20_000
SEED = 20


def test_every_seed_is_a_request_or_a_reply() -> None:
    """Otherwise the mutations would be of noise, and reach nothing behind the decoder."""
    outcomes = Counter(check(frame) for frame in seeds())
    assert outcomes["invalid"] == 0, outcomes
    assert len(set(outcomes) - REFUSALS) > 20


def test_seeded_mutations() -> None:
    mutator = Mutator(SEED)
    outcomes = Counter(check(mutator.frame()) for _ in range(FRAMES))
    # They get everywhere: refused for each of the reasons, and right after all for most operations.
    assert set(outcomes) >= REFUSALS, outcomes
    assert sum(outcome not in REFUSALS for outcome in outcomes) > 15, outcomes


edits = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 9), st.binary(max_size=12)), min_size=1, max_size=EDITS_MAX
)


@settings(max_examples=2_000, deadline=None)
@given(st.sampled_from(seeds()), edits)
def test_cuts_and_pastes(seed: bytes, made: list[tuple[int, int, bytes]]) -> None:
    frame = bytearray(seed)
    for at, cut, paste in made:
        frame[at : at + cut] = paste
    check(bytes(frame))


@settings(max_examples=1_000, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes(frame: bytes) -> None:
    check(frame)
