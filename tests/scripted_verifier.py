"""A verifier that plays a script: a real gRPC server without a model."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc

from specgw import wire
from specgw.errors import SpecgwError
from specgw.server import ServiceServer
from specgw.types import (
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    ModelDescription,
    Round,
    SpeculationStats,
    TokenLogprobs,
    UndraftedReason,
    VerifierInfo,
)
from specgw.v1 import verifier_pb2, verifier_pb2_grpc
from verifier_svc.client_stream import ClientStream, Sink


class ScriptedVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """Continues every prompt with the same tokens, in blocks of the same size.

    Args:
        output_token_ids: What follows any prompt that `outputs` does not name.
        outputs: What follows a prompt, by its token ids.
        block_size: Tokens in one response; all but the last count as accepted draft tokens.
        eos_token_id: Ends the output unless the request ignores it.
        hold_at: Output length at which a call waits until `released` is set.
        fail_at: Output length at which a call ends with `failure`, once.
        cached_token_count: What it says of its prefix cache in its first output.
        reports: What the verifier says of itself where that is not the default.
    """

    def __init__(
        self,
        output_token_ids: Sequence[int] = (),
        *,
        outputs: Mapping[tuple[int, ...], Sequence[int]] | None = None,
        vocab_size: int,
        vocab_fingerprint: str,
        block_size: int = 3,
        eos_token_id: int | None = None,
        max_model_len: int = 256,
        hold_at: int | None = None,
        fail_at: int | None = None,
        failure: SpecgwError | None = None,
        cached_token_count: int | None = None,
        **reports: Any,
    ) -> None:
        self.requests: list[GenerateRequest] = []
        self.refusals: dict[tuple[int, ...], SpecgwError] = {}  # by prompt; each happens once
        self._cached_token_count = cached_token_count
        self.deadlines_s: list[float] = []
        self.open_count = 0
        self.cancelled_count = 0
        self.released = asyncio.Event()
        self.changed = asyncio.Condition()
        self._output_token_ids = output_token_ids
        self._outputs = outputs or {}
        self._block_size = block_size
        self._eos_token_id = eos_token_id
        self._hold_at = hold_at
        self._fail_at = fail_at
        self._failure = failure
        model = ModelDescription(
            "scripted", "Script", vocab_size, vocab_fingerprint, max_model_len, "none", "cpu"
        )
        plenty = VerifierInfo("scripted", model, 1_000, 100_000, 1_000_000, 4, 4)
        self.info = replace(plenty, **{"generates_many": True, **reports})

    async def Generate(  # noqa: N802
        self,
        request: verifier_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[verifier_pb2.GenerateResponse]:
        self.deadlines_s.append(context.time_remaining() or 0.0)
        stats = SpeculationStats()
        async with aclosing(self.play(request)) as outputs:
            async for output in outputs:
                stats.count(output.round)
                yield wire.generate_output_to_pb(output, stats)

    async def GenerateMany(  # type: ignore[override]  # noqa: N802
        self,
        request_iterator: AsyncIterator[verifier_pb2.GenerateManyRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        async def noted() -> AsyncIterator[verifier_pb2.GenerateManyRequest]:
            async for request in request_iterator:
                if request.HasField("start"):
                    self.deadlines_s.append(request.start.timeout.ToTimedelta().total_seconds())
                yield request

        await _Calls(self).stream.serve(noted(), context.write)

    async def play(self, request: verifier_pb2.GenerateRequest) -> AsyncGenerator[GenerateOutput]:
        """Yields the outputs of one call, counting it."""
        generate_request = wire.generate_request_from_pb(request)
        self.requests.append(generate_request)
        await self._count(opened=1)
        try:
            async for output in self._play(generate_request):
                yield output
        except (asyncio.CancelledError, GeneratorExit):  # cancelled while playing, while writing
            self.cancelled_count += 1
            raise
        finally:
            self.open_count -= 1
            # Shielded: the count must be told even where the call was cancelled.
            await asyncio.shield(asyncio.create_task(self._count()))

    async def GetVerifierInfo(  # noqa: N802
        self,
        request: verifier_pb2.GetVerifierInfoRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> verifier_pb2.GetVerifierInfoResponse:
        return wire.verifier_info_to_pb(self.info)

    async def opened(self, count: int = 1) -> None:
        """Waits until `count` calls were opened in all."""
        await self._until(lambda: len(self.requests) >= count)

    async def cancelled(self, count: int = 1) -> None:
        """Waits until `count` calls were cancelled in all."""
        await self._until(lambda: self.cancelled_count >= count)

    async def closed(self) -> None:
        """Waits until no call is open."""
        await self._until(lambda: self.open_count == 0)

    async def _play(self, request: GenerateRequest) -> AsyncIterator[GenerateOutput]:
        prompt = tuple(request.prompt_token_ids)
        if (refusal := self.refusals.pop(prompt, None)) is not None:
            raise refusal
        token_ids = self._outputs.get(prompt, self._output_token_ids)
        params = request.sampling_params
        end = min(len(token_ids), params.max_tokens or len(token_ids))
        stops = set(params.stop_token_ids)
        if not params.ignore_eos and self._eos_token_id is not None:
            stops.add(self._eos_token_id)
        stop_at = next((i + 1 for i in range(end) if token_ids[i] in stops), None)
        end = stop_at or end
        position = len(request.output_token_ids)
        num_cached = self._cached_token_count
        prompt_logprobs = (
            ()
            if request.output_token_ids
            else scripted_logprobs(request.prompt_token_ids[1:], params.prompt_logprobs)
        )
        while True:
            await self._interrupt(position)
            block = token_ids[position : min(position + self._block_size, end)]
            position += len(block)
            round = Round(undrafted=UndraftedReason.DISABLED)
            if request.max_draft_tokens != 0 and self._block_size > 1 and block:
                round = Round(self._block_size, min(len(block), self._block_size - 1))
            if position < end:
                yield GenerateOutput(
                    block,
                    seed=params.seed,
                    round=round,
                    cached_token_count=num_cached,
                    logprobs=scripted_logprobs(block, params.logprobs),
                    prompt_logprobs=prompt_logprobs,
                )
                num_cached, prompt_logprobs = None, ()
                continue
            yield GenerateOutput(
                block,
                FinishReason.STOP if stop_at else FinishReason.LENGTH,
                token_ids[end - 1] if stop_at else None,
                params.seed,
                round,
                num_cached,
                scripted_logprobs(block, params.logprobs),
                prompt_logprobs,
            )
            return

    async def _interrupt(self, position: int) -> None:
        if self._fail_at is not None and position >= self._fail_at:
            self._fail_at = None
            assert self._failure is not None
            raise self._failure
        if self._hold_at is not None and position >= self._hold_at:
            await self.released.wait()

    async def _count(self, opened: int = 0) -> None:
        async with self.changed:
            self.open_count += opened
            self.changed.notify_all()

    async def _until(self, is_true: Any) -> None:
        async with asyncio.timeout(5), self.changed:
            await self.changed.wait_for(is_true)


class _Calls:
    """The calls of one `GenerateMany` stream. Implements `Sessions`."""

    def __init__(self, verifier: ScriptedVerifier) -> None:
        self.stream = ClientStream(self, max_calls=10_000, is_draining=False)
        self._verifier = verifier
        self._numbers = itertools.count()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def open_session(self, request: verifier_pb2.GenerateRequest, sink: Sink) -> int:
        number = next(self._numbers)
        self._tasks[number] = asyncio.create_task(self._run(request, sink))
        return number

    def close_session(self, session_id: int) -> None:
        task = self._tasks.pop(session_id)
        if task is not asyncio.current_task():  # else it ends by itself
            task.cancel()

    async def _run(self, request: verifier_pb2.GenerateRequest, sink: Sink) -> None:
        try:
            async with aclosing(self._verifier.play(request)) as outputs:
                async for output in outputs:
                    sink(output)
                    self.stream.flush()
                    await asyncio.sleep(0)  # as between steps
        except SpecgwError as error:
            sink(error)
            self.stream.flush()


def scripted_logprobs(token_ids: Sequence[int], num_top: int | None) -> tuple[TokenLogprobs, ...]:
    """Returns -id / 8 for each token, and -1, -2, ... for the tokens 0, 1, ... beside it."""
    if num_top is None:
        return ()
    top, values = tuple(range(num_top)), tuple(-1.0 - i for i in range(num_top))
    return tuple(
        TokenLogprobs((token_id, *top), (-token_id / 8, *values), token_id + 1)
        for token_id in token_ids
    )


@asynccontextmanager
async def serving(
    verifier: ScriptedVerifier, listen: str = "127.0.0.1:0"
) -> AsyncIterator[ServiceServer]:
    """Serves a scripted verifier inside the block; leaving it kills the server."""
    server = ServiceServer("specgw.v1.VerifierService", [listen])
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(verifier, server.grpc_server)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)
