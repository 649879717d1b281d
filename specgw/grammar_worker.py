"""Compiles constraints off the event loop, one at a time, for services."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from specgw.errors import Overloaded
from specgw.grammar import GrammarCompiler, GrammarMatcher
from specgw.types import GenerateRequest

_TIMEOUT_S = 10.0


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
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await loop.run_in_executor(self._executor, self._compiler.start, request)
        except TimeoutError:
            raise Overloaded("structured_outputs: took too long to compile") from None

    def stop(self) -> None:
        """Ends the thread after what it compiles now."""
        self._executor.shutdown(wait=False, cancel_futures=True)
