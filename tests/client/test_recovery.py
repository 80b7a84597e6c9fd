"""A stream whose engine stops: what the reader is told of it, and that the iteration goes on."""

from __future__ import annotations

import asyncio

from tests.client.peer import Call, Peer

from stateroom.client import Room, connect_async


def interrupted(call: Call) -> None:
    """Two tokens, a worker's death, two more."""
    tokens = list(b"abcd")
    for at, token in enumerate(tokens):
        if at == 2:
            details = {"length": 3, "reason": "it was ended by SIGKILL"}
            call.reply("event", event="engine_lost", session="session-0", model="toy", details=details)
            call.reply(
                "event", event="engine_recovered", session="session-0", model="toy", details={"length": 3}
            )
        call.token(token)
    call.result(finish="length", tokens=tokens, text="abcd", length=5, usage={})


EVENTS = [("engine_lost", 3), ("engine_recovered", 3)]


def test_events_of_a_stream_are_kept_and_the_iteration_goes_on(client_room: Room, client_peer: Peer) -> None:
    client_peer.on["decode"] = interrupted
    session = client_room.open(text="x")
    stream = session.decode(4)
    assert [token.text for token in stream] == ["a", "b", "c", "d"]
    assert stream.result.text == stream.text == "abcd"
    assert [(event.event, event.details["length"]) for event in stream.events] == EVENTS
    assert session.length == 5
    waited = session.decode(4)
    assert waited.wait().tokens == list(b"abcd")
    assert len(waited.events) == 2
    left = session.decode(4)
    assert next(left).text == "a"
    assert left.events == []  # as far as it was read
    left.close()


def test_the_same_for_asyncio(client_peer: Peer) -> None:
    client_peer.on["decode"] = interrupted

    async def main() -> None:
        async with asyncio.timeout(20), connect_async(client_peer.endpoint) as room:
            session = await room.open(text="x")
            stream = session.decode(4)
            assert stream.events == []
            assert [token.text async for token in stream] == ["a", "b", "c", "d"]
            assert [(event.event, event.details["length"]) for event in stream.events] == EVENTS

    asyncio.run(main())
