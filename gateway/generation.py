"""A request's way through the gateway, the same for HTTP and gRPC.

Wait for a slot, generate on a verifier, turn tokens into text, finish. Callers are `openai_api.py`
and `service.py`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import replace

from gateway.admission import Admission, Place
from gateway.detokenizer import Detokenizer, TextOutput
from gateway.ledger import Demand
from gateway.metrics import Metrics
from gateway.routing import Router
from gateway.tokenizer import Tokenizer
from specgw.errors import SpecgwError
from specgw.types import GenerateRequest, SpeculationStats

_TIMERS_EARLY_S = 0.002  # uvloop's timers are whole milliseconds


class TextGenerator:
    """Answers requests in text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        router: Router,
        admission: Admission,
        metrics: Metrics,
        request_timeout_s: float,
    ) -> None:
        self._tokenizer = tokenizer
        self._router = router
        self._admission = admission
        self._metrics = metrics
        self._request_timeout_s = request_timeout_s
        metrics.watch_load(lambda: admission.running_count, lambda: admission.waiting_count)
        metrics.watch_ledger(admission.ledger)

    @property
    def max_at_once(self) -> int:
        """Requests of one caller that may be answered at once."""
        return self._admission.max_at_once

    def deadline(self, time_left_s: float | None = None) -> float:
        """Returns the `time.monotonic()` by which a request that came now must be done.

        `time_left_s` is what the client still waits; the configured timeout holds as well.
        """
        limits = (self._request_timeout_s, time_left_s)
        return time.monotonic() + min(limit for limit in limits if limit is not None)

    @contextmanager
    def admitted(
        self, requests: Sequence[GenerateRequest], caller: int | None = None
    ) -> Iterator[Sequence[Place]]:
        """Gives each request of one call its place in the queue, or refuses them all.

        `caller` is the number of the client's API key, if there are keys.
        """
        with ExitStack() as stack:
            try:
                self._router.check_ready()
                places = self._admission.places([_demand(one) for one in requests], caller)
                entered = stack.enter_context(places)
            except SpecgwError as error:
                for _ in requests:
                    self._metrics.count_failed(type(error).__name__)
                raise
            yield entered

    async def generate(
        self, request: GenerateRequest, place: Place, deadline: float
    ) -> AsyncGenerator[TextOutput, None]:
        """Streams the answer. Leaving the iteration early ends the work everywhere.

        If the answer breaks off with an error, all text generated before was yielded. Callers wrap
        the iteration in `ended_by(deadline)`: no timer in here could end it between two outputs.
        """
        timer = self._metrics.time_request()
        detokenizer = Detokenizer(self._tokenizer.backend, request, self._tokenizer.eos_token_id)
        stats = SpeculationStats()
        try:
            async with (
                place.slot(deadline) as slot,
                aclosing(self._router.generate(request, slot, deadline)) as outputs,
            ):
                timer.admitted(len(request.prompt_token_ids))
                self._metrics.count_undrafted_request(slot.claim.undrafted)
                async for output in outputs:
                    text_output = detokenizer.push(output)
                    if (num_cached := output.cached_token_count) is not None:
                        self._metrics.count_prefix(len(request.prompt_token_ids), num_cached)
                        text_output = replace(text_output, cached_token_count=num_cached)
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
            is_late = time.monotonic() > deadline - _TIMERS_EARLY_S
            self._metrics.count_failed("DeadlineExceeded" if is_late else "Cancelled")
            raise
        finally:
            self._metrics.count_speculation(stats)
        yield text_output


def _demand(request: GenerateRequest) -> Demand:
    max_tokens = request.sampling_params.max_tokens
    assert max_tokens is not None, "the request builder sets it"
    return Demand(len(request.prompt_token_ids), max_tokens, request.max_draft_tokens)
