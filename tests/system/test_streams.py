"""Streams over real sockets: their replies in order and in company, cut short, left, unread, superseded."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack
import pytest
import zmq
from tests.conftest import RunningDaemon
from tests.daemon.rig import Raw
from tests.system.conftest import ConnectTo, RawClient, Tell
from tests.system.footprint import seconds_until

from stateroom.client import Room, Session, connect_async
from stateroom.client.errors import Busy, Exists, NotFound, RequestTimeout
from stateroom.client.protocol import Cancel, CancelResult

pytestmark = pytest.mark.system

ENDLESS = 12_000  # tokens: a decode that only ends when it is ended; the model's context is longer
SOON_S = 2.0  # for what happens at the next token
PROMPT = [10, 20, 30, 40, 50]


def running(room: Room) -> float:
    return room.stats().gauges["running"]


def begun(session: Session, **options: Any) -> Any:
    """A decode that runs, its first token read."""
    stream = session.decode(ENDLESS, ignore_eos=True, **options)
    next(stream)
    return stream


def greedy(room: Room, tokens: list[int], count: int = 8) -> list[int]:
    """What a fresh session with these tokens goes on with."""
    with room.open(tokens=tokens) as fresh:
        return fresh.decode(count, ignore_eos=True).wait().tokens


# ---------------------------------------------------------------- sequences


def test_replies_are_numbered_and_end_once(tiny_daemon: RunningDaemon, raw_client: RawClient) -> None:
    """Every kind of reply, of requests that overlap: 0, 1, 2, … and one final, the last."""
    client = raw_client(tiny_daemon, app="numbered")
    sessions = [client.open(PROMPT) for _ in range(6)]
    requests = {
        client.send("decode", session=sessions[0], max_tokens=40, ignore_eos=True): 41,
        client.send("decode", session=sessions[1], max_tokens=40, ignore_eos=True, stream=False): 1,
        client.send("decode", session=sessions[2], max_tokens=3, ignore_eos=True, logprobs=2): 4,
        client.send("prefill", session=sessions[3], tokens=[7] * 600, progress=True): None,
        client.send("prefill", session=sessions[4], tokens=[7] * 600): 1,
        client.send("score", session=sessions[5], tokens=[7] * 60): 1,
        client.send("list"): 1,
        client.send("decode", session="none", max_tokens=3): 1,
    }
    for request_id, wanted in requests.items():
        replies = client.replies(request_id)  # which holds them to 0, 1, 2, … and one final
        assert wanted is None or len(replies) == wanted
        assert all(reply["v"] == 1 for reply in replies)
    client.nothing_more()


def test_a_stream_tells_what_its_result_tells(tiny_daemon: RunningDaemon, raw_client: RawClient) -> None:
    client = raw_client(tiny_daemon, app="told")
    session = client.open(PROMPT)
    *events, final = client.replies(
        client.send("decode", session=session, max_tokens=30, ignore_eos=True, logprobs=1)
    )
    assert [token for event in events for token in event["tokens"]] == final["tokens"]
    assert "".join(event["text"] for event in events) == final["text"]
    assert [entry["token"] for event in events for entry in event["logprobs"]] == final["tokens"]
    assert (final["finish"], final["length"]) == ("length", 35)
    assert client.ask("tokens", session=session)["tokens"] == PROMPT + final["tokens"]


def test_two_clients_side_by_side(tiny_daemon: RunningDaemon, connect_to: ConnectTo) -> None:
    """Streams of two connections run at the same time, each with the tokens it has alone."""
    rooms = [connect_to(tiny_daemon, "left"), connect_to(tiny_daemon, "right")]
    prompts = ["once upon a time", "def main() -> int:"]
    sessions = [room.open(text=prompt) for room, prompt in zip(rooms, prompts, strict=True)]
    alone = [greedy(rooms[0], session.tokens().tokens, 120) for session in sessions]
    streams = [session.decode(120, ignore_eos=True) for session in sessions]
    seen = {0: [next(streams[0])], 1: [next(streams[1])]}
    assert running(rooms[0]) == 2
    threads = [threading.Thread(target=lambda i=i: seen[i].extend(streams[i])) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for i in (0, 1):
        assert [token for event in seen[i] for token in event.tokens] == alone[i]


# ---------------------------------------------------------------- two requests of one session


def test_busy_says_who_has_the_session(tiny_daemon: RunningDaemon, raw_client: RawClient) -> None:
    client, other = raw_client(tiny_daemon, app="busy"), raw_client(tiny_daemon, app="busy")
    session = client.open(PROMPT)
    running_id = client.send("decode", session=session, max_tokens=ENDLESS, ignore_eos=True)
    client.begun(running_id)
    assert other.refusal("cancel", request=running_id)["code"] == "not_found"  # ids are a connection's own
    for op, arguments in [
        ("decode", {"max_tokens": 1}), ("prefill", {"tokens": [1]}), ("fork", {}), ("trim", {"to": 1}),
        ("score", {"tokens": [1]}),
    ]:  # fmt: skip
        mine = client.refusal(op, session=session, **arguments)
        assert (mine["code"], mine["details"]["request"]) == ("busy", {"op": "decode", "id": running_id}), op
        theirs = other.refusal(op, session=session, **arguments)
        assert (theirs["code"], theirs["details"]["request"]["op"]) == ("busy", "decode")
        assert "id" not in theirs["details"]["request"]
    assert client.ask("info", session=session)["running"] == "decode"
    assert client.ask("cancel", request=running_id)["cancelled"] is True
    assert client.final(running_id)["finish"] == "cancelled"


def test_tokens_are_read_while_a_decode_streams(tiny_daemon: RunningDaemon, raw_client: RawClient) -> None:
    """A read gives what the session has at that moment, and the stream doesn't notice."""
    client, other = raw_client(tiny_daemon, app="reads"), raw_client(tiny_daemon, app="reads")
    session = client.open(PROMPT)
    decode = client.send("decode", session=session, max_tokens=ENDLESS, ignore_eos=True)
    client.begun(decode)
    seen = [other.ask("tokens", session=session)["tokens"] for _ in range(5)]
    part = other.ask("tokens", session=session, from_=2, to=7)["tokens"]
    assert client.ask("info", session=session)["running"] == "decode"
    assert client.ask("cancel", request=decode)["cancelled"] is True
    *events, final = client.replies(decode)
    held = other.ask("tokens", session=session)["tokens"]
    assert held == PROMPT + [token for event in events for token in event["tokens"]]
    assert held == PROMPT + final["tokens"]
    lengths = [len(tokens) for tokens in seen]
    assert len(PROMPT) < lengths[0] <= lengths[-1] <= len(held)
    assert lengths == sorted(lengths)
    assert all(tokens == held[: len(tokens)] for tokens in seen)
    assert part == held[2:7]


def test_sync_supersedes_a_decode_and_a_sync(tiny_daemon: RunningDaemon, connect_to: ConnectTo) -> None:
    room, other = connect_to(tiny_daemon, "sync"), connect_to(tiny_daemon, "sync")
    session = room.open(tokens=PROMPT)
    stream = begun(session)
    same = other.session(session.id)
    assert same.sync(tokens=[*PROMPT, 60, 61]).length == 7  # from another connection
    assert stream.wait().finish == "cancelled"
    assert same.tokens().tokens == [*PROMPT, 60, 61]

    results: dict[int, Any] = {}

    def sync(i: int) -> None:
        results[i] = room.session(session.id).sync(tokens=[*PROMPT, *([i] * 4_000)])

    threads = []
    for i in range(4):
        threads.append(threading.Thread(target=sync, args=(i,)))
        threads[-1].start()
        seconds_until(lambda: session.info().running == "sync", SOON_S, "the sync runs")
        time.sleep(0.03)
    for thread in threads:
        thread.join(30)
    assert [results[i].finish for i in range(4)] == ["cancelled", "cancelled", "cancelled", "done"]
    assert session.tokens().tokens == [*PROMPT, *([3] * 4_000)]
    assert session.decode(6, ignore_eos=True).wait().tokens == greedy(room, [*PROMPT, *([3] * 4_000)], 6)
    session.close()


# ---------------------------------------------------------------- cancel


def test_cancel_by_request_and_by_session(tiny_daemon: RunningDaemon, connect_to: ConnectTo) -> None:
    """The cancelled request ends within a token; what it drew is kept, and counted everywhere alike."""
    room, other = connect_to(tiny_daemon, "cancel"), connect_to(tiny_daemon, "cancel")
    with room.open(tokens=PROMPT) as session:
        for cancel in (
            lambda stream: room.call(Cancel(request=stream._inbox.request_id), CancelResult).cancelled,
            lambda stream: session.cancel(),
            lambda stream: other.cancel(session.id),
        ):
            before = session.length
            stream = begun(session)
            began = time.monotonic()
            assert cancel(stream) is True
            result = stream.wait()
            assert time.monotonic() - began < SOON_S
            assert result.finish == "cancelled"
            held = session.tokens().tokens
            assert len(held) == result.length == before + len(result.tokens)
            assert held[before:] == result.tokens
            assert session.decode(6, ignore_eos=True).wait().tokens == greedy(room, held, 6)
        assert session.cancel() is False
        with pytest.raises(NotFound):
            room.call(Cancel(request=2**40), CancelResult)


def test_cancelling_a_prefill_keeps_its_finished_part(
    tiny_daemon: RunningDaemon, connect_to: ConnectTo
) -> None:
    """B20, B22: a prefill ends at a chunk's boundary; tokens and KV agree."""
    room = connect_to(tiny_daemon, "chunks")
    tokens = [i % 250 for i in range(12_000)]
    with room.open(tokens=PROMPT) as session, ThreadPoolExecutor() as threads:
        done = threads.submit(session.prefill, tokens=tokens)
        seconds_until(lambda: session.info().running == "prefill", SOON_S, "the prefill runs")
        time.sleep(0.2)
        assert room.cancel(session.id) is True
        result = done.result(10)
        held = session.tokens().tokens
        assert result.finish == "cancelled"
        assert len(PROMPT) <= result.length == len(held) < len(PROMPT) + len(tokens)
        assert held == (PROMPT + tokens)[: len(held)]
        assert session.decode(6, ignore_eos=True).wait().tokens == greedy(room, held, 6)


@pytest.mark.parametrize("leave", ["break", "exception", "with", "drop"])
def test_leaving_a_stream_ends_it_in_the_daemon(
    tiny_daemon: RunningDaemon, connect_to: ConnectTo, tell: Tell, leave: str
) -> None:
    room = connect_to(tiny_daemon, "leaving")
    with room.open(tokens=PROMPT) as session:
        leave_early(session, leave)
        took = seconds_until(lambda: running(room) == 0, SOON_S, "the decode ends")
        held = session.tokens().tokens
        assert 6 <= len(held) < ENDLESS / 2
        assert session.decode(6, ignore_eos=True).wait().tokens == greedy(room, held, 6)
    tell(f"ended in {took * 1000:.0f} ms")


def leave_early(session: Session, how: str) -> None:
    if how == "break":
        for _ in session.decode(ENDLESS, ignore_eos=True):
            break
    elif how == "exception":
        with pytest.raises(KeyError):
            fail_at_first(session)
    elif how == "with":
        with session.decode(ENDLESS, ignore_eos=True) as stream:
            next(stream)
    else:
        next(session.decode(ENDLESS, ignore_eos=True))


def fail_at_first(session: Session) -> None:
    for _ in session.decode(ENDLESS, ignore_eos=True):
        raise KeyError


# ---------------------------------------------------------------- clients that do not read


def test_a_client_that_does_not_read_is_stopped_and_nobody_waits_for_it(
    tiny_daemon: RunningDaemon, raw_client: RawClient, connect_to: ConnectTo, tell: Tell
) -> None:
    """B61: the stream ends with `slow_consumer`, without a gap before it; the session is kept as it says."""
    room = connect_to(tiny_daemon, "beside")
    slow = raw_client(tiny_daemon, app="slow", receive_queue=1)
    session = slow.open(PROMPT)
    request_id = slow.send("decode", session=session, max_tokens=ENDLESS, ignore_eos=True, logprobs=20)
    with room.open(text="not slow") as beside:
        gaps, stream = [], beside.decode(4_000, ignore_eos=True)
        last = time.monotonic()
        for _ in stream:
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
            if len(gaps) % 50 == 0 and room.stats().counters["streams_cut"]:
                break
        alone = []  # the same machine, a moment later
        last = time.monotonic()
        for _ in beside.decode(200, ignore_eos=True):
            alone.append(time.monotonic() - last)
            last = time.monotonic()
    assert room.stats().counters["streams_cut"] == 1
    seconds_until(lambda: running(room) == 0, SOON_S, "the unread stream ends")
    replies = slow.replies(request_id)
    final = replies[-1]
    assert final["error"]["code"] == "slow_consumer"
    length = final["error"]["details"]["length"]
    held = slow.ask("tokens", session=session)["tokens"]
    told = [token for reply in replies[:-1] for token in reply["tokens"]]
    assert len(held) == length >= len(PROMPT) + len(told)
    assert held[: len(PROMPT) + len(told)] == PROMPT + told
    again = slow.ask("decode", session=session, max_tokens=6, ignore_eos=True)["tokens"]
    assert again == greedy(room, held, 6)
    gaps.sort()
    alone.sort()
    tell(
        f"cut after {len(told)} unread tokens of {length}; beside, {len(gaps)} tokens: "
        f"median {gaps[len(gaps) // 2] * 1000:.1f} ms, p99 {gaps[int(len(gaps) * 0.99)] * 1000:.1f} ms, "
        f"later, alone, p99 {alone[int(len(alone) * 0.99)] * 1000:.1f} ms"
    )
    assert gaps[int(len(gaps) * 0.99)] < 0.25 + 10 * alone[int(len(alone) * 0.99)]


def test_an_unread_watch_is_cut_and_other_replies_still_come(
    tiny_daemon: RunningDaemon, raw_client: RawClient, connect_to: ConnectTo
) -> None:
    slow = raw_client(tiny_daemon, app="unread", receive_queue=1)
    room = connect_to(tiny_daemon, "unread")
    before = room.stats().counters["streams_cut"]
    watch = slow.send("watch")

    def enough() -> bool:
        with room.open(name="again"):
            pass
        return room.stats().counters["streams_cut"] > before

    deadline = time.monotonic() + 30
    while not enough():
        assert time.monotonic() < deadline, "an unread watch goes on for ever"
    last = slow.send("list")
    assert slow.replies(watch)[-1]["error"]["code"] == "slow_consumer"
    assert slow.final(last)["kind"] == "result"


def test_large_replies_arrive_as_they_were_sent(tiny_daemon: RunningDaemon, raw_client: RawClient) -> None:
    """B66: replies above 64 KiB, many on their way at once to two clients that read late, none rewritten."""
    clients = [raw_client(tiny_daemon, app=f"large-{i}") for i in range(2)]
    names = [{f"{letter * 60}-{n:03}" for n in range(250)} for letter in "ab"]
    for client, own in zip(clients, names, strict=True):
        all_at_once(client, "open", [{"name": name} for name in own])
    asked = [(i, clients[i].send("list")) for _ in range(20) for i in (0, 1)]
    time.sleep(0.5)
    for i, request_id in asked:
        reply = clients[i].final(request_id)
        assert {session["name"] for session in reply["sessions"]} == names[i]
    assert len(msgpack.packb(reply)) > 64 * 1024
    for client, own in zip(clients, names, strict=True):
        all_at_once(client, "close", [{"session": name} for name in own])


def all_at_once(client: Raw, op: str, each: list[dict[str, Any]]) -> None:
    for request_id in [client.send(op, **arguments) for arguments in each]:
        assert client.final(request_id)["kind"] == "result"


def test_a_req_client(tiny_daemon: RunningDaemon, raw_client: RawClient) -> None:
    """Single-reply calls work with a REQ, which puts an empty frame before each message."""
    client = raw_client(tiny_daemon, app="req", kind=zmq.REQ)
    session = client.open(PROMPT)
    assert client.ask("info", session=session)["length"] == 5
    drawn = client.ask("decode", session=session, max_tokens=5, stream=False, ignore_eos=True)["tokens"]
    assert client.ask("tokens", session=session)["tokens"] == PROMPT + drawn
    assert client.refusal("decode", session=session)["code"] == "invalid"
    assert client.ask("close", session=session)["kind"] == "result"


# ---------------------------------------------------------------- timeouts


def test_a_client_is_usable_after_a_timeout(tiny_daemon: RunningDaemon, connect_to: ConnectTo) -> None:
    """B67: the late reply is dropped, the next one is its own request's, the request was cancelled."""
    room = connect_to(tiny_daemon, "timeout")
    session = room.open(tokens=PROMPT)
    with pytest.raises(RequestTimeout):
        session.prefill(tokens=[7] * 10_000, timeout_s=0.01)
    assert room.hello().app == "timeout"
    assert [info.session for info in room.list()] == [session.id]
    seconds_until(lambda: running(room) == 0, SOON_S, "the prefill was cancelled")
    held = session.tokens().tokens
    assert session.decode(6, ignore_eos=True).wait().tokens == greedy(room, held, 6)
    stream = session.decode(ENDLESS, ignore_eos=True, stream=False, timeout_s=0.05)
    with pytest.raises(RequestTimeout):
        stream.wait()
    for _ in range(20):
        assert room.stats().gauges["clients"] >= 1
    seconds_until(lambda: running(room) == 0, SOON_S, "the decode was cancelled")
    session.close()


# ---------------------------------------------------------------- text


def test_text_is_valid_and_shows_no_stop_string(tiny_daemon: RunningDaemon, raw_client: RawClient) -> None:
    """Random bytes: every event is UTF-8, and none has a stop string or its beginning."""
    client = raw_client(tiny_daemon, app="text")
    session = client.open(PROMPT)
    hot = {"temperature": 1.5, "seed": 5}
    *events, final = client.replies(
        client.send("decode", session=session, max_tokens=400, ignore_eos=True, sampling=hot)
    )
    # msgpack has decoded every text as strict UTF-8 by now.
    whole = final["text"]
    assert "".join(event["text"] for event in events) == whole
    assert "\ufffd" in whole  # the random bytes were no UTF-8 everywhere, and that is told, once each
    printable = [c for c in whole if c.isascii() and c.isprintable() and c != " "]
    tried = 0
    for at in range(20, 300, 40):
        stop = whole[at : at + 3]
        if len(printable) < 10 or "\ufffd" in stop:
            continue
        tried += 1
        check_stop(client, stop, whole, hot)
    check_stop(client, whole[50:56], whole, hot)
    assert tried >= 1


def check_stop(client: Raw, stop: str, whole: str, sampling: dict[str, Any]) -> None:
    session = client.open(PROMPT)
    decode = {"session": session, "max_tokens": 400, "ignore_eos": True, "sampling": sampling, "stop": [stop]}
    *events, final = client.replies(client.send("decode", **decode))
    assert final["finish"] == "stop"
    assert final["text"] == whole[: whole.index(stop)]
    shown = ""
    for event in events:
        shown += event["text"]
        assert stop not in shown
        # Nothing was shown that had to be taken back, not even the beginning of the stop string.
        assert final["text"].startswith(shown)
    assert shown == final["text"]
    client.ask("close", session=session)


# ---------------------------------------------------------------- seeds


def test_a_seed_gives_the_same_tokens_in_any_company(
    tiny_daemon: RunningDaemon, connect_to: ConnectTo
) -> None:
    """B23: alone, beside three others, and after a fork, from two connections; other seeds differ."""
    room, other = connect_to(tiny_daemon, "seed"), connect_to(tiny_daemon, "seed")
    options: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "ignore_eos": True}

    def drawn(session: Session, seed: int) -> list[int]:
        return session.decode(40, seed=seed, **options).wait().tokens

    base = room.open(text="the same beginning")
    alone = {seed: drawn(base.fork()[0], seed) for seed in (1, 2)}
    assert alone[1] != alone[2]
    assert drawn(other.open(text="the same beginning"), 1) == alone[1]
    crowd = [other.open(text=text) for text in ("x", "a crowd of others", "longer " * 30)]
    streams = [session.decode(ENDLESS, seed=9, **options) for session in crowd]
    for stream in streams:
        next(stream)
    assert drawn(base.fork()[0], 1) == alone[1]
    with ThreadPoolExecutor() as threads:
        both = [threads.submit(drawn, base.fork()[0], seed) for seed in (1, 2)]
    assert [one.result() for one in both] == [alone[1], alone[2]]
    for stream in streams:
        stream.close()
    assert drawn(base, 2) == alone[2]


def test_without_a_seed_draws_differ(tiny_daemon: RunningDaemon, connect_to: ConnectTo) -> None:
    room = connect_to(tiny_daemon, "unseeded")
    base = room.open(text="the same beginning")
    drawn = [child.decode(20, temperature=2.0, ignore_eos=True).wait().tokens for child in base.fork(3)]
    assert len({tuple(tokens) for tokens in drawn}) == 3


# ---------------------------------------------------------------- owners, names, time


def test_owners_are_strangers(tiny_daemon: RunningDaemon, connect_to: ConnectTo) -> None:
    """Another's session is `not_found` for every operation, by id and by name, and in no list."""
    mine, theirs = connect_to(tiny_daemon, "mine"), connect_to(tiny_daemon, "theirs")
    session = mine.open(tokens=PROMPT, name="notes")
    for reference in (session.id, "notes"):
        handle = Session(theirs, reference, None, 5)
        for call in _every_call(handle):
            with pytest.raises(NotFound):
                call()
        with pytest.raises(NotFound):
            theirs.session(reference)
        with pytest.raises(NotFound):
            theirs.cancel(reference)
    assert session.id not in [info.session for info in theirs.list()]
    stream = begun(session)
    with pytest.raises(NotFound):
        theirs.cancel(session.id)
    assert next(stream).tokens
    stream.close()
    assert theirs.open(name="notes").id != session.id  # names are an owner's own
    assert session.tokens(0, 5).tokens == PROMPT


def _every_call(handle: Session) -> list[Callable[[], object]]:
    return [
        handle.info, handle.tokens, handle.cancel, handle.close, handle.fork,
        lambda: handle.prefill(tokens=[1]), lambda: handle.sync(tokens=[1]), lambda: handle.trim(to=0),
        lambda: handle.score(tokens=[1]), lambda: handle.decode(1).wait(),
    ]  # fmt: skip


def test_names(tiny_daemon: RunningDaemon, connect_to: ConnectTo) -> None:
    room = connect_to(tiny_daemon, "names")
    session = room.open(tokens=PROMPT, name="a.b_c-1")
    assert room.session("a.b_c-1").id == session.id
    with pytest.raises(Exists):
        room.open(name="a.b_c-1")
    children = session.fork(names=["left", "right"])
    assert [room.session(name).id for name in ("left", "right")] == [child.id for child in children]
    with pytest.raises(Exists):
        session.fork(names=["new", "left"])
    assert len(room.list()) == 3  # all children or none
    session.close()
    room.open(name="a.b_c-1").close()  # free again
    with pytest.raises(NotFound):
        session.info()


def test_a_session_lives_as_long_as_it_is_used(tiny_daemon: RunningDaemon, connect_to: ConnectTo) -> None:
    """`ttl_s` counts from the last use, and a running request is use; then it is gone, and its name free."""
    room = connect_to(tiny_daemon, "ttl")
    short = room.open(tokens=PROMPT, name="short", ttl_s=1.0)
    stream = begun(short)
    until = time.monotonic() + 2.2
    while time.monotonic() < until:
        next(stream)
    stream.close()
    assert short.info().ttl_s == 1.0
    long = room.open(tokens=PROMPT, ttl_s=600.0)
    seconds_until(lambda: len(room.list()) == 1, 4.0, "the session expires")
    assert [info.session for info in room.list()] == [long.id]
    with pytest.raises(NotFound):
        short.tokens()
    room.open(name="short").close()


def test_a_session_that_is_busy_elsewhere(tiny_daemon: RunningDaemon, connect_to: ConnectTo) -> None:
    """Through the library: `Busy` names the operation, and the session is free when the stream ends."""
    room = connect_to(tiny_daemon, "busy2")
    session = room.open(tokens=PROMPT)
    stream = begun(session)
    with pytest.raises(Busy) as caught:
        session.prefill(tokens=[1])
    assert caught.value.details["request"]["op"] == "decode"
    stream.close()
    assert session.prefill(tokens=[1]).length == session.length
    for index, _ in zip(itertools.count(), session.decode(5, ignore_eos=True), strict=False):
        assert index < 5
    session.close()


# ---------------------------------------------------------------- asyncio


def test_the_same_with_asyncio(tiny_daemon: RunningDaemon, connect_to: ConnectTo) -> None:
    """Streams of one loop side by side; leaving one, or cancelling its task, ends it in the daemon."""
    room = connect_to(tiny_daemon, "async")
    prompts = [[*PROMPT, i] for i in range(4)]
    wanted = [greedy(room, prompt, 60) for prompt in prompts]

    async def all_of_it() -> None:
        async with connect_async(endpoint=tiny_daemon.endpoint, app="async") as together:
            sessions = [await together.open(tokens=prompt) for prompt in prompts]
            streams = [session.decode(60, ignore_eos=True) for session in sessions]
            results = await asyncio.gather(*(stream.wait() for stream in streams))
            assert [result.tokens for result in results] == wanted
            async for _ in sessions[0].decode(ENDLESS, ignore_eos=True):
                break
            task = asyncio.create_task(sessions[1].decode(ENDLESS, ignore_eos=True).wait())
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(sessions[2].prefill(tokens=[7] * 12_000), 0.05)
            until = time.monotonic() + SOON_S
            while (await together.stats()).gauges["running"]:
                assert time.monotonic() < until, "something runs on"
                await asyncio.sleep(0.01)
            for session in sessions[:3]:
                held = (await session.tokens()).tokens
                drawn = (await session.decode(6, ignore_eos=True).wait()).tokens
                assert drawn == await asyncio.to_thread(greedy, room, held, 6)
            for session in sessions:
                await session.close()

    asyncio.run(asyncio.wait_for(all_of_it(), 60))
