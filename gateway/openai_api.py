"""The OpenAI HTTP API: vLLM's routes, fields, errors and streams. Translates; decides nothing.

`build_app` is called by `__main__.py`.
"""

import math
import uuid
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.admission import Place
from gateway.agreement import count_agreed
from gateway.api_keys import ApiKeyGuard, caller_of
from gateway.concurrency import ended_by, run_together
from gateway.event_json import to_json
from gateway.event_stream import EventSender, EventStream, run_until_disconnect
from gateway.generation import TextGenerator
from gateway.json_body import BodyModel, read_json, validate
from gateway.metrics import Metrics
from gateway.openai_responses import (
    Answer,
    Body,
    ChatFormat,
    CompletionFormat,
    FormatOptions,
    error_body,
    error_fields,
    http_status,
    model_card,
)
from gateway.openai_types import (
    ChatCompletionRequest,
    ChatOptions,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from gateway.request_builder import DEFAULT_COMPLETION_TOKENS, FieldNames, RequestBuilder
from gateway.response_format import renamed
from gateway.tokenizer import Tokenizer
from specgw import __version__
from specgw.config import EngineArgs
from specgw.errors import InvalidRequest, ModelNotFound, Overloaded, SpecgwError
from specgw.types import GenerateRequest, SamplingParams


class OpenAIApi:
    """The handlers, one for each route."""

    def __init__(
        self,
        args: EngineArgs,
        tokenizer: Tokenizer,
        builder: RequestBuilder,
        generator: TextGenerator,
        metrics: Metrics,
        sampling_defaults: Mapping[str, float],
    ) -> None:
        self._args = args
        self._tokenizer = tokenizer
        self._builder = builder
        self._generator = generator
        self._metrics = metrics
        self._sampling_defaults = sampling_defaults
        self._system_fingerprint = f"specgw-{__version__}-{tokenizer.fingerprint[:8]}"

    async def completions(self, request: Request) -> Response:
        body = await _parse(request, CompletionRequest)
        model = self._served(body.model)
        params = await self._sampling_params(body)
        request_id = _request_id(request, body.request_id)
        self._check_count(len(body.prompts), params.n)
        generations: list[GenerateRequest] = []
        answers: list[Answer] = []
        prediction = await self._prediction(body)
        for prompt_index, prompt in enumerate(body.prompts):
            generation = self._builder.build(
                f"{request_id}-{prompt_index}",
                await self._tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens)
                if isinstance(prompt, str)
                else prompt,
                params,
                max_draft_tokens=body.num_speculative_tokens,
                default_max_tokens=DEFAULT_COMPLETION_TOKENS,
                cache_salt=body.cache_salt or "",
                prediction=prediction,
            )
            echoed = ""
            if body.echo:
                echoed = prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)
            for sample in generation.samples():
                token_ids = generation.prompt_token_ids
                answers.append(
                    Answer(
                        len(answers),
                        token_ids,
                        prompt_index,
                        echoed,
                        body.is_echo_only,
                        seed=sample.sampling_params.seed,
                        prediction=prediction,
                    )
                )
                generations.append(sample)
        options = replace(
            self._format_options(body, params, len(answers)),
            with_logprobs=body.logprobs is not None,
            echoes_prompt=body.echo,
        )
        form = CompletionFormat(request_id, model, options)
        return await self._respond(request, body, form, answers, generations)

    async def chat_completions(self, request: Request) -> Response:
        body = await _parse(request, ChatCompletionRequest)
        model = self._served(body.model)
        params = await self._sampling_params(body)
        request_id = _request_id(request, body.request_id)
        self._check_count(1, params.n)
        generation = self._builder.build(
            request_id,
            await self._chat_token_ids(body),
            params,
            max_draft_tokens=body.num_speculative_tokens,
            cache_salt=body.cache_salt or "",
            prediction=await self._prediction(body),
            names=FieldNames(prompt="messages"),
        )
        generations = generation.samples()
        answers = [
            Answer(
                index,
                generation.prompt_token_ids,
                echoed=body.echoed,
                seed=sample.sampling_params.seed,
                prediction=generation.prediction,
            )
            for index, sample in enumerate(generations)
        ]
        form = ChatFormat(request_id, model, self._format_options(body, params, len(answers)))
        return await self._respond(request, body, form, answers, generations)

    async def _prediction(self, body: CompletionRequest | ChatCompletionRequest) -> Sequence[int]:
        if body.prediction is None:
            return ()
        return await self._tokenizer.encode(body.prediction.text, add_special_tokens=False)

    async def models(self, request: Request) -> Response:
        cards = [
            model_card(
                name,
                self._args.model,
                self._builder.max_model_len,
                is_simulated=self._args.specgw.simulation is not None,
            )
            for name in self._args.served_model_names
        ]
        return JSONResponse({"object": "list", "data": cards})

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self._builder.is_ready else 503)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def prometheus(self, request: Request) -> Response:
        return Response(
            self._metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def tokenize(self, request: Request) -> Response:
        raw = await read_json(request)
        body: TokenizeChatRequest | TokenizeRequest
        if "messages" in raw:
            body = validate(raw, TokenizeChatRequest)
            self._served(body.model)
            token_ids = await self._chat_token_ids(body)
        else:
            body = validate(raw, TokenizeRequest)
            self._served(body.model)
            token_ids = await self._tokenizer.encode(
                body.prompt, add_special_tokens=body.add_special_tokens
            )
        return JSONResponse({
            "count": len(token_ids),
            "max_model_len": self._builder.max_model_len,
            "tokens": token_ids,
            "token_strs": self._tokenizer.tokens(token_ids) if body.return_token_strs else None,
        })  # fmt: skip

    async def detokenize(self, request: Request) -> Response:
        body = await _parse(request, DetokenizeRequest)
        self._served(body.model)
        for token_id in body.tokens:
            if token_id >= self._tokenizer.vocab_size:
                rule = f"must be token ids in [0, {self._tokenizer.vocab_size})"
                raise InvalidRequest("tokens", token_id, rule)
        return JSONResponse({"prompt": self._tokenizer.decode(body.tokens)})

    async def _chat_token_ids(self, body: ChatOptions) -> list[int]:
        messages = [message.for_template() for message in body.messages]
        text = await self._tokenizer.render_chat(messages, body.template_options())
        return await self._tokenizer.encode(text, add_special_tokens=body.add_special_tokens)

    async def _sampling_params(
        self, body: CompletionRequest | ChatCompletionRequest
    ) -> SamplingParams:
        params = body.sampling_params(self._sampling_defaults)
        try:
            await self._builder.check(params)
        except InvalidRequest as error:
            raise (error if body.response_format is None else renamed(error)) from None
        return self._tokenizer.with_bad_words(params)

    def _format_options(
        self,
        body: CompletionRequest | ChatCompletionRequest,
        params: SamplingParams,
        num_answers: int,
    ) -> FormatOptions:
        named_by_id = bool(body.return_tokens_as_token_ids)
        return FormatOptions(
            system_fingerprint=self._system_fingerprint,
            max_draft_tokens=self._args.max_draft_tokens,
            text_of="token_id:{}".format if named_by_id else self._tokenizer.text_of,
            num_answers=num_answers,
            return_token_ids=bool(body.return_token_ids),
            with_prompt_details=self._args.enable_prompt_tokens_details,
            with_logprobs=params.logprobs is not None,
            with_prompt_logprobs=params.prompt_logprobs is not None,
        )

    def _check_count(self, num_prompts: int, num_samples: int) -> None:
        """Refuses more answers to one request than the gateway takes as requests."""
        settings = self._args.specgw.gateway
        running, queued = settings.max_concurrent_requests, settings.max_queued_requests
        if num_prompts * num_samples > running + queued:
            limit = f"{running + queued} answers ({running} running, {queued} queued)"
            field, value = ("prompt", num_prompts) if num_samples == 1 else ("n", num_samples)
            raise InvalidRequest(field, value, f"must ask for at most {limit}")

    def _served(self, model: str | None) -> str:
        names = self._args.served_model_names
        if model is None:
            return names[0]
        if model not in names:
            raise ModelNotFound(
                f"The model `{model}` does not exist; served here: {', '.join(names)}"
            )
        return model

    async def _respond(
        self,
        request: Request,
        body: CompletionRequest | ChatCompletionRequest,
        form: CompletionFormat,
        answers: Sequence[Answer],
        generations: Sequence[GenerateRequest],
    ) -> Response:
        headers = {"x-request-id": form.response_id}
        caller, deadline = caller_of(request.scope), self._generator.deadline()
        if not body.stream:
            work = self._collect(form, answers, generations, deadline, caller)
            status, content = await run_until_disconnect(request.receive, work)
            return JSONResponse(content, status, headers)

        async def produce(events: EventSender) -> None:
            await self._stream(events, body, form, answers, generations, deadline, caller)

        return EventStream(produce, headers)

    async def _collect(
        self,
        form: CompletionFormat,
        answers: Sequence[Answer],
        generations: Sequence[GenerateRequest],
        deadline: float,
        caller: int | None,
    ) -> tuple[int, Body]:
        """Returns status and body. If the work broke off, the body has the error and what came."""

        async def collect(answer: Answer, generation: GenerateRequest, place: Place) -> None:
            async with aclosing(self._generator.generate(generation, place, deadline)) as outputs:
                async for output in outputs:
                    answer.add_whole(output)

        at_once = self._generator.max_at_once
        try:
            async with ended_by(deadline):
                with self._generator.admitted(generations, caller) as places:
                    await run_together(collect, answers, generations, places, at_once=at_once)
        except SpecgwError as error:
            if not any(answer.token_ids for answer in answers):
                raise
            content = form.response(answers, await _agreed(answers))
            return http_status(error), {**content, **error_body(error)}
        return 200, form.response(answers, await _agreed(answers))

    async def _stream(
        self,
        events: EventSender,
        body: CompletionRequest | ChatCompletionRequest,
        form: CompletionFormat,
        answers: Sequence[Answer],
        generations: Sequence[GenerateRequest],
        deadline: float,
        caller: int | None,
    ) -> None:
        """Sends all answers, their chunks mixed. An error after the first chunk is the last one."""
        with_usage = body.continuous_usage

        async def stream(answer: Answer, generation: GenerateRequest, place: Place) -> None:
            async with aclosing(self._generator.generate(generation, place, deadline)) as outputs:
                async for output in outputs:
                    await events.send(*form.events(answer, output, with_usage=with_usage))

        at_once = self._generator.max_at_once
        try:
            async with ended_by(deadline):
                with self._generator.admitted(generations, caller) as places:
                    await run_together(stream, answers, generations, places, at_once=at_once)
                if body.include_usage:
                    await events.send(to_json(form.usage_chunk(answers, await _agreed(answers))))
                await events.end()
        except SpecgwError as error:
            if not events.has_begun:
                raise
            await events.fail(to_json(error_body(error)))


async def _agreed(answers: Sequence[Answer]) -> int:
    """Counts the tokens of the prediction, which all answers to a request share."""
    return await count_agreed(answers[0].prediction, [answer.token_ids for answer in answers])


def build_app(api: OpenAIApi, api_keys: Sequence[str]) -> Starlette:
    """Returns the ASGI application."""
    routes = [
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/health", api.health),
        Route("/ping", api.health, methods=["GET", "POST"]),
        Route("/version", api.version),
        Route("/metrics", api.prometheus),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(ApiKeyGuard, api_keys=api_keys)] if api_keys else [],
        exception_handlers={
            SpecgwError: _error_response,
            HTTPException: _http_error_response,
            Exception: _internal_error_response,
        },
    )


async def _parse(request: Request, model: type[BodyModel]) -> BodyModel:
    return validate(await read_json(request), model)


def _request_id(request: Request, in_body: str | None) -> str:
    given = request.headers.get("x-request-id") or in_body or uuid.uuid4().hex
    if not (given.isascii() and given.isprintable() and len(given) <= 256):
        # It goes into a response header and into logs.
        raise InvalidRequest("request_id", given[:256], "must be at most 256 printable ASCII")
    return given


async def _error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, SpecgwError)
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    return JSONResponse(error_body(error), http_status(error), headers)


async def _http_error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(error_fields(error.detail, error.status_code), error.status_code)


async def _internal_error_response(request: Request, error: Exception) -> Response:
    return JSONResponse(error_fields("internal error; see the gateway's log", 500), 500)
