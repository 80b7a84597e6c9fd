"""The index of prefixes against brute force over the members themselves, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stateroom.daemon.engine.prefixes import BLOCK, Prefixes

REALMS = ["one", "two"]


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# Few beginnings and few ids, so that much is shared; lengths on both sides of a block's edge.
runs = st.builds(
    lambda first, n, tail: [first] * n + tail,
    st.integers(0, 1),
    st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 5]),
    st.lists(st.sampled_from([0, 1, 256]), max_size=4),
)


class Members(RuleBasedStateMachine):
    """Members that come, grow, are cut, and go, in two realms."""

    def __init__(self) -> None:
        super().__init__()
        self.index: Prefixes[str] = Prefixes()
        self.tokens: dict[tuple[str, str], list[int]] = {}

    places = st.tuples(st.sampled_from(REALMS), st.sampled_from("abcdef"))

    def moved(self, place: tuple[str, str], tokens: list[int]) -> None:
        self.tokens[place] = tokens
        self.index.move(*place, tokens, len(tokens))
        if not tokens:
            del self.tokens[place]

    @rule(place=places, more=runs)
    def grow(self, place: tuple[str, str], more: list[int]) -> None:
        self.moved(place, self.tokens.get(place, []) + more)

    @rule(place=places, data=st.data())
    def cut(self, place: tuple[str, str], data: Any) -> None:
        tokens = self.tokens.get(place, [])
        self.moved(place, tokens[: data.draw(st.integers(0, len(tokens)))])

    @rule(place=places, tokens=runs)
    def replace(self, place: tuple[str, str], tokens: list[int]) -> None:
        """As a `sync` does: back to what stays, then on."""
        kept = common(self.tokens.get(place, []), tokens)
        self.moved(place, tokens[:kept])
        self.moved(place, tokens)

    @rule(realm=st.sampled_from(REALMS), query=runs, data=st.data())
    def look(self, realm: str, query: list[int], data: Any) -> None:
        length = data.draw(st.integers(0, len(query)))
        found = list(self.index.matches(realm, query, length))
        wanted = {
            member: common(tokens, query[:length])
            for (of, member), tokens in self.tokens.items()
            if of == realm
        }
        assert {member: n for n, member in found} == wanted
        assert len(found) == len(wanted), "a member is found once"
        assert [n for n, _ in found] == sorted(wanted.values(), reverse=True)

    @invariant()
    def nothing_else_is_kept(self) -> None:
        assert {(realm, member): n for realm, member, n in self.index.places()} == {
            place: len(tokens) for place, tokens in self.tokens.items()
        }
        nodes = {
            (realm, *tokens[:end])
            for (realm, _), tokens in self.tokens.items()
            for end in [*range(0, len(tokens), BLOCK), len(tokens)]
        }
        assert self.index.blocks == len(nodes)


TestMembers = Members.TestCase
TestMembers.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("other", [256, 1 << 16, 1 << 32])
def test_ids_are_compared_in_full(other: int) -> None:
    """B74: prompts that differ by one id, in its high bits only, share nothing behind it."""
    index: Prefixes[str] = Prefixes()
    tokens = [7] * (3 * BLOCK)
    index.move("realm", "a", tokens, len(tokens))
    for at in (0, BLOCK, BLOCK + 3):
        query = [*tokens[:at], 7 + other, *tokens[at + 1 :]]
        assert next(index.matches("realm", query, len(query))) == (at, "a")


def test_realms_with_tags_do_not_collide() -> None:
    """B74: the same tokens of another owner, model or scheme are another thing."""
    index: Prefixes[str] = Prefixes()
    index.move(("owner", "a", "bc"), "mine", [1] * 64, 64)
    for realm in (("owner", "ab", "c"), ("trunk", "a", "bc"), ("owner", "a", ("bc",))):
        assert list(index.matches(realm, [1] * 64, 64)) == []


def test_a_lookup_is_as_short_among_thousands_as_among_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: the blocks that are looked at, with one system prompt for all."""
    from stateroom.daemon.engine import prefixes

    looked = 0
    plain = prefixes._common

    def counted(a: tuple[int, ...], b: tuple[int, ...]) -> int:
        nonlocal looked
        looked += 1
        return plain(a, b)

    monkeypatch.setattr(prefixes, "_common", counted)
    system = list(range(1000))
    index: Prefixes[int] = Prefixes()
    for n in range(2000):
        index.move("realm", n, [*system, n, *range(50)], 1051)
    query = [*system, 5000, 1, 2]
    assert next(index.matches("realm", query, len(query)))[0] == len(system)
    assert looked <= 4


def test_a_twin_stands_beside_its_like_in_one_step() -> None:
    """A fork's tokens are known already; where its parent stands with another number, nothing happens."""
    index: Prefixes[str] = Prefixes()
    tokens = list(range(100))
    index.move("realm", "parent", tokens, 70)
    blocks = index.blocks
    assert not index.stand_beside("realm", "child", "parent", 71)
    assert not index.stand_beside("other", "child", "parent", 70)
    assert not index.stand_beside("realm", "child", "stranger", 70)
    assert len(index) == 1
    assert index.stand_beside("realm", "child", "parent", 70)
    assert not index.stand_beside("realm", "child", "parent", 70)
    assert sorted(index.places()) == [("realm", "child", 70), ("realm", "parent", 70)]
    index.move("realm", "parent", tokens, 0)
    assert list(index.matches("realm", tokens, 100)) == [(70, "child")]
    assert index.blocks == blocks
    index.move("realm", "child", tokens, 0)
    assert index.blocks == 0
