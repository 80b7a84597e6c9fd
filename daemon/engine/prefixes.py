"""Whose tokens begin like these: an index of members by their tokens, for each realm. Pure.

A tree over blocks of `BLOCK` token ids. Ids stand there in full and are compared as they are, so that a hit
needs no luck with hashes; realms are tagged and never mix. Each node keeps its children sorted, too: what
shares the most with a query lies next to where the query would stand. The last block of a member may be
shorter, and then has no children.

A member that gets a token more moves within its last block; a lookup takes a step for each block of the
query, however many members share it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

BLOCK = 32  # tokens

Member = TypeVar("Member", bound=Hashable)
Block = tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Node(Generic[Member]):
    """A block below its parent's, and the members whose tokens end with it."""

    parent: _Node[Member] | None = None
    block: Block = ()
    depth: int = 0  # whole blocks from the root, this one too
    children: dict[Block, _Node[Member]] = field(default_factory=dict)
    order: list[Block] = field(default_factory=list)  # of the children
    members: dict[Member, None] = field(default_factory=dict)

    def below(self) -> Iterator[Member]:
        """The members here and below, nearest first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield from list(node.members)
            waiting.extend(node.children.values())


@dataclass(frozen=True, slots=True)
class _Place(Generic[Member]):
    node: _Node[Member]
    length: int


class Prefixes(Generic[Member]):
    """Members of realms with their tokens. A realm is any hashable value."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, _Node[Member]] = {}
        self._places: dict[tuple[Hashable, Member], _Place[Member]] = {}

    def __len__(self) -> int:
        """Places that are taken: members, once for each realm that they are in."""
        return len(self._places)

    @property
    def blocks(self) -> int:
        """Nodes that there are, roots too."""
        waiting, count = list(self._roots.values()), 0
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            count += 1
        return count

    def places(self) -> Iterator[tuple[Hashable, Member, int]]:
        """Each member of each realm, with how many of its tokens are known."""
        for (realm, member), place in self._places.items():
            yield realm, member, place.length

    def move(self, realm: Hashable, member: Member, tokens: Sequence[int], length: int) -> None:
        """The member now has the first `length` of these tokens; with none it leaves the realm.

        Those that it had and keeps must be the same: whoever changes tokens takes the length back before.
        """
        place = self._places.get((realm, member))
        if place is None:
            if length:
                self._put(realm, member, self._roots.setdefault(realm, _Node()), tokens, length)
            return
        if place.length == length:
            return
        node, kept = place.node, min(place.length, length) // BLOCK
        del node.members[member], self._places[realm, member]
        above = node
        while above.depth > kept or len(above.block) % BLOCK:
            assert above.parent is not None
            above = above.parent
        if length:
            self._put(realm, member, above, tokens, length)
        self._prune(realm, node)

    def stand_beside(self, realm: Hashable, member: Member, other: Member, length: int) -> bool:
        """A new member has the first `length` tokens of another: in one step, whatever their number.

        False, and nothing happens, unless the other is there with just so many.
        """
        place = self._places.get((realm, other))
        if place is None or place.length != length or (realm, member) in self._places:
            return False
        place.node.members[member] = None
        self._places[realm, member] = place
        return True

    def _put(
        self, realm: Hashable, member: Member, node: _Node[Member], tokens: Sequence[int], length: int
    ) -> None:
        for start in range(node.depth * BLOCK, length, BLOCK):
            block = tuple(tokens[start : min(start + BLOCK, length)])
            child = node.children.get(block)
            if child is None:
                depth = node.depth + (len(block) == BLOCK)
                child = node.children[block] = _Node(node, block, depth)
                insort(node.order, block)
            node = child
        node.members[member] = None
        self._places[realm, member] = _Place(node, length)

    def _prune(self, realm: Hashable, node: _Node[Member]) -> None:
        while not node.members and not node.children:
            if node.parent is None:
                self._roots.pop(realm, None)
                return
            parent, node.parent = node.parent, None
            del parent.children[node.block], parent.order[bisect_left(parent.order, node.block)]
            node = parent

    def matches(self, realm: Hashable, tokens: Sequence[int], length: int) -> Iterator[tuple[int, Member]]:
        """Members that share tokens with the first `length` of these: how many, the longest first.

        The index must not change while this is iterated over.
        """
        node = self._roots.get(realm)
        if node is None:
            return
        while True:
            start = node.depth * BLOCK
            block = tuple(tokens[start : min(start + BLOCK, length)])
            child = node.children.get(block)
            if child is None or len(block) < BLOCK:
                break
            node = child
        came_from: Block | None = None
        while True:
            start = node.depth * BLOCK
            block = tuple(tokens[start : min(start + BLOCK, length)])
            yield from _of_node(node, block, start, came_from)
            if node.parent is None:
                return
            node, came_from = node.parent, node.block


def _of_node(
    node: _Node[Member], block: Block, start: int, came_from: Block | None
) -> Iterator[tuple[int, Member]]:
    """Members at a node and below it but for one child, by how much of `block` they go on with."""
    right = bisect_left(node.order, block if came_from is None else came_from)
    left = right - 1
    right += came_from is not None
    at_node = [(start, member) for member in node.members]
    while left >= 0 or right < len(node.order):
        before = _common(node.order[left], block) if left >= 0 else -1
        after = _common(node.order[right], block) if right < len(node.order) else -1
        common = max(before, after)
        if not common:
            yield from at_node
            at_node = []
        if after >= before:
            child, right = node.children[node.order[right]], right + 1
        else:
            child, left = node.children[node.order[left]], left - 1
        for member in child.below():
            yield start + common, member
    yield from at_node


def _common(a: Block, b: Block) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
