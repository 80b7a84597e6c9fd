"""A client process that works until it is killed: `python vanishing_client.py ENDPOINT APP NAME SEED`.

Prints `ready` once it is connected; from then on its end may come at any point of any operation.
"""

from __future__ import annotations

import random
import sys

from stateroom.client import connect

TOKENS = 256  # ids of the tiny tokenizer's bytes


def main(endpoint: str, app: str, name: str, seed: int) -> None:
    draw = random.Random(seed)

    def some(least: int, most: int) -> list[int]:
        return [draw.randrange(TOKENS) for _ in range(draw.randint(least, most))]

    with connect(endpoint=endpoint, app=app) as room:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sessions = [room.open(name=name, tokens=some(5, 300))]
        while True:
            session = draw.choice(sessions)
            what = draw.choice(["decode", "decode", "prefill", "sync", "fork", "trim", "score"])
            if what == "decode":
                session.decode(draw.randint(1, 200), ignore_eos=True, seed=seed, temperature=1.0).wait()
            elif what == "prefill":
                session.prefill(tokens=some(1, 200))
            elif what == "sync":
                session.sync(tokens=session.tokens(0, min(session.length, 3)).tokens + some(1, 200))
            elif what == "fork" and len(sessions) < 4:
                sessions.extend(session.fork(draw.randint(1, 2)))
            elif what == "trim":
                session.trim(to=max(1, session.length - draw.randrange(20)))
            elif what == "score":
                session.score(tokens=some(1, 30))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
