"""Runs the parts of one request side by side, and ends them in time.

Callers are `openai_api.py` and `service.py`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from specgw.errors import DeadlineExceeded


@asynccontextmanager
async def ended_by(deadline: float) -> AsyncIterator[None]:
    """Ends what runs inside at a `time.monotonic()`, whatever it waits for: a slot or a reader.

    Raises:
        DeadlineExceeded: if it was not done by then.
    """
    try:
        async with asyncio.timeout(deadline - time.monotonic()) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded("the time for this request is up") from None


async def run_together(
    work: Callable[..., Awaitable[None]], *arguments: Iterable[Any], at_once: int
) -> None:
    """Awaits `work` for every set of arguments, as in `map`, at most `at_once` at the same time.

    The first error cancels the others and is raised as it is.
    """
    turns = asyncio.Semaphore(at_once)

    async def one(*values: Any) -> None:
        async with turns:
            await work(*values)

    try:
        async with asyncio.TaskGroup() as group:
            for values in zip(*arguments, strict=True):
                group.create_task(one(*values))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
