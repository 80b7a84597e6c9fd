"""Clients that aren't the library's: they send what it never would; each frame must have its one answer."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgpack
from tests.sim.must import must

from stateroom.daemon.requests import read_id

if TYPE_CHECKING:
    from tests.sim.world import World

GARBAGE_IDS = 10**12  # from here on


class Rude:
    """Sends what no library would: frames that are nothing, ids used twice, delimiters, too many frames."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.draw = random.Random(f"{world.seed}/rude {number}")
        self.name = b"\0rude %d" % number
        self.line = world.network.connect(self.name, self.hear)
        self.owed: dict[int | None, int] = {}  # final replies by the id that they should carry
        self.gone = False
        self.resting = False
        self.ids = GARBAGE_IDS
        world.loop.after(0.0, self._live)

    def _live(self) -> None:
        if self.gone or self.resting:
            return
        frames, number = self._frames()
        self.owed[number] = self.owed.get(number, 0) + 1
        self.line.send(frames)
        self.world.loop.after(self.draw.expovariate(2.0), self._live)

    def _frames(self) -> tuple[list[bytes], int | None]:
        draw = self.draw
        self.ids += draw.choice([0, 1, 1])
        number = self.ids
        valid = {"v": 1, "id": number, "op": draw.choice(["list", "stats", "open"])}
        kind = draw.randrange(7)
        if kind == 0:
            return [draw.randbytes(draw.randrange(1, 40))[:1] + b"\xc1\xc1"], None
        if kind == 1:
            return [msgpack.packb({**valid, "v": 2})], number
        if kind == 2:
            return [msgpack.packb({**valid, "no": 1})], number
        if kind == 3:
            return [msgpack.packb({**valid, "op": "fly"})], number
        if kind == 4:
            return [msgpack.packb(valid), msgpack.packb(valid)], number
        if kind == 5:
            return [b"", msgpack.packb(valid)], number
        return [msgpack.packb({**valid, "op": "open", "tokens": [1, 2, 3], "ttl_s": 5.0})], number

    def hear(self, frames: list[bytes]) -> None:
        reply = msgpack.unpackb(frames[-1])
        if reply["final"]:
            number = reply["id"]
            must(self.owed.get(number, 0) > 0, f"a reply to {number}, which has had all of its replies")
            self.owed[number] -= 1
            must(
                reply["kind"] == "result" or reply["error"]["code"] != "internal", f"internal error: {reply}"
            )

    def unheard(self, frames: list[bytes]) -> None:
        self.owed[read_id(frames[-1])] -= 1

    def rest(self) -> None:
        self.resting = True
        self.line.read_on()

    @property
    def waits(self) -> bool:
        return any(self.owed.values())
