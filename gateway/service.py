"""The gateway's gRPC edge: `GatewayService`, the twin of the OpenAI HTTP API.

Turns messages into values and back; `generation.py` does the rest.
"""

import uuid
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any

import grpc

from gateway.admission import Admission
from gateway.agreement import count_agreed
from gateway.api_keys import UNKNOWN_KEY, find_key
from gateway.concurrency import ended_by
from gateway.detokenizer import TextOutput
from gateway.generation import TextGenerator
from gateway.request_builder import DEFAULT_COMPLETION_TOKENS, FieldNames, RequestBuilder
from gateway.routing import Router
from gateway.tokenizer import Tokenizer
from specgw.config import EngineArgs
from specgw.errors import InvalidRequest, ModelNotFound
from specgw.types import GenerateRequest
from specgw.v1 import gateway_pb2, gateway_pb2_grpc
from specgw.wire import (
    model_description_to_pb,
    sampling_params_from_pb,
    speculation_stats_to_pb,
    structured_outputs_from_pb,
    token_ids_from_pb,
    token_ids_to_pb,
    token_logprobs_to_pb,
)

SERVICE_NAME = gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"].full_name


class GatewayService(gateway_pb2_grpc.GatewayServiceServicer):
    """Answers gRPC clients. With API keys, calls need `authorization: Bearer KEY` metadata."""

    def __init__(
        self,
        args: EngineArgs,
        tokenizer: Tokenizer,
        builder: RequestBuilder,
        generator: TextGenerator,
        router: Router,
        admission: Admission,
    ) -> None:
        self._args = args
        self._tokenizer = tokenizer
        self._builder = builder
        self._generator = generator
        self._router = router
        self._admission = admission

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server that has not started."""
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(self, server)

    # Writes instead of yielding: a generator could not end its own wait for a client to read.
    async def Generate(  # type: ignore[override]
        self,
        request: gateway_pb2.GatewayServiceGenerateRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        caller = await self._authenticate(context)
        deadline = self._generator.deadline(context.time_remaining())
        generation = await self._generation(request)
        seed = generation.sampling_params.seed
        output_token_ids: list[int] = []
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(ended_by(deadline))
            [place] = stack.enter_context(self._generator.admitted([generation], caller))
            answer = self._generator.generate(generation, place, deadline)
            async for output in await stack.enter_async_context(aclosing(answer)):
                output_token_ids += output.token_ids
                response = _response(output)
                if seed is not None:
                    response.seed, seed = seed, None
                if output.finish_reason is not None:
                    response.finish_reason = output.finish_reason.value
                    response.prompt_token_count = len(generation.prompt_token_ids)
                    response.output_token_count = len(output_token_ids)
                    accepted = await count_agreed(generation.prediction, [output_token_ids])
                    response.accepted_prediction_token_count = accepted
                    rejected = len(generation.prediction) - accepted
                    response.rejected_prediction_token_count = rejected
                    response.speculation.CopyFrom(speculation_stats_to_pb(output.speculation))
                await context.write(response)

    async def GetGatewayInfo(
        self,
        request: gateway_pb2.GetGatewayInfoRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> gateway_pb2.GetGatewayInfoResponse:
        await self._authenticate(context)
        model = self._router.target_model
        config = self._args.speculative_config
        return gateway_pb2.GetGatewayInfoResponse(
            served_model_names=self._args.served_model_names,
            target_model=model_description_to_pb(model) if model else None,
            method=config.method if config else "",
            max_draft_tokens=self._args.max_draft_tokens,
            verifier_addresses=self._router.addresses,
            running_count=self._admission.running_count,
            waiting_count=self._admission.waiting_count,
        )

    async def _generation(
        self, request: gateway_pb2.GatewayServiceGenerateRequest
    ) -> GenerateRequest:
        served = self._args.served_model_names
        if request.model and request.model not in served:
            raise ModelNotFound(
                f"the model {request.model} does not exist; served here: {', '.join(served)}"
            )
        params = replace(
            sampling_params_from_pb(request.sampling_params),
            stop=tuple(request.stop),
            skip_special_tokens=not request.keep_special_tokens,
            structured_outputs=structured_outputs_from_pb(request.structured_outputs)
            if request.HasField("structured_outputs")
            else None,
            bad_words=tuple(request.bad_words),
            include_stop_str_in_output=request.include_stop_str_in_output,
        )
        params = self._tokenizer.with_bad_words(params)
        await self._builder.check(params)
        if request.HasField("prompt_token_ids"):
            names = FieldNames("prompt_token_ids", "max_draft_tokens")
            prompt_token_ids = token_ids_from_pb(request.prompt_token_ids, names.prompt)
        elif request.HasField("prompt"):
            names = FieldNames("prompt", "max_draft_tokens")
            prompt_token_ids = await self._tokenizer.encode(request.prompt)
        else:
            raise InvalidRequest("input", None, "must be prompt or prompt_token_ids")
        return self._builder.build(
            uuid.uuid4().hex,
            prompt_token_ids,
            params,
            max_draft_tokens=(
                request.max_draft_tokens if request.HasField("max_draft_tokens") else None
            ),
            default_max_tokens=DEFAULT_COMPLETION_TOKENS,
            prediction=await self._tokenizer.encode(request.prediction, add_special_tokens=False),
            names=names,
        )

    async def _authenticate(self, context: grpc.aio.ServicerContext[Any, Any]) -> int | None:
        """Returns the number of the caller's key, if there are keys."""
        if not self._args.api_key:
            return None
        metadata = dict(context.invocation_metadata() or ())
        caller = find_key(str(metadata.get("authorization", "")), self._args.api_key)
        if caller is None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, UNKNOWN_KEY)
        return caller


def _response(output: TextOutput) -> gateway_pb2.GatewayServiceGenerateResponse:
    response = gateway_pb2.GatewayServiceGenerateResponse(
        text=output.text,
        token_ids=token_ids_to_pb(output.token_ids),
        logprobs=token_logprobs_to_pb(output.logprobs),
        prompt_logprobs=token_logprobs_to_pb(output.prompt_logprobs),
    )
    if isinstance(output.stop_reason, str):
        response.stop_string = output.stop_reason
    elif output.stop_reason is not None:
        response.stop_token_id = output.stop_reason
    return response
