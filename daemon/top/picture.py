"""The live view as a picture, for documents."""

from __future__ import annotations

import asyncio

from stateroom.daemon.top.screen import Top
from stateroom.daemon.top.source import Source

SIZE = (104, 24)  # columns, rows
LOOKS = 3  # rates need two
WAIT_S = 0.05


def picture(source: Source, size: tuple[int, int] = SIZE, looks: int = LOOKS) -> str:
    """The screen as SVG, without a terminal, once it has looked so often."""

    async def drawn() -> str:
        try:
            app = Top(source, await source.look())
            async with app.run_test(size=size) as pilot:
                while app.looked < looks:
                    await pilot.pause(WAIT_S)
                await pilot.pause()
                return app.export_screenshot(title="stateroom top")
        finally:
            await source.close()

    return asyncio.run(drawn())
