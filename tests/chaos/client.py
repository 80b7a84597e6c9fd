"""One client of a chaotic run: a process that keeps its own book of what each of its sessions must hold.

`python -m tests.chaos.client ENDPOINT APP SEED BOOK`. Whatever dies, it connects again and holds the daemon
to the book: what was told is there, but for what was under way, and was drawn as a fresh session draws it. On
SIGTERM it writes the book, with its counts and complaints, and leaves.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stateroom.client import Room, connect
from stateroom.client import protocol as p
from stateroom.client.errors import (
    Busy,
    Capacity,
    ClientError,
    Corrupt,
    EngineLost,
    NotFound,
    ShuttingDown,
    StateroomError,
)

VOCAB = 200
SESSIONS_MAX = 8  # of one client
LENGTH_MAX = 3_000
RECONNECT_S = 60.0  # for a daemon to come back
TIMEOUT_S = 60.0
LOST_MAX = 64  # tokens that were told in the last instant before the daemon was killed
BUSY_S = 20.0  # for a request that nobody waits for any more to end

Tokens = list[int]


class Wrong(AssertionError):
    """The daemon broke a promise."""


class ChaosClient:
    """Does things at random, by a seed, and knows what must come of them."""

    def __init__(self, endpoint: str, app: str, seed: int) -> None:
        self._endpoint, self._app = endpoint, app
        self._draw = random.Random(seed)
        self._shared = [random.Random(n).choices(range(VOCAB), k=700) for n in range(3)]  # of all clients
        self._rooms: dict[str, Room] = {}  # by app
        self.sessions: dict[str, Tokens] = {}
        self.snapshots: dict[str, Tokens] = {}
        self.counts: Counter[str] = Counter()
        self.most_lost = 0
        self.complaints: list[str] = []
        self.stopping = False
        self._names = 0

    # ------------------------------------------------------------ the connection

    @property
    def room(self) -> Room:
        return self.room_of(self._app)

    def room_of(self, app: str) -> Room:
        until = time.monotonic() + RECONNECT_S
        while app not in self._rooms:
            try:
                self._rooms[app] = connect(endpoint=self._endpoint, app=app, timeout_s=5.0)
                self.counts["connected"] += 1
            except (ClientError, StateroomError):
                if time.monotonic() > until:
                    raise Wrong(f"no daemon within {RECONNECT_S} s") from None
                time.sleep(0.1)
        return self._rooms[app]

    def drop(self) -> None:
        for room in self._rooms.values():
            room.close()
        self._rooms.clear()

    def ask(self, request: p.Request, result: type[Any]) -> Any:
        return self.room.call(request, result, timeout_s=TIMEOUT_S)

    def patiently(self, ask: Callable[[], Any]) -> Any:
        """A request that changes nothing, until it is answered."""
        until = time.monotonic() + RECONNECT_S
        while True:
            try:
                return ask()
            except (Busy, Capacity, ShuttingDown, EngineLost) as error:
                why: Exception = error
            except ClientError as error:
                self.drop()
                why = error
            if time.monotonic() > until:
                raise Wrong(f"not answered within {RECONNECT_S} s: {why}")
            time.sleep(0.1)

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        while not self.stopping:
            try:
                self.step()
            except Wrong as wrong:
                self.complaints.append(str(wrong)[:2_000])
            except (Capacity, Busy, ShuttingDown, EngineLost) as error:
                self.counts[f"refused.{error.code}"] += 1
                time.sleep(0.05)
            except StateroomError as error:
                self.complaints.append(f"{self._app}: {type(error).__name__}: {error}")
            except ClientError as error:
                self.counts[f"unheard.{type(error).__name__}"] += 1
                self.drop()

    def step(self) -> None:
        ops = [self.decode] * 6 + [self.prefill, self.trim, self.sync, self.fork, self.park, self.save]
        ops += [self.restore, self.close, self.open]
        if not self.sessions:
            self.open()
        else:
            self._draw.choice(ops)()

    def pick(self) -> str:
        return self._draw.choice(list(self.sessions))

    def some(self, most: int) -> Tokens:
        return self._draw.choices(range(VOCAB), k=self._draw.randint(1, most))

    def name(self) -> str:
        self._names += 1
        return f"{self._app}-{self._names}"

    # ------------------------------------------------------------ what is left after a loss

    def change(self, op: str, session: str, call: Callable[[], Tokens], *others: Tokens) -> None:
        """Runs a request that leaves the session with what `call` gives; unheard, with that or the others."""
        before = self.sessions[session]
        try:
            self.sessions[session] = call()
            self.counts[op] += 1
        except ClientError:
            self.counts[f"unheard.{op}"] += 1
            self.drop()
            self.settle(op, session, [before, *others])
        except EngineLost:
            self.counts[f"lost.{op}"] += 1
            self.settle(op, session, [before, *others])

    def runs(self, session: str) -> bool:
        found = self.patiently(lambda: self.ask(p.Info(session=session), p.InfoResult))
        return found.info.running is not None

    def held(self, session: str) -> Tokens:
        """What the daemon says that a session holds, once nothing runs in it."""
        try:
            return self._held(session)
        except Wrong:
            self.sessions.pop(session, None)  # nobody knows any more what it must hold
            raise

    def _held(self, session: str) -> Tokens:

        def ask() -> Tokens:
            tokens: Tokens = self.ask(p.ReadTokens(session=session), p.TokensResult).tokens
            return tokens

        until = time.monotonic() + BUSY_S
        while (
            self.patiently(lambda: self.ask(p.Info(session=session), p.InfoResult)).info.running is not None
        ):
            if time.monotonic() > until:
                raise Wrong(f"{session} is still running after {BUSY_S} s")
            time.sleep(0.02)
        try:
            return self.patiently(ask)  # type: ignore[no-any-return]
        except NotFound:
            raise Wrong(f"{self._app}: the session {session} is gone") from None

    def settle(self, op: str, session: str, may_be: list[Tokens]) -> None:
        found = self.held(session)
        for whole in may_be:
            if found == whole[: len(found)] and len(whole) - len(found) <= LOST_MAX:
                self.lost(len(whole) - len(found))
                self.sessions[session] = found
                return
        wanted = [len(each) for each in may_be]
        self.sessions[session] = found
        raise Wrong(f"{self._app}: after {op}, {session} holds {len(found)} tokens, none of {wanted}")

    def lost(self, tokens: int) -> None:
        if tokens:
            self.counts["told_and_lost"] += tokens
            self.most_lost = max(self.most_lost, tokens)

    # ------------------------------------------------------------ operations

    def open(self) -> None:
        if len(self.sessions) >= SESSIONS_MAX:
            self.close()
            return
        tokens = self._draw.choice(self._shared)[: self._draw.randint(20, 700)] + self.some(20)
        name = self.name()
        try:
            opened = self.ask(p.Open(tokens=tokens, name=name), p.OpenResult)
        except ClientError:
            self.drop()
            self.counts["unheard.open"] += 1
            return  # a session of that name may be there, which nobody needs
        self.sessions[opened.session] = tokens
        self.counts["open"] += 1

    def prefill(self) -> None:
        session, new = self.pick(), self.some(200)
        before = self.sessions[session]
        if len(before) > LENGTH_MAX:
            self.trim(session)
            return

        def call() -> Tokens:
            self.ask(p.Prefill(session=session, tokens=new), p.LengthResult)
            return before + new

        self.change("prefill", session, call, before + new)

    def trim(self, session: str | None = None) -> None:
        session = session or self.pick()
        before = self.sessions[session]
        to = self._draw.randint(1, min(len(before), LENGTH_MAX // 2))

        def call() -> Tokens:
            self.ask(p.Trim(session=session, to=to, replay=True), p.LengthResult)
            return before[:to]

        self.change("trim", session, call, before[:to])

    def sync(self) -> None:
        session = self.pick()
        before = self.sessions[session]
        keep = self._draw.randint(0, len(before))
        target = before[:keep] + self.some(50)

        def call() -> Tokens:
            self.ask(p.Sync(session=session, tokens=target), p.LengthResult)
            return target

        self.change("sync", session, call, target)

    def fork(self) -> None:
        if len(self.sessions) >= SESSIONS_MAX:
            self.close()
            return
        session = self.pick()
        try:
            made = self.ask(p.Fork(session=session, n=1), p.ForkResult)
        except ClientError:
            self.drop()
            self.counts["unheard.fork"] += 1
            return
        self.sessions[made.sessions[0]] = list(self.sessions[session])
        self.counts["fork"] += 1

    def park(self) -> None:
        session = self.pick()
        before = self.sessions[session]

        def call() -> Tokens:
            self.ask(p.Park(session=session), p.ParkResult)
            return before

        self.change("park", session, call)

    def save(self) -> None:
        session, name = self.pick(), f"{self._app}-{self._draw.randrange(3)}"
        before = self.sessions[session]

        def call() -> Tokens:
            # What was under that name is there until this is; unheard, it may be either.
            self.snapshots.pop(name, None)
            self.ask(p.Save(session=session, snapshot=name, replace=True), p.SaveResult)
            self.snapshots[name] = before
            return before

        self.change("save", session, call)

    def restore(self) -> None:
        if not self.snapshots or len(self.sessions) >= SESSIONS_MAX:
            return
        name = self._draw.choice(list(self.snapshots))
        try:
            made = self.ask(p.Restore(snapshot=name), p.OpenResult)
        except ClientError:
            self.drop()
            self.counts["unheard.restore"] += 1
        except Corrupt:
            self.counts["refused.corrupt"] += 1  # somebody flips bits
            self.snapshots.pop(name)
        except NotFound:
            del self.snapshots[name]
            raise Wrong(f"{self._app}: the snapshot {name} is gone") from None
        else:
            self.sessions[made.session] = list(self.snapshots[name])
            self.counts["restore"] += 1

    def close(self) -> None:
        session = self.pick()
        try:
            self.ask(p.Close(session=session), p.CloseResult)
            self.counts["close"] += 1
        except ClientError:
            self.drop()
            self.counts["unheard.close"] += 1
        except NotFound:
            raise Wrong(
                f"{self._app}: {self.sessions.pop(session)[:0]}{session} was gone at its close"
            ) from None
        finally:
            self.sessions.pop(session, None)

    # ------------------------------------------------------------ decode

    def decode(self) -> None:
        session = self.pick()
        before = self.sessions[session]
        if len(before) > LENGTH_MAX:
            self.trim(session)
            return
        sampling = p.Sampling()
        if self._draw.random() < 0.5:
            sampling = p.Sampling(temperature=1.0, top_k=20, seed=self._draw.randrange(2**32))
        guess = p.Speculate(kind="lookup") if self._draw.random() < 0.2 else None
        wanted = self._draw.randint(5, 120)
        request = p.Decode(
            session=session, max_tokens=wanted, sampling=sampling, ignore_eos=True, speculate=guess
        )
        told: Tokens = []
        try:
            inbox = self.room.start(request, timeout_s=TIMEOUT_S)
            while not isinstance(part := inbox.take(), p.Result):
                if isinstance(part, p.TokenEvent):
                    told += part.tokens
                elif isinstance(part, p.Event):
                    self.counts[f"told.{part.event}"] += 1
            assert isinstance(part, p.DecodeResult)
            if told != part.tokens:
                raise Wrong(f"{self._app}: the stream told {told}, its end {part.tokens}")
            self.sessions[session] = before + told
            if part.finish == "cancelled":
                self.counts["cut.decode"] += 1  # the daemon was told to stop
            elif len(told) != wanted:
                raise Wrong(f"{self._app}: {len(told)} of {wanted} tokens, {part.finish}")
            else:
                self.counts["decode"] += 1
            if self._draw.random() < 0.2:
                self.compare(before, told, sampling)
        except ClientError:
            self.counts["unheard.decode"] += 1
            self.drop()
            self.go_on(session, before, told, sampling)
        except EngineLost:
            self.counts["lost.decode"] += 1
            self.go_on(session, before, told, sampling)

    def go_on(self, session: str, before: Tokens, told: Tokens, sampling: p.Sampling) -> None:
        """A decode whose end was not heard: what is there must be what it would have drawn."""
        found = self.held(session)
        whole = before + told
        self.sessions[session] = found
        shared = min(len(found), len(whole))
        if found[:shared] != whole[:shared] or len(whole) - len(found) > LOST_MAX:
            raise Wrong(f"{self._app}: {len(found)} tokens of {session} after {len(whole)} were told")
        self.lost(len(whole) - shared)
        if len(found) > len(before):
            self.compare(before, found[len(before) :], sampling)

    def compare(self, before: Tokens, drawn: Tokens, sampling: p.Sampling) -> None:
        """With what a fresh session draws: one of another owner, who shares nothing with this one."""

        def fresh() -> Tokens:
            room = self.room_of(f"{self._app}-fresh")
            opened = room.call(p.Open(tokens=before, ttl_s=120.0), p.OpenResult, timeout_s=TIMEOUT_S)
            asked = p.Decode(
                session=opened.session,
                max_tokens=len(drawn),
                sampling=sampling,
                ignore_eos=True,
                stream=False,
            )
            tokens = room.call(asked, p.DecodeResult, timeout_s=TIMEOUT_S).tokens
            room.call(p.Close(session=opened.session), p.CloseResult)
            return tokens

        again = self.patiently(fresh)
        self.counts["compared"] += 1
        if again != drawn:
            at = next(n for n, (a, b) in enumerate(zip(again, drawn, strict=True)) if a != b)
            raise Wrong(
                f"{self._app}: token {at} of {len(drawn)} behind {len(before)} isn't a fresh session's"
            )

    # ------------------------------------------------------------ the end

    def book(self) -> dict[str, Any]:
        return {
            "app": self._app,
            "sessions": self.sessions,
            "snapshots": self.snapshots,
            "counts": dict(self.counts),
            "most_lost": self.most_lost,
            "complaints": self.complaints,
        }


def main() -> None:
    endpoint, app, seed, book = sys.argv[1:]
    client = ChaosClient(endpoint, app, int(seed))

    def stop(*_: object) -> None:
        client.stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        client.run()
    except Exception as error:
        client.complaints.append(f"{type(error).__name__}: {error}")
        raise
    finally:
        Path(book).write_text(json.dumps(client.book()))


if __name__ == "__main__":
    main()
