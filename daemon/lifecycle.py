"""Lifecycles as tables: state × event → state. Pure; an event passes its table first, then things change.

A session's request runs alone in it, so the session's table says what a new request meets. (A read, `tokens`,
takes nothing, and no table of sessions knows of it.)

    OPENING ──OPENED──► IDLE ──START──► RUNNING ──END──► IDLE
       │REFUSED          │CLOSE           │SUPERSEDE        CLOSED ◄─END── CLOSING
       ▼                 ▼                ▼                                  ▲
    CLOSED            CLOSING         REPLACING ──END──► IDLE (the held      │END
                                          │CLOSE         sync starts next)   │
                                          ▼                                  │
                          RUNNING ─CLOSE► ENDING ────────────────────────────┘
    REPLACING, ENDING ──RELEASE──► RUNNING: what waited went away

An entry that is missing is a bug of ours (`IllegalEvent`), never something a client can cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar


class SessionState(Enum):
    OPENING = "opening"  # its `open` or its parent's `fork` is not answered yet
    IDLE = "idle"
    RUNNING = "running"  # one request has it
    REPLACING = "replacing"  # that request was cancelled and a newer `sync` waits for its end
    ENDING = "ending"  # that request was cancelled and a `close` waits for its end
    CLOSING = "closing"  # the engine frees it
    CLOSED = "closed"


class SessionEvent(Enum):
    OPENED = "opened"
    REFUSED = "refused"  # its `open` or `fork` ended with an error
    START = "start"
    SUPERSEDE = "supersede"
    RELEASE = "release"  # the `sync` or `close` that waited went away
    CLOSE = "close"
    END = "end"  # the running request, or the close, got its final answer


class RequestState(Enum):
    HELD = "held"  # with the broker: its engine is not ready or died, or an older request must end first
    SENT = "sent"  # with the engine, or a watch that goes on
    CANCELLING = "cancelling"  # with the engine, told to end
    CUT = "cut"  # its client does not read: told to end, its last word will be `slow_consumer`
    ORPHANED = "orphaned"  # its client is gone: told to end, nobody hears its answers
    DONE = "done"  # its one final reply was given


class RequestEvent(Enum):
    SEND = "send"
    LOSE = "lose"  # its worker died, and it goes to the next one
    REPLY = "reply"  # a reply that is not final
    CANCEL = "cancel"
    OVERFLOW = "overflow"  # the client's outbox is full
    VANISH = "vanish"
    FINAL = "final"


class EngineState(Enum):
    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"  # died; starts again after a pause
    STOPPING = "stopping"
    FAILED = "failed"  # can't be loaded, and trying again won't help


class EngineEvent(Enum):
    START = "start"
    READY = "ready"
    REFUSED = "refused"  # it said that the model can't be loaded, for good
    DIED = "died"  # its process ended, or it had to be ended
    STOP = "stop"


S, R, E = SessionState, RequestState, EngineState

SESSIONS: dict[SessionState, dict[SessionEvent, SessionState]] = {
    S.OPENING: {SessionEvent.OPENED: S.IDLE, SessionEvent.REFUSED: S.CLOSED},
    S.IDLE: {SessionEvent.START: S.RUNNING, SessionEvent.CLOSE: S.CLOSING},
    S.RUNNING: {
        SessionEvent.END: S.IDLE,
        SessionEvent.SUPERSEDE: S.REPLACING,
        SessionEvent.CLOSE: S.ENDING,
    },
    S.REPLACING: {
        SessionEvent.END: S.IDLE,
        SessionEvent.SUPERSEDE: S.REPLACING,
        SessionEvent.RELEASE: S.RUNNING,
        SessionEvent.CLOSE: S.ENDING,
    },
    S.ENDING: {SessionEvent.END: S.CLOSING, SessionEvent.RELEASE: S.RUNNING},
    S.CLOSING: {SessionEvent.END: S.CLOSED},
    S.CLOSED: {},
}

REQUESTS: dict[RequestState, dict[RequestEvent, RequestState]] = {
    R.HELD: {
        RequestEvent.SEND: R.SENT,
        RequestEvent.REPLY: R.HELD,
        RequestEvent.FINAL: R.DONE,
    },
    R.SENT: {
        RequestEvent.LOSE: R.HELD,
        RequestEvent.REPLY: R.SENT,
        RequestEvent.CANCEL: R.CANCELLING,
        RequestEvent.OVERFLOW: R.CUT,
        RequestEvent.VANISH: R.ORPHANED,
        RequestEvent.FINAL: R.DONE,
    },
    R.CANCELLING: {
        RequestEvent.REPLY: R.CANCELLING,
        RequestEvent.CANCEL: R.CANCELLING,
        RequestEvent.OVERFLOW: R.CUT,
        RequestEvent.VANISH: R.ORPHANED,
        RequestEvent.FINAL: R.DONE,
    },
    R.CUT: {
        RequestEvent.REPLY: R.CUT,
        RequestEvent.CANCEL: R.CUT,
        RequestEvent.OVERFLOW: R.CUT,
        RequestEvent.VANISH: R.ORPHANED,
        RequestEvent.FINAL: R.DONE,
    },
    R.ORPHANED: {
        RequestEvent.REPLY: R.ORPHANED,
        RequestEvent.CANCEL: R.ORPHANED,
        RequestEvent.FINAL: R.DONE,
    },
    R.DONE: {},
}

ENGINES: dict[EngineState, dict[EngineEvent, EngineState]] = {
    E.STOPPED: {EngineEvent.START: E.STARTING},
    E.STARTING: {
        EngineEvent.READY: E.READY,
        EngineEvent.REFUSED: E.FAILED,
        EngineEvent.DIED: E.WAITING,
        EngineEvent.STOP: E.STOPPING,
    },
    E.READY: {EngineEvent.DIED: E.WAITING, EngineEvent.STOP: E.STOPPING},
    E.WAITING: {EngineEvent.START: E.STARTING, EngineEvent.STOP: E.STOPPED},
    E.STOPPING: {EngineEvent.DIED: E.STOPPED},
    E.FAILED: {EngineEvent.DIED: E.FAILED, EngineEvent.START: E.STARTING, EngineEvent.STOP: E.FAILED},
}


class IllegalEvent(AssertionError):
    """An event that its table has no entry for: a bug of ours."""


State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)


def after(table: Mapping[State, Mapping[Event, State]], state: State, event: Event) -> State:
    """The state that `event` leads to.

    Raises:
        IllegalEvent: the table has no entry; nothing was changed.
    """
    following = table[state].get(event)
    if following is None:
        raise IllegalEvent(f"{type(state).__name__} {state.value} cannot take {event.value}")
    return following
