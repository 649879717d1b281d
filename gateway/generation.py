"""A request's way through the gateway, the same for HTTP and gRPC.

Check, wait for a slot, generate on a verifier, turn tokens into text, finish. Callers are
`openai_api.py` and `service.py`; they translate, this module decides.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from gateway.admission import Admission
from gateway.detokenizer import Detokenizer, TextOutput
from gateway.metrics import Metrics
from gateway.routing import Router
from gateway.tokenizer import Tokenizer
from specgw.errors import InvalidRequest, NotReady, SpecgwError
from specgw.types import (
    GenerateRequest,
    ModelDescription,
    SamplingParams,
    SpeculationStats,
)

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default where the prompt is not a chat

T = TypeVar("T")


class TextGenerator:
    """Answers requests in text.

    Args:
        max_model_len: Longest context as configured; the verifiers' own limit holds as well.
        max_draft_tokens: Most draft tokens per round as configured.
        request_timeout_s: Most time for one request, waiting included.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        router: Router,
        admission: Admission,
        metrics: Metrics,
        *,
        max_model_len: int | None,
        max_draft_tokens: int,
        request_timeout_s: float,
    ) -> None:
        self.tokenizer = tokenizer
        self._router = router
        self._admission = admission
        self._metrics = metrics
        self._max_model_len = max_model_len
        self._max_draft_tokens = max_draft_tokens
        self._request_timeout_s = request_timeout_s
        metrics.watch_load(lambda: admission.running_count, lambda: admission.waiting_count)

    @property
    def max_model_len(self) -> int | None:
        """Longest context in tokens; None while unknown."""
        model = self._router.target_model
        limits = (self._max_model_len, model.max_model_len if model else None)
        return min((limit for limit in limits if limit is not None), default=None)

    def build_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        max_draft_tokens: int | None = None,
        default_max_tokens: int | None = None,
        prompt_field: str = "prompt",
    ) -> GenerateRequest:
        """Checks a request against the model, before any work is done for it, and completes it.

        `default_max_tokens` holds when `params` has none, as far as the context has room.
        `prompt_field` is what error messages call the prompt.

        Raises:
            InvalidRequest: naming the field, its value and the limit.
            NotReady: if no verifier was ever reached, so that the limits are unknown.
        """
        model = self._router.target_model
        if model is None:
            raise NotReady(f"no verifier was reached yet ({self._router.states})")
        _check_token_ids(prompt_field, prompt_token_ids, model)
        _check_token_ids("stop_token_ids", params.stop_token_ids, model)
        if max_draft_tokens is not None and not 0 <= max_draft_tokens <= self._max_draft_tokens:
            rule = f"must be in [0, {self._max_draft_tokens}], the number configured"
            raise InvalidRequest("num_speculative_tokens", max_draft_tokens, rule)
        params = self._fit(params, len(prompt_token_ids), default_max_tokens, prompt_field)
        if params.seed is None:  # drawn here, so that another verifier can go on with it
            params = replace(params, seed=secrets.randbits(63))
        return GenerateRequest(
            request_id, prompt_token_ids, params, max_draft_tokens=max_draft_tokens
        )

    async def generate(
        self, request: GenerateRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[TextOutput, None]:
        """Streams the answer. Leaving the iteration early ends the work everywhere.

        If the answer breaks off with an error, all text generated before was yielded. `timeout_s`
        is what the caller has left; the configured timeout holds as well.
        """
        timer = self._metrics.time_request()
        limits = (self._request_timeout_s, timeout_s)
        deadline = time.monotonic() + min(limit for limit in limits if limit is not None)
        detokenizer = Detokenizer(self.tokenizer.backend, request, self.tokenizer.eos_token_id)
        stats = SpeculationStats()
        try:
            async with (
                self._admission.slot(),
                aclosing(self._router.generate(request, deadline)) as outputs,
            ):
                timer.admitted(len(request.prompt_token_ids))
                async for output in outputs:
                    text_output = detokenizer.push(output)
                    stats = text_output.speculation
                    timer.delivered(len(text_output.token_ids))
                    if text_output.finish_reason is None:
                        yield text_output
                        continue
                    timer.finished(text_output.finish_reason.value)
                    break
        except SpecgwError as error:
            self._metrics.count_failed(type(error).__name__)
            if (held := detokenizer.flush()).text:
                yield held
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self._metrics.count_failed("Cancelled")
            raise
        finally:
            self._metrics.count_speculation(stats)
        yield text_output

    def _fit(
        self,
        params: SamplingParams,
        num_prompt_tokens: int,
        default_max_tokens: int | None,
        prompt_field: str,
    ) -> SamplingParams:
        """Checks prompt and `max_tokens` against the context limit."""
        limit = self.max_model_len
        assert limit is not None
        room = limit - num_prompt_tokens
        if num_prompt_tokens < 1:
            raise InvalidRequest(prompt_field, num_prompt_tokens, "must have at least one token")
        if room < 1:
            rule = (
                f"must be shorter than this model's maximum context length of {limit} tokens, "
                "so that output fits"
            )
            raise InvalidRequest(f"{prompt_field} length", num_prompt_tokens, rule)
        if params.max_tokens is None:
            return replace(params, max_tokens=min(default_max_tokens or room, room))
        if params.max_tokens > room:
            rule = (
                f"must be at most {room}: this model's maximum context length is {limit} tokens "
                f"and the prompt has {num_prompt_tokens}"
            )
            raise InvalidRequest("max_tokens", params.max_tokens, rule)
        return params


async def run_together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs all at once. The first error cancels the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _check_token_ids(field: str, token_ids: Sequence[int], model: ModelDescription) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < model.vocab_size:
            rule = f"must be token ids in [0, {model.vocab_size})"
            raise InvalidRequest(field, token_id, rule)
