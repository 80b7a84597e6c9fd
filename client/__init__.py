"""The thin client library: sessions that live in a Stateroom daemon, as Python objects.

    from stateroom.client import connect

    with connect(app="my-editor") as room:
        base = room.open(text=buffer)
        drafts = base.fork(4)
        for token in drafts[0].decode(max_tokens=64, stop=["\\n"]):
            print(token.text, end="")
        base.sync(text=edited_buffer).receipt

`connect_async` has the same surface for asyncio. The library needs pyzmq and msgpack, and no mlx; a name
is loaded when it is first used.
"""

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without its import
if TYPE_CHECKING:
    from stateroom.client import errors
    from stateroom.client.async_room import AsyncRoom
    from stateroom.client.asynchronous import connect_async
    from stateroom.client.blocking import connect
    from stateroom.client.errors import ClientError, Disconnected, NoDaemon, RequestTimeout, StateroomError
    from stateroom.client.protocol import (
        KV,
        Caps,
        DecodeResult,
        Event,
        Grammar,
        LengthResult,
        Message,
        Progress,
        Receipt,
        Sampling,
        SessionInfo,
        SnapshotInfo,
        Speculate,
        TokenEvent,
        VerifyResult,
    )
    from stateroom.client.room import Room
    from stateroom.client.session import AsyncSession, Session
    from stateroom.client.stream import AsyncEventStream, AsyncTokenStream, EventStream, TokenStream
    from stateroom.client.timeouts import Timeouts

_MODULES = {
    "async_room": ("AsyncRoom",),
    "asynchronous": ("connect_async",),
    "blocking": ("connect",),
    "errors": ("ClientError", "Disconnected", "NoDaemon", "RequestTimeout", "StateroomError"),
    "protocol": (
        "KV", "Caps", "DecodeResult", "Event", "Grammar", "LengthResult", "Message", "Progress", "Receipt",
        "Sampling", "SessionInfo", "SnapshotInfo", "Speculate", "TokenEvent", "VerifyResult",
    ),
    "room": ("Room",),
    "session": ("AsyncSession", "Session"),
    "stream": ("AsyncEventStream", "AsyncTokenStream", "EventStream", "TokenStream"),
    "timeouts": ("Timeouts",),
}  # fmt: skip

__all__ = [
    "KV",
    "AsyncEventStream",
    "AsyncRoom",
    "AsyncSession",
    "AsyncTokenStream",
    "Caps",
    "ClientError",
    "DecodeResult",
    "Disconnected",
    "Event",
    "EventStream",
    "Grammar",
    "LengthResult",
    "Message",
    "NoDaemon",
    "Progress",
    "Receipt",
    "RequestTimeout",
    "Room",
    "Sampling",
    "Session",
    "SessionInfo",
    "SnapshotInfo",
    "Speculate",
    "StateroomError",
    "Timeouts",
    "TokenEvent",
    "TokenStream",
    "VerifyResult",
    "connect",
    "connect_async",
    "errors",
]


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name == "errors":
        return import_module("stateroom.client.errors")
    for module, names in _MODULES.items():
        if name in names:
            value: object = getattr(import_module(f"stateroom.client.{module}"), name)
            globals()[name] = value  # the next time, Python finds it without asking here
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
