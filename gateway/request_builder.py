"""Checks a request against the model before any work is done for it, and completes it.

Callers are `openai_api.py` and `service.py`.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.routing import Router
from specgw.errors import InvalidRequest, NotReady
from specgw.grammar_worker import GrammarWorker
from specgw.types import GenerateRequest, ModelDescription, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default where the prompt is not a chat


@dataclass(frozen=True, slots=True)
class FieldNames:
    """What an API calls the fields that error messages name."""

    prompt: str = "prompt"
    max_draft_tokens: str = "num_speculative_tokens"


class RequestBuilder:
    """Makes requests that a verifier will not refuse.

    Args:
        router: Knows the target model.
        grammars: Knows what constraints its vocabulary can keep to.
        max_model_len: Longest context as configured; the verifiers' own limit holds as well.
        max_draft_tokens: Most draft tokens per round as configured.
        max_logprobs: Most log probabilities for one token that may be asked for.
        seed: Where the seeds of requests without one come from.
    """

    def __init__(
        self,
        router: Router,
        grammars: GrammarWorker,
        max_model_len: int | None,
        max_draft_tokens: int,
        max_logprobs: int,
        seed: int,
    ) -> None:
        self._router = router
        self._grammars = grammars
        self._max_model_len = max_model_len
        self._max_draft_tokens = max_draft_tokens
        self._max_logprobs = max_logprobs
        self._seeds = random.Random(seed)

    @property
    def is_ready(self) -> bool:
        """Whether some verifier would take a request now."""
        return self._router.is_ready

    @property
    def max_model_len(self) -> int | None:
        """Longest context in tokens; None while unknown."""
        model = self._router.target_model
        limits = (self._max_model_len, model.max_model_len if model else None)
        return min((limit for limit in limits if limit is not None), default=None)

    async def check(self, params: SamplingParams) -> None:
        """Refuses a constraint that no output can keep to, before a verifier hears of it.

        Raises:
            InvalidRequest: naming the field, its value and what is wrong with it.
        """
        if params.structured_outputs is not None:
            await self._grammars.check(params.structured_outputs)

    def build(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        max_draft_tokens: int | None = None,
        default_max_tokens: int | None = None,
        cache_salt: str = "",
        prediction: Sequence[int] = (),
        names: FieldNames = FieldNames(),
    ) -> GenerateRequest:
        """Returns the request with its seed and its number of output tokens.

        `default_max_tokens` holds when `params` has none, as far as the context has room; without
        it, the context's room does.

        Raises:
            InvalidRequest: naming the field, its value and the limit.
            NotReady: if no verifier was ever reached, so that the limits are unknown.
        """
        model = self._router.target_model
        if model is None:
            raise NotReady(f"no verifier was reached yet ({self._router.states})")
        params.check_logprobs(self._max_logprobs)
        _check_token_ids(names.prompt, prompt_token_ids, model)
        self._check_prediction(prediction, model)
        for name, token_ids in params.token_ids().items():
            _check_token_ids(name, token_ids, model)
        if max_draft_tokens is not None and not 0 <= max_draft_tokens <= self._max_draft_tokens:
            rule = f"must be in [0, {self._max_draft_tokens}], the number configured"
            raise InvalidRequest(names.max_draft_tokens, max_draft_tokens, rule)
        room = self._room(len(prompt_token_ids), names)
        if params.max_tokens is None:
            params = replace(params, max_tokens=min(default_max_tokens or room, room))
        elif params.max_tokens > room:
            rule = (
                f"must be at most {room}: the prompt has {len(prompt_token_ids)} tokens and this "
                f"model's maximum context length is {self.max_model_len} tokens"
            )
            raise InvalidRequest("max_tokens", params.max_tokens, rule)
        if params.seed is None:  # drawn here, so that another verifier can go on with it
            params = replace(params, seed=self._seeds.getrandbits(63))
        return GenerateRequest(
            request_id,
            prompt_token_ids,
            params,
            max_draft_tokens=max_draft_tokens,
            cache_salt=cache_salt,
            prediction=prediction,
        )

    def _check_prediction(self, token_ids: Sequence[int], model: ModelDescription) -> None:
        _check_token_ids("prediction", token_ids, model)
        if len(token_ids) > (self.max_model_len or 0):
            rule = f"must have at most {self.max_model_len} tokens, the model's context length"
            raise InvalidRequest("prediction", f"{len(token_ids)} tokens", rule)

    def _room(self, num_prompt_tokens: int, names: FieldNames) -> int:
        """Returns how many output tokens fit the context, at least one."""
        limit = self.max_model_len
        assert limit is not None
        if num_prompt_tokens < 1:
            raise InvalidRequest(names.prompt, num_prompt_tokens, "must have at least one token")
        if num_prompt_tokens >= limit:
            rule = (
                f"must leave room for output in this model's maximum context length of {limit} "
                f"tokens, so it must have at most {limit - 1} tokens"
            )
            raise InvalidRequest(names.prompt, num_prompt_tokens, rule)
        return limit - num_prompt_tokens


def _check_token_ids(field: str, token_ids: Sequence[int], model: ModelDescription) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < model.vocab_size:
        wrong = next(one for one in token_ids if not 0 <= one < model.vocab_size)
        raise InvalidRequest(field, wrong, f"must be token ids in [0, {model.vocab_size})")
