"""What the daemon adds to a token: with a model of two small layers, nearly nothing else is left."""

from __future__ import annotations

from benchmarks.claims.single import agreement, through_daemon
from benchmarks.measurement import Measurement, together
from benchmarks.rig import TOY, Rig

ROUNDS = 9
TOKENS = 256
PROMPT = 32
MOST_MS = 0.2


def run(rig: Rig) -> list[Measurement]:
    sides = rig.sides(TOY)
    prompt = sides.prompt(PROMPT)
    tokens = 64 if rig.quick else TOKENS
    through_daemon(sides, prompt, tokens)
    sides.peer.generate(prompt, tokens)
    pairs = [
        (through_daemon(sides, prompt, tokens), sides.peer.generate(prompt, tokens))
        for _ in range(rig.rounds(ROUNDS))
    ]
    return [
        Measurement(
            claim=f"added to a token, {sides.model.name}",
            unit="ms",
            ours=tuple(1000 / run.tokens_per_s for run, _ in pairs),
            peer=tuple(1000 / run.tokens_per_s for _, run in pairs),
            peer_name="stream_generate",
            lower_is_better=True,
            most_added=MOST_MS,
            tokens=together([agreement(sides, prompt, ours, theirs) for ours, theirs in pairs]),
        )
    ]
