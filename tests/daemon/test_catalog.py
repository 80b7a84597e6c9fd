"""Sessions by id and name, whose they are, and what the journal makes of their tokens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stateroom.client.errors import Capacity, Exists, NotFound
from stateroom.client.protocol import KV, KindCaps, SessionInfo
from stateroom.client.wire import to_wire
from stateroom.daemon.catalog import Catalog
from stateroom.daemon.clock import ManualClock
from stateroom.daemon.lifecycle import SessionEvent
from stateroom.daemon.link import ChatTurn, Journal, Part
from stateroom.daemon.parts import Parts
from stateroom.daemon.session import Session
from stateroom.daemon.store.pending import Pending
from stateroom.daemon.store.store import Store


def add(catalog: Catalog, owner: str = "app", name: str | None = None, ttl_s: float | None = None) -> Session:
    (session,) = catalog.add(owner, "toy", [name], "interactive", ttl_s, [])
    session.advance(SessionEvent.OPENED)
    return session


def only(owner: str) -> Callable[[str], bool]:
    return lambda other: other == owner


def close(catalog: Catalog, session: Session) -> None:
    session.advance(SessionEvent.CLOSE)
    session.advance(SessionEvent.END)
    catalog.remove(session)


def test_ids_and_names_find_own_sessions_only() -> None:
    catalog = Catalog(ManualClock())
    mine, theirs = add(catalog, "a", "draft"), add(catalog, "b", "draft")
    assert catalog.find("a", "draft") is catalog.find("a", mine.id) is mine
    assert catalog.find("b", "draft") is theirs
    for owner, reference in (("a", theirs.id), ("c", "draft"), ("c", mine.id), ("a", "other")):
        with pytest.raises(NotFound) as caught:
            catalog.find(owner, reference)
        assert caught.value.field == "session"
        assert reference not in caught.value.message
    assert [session.id for session in catalog.owned("a")] == [mine.id]


def test_a_session_named_like_anothers_id_shadows_nothing() -> None:
    catalog = Catalog(ManualClock())
    mine = add(catalog, "a")
    trap = add(catalog, "b", mine.id)
    assert catalog.find("a", mine.id) is mine
    assert catalog.find("b", mine.id) is trap


def test_names_are_unique_until_closed_and_added_together_or_not_at_all() -> None:
    catalog = Catalog(ManualClock())
    first = add(catalog, name="x")
    with pytest.raises(Exists):
        catalog.add("app", "toy", ["y", "x"], "interactive", None, [first.id])
    assert len(catalog) == 1
    assert len(catalog.add("app", "toy", ["y", None], "interactive", None, [first.id])) == 2
    close(catalog, first)
    assert add(catalog, name="x").id != first.id


def test_there_is_a_limit_of_sessions() -> None:
    catalog = Catalog(ManualClock(), sessions_max=2)
    first = add(catalog)
    with pytest.raises(Capacity):
        catalog.add("app", "toy", [None, None], "interactive", None, [])
    add(catalog)
    with pytest.raises(Capacity) as caught:
        add(catalog)
    assert caught.value.details["retry_after_s"] > 0
    close(catalog, first)
    add(catalog)


def test_ids_cannot_be_guessed() -> None:
    """128 bits at least: 22 characters of base64, none repeated in a thousand."""
    catalog = Catalog(ManualClock())
    ids = {add(catalog).id for _ in range(1000)}
    assert len(ids) == 1000
    assert min(map(len, ids)) >= 22


def test_the_journal_keeps_a_prefix_and_appends() -> None:
    catalog = Catalog(ManualClock())
    session = add(catalog)
    for keep, tokens, expected in (
        (0, [1, 2, 3], [1, 2, 3]),
        (3, [4], [1, 2, 3, 4]),
        (2, [], [1, 2]),
        (1, [2**31 - 1, 9], [1, 2**31 - 1, 9]),
        (0, [], []),
    ):
        catalog.journal(session, Journal(session.id, keep, tokens, private_bytes=10))
        assert session.tokens.tolist() == expected
        assert session.length == len(expected)
    assert (catalog.split(session), session.resident) == ((10, 0), True)
    with pytest.raises(AssertionError):
        catalog.journal(session, Journal(session.id, 1, []))
    catalog.forget_engine(session)
    assert (catalog.split(session), session.resident) == ((0, 0), False)


def test_what_a_session_writes_over_a_trunk_is_not_of_the_trunk() -> None:
    catalog = Catalog(ManualClock())
    session = add(catalog)
    session.trunk, session.trunk_length = "trunk", 3
    for keep, tokens, left in ((0, [1, 2, 3], 0), (3, [4], 0)):
        catalog.journal(session, Journal(session.id, keep, tokens))
        assert session.trunk_length == left
    session.trunk_length = 3
    for keep, tokens, left in ((4, [5], 3), (2, [8, 9], 2), (4, [], 2)):
        catalog.journal(session, Journal(session.id, keep, tokens))
        assert session.trunk_length == left


def test_what_is_shared_follows_all_who_have_it() -> None:
    """A part is private to the last who has it, whoever it was that went; each is counted once."""
    catalog = Catalog(ManualClock())
    trunk, mark, other = Part(1, 100, True), Part(2, 7, False), Part(3, 50, True)
    a, b, c = (add(catalog) for _ in range(3))
    for session, parts in ((a, [trunk, mark]), (b, [trunk, mark]), (c, [trunk, other])):
        session.generation = 4
        catalog.journal(session, Journal(session.id, 0, [1], private_bytes=10, parts=parts))
    assert [catalog.split(each) for each in (a, b, c)] == [(10, 107), (10, 107), (60, 100)]
    assert [catalog.info(each).capacity_bytes for each in (a, b, c)] == [110, 110, 160]
    figures = catalog.parts
    assert (figures.trunks, figures.trunk_bytes) == (2, 150)
    assert (figures.private_bytes, figures.shared_bytes) == (50, 107)
    catalog.journal(b, Journal(b.id, 1, [2], private_bytes=20))
    assert catalog.split(b) == (20, 107), "what isn't told is as it was"
    catalog.journal(b, Journal(b.id, 1, [], private_bytes=20, parts=[]))
    assert [catalog.split(each) for each in (a, b, c)] == [(17, 100), (20, 0), (60, 100)]
    catalog.forget_engine(c)
    assert catalog.split(a) == (117, 0)
    a.advance(SessionEvent.CLOSE)
    a.advance(SessionEvent.END)
    catalog.remove(a)
    assert (len(figures), figures.trunks, figures.trunk_bytes) == (0, 0, 0)
    assert (figures.private_bytes, figures.shared_bytes) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 4), st.sets(st.integers(1, 5))), max_size=30))
def test_the_sums_of_parts_are_those_of_their_holders(changes: list[tuple[int, set[int]]]) -> None:
    parts, held = Parts(), dict[int, list[Part]]()
    for session, numbers in changes:
        after = [Part(number, 10**number, number % 2 == 0) for number in sorted(numbers)]
        parts.replace(1, held.get(session, []), after)
        held[session] = after
    holders = Counter(part for each in held.values() for part in each)
    assert len(parts) == len(holders)
    assert parts.trunk_bytes == sum(part.bytes for part in holders if part.trunk)
    assert parts.private_bytes == sum(part.bytes for part, count in holders.items() if count == 1)
    assert parts.shared_bytes == sum(part.bytes for part, count in holders.items() if count > 1)


def test_a_listing_is_what_info_tells_in_wire_form() -> None:
    clock = ManualClock(1000.0)
    catalog = Catalog(clock)
    bare, full = add(catalog), add(catalog, name="full", ttl_s=9.5)
    add(catalog, "other")
    (child,) = catalog.add("app", "toy", [None], "background", None, [full.id, bare.id])
    clock.advance(2.5)
    full.kinds = [KindCaps(kind="full", scheme="dense", layers=2)]
    catalog.journal(full, Journal(full.id, 0, [1, 2, 3], private_bytes=10, parts=[Part(1, 5, True)]))
    full.advance(SessionEvent.START)
    full.running, full.running_op = 7, "decode"
    full.trunk, full.quarantined = "a trunk", "it kills"
    catalog.publish(full, "shown").advance(SessionEvent.OPENED)
    assert catalog.info(full).published == ["shown"]
    listed = catalog.listed(only("app"))
    assert [session for session, _ in listed] == [bare, full, child]
    assert [info for _, info in listed] == [to_wire(catalog.info(session)) for session, _ in listed]
    told = {field.metadata.get("wire", field.name) for field in fields(SessionInfo)}
    assert told - {"waiting"} == set(listed[1][1])  # that is known of its request


def test_a_trunk_is_found_by_its_secret_or_by_its_publisher() -> None:
    """And is no session to anybody: not listed, not found, not expired."""
    catalog = Catalog(ManualClock())
    mine = add(catalog, ttl_s=1.0)
    trunk = catalog.publish(mine, "name")
    for refused in (lambda: catalog.trunk("app", trunk.id), lambda: catalog.published("app", "name")):
        with pytest.raises(NotFound):  # it isn't there before `publish` is answered
            refused()
    assert catalog.trunks_of(only("app")) == []
    trunk.advance(SessionEvent.OPENED)
    for owner, reference in (("app", "name"), ("app", trunk.id), ("other", trunk.id)):
        assert catalog.trunk(owner, reference) is trunk
    assert catalog.published("app", "name") is trunk
    said = set()
    for look in (
        lambda: catalog.trunk("other", "name"),
        lambda: catalog.trunk("other", "nothing"),
        lambda: catalog.trunk("other", mine.id),
        lambda: catalog.trunk("app", mine.id),
    ):
        with pytest.raises(NotFound) as error:
            look()
        said.add((error.value.message, error.value.field))
    assert len(said) == 1, "what it says doesn't depend on what others have"
    with pytest.raises(NotFound):
        catalog.published("other", "name")
    with pytest.raises(NotFound):
        catalog.find("app", trunk.id)
    with pytest.raises(Exists):
        catalog.publish(mine, "name")
    assert [info.name for info in catalog.trunks_of(only("app"))] == ["name"]
    assert catalog.trunks_of(only("other")) == []
    assert catalog.owned("app") == [mine]
    assert len(trunk.id) >= 22


def test_trunks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stateroom.daemon.catalog.TRUNKS_MAX", 2)
    catalog = Catalog(ManualClock())
    mine = add(catalog)
    trunks = [catalog.publish(mine, name) for name in ("a", "b")]
    with pytest.raises(Capacity):
        catalog.publish(mine, "c")
    trunks[0].advance(SessionEvent.REFUSED)
    catalog.remove(trunks[0])
    catalog.publish(mine, "a")


def test_idle_sessions_expire_by_the_clock_given() -> None:
    clock = ManualClock(1000.0)
    catalog = Catalog(clock)
    short, long, forever = add(catalog, ttl_s=10), add(catalog, ttl_s=100), add(catalog)
    clock.advance(9.9)
    assert catalog.expired() == []
    catalog.touch(short)
    clock.advance(9.9)
    assert catalog.expired() == []
    clock.advance(0.1)
    assert catalog.expired() == [short]
    clock.advance(1000)
    assert set(catalog.expired()) == {short, long}
    long.advance(SessionEvent.START)
    assert forever not in catalog.expired()
    assert catalog.expired() == [short]
    assert catalog.info(forever).age_s == pytest.approx(1019.9)


OF_A_WORKER = ("tier", "kinds", "private_bytes", "live_bytes", "capacity_bytes", "disk_bytes", "checkpoints")


def same(one: Catalog, two: Catalog) -> None:
    """All that outlives a daemon, session by session."""
    assert {session.id for session in one} == {session.id for session in two}
    for session in one:
        twin = two.get(session.id)
        assert twin is not None
        for name in ("tokens", "chat", "kv", "published_as", "trunk_length", "snapshot"):
            assert getattr(twin, name) == getattr(session, name)
        infos = [to_wire(catalog.info(each)) for catalog, each in ((one, session), (two, twin))]
        times = [[info.pop(name, None) for name in ("age_s", "idle_s", "expires_in_s")] for info in infos]
        assert times[0] == pytest.approx(times[1], abs=0.01)
        for info in infos:
            for name in OF_A_WORKER:
                info.pop(name, None)
        assert infos[0] == infos[1]
    for owner in ("a", "b"):
        trunks = [[trunk.trunk for trunk in catalog.trunks_of(only(owner))] for catalog in (one, two)]
        assert trunks[0] == trunks[1]


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), acts=st.lists(st.integers(0, 9), max_size=40))
def test_what_is_kept_is_taken_in_again(seed: int, acts: list[int]) -> None:
    """Acts at random through the catalog, a flush at random, a real file: the next catalog is the same."""
    drawn = random.Random(seed)
    with TemporaryDirectory() as folder:
        store, pending = Store(Path(folder) / "catalog.db"), Pending()
        clock = ManualClock(50.0)
        catalog = Catalog(clock, pending=pending, wall_ms=lambda: 10**12 + round(1000 * clock()))
        for act in acts:
            clock.advance(drawn.random() * 100)
            sessions = [session for session in catalog if session.published_as is None]
            if act <= 2 or not sessions:
                session = add(catalog, drawn.choice("ab"), ttl_s=drawn.choice((None, 5000.0)))
                session.kv = drawn.choice((None, KV(scheme="affine8")))
                catalog.opened(session)
                continue
            session = drawn.choice(sessions)
            if act <= 5:
                new = [drawn.randrange(2**31) for _ in range(drawn.randrange(900))]
                chat = [ChatTurn([], 3, 1)] if drawn.random() < 0.3 else None
                snapshot = drawn.choice((None, "", "snapshot"))
                keep = drawn.randint(0, session.length)
                catalog.journal(session, Journal(session.id, keep, new, chat=chat, snapshot=snapshot))
                catalog.touch(session)
            elif act == 6 and session.id not in {
                info.trunk for info in catalog.trunks_of(only(session.owner))
            }:
                trunk = catalog.publish(session, f"trunk-{drawn.randrange(2**60)}")
                trunk.tokens = session.tokens[:]
                trunk.advance(SessionEvent.OPENED)
                catalog.opened(trunk)
            elif act == 7:
                session.quarantined = drawn.choice((None, "it kills"))
                catalog.record(session)
            elif act == 8:
                close(catalog, session)
            else:
                store.write(pending.take())
        store.write(pending.take())
        store.reload()
        again = Catalog(clock, wall_ms=lambda: 10**12 + round(1000 * clock()))
        again.restore(store.loaded)
        same(catalog, again)
        store.close()
