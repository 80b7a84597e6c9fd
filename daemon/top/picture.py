"""The live view as a picture, for documents."""

from __future__ import annotations

import asyncio

from stateroom.daemon.top.screen import Top
from stateroom.daemon.top.source import Source

SIZE = (104, 24)  # columns, rows
LOOKS = 3  # rates need two


def picture(source: Source, size: tuple[int, int] = SIZE, looks: int = LOOKS) -> str:
    """The screen as SVG, without a terminal, once it has looked so often."""

    async def drawn() -> str:
        try:
            first = await source.look()
            app = Top(source, first)
            async with app.run_test(size=size) as pilot:
                await asyncio.sleep(looks * first.every_s)  # it looks by itself
                await pilot.pause()
                return app.export_screenshot(title="stateroom top")
        finally:
            await source.close()

    return asyncio.run(drawn())
