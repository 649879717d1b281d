"""Runs a program's coroutine on the fastest event loop that is there. The caller is the gateway."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine as `asyncio.run` does, on uvloop where that is installed."""
    try:
        import uvloop  # there is none for Windows
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
