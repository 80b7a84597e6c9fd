"""A chat program: one session holds the conversation; each turn sends only what is new.

Run by `stateroom demo`; alone: python -m stateroom.daemon.demo.chat FIGURES_FILE
"""

from __future__ import annotations

import sys
from pathlib import Path

from stateroom.client import LengthResult, Message, Session, connect
from stateroom.daemon.demo.tally import Tally, say, shown

TOKENS = 24  # of one answer
FIRST = "What is the capital of France?"
SECOND = "And of Italy?"
INSTEAD = "And of Spain?"


def answer(session: Session, tally: Tally) -> None:
    with session.decode(max_tokens=TOKENS) as stream:
        done = stream.wait()
    tally.decoded += done.usage.decoded
    say(f"  < {shown(done.text)}")


def ask(session: Session, question: str, tally: Tally) -> LengthResult:
    say(f"  > {question}")
    done = session.prefill(messages=[Message(role="user", content=question)])
    say(f"  {tally.add(done.receipt)}")
    answer(session, tally)
    return done


def main() -> None:
    tally = Tally()
    with connect(app="chat") as room:
        say("opens a conversation")
        say(f"  > {FIRST}")
        session = room.open(messages=[Message(role="user", content=FIRST)])
        say(f"  {tally.first(session.receipt)}")
        answer(session, tally)

        say("goes on")
        before = session.length
        ask(session, SECOND, tally)

        say("takes the last exchange back, asks something else")
        dropped = session.trim(to=before)
        say(f"  {dropped.receipt.trimmed} tokens dropped in {dropped.receipt.ms:.0f} ms, {before} stay")
        ask(session, INSTEAD, tally)
        session.close()
    tally.write(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
