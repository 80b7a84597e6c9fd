"""Rooms and sessions for asyncio, against a real ROUTER."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import time
from collections.abc import Awaitable, Callable

import pytest
from tests.client.peer import PATIENCE_S, Call, Peer, end_as_cancelled, endless

from stateroom.client import AsyncRoom, AsyncSession, Room, Session, Timeouts, connect_async
from stateroom.client.errors import (
    Disconnected,
    Invalid,
    NotEnded,
    NotFound,
    Numeric,
    RequestTimeout,
    ShuttingDown,
    StreamBroken,
    WrongProcess,
)
from stateroom.client.protocol import Progress, Stats


def run(peer: Peer, test: Callable[[AsyncRoom], Awaitable[None]], **options: Timeouts) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), connect_async(peer.endpoint, app="tests", **options) as room:
            await test(room)

    asyncio.run(main())


def test_what_is_published_is_forked_by_who_is_told(client_peer: Peer) -> None:
    async def test(room: AsyncRoom) -> None:
        session = await room.open(text="hello")
        published = await session.publish("greeting")
        assert [trunk.name for trunk in await room.trunks()] == ["greeting"]
        children = await room.fork(published.trunk, 2)
        assert [child.length for child in children] == [5, 5]
        assert (await room.unpublish("greeting")).freed_bytes == 5
        with pytest.raises(NotFound):
            await room.fork(published.trunk)

    run(client_peer, test)


async def seen(peer: Peer, op: str, nth: int = 1) -> Call:
    return await asyncio.to_thread(peer.wait_for, op, nth)


@pytest.mark.parametrize(("blocking", "asynchronous"), [(Room, AsyncRoom), (Session, AsyncSession)])
def test_both_shells_have_the_same_surface(blocking: type, asynchronous: type) -> None:
    def surface(shell: type) -> dict[str, list[str]]:
        methods = dict(inspect.getmembers(shell, inspect.isfunction))
        return {name: list(inspect.signature(methods[name]).parameters) for name in methods if name[0] != "_"}

    assert surface(blocking) == surface(asynchronous)


def test_the_example_of_the_design(client_peer: Peer) -> None:
    async def main(room: AsyncRoom) -> None:
        base = await room.open(text="def main")
        drafts = await base.fork(4)
        texts = [token.text async for token in drafts[0].decode(max_tokens=64, stop=["\n"])]
        assert "".join(texts).startswith("opqrstuvwxyzabc")
        assert (await base.sync(text="def many")).receipt.reused == 6
        assert base.length == 8

    run(client_peer, main)
    assert list(client_peer.apps.values()) == ["tests"]


def test_each_operation(client_peer: Peer) -> None:
    async def main(room: AsyncRoom) -> None:
        session = await room.open(tokens=[97, 98], name="one")
        updates: list[object] = []
        await session.prefill(text="cdef", on_progress=updates.append)
        assert updates == [Progress(done=2, total=4)]
        assert (await session.trim(to=3)).length == session.length == 3
        assert (await session.tokens(1)).text == "bc"
        assert (await session.score(text="xy")).total == -2.0
        assert (await session.info()).length == 3
        assert (await room.session("one")).id == session.id
        assert [child.name for child in await session.fork(names=["l", "r"])] == ["l", "r"]
        assert await session.cancel() is False
        assert await room.cancel("one") is False
        assert len(await room.list()) == 3
        assert (await room.hello()).app == room.server.app == "tests"
        assert (await room.stats()).gauges == {"rows": 0.0}
        assert (await room.load("m")).loaded
        assert not (await room.unload("m")).loaded
        async with room.watch() as events:
            assert (await anext(events)).event == "opened"
            client_peer.on["cancelled"] = lambda call: call.result(events=1)
        assert events.result.events == 1
        async with session:
            pass
        assert session.closed
        with pytest.raises(NotFound):
            await session.prefill(text="a")
        with pytest.raises(Invalid):
            await (await room.open()).decode(1, seed=2**64).wait()

    run(client_peer, main)


def test_a_room_can_be_awaited_or_just_used(client_peer: Peer) -> None:
    async def main() -> None:
        awaited = await connect_async(client_peer.endpoint)
        assert "AsyncRoom" in repr(awaited)
        await awaited.close()
        used = connect_async(client_peer.endpoint)
        await asyncio.gather(*(used.stats() for _ in range(5)))
        await used.close()
        with pytest.raises(Disconnected, match="closed"):
            await used.stats()

    asyncio.run(main())
    assert len(client_peer.asked("hello")) == 2


def test_streams_tell_their_text_and_their_result(client_peer: Peer) -> None:
    async def main(room: AsyncRoom) -> None:
        session = await room.open(text="a")
        stream = session.decode(3)
        with pytest.raises(NotEnded):
            _ = stream.result
        assert (await anext(stream)).text == "b"
        assert (stream.text, session.length) == ("b", 2)
        assert (await stream.wait()).text == stream.text == "bcd"
        assert [token async for token in stream] == []
        drafts = await session.fork(3)
        results = await asyncio.gather(*(draft.decode(2).wait() for draft in drafts))
        assert [result.text for result in results] == ["ef"] * 3

    run(client_peer, main)


def test_leaving_the_loop_cancels_and_the_next_operation_waits(client_peer: Peer) -> None:
    def end_late(call: Call) -> None:
        threading.Timer(0.1, end_as_cancelled, [call]).start()

    def trim(call: Call) -> None:
        running = client_peer.asked("decode")[-1]
        call.result(length=1, receipt={}) if running.ended else call.error("busy")

    client_peer.on |= {"decode": endless, "cancelled": end_late, "trim": trim}

    async def main(room: AsyncRoom) -> None:
        session = await room.open(text="a")
        stream = session.decode(99)
        async for _ in stream:
            break
        await session.trim(to=1)
        assert stream.result.finish == "cancelled"
        with pytest.raises(ZeroDivisionError):
            async with session.decode(99) as stream:
                raise ZeroDivisionError
        assert stream.result.finish == "cancelled"
        stream = session.decode(99)
        await anext(stream)
        del stream
        gc.collect()
        await seen(client_peer, "cancel", nth=3)
        await session.trim(to=1)

    run(client_peer, main)


def test_a_cancelled_task_cancels_its_request(client_peer: Peer) -> None:
    client_peer.on["prefill"] = lambda call: None

    async def main(room: AsyncRoom) -> None:
        session = await room.open()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.prefill(text="a"), 0.05)
        cancel = await seen(client_peer, "cancel")
        assert cancel.args == {"request": client_peer.asked("prefill")[0].id}
        client_peer.on["decode"] = endless
        stream = session.decode(9)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.wait(), 0.05)
        cancel = await seen(client_peer, "cancel", nth=2)
        assert cancel.args == {"request": client_peer.asked("decode")[0].id}
        assert (await room.stats()).gauges

    run(client_peer, main)


def test_no_token_is_lost_though_every_wait_is_cut_short(client_peer: Peer) -> None:
    """B68: a receive that is cancelled may lose a message; ours never is."""

    bursts, burst = 200, 5

    def dribble(call: Call) -> None:
        for _ in range(bursts):
            time.sleep(0.001)
            for _ in range(burst):
                call.token(97 + call.seq % 26)
        tokens = [97 + n % 26 for n in range(bursts * burst)]
        client_peer.end_decode(call, tokens, len(tokens), "length")

    client_peer.on["decode"] = lambda call: threading.Thread(target=dribble, args=[call]).start()

    async def main(room: AsyncRoom) -> None:
        session = await room.open(text="a")
        drawn: list[int] = []
        cut = 0
        async with session.decode(bursts * burst) as stream:
            while True:
                try:
                    drawn += (await asyncio.wait_for(anext(stream), 0.0001)).tokens
                except TimeoutError:
                    cut += 1
                except StopAsyncIteration:
                    break
        assert cut > 20
        assert drawn == stream.result.tokens

    run(client_peer, main)


def test_errors_end_a_stream(client_peer: Peer) -> None:
    def numeric(call: Call) -> None:
        call.token(98)
        call.error("numeric", "NaN.", length=2)

    def gappy(call: Call) -> None:
        call.seq = 3
        call.token(98)

    async def main(room: AsyncRoom) -> None:
        session = await room.open(text="abc")
        client_peer.on["decode"] = numeric
        with pytest.raises(Numeric):
            await session.decode(9).wait()
        assert session.length == 2
        client_peer.on["decode"] = gappy
        with pytest.raises(StreamBroken):
            await session.decode(9).wait()
        await seen(client_peer, "cancel")

    run(client_peer, main)


def test_after_a_timeout_the_late_reply_is_dropped_and_the_room_goes_on(client_peer: Peer) -> None:
    """B67."""
    client_peer.on["stats"] = lambda call: None

    async def main(room: AsyncRoom) -> None:
        with pytest.raises(RequestTimeout):
            await room.stats()
        late = await seen(client_peer, "stats")
        assert (await seen(client_peer, "cancel")).args == {"request": late.id}
        late.result(counters={"late": 1}, gauges={})
        client_peer.on["stats"] = lambda call: call.result(counters={"new": 1}, gauges={})
        assert (await room.stats()).counters == {"new": 1}

    run(client_peer, main, timeouts=Timeouts(call_s=0.5))


def test_a_lost_daemon_fails_open_requests_at_once_and_the_room_connects_anew(client_peer: Peer) -> None:
    client_peer.on["decode"] = endless

    async def main(room: AsyncRoom) -> None:
        session = await room.open(text="a")
        stream = session.decode(9)
        await anext(stream)
        await asyncio.to_thread(client_peer.stop)
        with pytest.raises(Disconnected, match="went away"):
            await asyncio.wait_for(stream.wait(), 1.5)
        old_ids = {call.id for call in client_peer.calls}
        client_peer.calls.clear()
        client_peer.start()
        await room.stats()
        assert [call.op for call in client_peer.calls] == ["hello", "stats"]
        assert not old_ids & {call.id for call in client_peer.calls}

        client_peer.on["stats"] = lambda call: None
        asked = asyncio.create_task(room.stats())
        (await seen(client_peer, "stats", nth=2)).error("shutting_down", "The daemon stops.")
        await asyncio.to_thread(client_peer.stop)
        with pytest.raises(ShuttingDown):
            await asked

    run(client_peer, main)


def test_closing_ends_what_tasks_wait_for_and_an_attempt_to_connect(client_peer: Peer) -> None:
    async def main() -> None:
        client_peer.on["stats"] = lambda call: None
        room = await connect_async(client_peer.endpoint)
        asked = asyncio.create_task(room.stats())
        await seen(client_peer, "stats")
        await room.close()
        with pytest.raises(Disconnected):
            await asked

        client_peer.on["hello"] = lambda call: None
        room = connect_async(client_peer.endpoint, timeout_s=PATIENCE_S)
        asked = asyncio.create_task(room.stats())
        await seen(client_peer, "hello", nth=2)
        await room.close()
        with pytest.raises(Disconnected):
            await asyncio.wait_for(asked, 1)

    asyncio.run(main())


def test_a_room_belongs_to_one_event_loop(client_peer: Peer) -> None:
    room = connect_async(client_peer.endpoint)

    async def use() -> None:
        await room.stats()

    async def first() -> None:
        await use()
        with pytest.raises(WrongProcess, match="another event loop"):
            await asyncio.to_thread(asyncio.run, use())
        await room.close()

    asyncio.run(first())


def test_a_stream_dropped_in_another_thread_is_cancelled(client_peer: Peer) -> None:
    client_peer.on["decode"] = endless

    async def main(room: AsyncRoom) -> None:
        streams = [(await room.open(text="a")).decode(9)]
        await anext(streams[0])
        await asyncio.to_thread(streams.clear)
        await seen(client_peer, "cancel")

    run(client_peer, main)


def test_raw_requests(client_peer: Peer) -> None:
    async def main(room: AsyncRoom) -> None:
        inbox = await room.start(Stats())
        assert inbox.request_id == client_peer.asked("hello")[0].id + 1
        await inbox.take()

    run(client_peer, main)
