"""Quotas: the sums that are kept are those of a fresh count, whatever came; a refusal names the quota."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.daemon.conftest import StartBroker
from tests.daemon.rig import Rig

from stateroom.client.errors import Capacity
from stateroom.client.protocol import Close, Decode, Fork, Message, Open, Prefill, Restore, Sync
from stateroom.daemon.catalog import Catalog
from stateroom.daemon.config import parse_quotas
from stateroom.daemon.exits import Leave
from stateroom.daemon.lifecycle import SessionState
from stateroom.daemon.link import Journal, Part
from stateroom.daemon.quotas import Quota, Quotas, account_of, surely_computes
from stateroom.daemon.session import Session

OWNERS = ("editor", "agent", "laptop/chat", "laptop/agent")
PARTS = [Part(number, 100 * number + 1, trunk=bool(number % 2)) for number in range(1, 7)]


class Sums(RuleBasedStateMachine):
    """A catalog under random openings, journals, deaths and ends."""

    def __init__(self) -> None:
        super().__init__()
        given = {"agent": Quota(sessions=3), "laptop": Quota(sessions=5), "default": Quota(sessions=8)}
        self.catalog = Catalog(lambda: 0.0, quotas=Quotas(given))
        self.most = {"agent": 3, "laptop": 5, "editor": 8}

    @property
    def sessions(self) -> list[Session]:
        return list(self.catalog)

    @rule(owner=st.sampled_from(OWNERS), count=st.integers(1, 3))
    def open(self, owner: str, count: int) -> None:
        held, most = self.count(account_of(owner), "sessions"), self.most[account_of(owner)]
        if held + count > most:
            with pytest.raises(Capacity) as full:
                self.catalog.add(owner, "m", [None] * count, "interactive", None, [])
            told = {"quota": "sessions", "limit": most, "held": held}
            assert told.items() <= full.value.details.items()
            return
        for session in self.catalog.add(owner, "m", [None] * count, "interactive", None, []):
            session.generation, session.state = 1, SessionState.IDLE

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), own=st.integers(0, 1000), parts=st.lists(st.sampled_from(PARTS), unique=True))
    def journal(self, data: st.DataObject, own: int, parts: list[Part]) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        session.generation = max(session.generation, 1)
        change = Journal(
            session=session.id, keep=0, tokens=[], private_bytes=own, live_bytes=own, parts=parts
        )
        self.catalog.journal(session, change)

    @rule()
    def die(self) -> None:
        for session in self.sessions:
            self.catalog.forget_engine(session)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        session.state = SessionState.CLOSED
        self.catalog.remove(session)

    def count(self, account: str, what: str) -> int:
        mine = [session for session in self.sessions if account_of(session.owner) == account]
        if what == "sessions":
            return len(mine)
        shared = {(s.generation, part.number): part.bytes for s in mine for part in s.parts}
        return sum(session.own_bytes for session in mine) + sum(shared.values())

    @invariant()
    def sums_are_what_there_is(self) -> None:
        accounts = {account_of(owner) for owner in OWNERS}
        for account in accounts:
            for what in ("sessions", "bytes"):
                assert self.catalog.quotas.held(account, what) == self.count(account, what)
        assert len(self.catalog.quotas) == sum(self.count(account, "sessions") > 0 for account in accounts)


TestSums = Sums.TestCase


def test_a_key_has_one_account_whatever_it_calls_its_apps() -> None:
    quotas = Quotas({"laptop": Quota(requests=2)})
    quotas.add("laptop/one", "requests", 1)
    quotas.add("laptop/two", "requests", 1)
    with pytest.raises(Capacity, match="'laptop' may have 2 open requests; it has 2") as full:
        quotas.check("laptop/three", "requests")
    assert full.value.details == {"quota": "requests", "limit": 2, "held": 2, "retry_after_s": 1.0}
    quotas.check("laptopp", "requests")
    quotas.add("laptop/one", "requests", -1)
    quotas.check("laptop/three", "requests")


def test_names_that_clients_choose_leave_nothing_behind() -> None:
    quotas = Quotas()
    for number in range(1000):
        quotas.add(f"app {number}", "requests", 1)
        quotas.add(f"app {number}", "requests", -1)
        quotas.hold(f"app {number}", 1, [], PARTS)
        quotas.hold(f"app {number}", 1, PARTS, [])
    assert len(quotas) == 0


@given(st.integers(0, 50), st.integers(0, 50))
def test_what_a_request_surely_computes(tokens: int, length: int) -> None:
    ids = list(range(tokens))
    assert surely_computes(Prefill(session="s", tokens=ids), length) == (tokens or None)
    assert surely_computes(Sync(session="s", tokens=ids), length) == (max(tokens - length, 0) or None)


def test_what_other_requests_surely_compute() -> None:
    assert surely_computes(Open(), 0) is None
    assert surely_computes(Open(text=""), 0) is None
    assert surely_computes(Open(text="long"), 0) == 1
    assert surely_computes(Prefill(session="s", messages=[Message(role="user", content="x")]), 0) == 1
    assert surely_computes(Decode(session="s", max_tokens=5), 0) == 5
    assert surely_computes(Decode(session="s", max_tokens=10_000), 0) == 256
    assert surely_computes(Restore(snapshot="s"), 0) == 1
    assert surely_computes(Fork(session="s"), 9) is None
    assert surely_computes(Close(session="s"), 9) is None


def test_quotas_as_they_are_typed() -> None:
    made = parse_quotas(["my=app=sessions:3,bytes:1KiB", "default=requests:4,disk:2MB"])
    assert made["my=app"] == Quota(sessions=3, bytes=1024)
    assert made["default"] == Quota(requests=4, disk=2_000_000)
    assert parse_quotas([]) == {}


@pytest.mark.parametrize(
    "text",
    ["", "editor", "editor=", "=sessions:1", "a=sessions", "a=sessions:-1", "a=sessions:x", "a=bytes:x",
     "a=cows:1", "a=sessions:1,sessions:2", "a=sessions:1,", "laptop/chat=sessions:1", "a=sessions:²"],
)  # fmt: skip
def test_what_is_no_quota_is_said(text: str) -> None:
    with pytest.raises(Leave):
        parse_quotas([text])


def test_two_quotas_of_one_app_are_refused() -> None:
    with pytest.raises(Leave, match="two quotas"):
        parse_quotas(["a=sessions:1", "a=bytes:1"])


# ---------------------------------------------------------------- in a daemon

SMALL = {"editor": Quota(sessions=2, bytes=200), "streamer": Quota(requests=2)}


@pytest.fixture
def rig(start_broker: StartBroker) -> Rig:
    """Its worker says that each token takes 10 bytes."""
    return start_broker("step_s=0.02", quotas=SMALL)


def quota_of(error: dict[str, Any]) -> str:
    assert error["code"] == "capacity"
    assert set(error["details"]) == {"quota", "limit", "held", "retry_after_s"}
    named: str = error["details"]["quota"]
    return named


def test_sessions_of_an_app_are_bounded_and_those_of_others_are_not(rig: Rig) -> None:
    editor, other = rig.client("editor"), rig.client("other")
    first = editor.open(name="first")
    assert quota_of(editor.refusal("fork", session=first, n=2)) == "sessions"
    editor.open(name="second")
    assert quota_of(editor.refusal("open", tokens=[1], name="third")) == "sessions"
    assert quota_of(editor.refusal("publish", session=first, as_="trunk")) == "sessions"
    listed = editor.ask("list")
    assert ([info["name"] for info in listed["sessions"]], listed["trunks"]) == (["first", "second"], [])
    for _ in range(3):
        other.open()
    editor.ask("close", session="second")
    editor.open(name="third")


def test_kv_of_an_app_is_bounded_by_what_its_requests_surely_add(rig: Rig) -> None:
    editor = rig.client("editor")
    session = editor.open([1] * 10)
    assert quota_of(editor.refusal("prefill", session=session, tokens=[1] * 11)) == "bytes"
    assert quota_of(editor.refusal("decode", session=session, max_tokens=11)) == "bytes"
    assert quota_of(editor.refusal("sync", session=session, tokens=[1] * 21)) == "bytes"
    assert editor.ask("info", session=session)["length"] == 10
    assert editor.ask("prefill", session=session, tokens=[1] * 10)["length"] == 20
    assert quota_of(editor.refusal("open", text="more")) == "bytes"
    assert editor.ask("sync", session=session, tokens=[1] * 5)["length"] == 5
    assert editor.ask("decode", session=session, max_tokens=5)["length"] == 10
    assert rig.look(lambda broker: broker.catalog.quotas.held("editor", "bytes")) == 100


def test_open_requests_of_an_app_are_bounded_over_all_its_connections(rig: Rig) -> None:
    clients = [rig.client("streamer") for _ in range(3)]
    sessions = [client.open() for client in clients[:2]]
    streams = [
        client.send("decode", session=session, max_tokens=10_000, ignore_eos=True)
        for client, session in zip(clients[:2], sessions, strict=True)
    ]
    for client, stream in zip(clients, streams, strict=False):
        client.begun(stream)
    assert quota_of(clients[2].refusal("tokens", session=sessions[0])) == "requests"
    assert clients[2].ask("info", session=sessions[0])["state"] == "running"  # answered at once
    clients[0].ask("cancel", request=streams[0])
    assert clients[0].final(streams[0])["finish"] == "cancelled"
    assert clients[2].ask("tokens", session=sessions[0])["kind"] == "result"
    clients[1].close()  # a client that vanishes takes its request along
    rig.until(lambda broker: broker.catalog.quotas.held("streamer", "requests") == 0)


def test_what_is_left_over_when_all_is_closed_is_nothing(rig: Rig) -> None:
    editor = rig.client("editor")
    session = editor.open([1, 2, 3])
    editor.ask("decode", session=session, max_tokens=3)
    editor.refusal("prefill", session=session, tokens=[1] * 100)
    editor.ask("close", session=session)
    rig.until(lambda broker: len(broker.catalog.quotas) == 0)


def test_snapshots_of_an_app_are_bounded_and_what_is_forgotten_is_room_again(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    """What is saved counts by its bytes on disk; what the daemon keeps by itself doesn't."""
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    rig = start_broker(state_dir=state, quotas={"editor": Quota(disk=1)})
    editor, other = rig.client("editor"), rig.client("other")
    assert quota_of(editor.refusal("save", session=editor.open(), snapshot="plan")) == "disk"
    assert quota_of(editor.refusal("import", snapshot="plan", total=2, data=b"x")) == "disk"
    assert editor.ask("snapshots")["snapshots"] == []
    session = other.open()
    other.ask("park", session=session)
    saved = other.ask("save", session=session, snapshot="plan")
    held = rig.look(lambda broker: broker.catalog.quotas.held("other", "disk"))
    assert held == saved["bytes"] > 0
    other.ask("forget", snapshot="plan")
    assert rig.look(lambda broker: broker.catalog.quotas.held("other", "disk")) == 0


def test_a_snapshot_that_is_replaced_makes_room_for_its_successor(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    rig = start_broker(state_dir=state, quotas={"editor": Quota(disk=45)})
    editor = rig.client("editor")
    session = editor.open([1, 2, 3])
    assert editor.ask("save", session=session, snapshot="plan")["kind"] == "result"
    assert quota_of(editor.refusal("save", session=session, snapshot="other")) == "disk"
    assert editor.ask("save", session=session, snapshot="plan", replace=True)["kind"] == "result"
    assert [known["snapshot"] for known in editor.ask("snapshots")["snapshots"]] == ["plan"]
