"""Decides which requests run now, which wait and which are refused. Counts; knows no verifier.

The caller is `generation.py`.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from specgw.errors import Overloaded


class Admission:
    """A fixed number of slots and a bounded queue, first come first served."""

    def __init__(self, max_running: int, max_waiting: int, queue_timeout_s: float) -> None:
        self.max_running = max_running
        self._max_waiting = max_waiting
        self._queue_timeout_s = queue_timeout_s
        self._running_count = 0
        self._turns: deque[asyncio.Future[None]] = deque()

    @property
    def running_count(self) -> int:
        """Slots in use."""
        return self._running_count

    @property
    def waiting_count(self) -> int:
        """Requests that wait for a slot."""
        return len(self._turns)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Holds a slot.

        Raises:
            Overloaded: if the queue is full, or the wait was too long.
        """
        await self._acquire()
        try:
            yield
        finally:
            self._release()

    async def _acquire(self) -> None:
        if self._running_count < self.max_running:
            self._running_count += 1
            return
        if len(self._turns) >= self._max_waiting:
            raise Overloaded(
                f"the queue is full: {self._running_count} requests are running "
                f"(at most {self.max_running}) and {len(self._turns)} waiting "
                f"(at most {self._max_waiting})"
            )
        turn = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                await turn
        except BaseException as error:
            if turn.cancelled():
                with suppress(ValueError):
                    self._turns.remove(turn)
            else:  # the turn came in the very moment the wait ended
                self._release()
            if isinstance(error, TimeoutError):
                raise Overloaded(
                    f"no slot became free in {self._queue_timeout_s:g} s: {self._running_count} "
                    f"requests are running (at most {self.max_running})"
                ) from None
            raise

    def _release(self) -> None:
        while self._turns:  # the slot goes from hand to hand and is never free in between
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._running_count -= 1
