"""Compiles constraints off the event loop, one at a time, for services."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from specgw.errors import Overloaded
from specgw.grammar import GrammarCompiler, GrammarMatcher
from specgw.structured_outputs import StructuredOutputsParams
from specgw.types import GenerateRequest

_TIMEOUT_S = 10.0

_Given = TypeVar("_Given")
_Compiled = TypeVar("_Compiled")


class GrammarWorker:
    """One thread beside the event loop: constraints, however hard, take one core at most."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")

    async def start(self, request: GenerateRequest) -> GrammarMatcher | None:
        """Returns a matcher at the start of a request's output; none if any text will do.

        Raises:
            InvalidRequest: naming the field that is no constraint.
            Overloaded: if it would take too long.
        """
        if request.sampling_params.structured_outputs is None:
            return None
        return await self._run(self._compiler.start, request)

    async def check(self, params: StructuredOutputsParams) -> None:
        """Raises what `start` would for a constraint."""
        await self._run(self._compiler.compile, params)

    async def _run(self, compile: Callable[[_Given], _Compiled], given: _Given) -> _Compiled:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await loop.run_in_executor(self._executor, compile, given)
        except TimeoutError:
            raise Overloaded("structured_outputs: took too long to compile") from None

    def stop(self) -> None:
        """Ends the thread after what it compiles now."""
        self._executor.shutdown(wait=False, cancel_futures=True)
