"""The catalog on disk: what waits is written by a thread, and the loop never waits for that.

    Catalog ── Pending ── Keeper (loop: when, and what if not) ── Store.write (a thread, one flush at a time)

A message is added to the tail first, which a kill of this process leaves whole, then it waits for a flush.
That begins `FLUSH_S` after the first message that waits, or at once when one is urgent, and never before the
one under way is through. It *lasts* (it outlives a loss of power) when one is urgent, and what didn't is made
to last within `LASTING_S`. A batch that could not be written is put back and tried again.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from structlog.typing import FilteringBoundLogger

from stateroom.daemon.alarm import Alarm
from stateroom.daemon.clock import Clock
from stateroom.daemon.exits import DAMAGED, FAILED, FORBIDDEN, RUNNING, Leave
from stateroom.daemon.logs import incident
from stateroom.daemon.store.pending import Batch, Pending
from stateroom.daemon.store.refusals import Locked, NotWritten, StoreRefused
from stateroom.daemon.store.rows import Everything
from stateroom.daemon.store.store import Store
from stateroom.daemon.store.tail import Tail, replay

FILE_NAME, TAIL_NAME = "catalog.db", "catalog.tail"
FREE_SPACE = "Free some space, or choose another --home."
FLUSH_S = 0.25  # what was told to a client waits for so long before it is written
LASTING_S = 1.0  # and for so long before it outlives a loss of power
RETRY_FIRST_S = 0.5  # after a flush that failed, doubled with each
RETRY_MOST_S = 30.0
LAST_S = 0.3  # for a flush under way, and for the last one, at the daemon's end


def open_store(state_dir: Path) -> Store:
    """The store of a daemon, whole and ours.

    Raises:
        Leave: it can't be used. Nothing was changed; the message names the file and says what to do.
    """
    file = state_dir / FILE_NAME
    try:
        return Store(file)
    except Locked as error:
        raise Leave(RUNNING, str(error)) from error
    except StoreRefused as error:
        raise Leave(DAMAGED, str(error)) from error
    except NotWritten as error:
        raise Leave(FAILED, f"{error}. {FREE_SPACE}") from error
    except OSError as error:
        raise Leave(FORBIDDEN, f"The catalog {file} can't be opened: {error.strerror}.") from error


class Keeper:
    """Owns the store and what waits for it. Make it inside a running event loop; `close` it last.

    Attributes:
        pending: where the catalog tells what happens.
        failures: flushes that could not be written, since the start.
    """

    def __init__(self, store: Store, clock: Clock, log: FilteringBoundLogger) -> None:
        self._store, self._clock, self._log = store, clock, log
        self._number = store.number  # of the last flush that was tried
        self._tail = Tail(store.file.with_name(TAIL_NAME))
        try:
            self._take_in_tail()
        except BaseException:
            store.close()
            raise
        self.pending = Pending(self._tail.add, self._news)
        self.failures = 0
        self._alarm = Alarm(self._flush)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keeper")
        self._flushing: asyncio.Future[None] | None = None
        self._batch = Batch()  # that is being written
        self._urgent = False
        self._since_s: float | None = None  # when what waits longest came
        self._last_s: float | None = None  # by when what was written must last; None: it does
        self._failing_s = 0.0  # until the next attempt after one that failed; 0: the last one didn't

    def _take_in_tail(self) -> None:
        """What the process before was told and had not flushed when it was killed.

        Raises:
            Leave: the disk is full, or it doesn't fit the catalog. Both files are as they were.
        """
        try:
            messages = self._tail.after(self._number)
            if messages:
                before = Pending()
                replay(messages, before)
                self._number = self._tail.number + 1
                self._store.write(before.take(), lasting=True, number=self._number)
                self._store.reload()
                self._log.info("journal taken in", messages=len(messages))
        except NotWritten as error:
            raise Leave(FAILED, f"{error}. {FREE_SPACE}") from error
        except Exception as error:
            raise Leave(
                DAMAGED,
                f"{self._tail.file} doesn't fit {self._store.file.name}: {error!r}. To start without what it "
                "holds, the last moments of the daemon before, move it away.",
            ) from error
        self._tail.begin(self._number)

    def loaded(self) -> Everything:
        """What the store held when it was opened; given once, since it may be much."""
        loaded, self._store.loaded = self._store.loaded, Everything()
        return loaded

    def gauges(self) -> dict[str, float]:
        """How much isn't on disk yet, for how long, and what went wrong."""
        lag_s = 0.0 if self._since_s is None else self._clock() - self._since_s
        waiting = len(self._batch) + len(self.pending)
        return {"journal_pending": waiting, "journal_lag_s": lag_s, "journal_failures": self.failures}

    # ------------------------------------------------------------ when

    def _news(self, urgent: bool) -> None:
        """Something waits."""
        if self._since_s is None:
            self._since_s = self._clock()
        self._urgent |= urgent
        if self._flushing is None and not self._failing_s:
            self._alarm.ring_in(0.0 if urgent else FLUSH_S)

    def _flush(self) -> None:
        """Has what waits written, unless that is under way."""
        lasting = self._urgent or (self._last_s is not None and self._clock() >= self._last_s)
        if self._flushing is not None or not (self.pending or lasting):
            return
        self._urgent = False
        self._batch = self.pending.take()
        self._number += 1
        number = self._number
        self._tail.mark(number)
        write = partial(self._store.write, self._batch, lasting, number)
        self._flushing = asyncio.get_running_loop().run_in_executor(self._thread, write)
        self._flushing.add_done_callback(lambda flushed: self._flushed(flushed, number, lasting))

    def _flushed(self, flushed: asyncio.Future[None], number: int, lasting: bool) -> None:
        self._flushing = None
        batch, self._batch = self._batch, Batch()
        error = flushed.exception()
        if error is not None:
            self._failed(error, batch, lasting)
            return
        if self._store.number == number:
            self._tail.flushed()
        if self._failing_s:
            self._log.info("journal written again", file=str(self._store.file))
            self._failing_s = 0.0
        self._since_s = self._clock() if self.pending else None
        if lasting:
            self._last_s = None
        elif self._last_s is None:
            self._last_s = self._clock() + LASTING_S
        if self.pending:
            self._alarm.ring_in(0.0 if self._urgent else FLUSH_S)
        elif self._last_s is not None:
            self._alarm.ring_in(max(0.0, self._last_s - self._clock()))

    # ------------------------------------------------------------ what if not

    def _failed(self, error: BaseException, batch: Batch, lasting: bool) -> None:
        self.failures += 1
        self._failing_s = min(max(2 * self._failing_s, RETRY_FIRST_S), RETRY_MOST_S)
        self._urgent |= lasting
        self.pending.put_back(batch)
        self._alarm.ring_in(self._failing_s)
        # Twice as long apart with each failure, so that a full disk isn't filled with this.
        expected = isinstance(error, NotWritten | StoreRefused)
        self._log.error(
            "journal not written",
            reason=str(error),
            retry_in_s=self._failing_s,
            waiting=len(self.pending),
            tail=self._tail.lost or "whole",
            incident=None if expected else incident(),
            exc_info=None if expected else error,
        )

    # ------------------------------------------------------------ the end

    async def close(self) -> None:
        """Writes what waits, so that it lasts, and lets go of the file; twice `LAST_S` at most."""
        if self._flushing is not None:
            await asyncio.wait([self._flushing], timeout=LAST_S)
        self._alarm.stop()
        late = None if self._flushing is None else self._number
        end = partial(self._end, self.pending.take(), late)
        closing = asyncio.get_running_loop().run_in_executor(self._thread, end)
        _, waiting = await asyncio.wait([closing], timeout=LAST_S)
        if waiting:  # the process ends once it is through, or is ended before; nothing is lost by that
            closing.cancel()  # only the waiting: nobody hears of its end
            self._log.warning("journal still being written", file=str(self._store.file))
        self._thread.shutdown(wait=False)

    def _end(self, batch: Batch, late: int | None) -> None:
        """On the thread. `late`: the number of a flush that nobody waited for any more."""
        written = False
        try:
            if late is not None and late != self._store.number:
                raise NotWritten(self._store.file, "the flush before failed")
            self._store.write(batch, lasting=True, number=self._number + 1)
            written = True
        except Exception as error:
            self._log.error(
                "journal not written", reason=str(error), left_to="the next start", waiting=len(batch)
            )
        finally:
            self._tail.close(remove=written)
            self._store.close()
