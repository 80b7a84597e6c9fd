"""An agent's step, best of several, with a way back: branch, try, keep one, or take the step back.

    with connect(app="my-agent") as room, room.open(text=task) as session:
        step = best_of(session, 4, max_tokens=40)      # four attempts from the same tokens
        if not good(step.text):
            step.undo()                                # as if it had never been

The attempts are forks: they share every token so far, so that four cost little more memory than one, and they
decode side by side. The best one is what the model itself finds likeliest, by token, unless told otherwise.

Run it by itself to see it at work: `python examples/best_of.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stateroom.client import Session, connect

TEMPERATURE = 0.8


@dataclass(frozen=True)
class Attempt:
    text: str
    tokens: list[int]
    score: float


@dataclass(frozen=True)
class Step:
    """What was kept, and all that was tried. `undo` brings the session back to where it stood."""

    session: Session
    before: int
    best: Attempt
    attempts: list[Attempt]

    @property
    def text(self) -> str:
        return self.best.text

    def undo(self) -> None:
        self.session.trim(to=self.before, replay=True)


def likelihood(session: Session, tokens: list[int]) -> float:
    """The mean log-probability of a token: nothing is added to the session."""
    return session.score(tokens=tokens).total / max(len(tokens), 1)


def best_of(
    session: Session,
    n: int,
    *,
    max_tokens: int,
    stop: list[str] | None = None,
    judge: Callable[[Session, list[int]], float] = likelihood,
    seed: int = 0,
) -> Step:
    """Appends the best of `n` attempts to a session. `judge` scores the tokens of one, higher is better.

    Whatever happens on the way, the attempts are closed and the session is as it was, or with the best.
    """
    before = session.length
    forks = session.fork(n)
    try:
        # All are begun before any is awaited: they are served in one pass over the model.
        streams = [
            fork.decode(max_tokens, temperature=TEMPERATURE, seed=seed + at, stop=stop or [])
            for at, fork in enumerate(forks)
        ]
        drawn = [stream.wait() for stream in streams]
    finally:
        for fork in forks:
            fork.close()
    attempts = [Attempt(one.text, one.tokens, judge(session, one.tokens)) for one in drawn]
    best = max(attempts, key=lambda attempt: attempt.score)
    session.prefill(tokens=best.tokens)
    return Step(session, before, best, attempts)


def main() -> None:
    with connect(app="best-of-example") as room:
        task = "Three reasons to keep a language model's cache resident:\n1."
        with room.open(text=task) as session:
            step = best_of(session, 4, max_tokens=30, stop=["\n"])
            for attempt in step.attempts:
                print(f"{attempt.score:7.3f} {attempt.text!r}")
            print(f"kept: {step.text!r}, {session.length} tokens")
            step.undo()
            print(f"taken back: {session.length} tokens")


if __name__ == "__main__":
    main()
