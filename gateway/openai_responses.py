"""The bodies of OpenAI responses and errors, filled as vLLM 0.32 does. Plain mappings, no I/O.

The caller is `openai_api.py`.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.detokenizer import TextOutput
from specgw.errors import InvalidRequest, ModelNotFound, SpecgwError
from specgw.types import SpeculationStats

Body = dict[str, Any]

_HTTP_STATUS = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "NOT_FOUND": 404,
    "CANCELLED": 499,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
_ERROR_TYPES = {
    401: "AuthenticationError",
    404: "NotFoundError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


@dataclass(slots=True)
class Answer:
    """The answer to one prompt, as far as it came."""

    index: int
    prompt_token_ids: Sequence[int]
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    last: TextOutput | None = None
    cached_token_count: int | None = None

    def add(self, output: TextOutput) -> None:
        """Takes in what a stream still needs of an output that it sends on."""
        self.token_ids += output.token_ids
        self.last = output
        if self.cached_token_count is None:
            self.cached_token_count = output.cached_token_count

    def add_whole(self, output: TextOutput) -> None:
        """Takes in an output with its text."""
        self.add(output)
        self.texts.append(output.text)

    @property
    def text(self) -> str:
        """The text of the outputs that were taken in whole."""
        return "".join(self.texts)

    @property
    def ending(self) -> tuple[str | None, str | int | None]:
        """Finish and stop reason; `abort` as long as the answer is not complete."""
        if self.last is None or self.last.finish_reason is None:
            return "abort", None
        return self.last.finish_reason.value, self.last.stop_reason


class CompletionFormat:
    """Writes the responses of `/v1/completions` for one request."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(
        self,
        request_id: str,
        model: str,
        *,
        system_fingerprint: str,
        return_token_ids: bool,
        max_draft_tokens: int,
        with_prompt_details: bool = False,
        num_prompts: int = 1,
    ) -> None:
        self.response_id = self.id_prefix + request_id
        self._model = model
        self._created = int(time.time())
        self._system_fingerprint = system_fingerprint
        self._return_token_ids = return_token_ids
        self._max_draft_tokens = max_draft_tokens
        self._with_prompt_details = with_prompt_details
        self._num_prompts = num_prompts

    def response(self, answers: Sequence[Answer]) -> Body:
        """Returns the whole response."""
        return {
            **self._head(self.object_name),
            "choices": [self._choice(answer) for answer in answers],
            "service_tier": None,
            "system_fingerprint": self._system_fingerprint,
            "usage": {"prompt_tokens_details": None, **self._final_usage(answers)},
            "kv_transfer_params": None,
            "metrics": self._metrics(answers),
        }

    def opening(self, answer: Answer) -> Body | None:
        """Returns the chunk before the first output of an answer, if there is one."""
        return None

    def chunk(self, answer: Answer, output: TextOutput, *, with_usage: bool) -> Body | None:
        """Returns the chunk for the last output added to `answer`; None if it says nothing."""
        is_last = output.finish_reason is not None
        if not (output.text or is_last or with_usage or self._return_token_ids):
            return None
        choice = self._delta(answer, output)
        choice["finish_reason"] = output.finish_reason.value if output.finish_reason else None
        if output.stop_reason is not None:
            choice["stop_reason"] = output.stop_reason
        if self._return_token_ids:
            choice["token_ids"] = list(output.token_ids)
            if len(answer.token_ids) == len(output.token_ids):
                choice["prompt_token_ids"] = list(answer.prompt_token_ids)
        body = {**self._head(self.chunk_object_name), "choices": [choice]}
        if with_usage:
            body["usage"] = _usage([answer])
        if is_last and self._num_prompts == 1:
            body["metrics"] = self._metrics([answer])
        return body

    def usage_chunk(self, answers: Sequence[Answer]) -> Body:
        """Returns the chunk after the last output, for clients that asked for usage."""
        body: Body = {
            **self._head(self.chunk_object_name),
            "choices": [],
            "usage": self._final_usage(answers),
        }
        if self._num_prompts == 1:
            body["metrics"] = self._metrics(answers)
        return body

    def _final_usage(self, answers: Sequence[Answer]) -> Body:
        usage = _usage(answers)
        num_cached = answers[-1].cached_token_count  # vLLM tells that of the last prompt
        if self._with_prompt_details and num_cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": num_cached}
        return usage

    def _head(self, object_name: str) -> Body:
        return {
            "id": self.response_id,
            "object": object_name,
            "created": self._created,
            "model": self._model,
        }

    def _choice(self, answer: Answer) -> Body:
        finish_reason, stop_reason = answer.ending
        return {
            "index": answer.index,
            "text": answer.text,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            "token_ids": answer.token_ids if self._return_token_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": list(answer.prompt_token_ids) if self._return_token_ids else None,
        }

    def _delta(self, answer: Answer, output: TextOutput) -> Body:
        return {"index": answer.index, "text": output.text, "logprobs": None}

    def _metrics(self, answers: Sequence[Answer]) -> Body | None:
        if self._num_prompts != 1:
            return None
        last = answers[0].last
        stats = last.speculation if last else None
        return {
            "speculative_decoding": speculation_body(
                stats or SpeculationStats(), self._max_draft_tokens
            )
        }


class ChatFormat(CompletionFormat):
    """Writes the responses of `/v1/chat/completions` for one request."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def response(self, answers: Sequence[Answer]) -> Body:
        body = super().response(answers)
        body["prompt_logprobs"] = None
        body["prompt_token_ids"] = (
            list(answers[0].prompt_token_ids) if self._return_token_ids else None
        )
        return body

    def opening(self, answer: Answer) -> Body | None:
        choice = {
            "index": answer.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return {**self._head(self.chunk_object_name), "choices": [choice]}

    def _choice(self, answer: Answer) -> Body:
        finish_reason, stop_reason = answer.ending
        return {
            "index": answer.index,
            "message": {
                "role": "assistant",
                "content": answer.text,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            "token_ids": answer.token_ids if self._return_token_ids else None,
        }

    def _delta(self, answer: Answer, output: TextOutput) -> Body:
        return {"index": answer.index, "delta": {"content": output.text}, "logprobs": None}


def speculation_body(stats: SpeculationStats, max_draft_tokens: int) -> Body:
    """Returns the statistics under vLLM's names, with positions and undrafted rounds added.

    Mean acceptance length counts the bonus token. Ratios are null without a draft.
    """
    drafts, drafted, accepted = (
        stats.draft_count,
        stats.draft_token_count,
        stats.accepted_token_count,
    )
    missing = max_draft_tokens - len(stats.accepted_per_position)
    per_position = stats.accepted_per_position + [0] * missing
    # Whoever accepted position i also accepted all before: differences count the rounds by length.
    at_least = [drafts, *per_position, 0]
    return {
        "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_histogram": [more - fewer for more, fewer in itertools.pairwise(at_least)],
        "num_spec_steps": drafts,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": max_draft_tokens,
        "num_accepted_draft_tokens_per_position": per_position,
        "num_undrafted_steps": {reason.value: count for reason, count in stats.undrafted.items()},
    }


def http_status(error: SpecgwError) -> int:
    """Returns the HTTP status of an error."""
    return _HTTP_STATUS.get(error.status, 500)


def error_body(error: SpecgwError) -> Body:
    """Returns the body that tells a client of an error."""
    param = error.field if isinstance(error, InvalidRequest) else None
    if isinstance(error, ModelNotFound):
        param = "model"
    return error_fields(str(error), http_status(error), param)


def error_fields(message: str, status: int, param: str | None = None) -> Body:
    """Returns an error body from its parts."""
    other = "BadRequestError" if status < 500 else "InternalServerError"
    error_type = _ERROR_TYPES.get(status, other)
    return {"error": {"message": message, "type": error_type, "param": param, "code": status}}


def model_card(
    name: str, root: str, max_model_len: int | None, *, is_simulated: bool
) -> Mapping[str, Any]:
    """Returns an entry of `/v1/models`."""
    return {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "specgw simulation" if is_simulated else "specgw",
        "root": root,
        "parent": None,
        "max_model_len": max_model_len,
    }


def _usage(answers: Sequence[Answer]) -> Body:
    num_prompt = sum(len(answer.prompt_token_ids) for answer in answers)
    num_output = sum(len(answer.token_ids) for answer in answers)
    return {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_output,
        "completion_tokens": num_output,
    }
