"""An editor's completion source: one session holds the buffer, forks of it draw suggestions.

Run by `stateroom demo`; alone: python -m stateroom.daemon.demo.editor FIGURES_FILE
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from stateroom.client import AsyncSession, DecodeResult, connect_async
from stateroom.daemon.demo.buffer import BEFORE, EDITED
from stateroom.daemon.demo.tally import Tally, say, shown

DRAFTS = 4
TOKENS = 20  # of one suggestion
SEED = 7


async def suggest(buffer: AsyncSession, tally: Tally) -> None:
    """Four suggestions at once, from forks that are thrown away afterwards."""
    drafts = await buffer.fork(DRAFTS)
    results = await asyncio.gather(*(draw(draft, SEED + i) for i, draft in enumerate(drafts)))
    for i, done in enumerate(results):
        say(f"  suggestion {i + 1}: {shown(done.text)}")
        tally.add_fork(buffer.length, done)
    kept = sum(buffer.length - done.usage.prefilled for done in results)
    say(f"  {DRAFTS} forks of {buffer.length} tokens, decoded together: {kept} tokens not computed again")
    for draft in drafts:
        await draft.close()


async def draw(draft: AsyncSession, seed: int) -> DecodeResult:
    return await draft.decode(max_tokens=TOKENS, temperature=0.7, seed=seed, stop=["\n\n"]).wait()


async def edit(tally: Tally) -> None:
    async with connect_async(app="editor") as room:
        buffer = await room.open(text=BEFORE)
        say(f"opens a file of {buffer.length} tokens")
        say(f"  {tally.first(buffer.receipt)}")
        await suggest(buffer, tally)

        say("edits a line in the middle, types two more at the end, syncs")
        synced = await buffer.sync(text=EDITED)
        say(f"  {tally.add(synced.receipt)}")
        await suggest(buffer, tally)

        say("saves without a change, syncs")
        synced = await buffer.sync(text=EDITED)
        say(f"  {tally.add(synced.receipt)}")
        await buffer.close()


def main() -> None:
    tally = Tally()
    asyncio.run(edit(tally))
    tally.write(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
