"""What is at work in the picture of `top`: an editor, a chat, an agent, an indexer, and a manual that rests.

`python -m docs.pictures.programs ENDPOINT` says when everybody is at it, and goes on until it is ended.
"""

from __future__ import annotations

import asyncio
import sys

from stateroom.client import AsyncRoom, AsyncSession, Message, connect_async
from stateroom.daemon.demo.buffer import BEFORE

TOKENS = 2000  # of a stream: more than are drawn before the picture is


async def draws(session: AsyncSession, drawing: asyncio.Event, seed: int) -> None:
    async with session.decode(TOKENS, temperature=0.8, seed=seed, ignore_eos=True) as stream:
        async for _ in stream:
            drawing.set()


async def editor(room: AsyncRoom, drawing: asyncio.Event) -> None:
    buffer = await room.open(text=BEFORE, name="inventory.py", ttl_s=3600)
    drafts = await buffer.fork(names=[f"suggestion-{n}" for n in range(1, 4)])
    await asyncio.gather(*(draws(draft, drawing, n) for n, draft in enumerate(drafts)))


async def chat(room: AsyncRoom, drawing: asyncio.Event) -> None:
    question = Message(role="user", content="Why is the sky blue? Explain it at length.")
    await draws(await room.open(messages=[question], name="chat"), drawing, 0)


async def agent(room: AsyncRoom, drawing: asyncio.Event) -> None:
    plan = await room.open(
        text=BEFORE + "\n# What to do next:\n# 1.", name="plan", session_class="background"
    )
    ways = await plan.fork(names=["way-a", "way-b"])
    await asyncio.gather(*(draws(way, drawing, 10 + n) for n, way in enumerate(ways)))


async def indexer(room: AsyncRoom, drawing: asyncio.Event) -> None:
    drawing.set()
    await room.open(text=BEFORE[::-1] * 8, name="chapter-7", session_class="background")


async def librarian(room: AsyncRoom, drawing: asyncio.Event) -> None:
    manual = await room.open(text="Chapter one. " * 100, name="manual")
    await manual.park()
    drawing.set()


PROGRAMS = {"librarian": librarian, "my-editor": editor, "chat": chat, "agent": agent, "indexer": indexer}


async def main(endpoint: str) -> None:
    async with asyncio.TaskGroup() as group:
        for name, program in PROGRAMS.items():
            room, drawing = await connect_async(endpoint, app=name), asyncio.Event()
            group.create_task(program(room, drawing))
            await drawing.wait()
        sys.stdout.write("at work\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
