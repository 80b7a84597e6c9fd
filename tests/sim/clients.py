"""Virtual clients: the library's real `Connection` over a simulated line, and a habit of asking for things.

Each kind of client is a table of what it likes to do.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.sim.language import POISON, VOCAB
from tests.sim.ledger import Asked, Handle, Ledger
from tests.sim.must import must

from stateroom.client import protocol as p
from stateroom.client.connection import Connection, Done, Happening, Ignored, Update, Why
from stateroom.client.errors import Disconnected, Internal, RequestTimeout, StreamBroken
from stateroom.client.timeouts import Timeouts
from stateroom.daemon.requests import read_id

if TYPE_CHECKING:
    from tests.sim.world import World

NAME = "own-name"  # one that every client of an owner may use
TRUNK_NAMES = ("rules", "manual")
HANDLES_MAX = 6  # a client that has more closes one

HABITS: dict[str, dict[str, int]] = {
    "editor": {"open": 1, "sync": 12, "decode": 5, "tokens": 1, "cancel": 2},
    "agent": {
        "open": 2, "fork": 4, "decode": 8, "prefill": 2, "trim": 2, "close": 4, "tokens": 1,
        "publish": 1, "fork_trunk": 2,
    },
    "chat": {"open": 1, "prefill": 4, "decode": 6, "info": 1},
    "monitor": {
        "watch": 2, "list": 4, "requests": 2, "stats": 4, "info": 2, "hello": 1, "end_watch": 2, "load": 1,
        "unload": 1,
    },
    "poisoner": {"open": 2, "poison": 3, "decode": 2, "sync": 2, "close": 1},
    "crowd": {"open": 2, "decode": 4, "close": 1},
    "all": {
        "open": 3, "prefill": 3, "decode": 5, "decode_whole": 2, "sync": 4, "trim": 2, "fork": 2, "score": 1,
        "tokens": 2, "close": 2, "info": 1, "list": 1, "requests": 1, "stats": 1, "watch": 1, "end_watch": 1,
        "cancel": 3,
        "cancel_session": 1, "cancel_lost": 1, "open_named": 1, "fork_named": 1, "named": 3, "common": 3,
        "load": 1, "unload": 1, "missing": 1, "too_long": 1, "publish": 1, "unpublish": 1, "fork_trunk": 2,
    },
}  # fmt: skip


class Client:
    """One process that uses the library.

    Args:
        think_s: its mean pause between two requests.
        most: requests that it has open at once.
        before: one that had the same routing id, which this one chose, and has gone.
    """

    def __init__(
        self,
        world: World,
        number: int,
        app: str,
        habit: str,
        think_s: float,
        most: int,
        before: Client | None = None,
    ) -> None:
        self.world, self.app = world, app
        self.draw = random.Random(f"{world.seed}/client {number}")
        self.habit, self.think_s, self.most = HABITS[habit], think_s, most
        self.name = before.name if before else b"\0client %d" % number
        self.returned = before is not None
        first_id = before.connection.next_id if before else 1  # as the library does when it connects again
        self.connection = Connection(first_id=first_id, cancel_s=600.0)
        self.timeouts = Timeouts(call_s=600.0, compute_s=3600.0)
        self.line = world.network.connect(self.name, self.hear)
        self.ledger = Ledger()
        self.asked: dict[int, Asked] = {}
        self.gone = False
        self.resting = False  # asks for nothing new
        self.ask(p.Hello(app=app))
        world.loop.after(0.0, self._live)

    # ------------------------------------------------------------ asking

    def ask(self, request: p.Request, handle: Handle | None = None, *, common: bool = False) -> int:
        now_s = self.world.loop.time()
        asked = Asked(request, handle, now_s, common=common)
        number = self.connection.start(request, self.timeouts.wait_for(request.op), now_s)
        self.ledger.began(asked)
        if handle is not None and request.op in ("sync", "close", "cancel"):
            self._mark_cancelled(handle)
        self.asked[number] = asked
        self._send()
        return number

    def _mark_cancelled(self, handle: Handle) -> None:
        for asked in self.asked.values():
            asked.cancelled |= asked.handle is handle

    def cancel(self, number: int) -> None:
        self.asked[number].cancelled = True
        self.connection.cancel(number, self.world.loop.time())
        self._send()

    def _send(self) -> None:
        for frame in self.connection.frames_to_send():
            self.line.send([frame])

    def _live(self) -> None:
        if self.gone or self.resting:
            return
        if len(self.asked) < self.most:
            self.act()
        self.world.loop.after(self.draw.expovariate(1 / self.think_s), self._live)

    def act(self) -> None:
        choice = self.draw.choices(list(self.habit), weights=list(self.habit.values()))[0]
        if len(self.ledger.handles) > HANDLES_MAX:
            choice = "close"
        getattr(self, f"_{choice}")()

    def tokens(self) -> list[int]:
        longest = self.world.nature.longest
        length = self.draw.choice([0, 1, 5, self.draw.randrange(60), self.draw.randrange(longest)])
        if self.draw.random() < 0.3:  # the beginning of what others have, too
            return self.world.nature.preamble[:length]
        return [self.draw.randrange(1, VOCAB) for _ in range(length)]

    def handle(self) -> Handle | None:
        handles = self.ledger.handles
        return self.draw.choice(handles[-HANDLES_MAX:]) if handles else None

    def _with_handle(self, make: Callable[[Handle], p.Request]) -> None:
        handle = self.handle()
        if handle is None:
            self._open()
        else:
            self.ask(make(handle), handle)

    # ------------------------------------------------------------ what it may like to do

    def _open(self) -> None:
        draw = self.draw
        self.ask(
            p.Open(
                tokens=self.tokens(),
                model=draw.choice(self.world.nature.models),
                session_class="background" if draw.random() < 0.3 else "interactive",
                ttl_s=draw.choice([2.0, 30.0]) if draw.random() < 0.2 else None,
            ),
            common=draw.random() < 0.1,
        )

    def _prefill(self) -> None:
        progress = self.draw.random() < 0.5
        self._with_handle(lambda h: p.Prefill(session=h.session, tokens=self.tokens(), progress=progress))

    def _poison(self) -> None:
        """Input that kills the worker which computes it."""
        tokens = [*self.tokens(), POISON, *self.tokens()]
        made: list[Callable[[Handle], p.Request]] = [
            lambda h: p.Prefill(session=h.session, tokens=tokens),
            lambda h: p.Sync(session=h.session, tokens=tokens),
        ]
        if self.draw.random() < 0.2:
            self.ask(p.Open(tokens=tokens))
        else:
            self._with_handle(self.draw.choice(made))

    def _decode(self, stream: bool = True) -> None:
        most = self.draw.choice([1, 3, 10, 30, 30, self.world.nature.longest_decode])
        on = self.draw.random() < 0.5
        self._with_handle(
            lambda h: p.Decode(session=h.session, max_tokens=most, stream=stream, ignore_eos=on)
        )

    def _decode_whole(self) -> None:
        self._decode(stream=False)

    def _sync(self) -> None:
        """An edited buffer: some of what was there, and something else."""

        def edited(handle: Handle) -> p.Request:
            kept = handle.tokens[: self.draw.randrange(len(handle.tokens) + 1)]
            return p.Sync(session=handle.session, tokens=kept + self.tokens())

        self._with_handle(edited)

    def _trim(self) -> None:
        def trim(handle: Handle) -> p.Request:
            some = self.draw.randrange(len(handle.tokens) + 2)
            if self.draw.random() < 0.5:
                return p.Trim(session=handle.session, to=some, replay=self.draw.random() < 0.5)
            return p.Trim(session=handle.session, count=some)

        self._with_handle(trim)

    def _fork(self) -> None:
        self._with_handle(lambda h: p.Fork(session=h.session, n=self.draw.choice([1, 1, 2, 5])))

    def _publish(self) -> None:
        self._with_handle(lambda h: p.Publish(session=h.session, name=self.draw.choice(TRUNK_NAMES)))

    def _unpublish(self) -> None:
        self.ask(p.Unpublish(name=self.draw.choice(TRUNK_NAMES)))

    def _fork_trunk(self) -> None:
        """One of anybody's trunks by its id, or an own one by its name."""
        trunks = self.world.trunks
        if trunks and self.draw.random() < 0.8:
            trunk = self.draw.choice(list(trunks)[-6:])
            number = self.ask(p.Fork(trunk=trunk, n=self.draw.choice([1, 3])))
            self.asked[number].trunk = trunks[trunk]
        else:
            self.ask(p.Fork(trunk=self.draw.choice(TRUNK_NAMES)))

    def _score(self) -> None:
        self._with_handle(lambda h: p.Score(session=h.session, tokens=self.tokens()))

    def _tokens(self) -> None:
        self._with_handle(lambda h: p.ReadTokens(session=h.session))

    def _close(self) -> None:
        self._with_handle(lambda h: p.Close(session=h.session))

    def _info(self) -> None:
        self._with_handle(lambda h: p.Info(session=h.session))

    def _hello(self) -> None:
        self.ask(p.Hello())

    def _list(self) -> None:
        self.ask(p.List(everyone=self.draw.random() < 0.2))

    def _requests(self) -> None:
        session = self.draw.choice([None, None, NAME])
        self.ask(p.Requests(session=session, everyone=self.draw.random() < 0.5), common=session is not None)

    def _stats(self) -> None:
        self.ask(p.Stats())

    def _watch(self) -> None:
        every_s = self.draw.choice([None, None, 0.5])
        self.ask(p.Watch(sessions=self.draw.random() < 0.8, stats_every_s=every_s))

    def _end_watch(self) -> None:
        for number in [n for n, asked in self.asked.items() if asked.request.op == "watch"][:1]:
            self.cancel(number)

    def _cancel(self) -> None:
        if self.asked:
            self.cancel(self.draw.choice(list(self.asked)))

    def _cancel_session(self) -> None:
        self._with_handle(lambda h: p.Cancel(session=h.session))

    def _cancel_lost(self) -> None:
        self.ask(p.Cancel(request=self.draw.choice([0, 1, 10**9])))

    def _open_named(self) -> None:
        self.ask(p.Open(name=NAME, tokens=self.tokens(), ttl_s=20.0), common=True)

    def _fork_named(self) -> None:
        common = self.world.common[self.app]
        if common:
            self.ask(p.Fork(session=self.draw.choice(common), n=2, names=[NAME, "other-name"]), common=True)

    def _named(self) -> None:
        self._anything(NAME)

    def _common(self) -> None:
        common = self.world.common[self.app]
        self._anything(self.draw.choice(common[-8:]) if common else NAME)

    def _anything(self, session: str) -> None:
        draw = self.draw
        made: list[p.Request] = [
            p.Decode(session=session, max_tokens=draw.choice([1, 20, 200])),
            p.Sync(session=session, tokens=self.tokens()),
            p.Prefill(session=session, tokens=self.tokens()),
            p.Fork(session=session, n=2),
            p.Cancel(session=session),
            p.Trim(session=session, to=0),
            p.ReadTokens(session=session),
            p.Info(session=session),
            p.Close(session=session),
        ]
        self.ask(draw.choice(made), common=True)

    def _load(self) -> None:
        self.ask(p.Load(model=self.draw.choice([*self.world.nature.models, "no such"])))

    def _unload(self) -> None:
        self.ask(p.Unload(model=self.draw.choice(self.world.nature.models)))

    def _missing(self) -> None:
        self.ask(p.Decode(session="no such session", max_tokens=3), common=True)

    def _too_long(self) -> None:
        self._with_handle(lambda h: p.Prefill(session=h.session, tokens=[7] * 5000))

    # ------------------------------------------------------------ hearing

    def hear(self, frames: list[bytes]) -> None:
        must(len(frames) == 1, "a reply of several frames")
        happenings = self.connection.receive(frames[0], self.world.loop.time())
        self._send()
        for happening in happenings:
            self._take(happening)

    def _take(self, happening: Happening) -> None:
        if isinstance(happening, Ignored):
            # A socket that knows the successor already may give it what its predecessor was meant to get.
            fine = (Why.LATE, Why.STRANGER) if self.returned else (Why.LATE,)
            must(happening.why in fine, f"{happening.why.value}: {happening.detail}")
            return
        asked = self.asked[happening.request_id]
        if isinstance(happening, Update):
            if isinstance(happening.body, p.TokenEvent):
                asked.streamed += happening.body.tokens
            return
        del self.asked[happening.request_id]
        asked.cancelled |= self.world.closing  # the daemon's end is that of what runs
        outcome = happening.result if isinstance(happening, Done) else happening.error
        must(not isinstance(outcome, Internal | StreamBroken), f"{asked.request.op}: {outcome!r}")
        if asked.common:
            self._share(outcome)
        elif isinstance(outcome, p.PublishResult):
            assert asked.handle is not None
            held = asked.handle
            must(not held.sure or outcome.length == len(held.tokens), "a publish of another length")
            self.world.trunks[outcome.trunk] = list(held.tokens) if held.sure else None
        self.ledger.ended(asked, outcome)
        self.world.outcomes.add(f"{asked.request.op} {outcome_name(outcome)}")

    def _share(self, outcome: Any) -> None:
        common = self.world.common[self.app]
        if isinstance(outcome, p.OpenResult):
            common.append(outcome.session)
        elif isinstance(outcome, p.ForkResult):
            common.extend(outcome.sessions)

    def unheard(self, frames: list[bytes]) -> None:
        """The daemon passed over a request, for this client reads nothing: its patience ends here and now."""
        number = read_id(frames[-1])
        assert number is not None
        for happening in self.connection.abandon(number, RequestTimeout("nobody answers")):
            self._take(happening)
        self._send()

    # ------------------------------------------------------------ leaving

    def vanish(self) -> None:
        """The process is killed."""
        self.gone = True
        self.line.close()
        for happening in self.connection.lose("killed"):
            must(isinstance(getattr(happening, "error", None), Disconnected), "lost, and not disconnected")
        self.asked.clear()

    @property
    def waits(self) -> bool:
        return bool(self.asked)

    def read_on(self) -> None:
        if not self.gone:
            self.line.read_on()

    def rest(self) -> None:
        """Nothing new; watches end, and what comes is read."""
        self.resting = True
        self.line.read_on()
        for number, asked in list(self.asked.items()):
            if asked.request.op == "watch":
                self.cancel(number)


class Hungry(Client):
    """Always has work for the device: what ends in one of its `sessions` is followed by more at once.

    Args:
        tokens: of the prompts that it computes again and again; 0: it decodes instead.
    """

    def __init__(self, world: World, number: int, app: str, sessions: int, tokens: int) -> None:
        super().__init__(world, number, app, "all", 1.0, 0)
        self.length = tokens
        for _ in range(sessions):
            self.ask(p.Open(tokens=[1, 2, 3]))

    def _take(self, happening: Happening) -> None:
        asked = None if isinstance(happening, Ignored) else self.asked.get(happening.request_id)
        super()._take(happening)
        if self.resting or asked is None or isinstance(asked.request, p.Hello):
            return
        handle = asked.handle or self.ledger.handles[-1]
        if self.length or isinstance(asked.request, p.Decode):
            length = self.length or 3
            tokens = [
                self.draw.randrange(1, VOCAB) for _ in range(self.draw.randint(length // 2 + 1, length))
            ]
            self.ask(p.Sync(session=handle.session, tokens=tokens), handle)
        else:
            most = self.draw.randint(20, 120)
            request = p.Decode(session=handle.session, max_tokens=most, stream=False, ignore_eos=True)
            self.ask(request, handle)


def outcome_name(outcome: Any) -> str:
    """The code of an error, how a result came about, or the class of what went wrong here."""
    plain = "ok" if isinstance(outcome, p.Result) else type(outcome).__name__
    return getattr(outcome, "code", None) or getattr(outcome, "finish", None) or plain
