"""`python -m tests.fuzz --frames 1000000`: fuzzes decode and validate, guided by coverage where atheris runs.

Elsewhere (no wheel of it for this platform or Python) the same property is driven by seeded mutation alone. A
frame that fails is printed as hexadecimal digits, for a test of its own.
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

TELL_EVERY = 100_000


def guided(frames: int, seed: int, corpus: Path) -> None:
    """By atheris, which ends the process."""
    import atheris

    with atheris.instrument_imports(include=["stateroom", "msgpack"]):
        from tests.fuzz.mutation import Mutator, seeds
        from tests.fuzz.target import check

    def one(data: bytes) -> None:
        try:
            check(data)
        except BaseException:
            print(f"failed at {data.hex()}", flush=True)
            raise

    mutator = Mutator(seed)

    def bend(data: bytes, max_size: int, number: int) -> bytes:
        # Bytes alone seldom get past msgpack, edits of values seldom break it: both.
        return atheris.Mutate(data, max_size) if number % 2 else mutator.bent(data)[:max_size]

    corpus.mkdir(parents=True, exist_ok=True)
    for n, frame in enumerate(seeds()):
        (corpus / f"seed-{n:03}").write_bytes(frame)
    arguments = ["fuzz", f"-runs={frames}", f"-seed={seed}", "-max_len=4096", "-print_final_stats=1"]
    atheris.Setup([*arguments, str(corpus)], one, custom_mutator=bend)
    atheris.Fuzz()


def mutated(frames: int, seed: int) -> None:
    from tests.fuzz.mutation import Mutator
    from tests.fuzz.target import check

    mutator, outcomes, began = Mutator(seed), Counter[str](), time.monotonic()
    tracemalloc.start()
    first = 0
    for n in range(1, frames + 1):
        frame = mutator.frame()
        try:
            outcomes[check(frame)] += 1
        except BaseException:
            print(f"failed at {frame.hex()}", flush=True)
            raise
        if n % TELL_EVERY == 0:
            held, _ = tracemalloc.get_traced_memory()
            first = first or held
            print(f"{n:>10,} frames, {time.monotonic() - began:.0f} s, {held - first:+,} bytes", flush=True)
    print(dict(outcomes.most_common()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, help="kept between runs; else forgotten")
    parser.add_argument("--plain", action="store_true", help="seeded mutation, though atheris is here")
    asked = parser.parse_args()
    try:
        if not asked.plain:
            import atheris  # noqa: F401
    except ImportError:
        print("atheris isn't here: seeded mutation, without guidance", file=sys.stderr)
        asked.plain = True
    if asked.plain:
        mutated(asked.frames, asked.seed)
    else:
        with TemporaryDirectory() as folder:
            guided(asked.frames, asked.seed, asked.corpus or Path(folder) / "corpus")


if __name__ == "__main__":
    main()
