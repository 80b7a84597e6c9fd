"""Drafts by looking up, against the plainest search through all that a session has held."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stateroom.daemon.engine.speculation.lookup import GRAM_MAX, GRAM_MIN, MATCH_MAX, Lookup

few = st.integers(0, 3)  # so that runs recur


def searched(parts: list[list[int]], tokens: list[int], most: int) -> tuple[int, list[int]]:
    """The longest run of up to 5 last tokens that stands in some part before something; the latest place.

    Gives how many tokens match there, up to 16, and what follows; behind the last part's end, that again.
    """
    for gram in range(min(GRAM_MAX, len(tokens)), GRAM_MIN - 1, -1):
        for part in reversed(parts):
            for at in range(len(part) - 1, gram - 1, -1):
                if part[at - gram : at] != tokens[-gram:]:
                    continue
                reach = range(gram, (min(MATCH_MAX, at, len(tokens)) if gram == GRAM_MAX else gram) + 1)
                matched = max(n for n in reach if part[at - n : at] == tokens[-n:])
                follows = part[at:] * (most if part is parts[-1] else 1)
                return matched, follows[:most]
    return 0, []


def found(lookup: Lookup, tokens: list[int], most: int) -> tuple[int, list[int]]:
    draft = lookup.draft(tokens, most)
    return draft.matched, draft.tokens


@given(pieces=st.lists(st.lists(few, max_size=12), max_size=6), most=st.integers(1, 9))
def test_the_longest_match_and_of_those_the_latest(pieces: list[list[int]], most: int) -> None:
    lookup, tokens = Lookup(), []
    for piece in pieces:
        tokens = [*tokens, *piece]
        assert found(lookup, tokens, most) == searched([tokens], tokens, most)


@given(
    changes=st.lists(st.tuples(st.floats(0, 1), st.lists(few, max_size=8)), min_size=1, max_size=6),
    replaced=st.lists(few, max_size=8),
    most=st.integers(1, 9),
)
def test_what_was_replaced_is_found_too(
    changes: list[tuple[float, list[int]]], replaced: list[int], most: int
) -> None:
    """Each change cuts the session somewhere and appends; the versions before it are parts of their own."""
    lookup, tokens = Lookup(), []
    lookup.remember(replaced)
    parts: list[list[int]] = [replaced, tokens]
    for keep, new in changes:
        length = int(keep * len(tokens))
        if length < len(tokens):
            lookup.cut(tokens, length)
            parts.append([])
        fresh = parts.pop()
        # A part begins with what it has in common with the one before it, as far as a match can look.
        start = tokens[:length][-GRAM_MAX:] if not fresh and len(parts) > 1 else fresh
        tokens = [*tokens[:length], *new]
        parts.append([*start, *new])
        assert found(lookup, tokens, most) == searched(parts, tokens, most)


@settings(max_examples=30)
@given(tokens=st.lists(st.integers(0, 5), min_size=200, max_size=400), log_max=st.sampled_from([32, 50]))
def test_the_log_is_bounded(tokens: list[int], log_max: int) -> None:
    """The newer half is searched as if it were all; the older one is found while it is there."""
    lookup = Lookup(log_max)
    for length in range(1, len(tokens) + 1):
        draft = lookup.draft(tokens[:length], 3)
        assert lookup.held <= log_max
        assert lookup.entries <= (GRAM_MAX - GRAM_MIN + 1) * log_max
        if draft.tokens:  # it did stand so
            run = tokens[length - draft.matched : length]
            places = [at for at in range(draft.matched, length) if tokens[at - draft.matched : at] == run]
            assert draft.tokens[0] in {tokens[at] for at in places}
        near = searched([tokens[max(length - log_max // 2 + 1, 0) : length]], tokens[:length], 3)
        assert draft.matched >= near[0]


def test_a_long_session_is_taken_over_in_pieces() -> None:
    lookup, tokens = Lookup(), [n % 7 for n in range(100)]
    assert not lookup.follow(tokens, most=40)
    assert lookup.taken == 40
    assert lookup.follow(tokens, most=60)
    assert lookup.follow(tokens, most=0)


def test_a_run_that_repeats_itself_goes_on_so() -> None:
    assert found(Lookup(), [9, 1, 2, 3, 1, 2, 3, 1, 2], 7) == (5, [3, 1, 2, 3, 1, 2, 3])


def test_nothing_is_guessed_across_a_seam() -> None:
    lookup = Lookup()
    lookup.remember([1, 2, 3])
    assert found(lookup, [4, 1, 2], 5) == (2, [3])
    assert found(lookup, [4, 2, 3], 5) == (0, [])
