"""Rows, engines and sums out of a snapshot; order and choice of rows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.top.scripted import MIB, model, session, snapshot, stats

from stateroom.client.protocol import WAITING, RequestInfo
from stateroom.daemon.top.board import ORDERS, Board, Row, Tier, arranged, board
from stateroom.daemon.top.rates import Rates
from stateroom.daemon.top.snapshot import Snapshot


def made(snapshot: Snapshot, owner: str | None = None) -> Board:
    rates = Rates()
    rates.take(snapshot)
    return board(snapshot, rates, owner)


def request(rid: int, of: str, **more: object) -> RequestInfo:
    told: dict[str, object] = {"op": "decode", "session": session(of).session, "model": "tiny"}
    return RequestInfo(rid=rid, **(told | more))  # type: ignore[arg-type]


# ---------------------------------------------------------------- rows


def test_a_row_says_what_its_session_does() -> None:
    found = made(
        snapshot(
            session("idle"),
            session("prefill", running="prefill", state="running"),
            session("decode", running="decode", state="running"),
            session("waits", running="decode", state="running", waiting="memory"),
            session("bad", quarantined="its logits were not numbers"),
            requests=[
                request(1, "prefill", op="prefill", done=450, total=1_000),
                request(2, "decode", done=0, total=0, tokens_per_s=42.5),
                request(4, "waits", waiting="memory", tokens_per_s=7.0),
                request(3, "decode", state="queued", tokens_per_s=9.0),
            ],
        )
    )
    assert [row.state for row in found.rows] == [
        "idle",
        "prefill 45%",
        "decode",
        "waits for memory",
        "quarantined",
    ]
    assert [row.per_s for row in found.rows] == [0.0, 0.0, 42.5, 0.0, 0.0]
    assert [each.rid for each in found.rows[2].requests] == [2, 3]


def test_a_session_that_says_nothing_of_its_speed_has_that_by_which_it_grew() -> None:
    rates = Rates()
    rates.take(snapshot(session("a", length=100), at_s=1.0))
    later = snapshot(session("a", length=164, running="prefill"), at_s=3.0)
    rates.take(later)
    assert board(later, rates).rows[0].per_s == 32.0


def test_only_sessions_of_one_owner_are_rows_and_sums_are_of_all() -> None:
    found = made(snapshot(session("a"), session("b", owner="agents", tier="tokens", length=7)), "agents")
    assert [row.title for row in found.rows] == ["b"]
    assert found.tiers["tokens"] == Tier(0, 7)  # the stats of this test know of none


def test_a_session_without_a_name_is_called_by_its_id() -> None:
    assert made(snapshot(session("a", name=None))).rows[0].title == "a-012345"


# ---------------------------------------------------------------- engines and the ladder


def test_an_engine_counts_what_waits_for_it() -> None:
    found = made(
        snapshot(
            session("a"),
            requests=[
                request(1, "a", waiting="turn"),
                request(2, "a", state="queued", waiting="session"),
                request(3, "a"),
                request(4, "a", state="done", code="ok"),
                request(5, "a", model="other", waiting="engine"),
            ],
            stats=stats(model(rows=3), model("other", "starting") | {"failure": "It is not there."}),
        )
    )
    ready, starting = found.engines
    assert (ready.queue, ready.rows, ready.trouble) == (2, 3, None)
    assert (starting.queue, starting.trouble) == (1, "It is not there.")


def test_the_ladder_counts_what_is_where() -> None:
    found = made(
        snapshot(
            session("a"),
            session("b", tier="disk", disk_bytes=5 * MIB),
            session("c", tier="disk", disk_bytes=6 * MIB),
            session("d", tier="tokens", length=77),
            stats=stats(sessions_resident=1, sessions_disk=2, sessions_tokens=1),
        )
    )
    assert found.tiers == {"resident": Tier(1, 10 * MIB), "disk": Tier(2, 11 * MIB), "tokens": Tier(1, 77)}


# ---------------------------------------------------------------- order and choice

names = st.text("abcdefgh", min_size=1, max_size=6)
rows = st.lists(
    st.builds(
        lambda name, owner, length, private, shared, idle, per_s, waiting: Row(
            session(
                name, owner=owner, length=length, private_bytes=private, shared_bytes=shared, idle_s=idle,
                waiting=waiting,
            ),
            (), per_s,
        ),
        names, names, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.floats(0, 9),
        st.floats(0, 9), st.sampled_from([None, *WAITING]),
    ),
    unique_by=lambda row: row.id,
)  # fmt: skip
orders = st.sampled_from(ORDERS)


@given(rows, orders, st.booleans(), st.randoms())
def test_an_order_is_the_same_however_rows_came(
    found: list[Row], sort: str, reverse: bool, random: object
) -> None:
    first = arranged(found, sort, reverse, "")
    random.shuffle(found)  # type: ignore[attr-defined]
    assert arranged(found, sort, reverse, "") == first
    assert arranged(found, sort, not reverse, "") == first[::-1]
    assert sorted(row.id for row in first) == sorted(row.id for row in found)


@given(rows)
def test_each_order_begins_with_what_is_asked_for(found: list[Row]) -> None:
    def values(sort: str, of: str) -> list[object]:
        return [getattr(row.session, of) for row in arranged(found, sort, False, "")]

    for sort, field in (
        ("length", "length"), ("private", "private_bytes"), ("shared", "shared_bytes"), ("idle", "idle_s"),
    ):  # fmt: skip
        assert values(sort, field) == sorted(values(sort, field), reverse=True)  # type: ignore[type-var]
    assert values("owner", "owner") == sorted(values("owner", "owner"))  # type: ignore[type-var]
    assert values("session", "name") == sorted(values("session", "name"))  # type: ignore[type-var]
    rest = [(not row.busy, row.waiting is not None) for row in arranged(found, "activity", False, "")]
    assert rest == sorted(rest)


@given(rows, st.lists(names, max_size=2))
def test_a_filter_keeps_exactly_those_with_all_words(found: list[Row], words: list[str]) -> None:
    kept = arranged(found, "length", False, " ".join(words).upper())
    for row in found:
        told = [row.title, row.id, row.session.owner, row.session.model, "interactive", "device", row.state]
        assert (row in kept) == all(any(word in part for part in told) for word in words)


def test_a_filter_finds_places_and_states() -> None:
    found = made(snapshot(session("a", tier="disk"), session("b", waiting="turn", running="decode"))).rows
    assert [row.title for row in arranged(found, "session", False, "disk")] == ["a"]
    assert [row.title for row in arranged(found, "session", False, "waits turn")] == ["b"]
