"""Runs the parts of one request side by side. The caller is `openai_api.py`."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any


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
