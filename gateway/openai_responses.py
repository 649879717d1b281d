"""The bodies of OpenAI responses and errors, filled as vLLM 0.32 does. Plain mappings, no I/O.

The caller is `openai_api.py`.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.detokenizer import TextOutput
from gateway.event_json import ChunkTemplate, to_json
from gateway.logprobs_format import (
    TokenText,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from specgw.errors import InvalidRequest, ModelNotFound, SpecgwError
from specgw.types import FinishReason, SpeculationStats, TokenLogprobs

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
    """One answer to a prompt, as far as it came.

    Attributes:
        index: Its number among the choices of the response.
        prompt_token_ids: What is answered.
        prompt_index: Number of the prompt; several answers may share it.
        echoed: What the text begins with.
        is_echo_only: Whether that and the prompt are all that is shown.
        seed: Of its random numbers, whether the client chose it or the gateway did.
        prediction: Token ids of what the client says it may be.
    """

    index: int
    prompt_token_ids: Sequence[int]
    prompt_index: int = 0
    echoed: str = ""
    is_echo_only: bool = False
    seed: int | None = None
    prediction: Sequence[int] = ()
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    num_outputs: int = 0
    last: TextOutput | None = None
    cached_token_count: int | None = None

    def add(self, output: TextOutput) -> TextOutput:
        """Takes in what a stream still needs of an output, and returns it as it is sent on."""
        if self.is_echo_only:
            output = _unshown(output)
        if self.num_outputs == 0:
            output = replace(output, text=self.echoed + output.text)
            self.prompt_logprobs = output.prompt_logprobs
        self.num_outputs += 1
        self.token_ids += output.token_ids
        self.last = output
        if self.cached_token_count is None:
            self.cached_token_count = output.cached_token_count
        return output

    def add_whole(self, output: TextOutput) -> None:
        """Takes in an output with its text."""
        output = self.add(output)
        self.texts.append(output.text)
        self.logprobs += output.logprobs

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


@dataclass(frozen=True, slots=True)
class FormatOptions:
    """What a request and the configuration say of its responses.

    Attributes:
        system_fingerprint: As in every response.
        max_draft_tokens: As configured.
        text_of: What a token is called in log probabilities.
        num_answers: Answers to all prompts together; statistics are told of a single one.
        return_token_ids: Whether the ids of prompt and output are told.
        with_prompt_details: Whether usage tells how much of a prompt was cached.
        with_logprobs: Whether log probabilities of the answer are told.
        with_prompt_logprobs: Whether those of the prompt are.
        echoes_prompt: Whether the answer's tokens begin with the prompt's.
    """

    system_fingerprint: str
    max_draft_tokens: int
    text_of: TokenText
    num_answers: int = 1
    return_token_ids: bool = False
    with_prompt_details: bool = False
    with_logprobs: bool = False
    with_prompt_logprobs: bool = False
    echoes_prompt: bool = False


class CompletionFormat:
    """Writes the responses of `/v1/completions` for one request."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, request_id: str, model: str, options: FormatOptions) -> None:
        self.response_id = self.id_prefix + request_id
        self._model = model
        self._created = int(time.time())
        self._options = options
        self._offsets: dict[int, int] = {}  # of the next token's text, by answer
        self._has_more_than_text = options.return_token_ids or options.with_logprobs
        self._templates: dict[int, ChunkTemplate] = {}  # by answer

    def response(self, answers: Sequence[Answer], num_agreed: int) -> Body:
        """Returns the whole response; `num_agreed` tokens of predictions came true."""
        return {
            **self._head(self.object_name),
            "choices": [self._choice(answer) for answer in answers],
            "service_tier": None,
            "system_fingerprint": self._options.system_fingerprint,
            "usage": {"prompt_tokens_details": None, **self._final_usage(answers, num_agreed)},
            "kv_transfer_params": None,
            "metrics": self._metrics(answers),
        }

    def events(self, answer: Answer, output: TextOutput, *, with_usage: bool) -> list[bytes]:
        """Takes an output into `answer`; returns the JSON of the chunks that tell of it."""
        is_first = answer.last is None
        output = answer.add(output)
        has_more = with_usage or self._has_more_than_text or output.finish_reason is not None
        if not (is_first or has_more):
            return [self._template(answer).to_json(output.text)] if output.text else []
        opening = self.opening(answer) if is_first else None
        chunk = self.chunk(answer, output, with_usage=with_usage)
        return [to_json(body) for body in (opening, chunk) if body is not None]

    def opening(self, answer: Answer) -> Body | None:
        """Returns the chunk before the first output of an answer, if there is one."""
        return None

    def chunk(self, answer: Answer, output: TextOutput, *, with_usage: bool) -> Body | None:
        """Returns the chunk for the last output added to `answer`; None if it says nothing."""
        is_last = output.finish_reason is not None
        if not (output.text or is_last or with_usage or self._has_more_than_text):
            return None
        choice = self._delta(answer, output)
        choice["finish_reason"] = output.finish_reason.value if output.finish_reason else None
        if is_last:
            choice["seed"] = answer.seed
        if output.stop_reason is not None:
            choice["stop_reason"] = output.stop_reason
        if self._options.return_token_ids:
            choice["token_ids"] = list(output.token_ids)
            if answer.num_outputs == 1:
                choice["prompt_token_ids"] = list(answer.prompt_token_ids)
        body = {**self._head(self.chunk_object_name), "choices": [choice]}
        if with_usage:
            body["usage"] = _usage([answer])
        if is_last and self._options.num_answers == 1:
            body["metrics"] = self._metrics([answer])
        return body

    def usage_chunk(self, answers: Sequence[Answer], num_agreed: int) -> Body:
        """Returns the chunk after the last output, for clients that asked for usage."""
        body: Body = {
            **self._head(self.chunk_object_name),
            "choices": [],
            "usage": self._final_usage(answers, num_agreed),
        }
        if self._options.num_answers == 1:
            body["metrics"] = self._metrics(answers)
        return body

    def _template(self, answer: Answer) -> ChunkTemplate:
        template = self._templates.get(answer.index)
        if template is None:
            template = self._templates[answer.index] = ChunkTemplate(
                lambda text: self.chunk(answer, TextOutput(text, ()), with_usage=False) or {}
            )
        return template

    def _final_usage(self, answers: Sequence[Answer], num_agreed: int) -> Body:
        usage = _usage(answers) | _prediction_usage(answers, num_agreed)
        num_cached = answers[-1].cached_token_count  # vLLM tells that of the last prompt
        if self._options.with_prompt_details and num_cached is not None:
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
            "logprobs": self._logprobs(answer, answer.token_ids, answer.logprobs, is_first=True),
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            "seed": answer.seed,
            "token_ids": answer.token_ids if self._options.return_token_ids else None,
            "prompt_logprobs": self._prompt_logprobs(answer),
            "prompt_token_ids": list(answer.prompt_token_ids)
            if self._options.return_token_ids
            else None,
        }

    def _delta(self, answer: Answer, output: TextOutput) -> Body:
        logprobs = self._logprobs(
            answer, output.token_ids, output.logprobs, is_first=answer.num_outputs == 1
        )
        return {"index": answer.index, "text": output.text, "logprobs": logprobs}

    def _logprobs(
        self,
        answer: Answer,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        *,
        is_first: bool,
    ) -> Body | None:
        """Returns the log probabilities of an answer's next tokens; its first ones may be echoed.

        An answer that broke off has none for tokens that never came.
        """
        if not self._options.with_logprobs:
            return None
        scored: list[TokenLogprobs | None] = list(logprobs)
        if is_first and self._options.echoes_prompt:
            token_ids = [*answer.prompt_token_ids, *token_ids]
            scored = [None, *answer.prompt_logprobs, *scored]
        offset = self._offsets.get(answer.index, 0)
        body = completion_logprobs(token_ids, scored, self._options.text_of, offset)
        self._offsets[answer.index] = offset + sum(map(len, body["tokens"]))
        return body

    def _prompt_logprobs(self, answer: Answer) -> list[Body | None] | None:
        if not self._options.with_prompt_logprobs:
            return None
        return prompt_logprobs(answer.prompt_logprobs, self._options.text_of)

    def _metrics(self, answers: Sequence[Answer]) -> Body | None:
        if self._options.num_answers != 1:
            return None
        last = answers[0].last
        stats = last.speculation if last else None
        return {
            "speculative_decoding": speculation_body(
                stats or SpeculationStats(), self._options.max_draft_tokens
            )
        }


class ChatFormat(CompletionFormat):
    """Writes the responses of `/v1/chat/completions` for one request."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def response(self, answers: Sequence[Answer], num_agreed: int) -> Body:
        body = super().response(answers, num_agreed)
        body["prompt_logprobs"] = self._prompt_logprobs(answers[0])
        body["prompt_token_ids"] = (
            list(answers[0].prompt_token_ids) if self._options.return_token_ids else None
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
            "logprobs": self._chat_logprobs(answer.logprobs),
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            "seed": answer.seed,
            "token_ids": answer.token_ids if self._options.return_token_ids else None,
        }

    def _delta(self, answer: Answer, output: TextOutput) -> Body:
        return {
            "index": answer.index,
            "delta": {"content": output.text},
            "logprobs": self._chat_logprobs(output.logprobs),
        }

    def _chat_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> Body | None:
        if not self._options.with_logprobs:
            return None
        return chat_logprobs(logprobs, self._options.text_of)


def _unshown(output: TextOutput) -> TextOutput:
    """Returns an output of which only the end is shown: the limit was no token at all."""
    ended = output.finish_reason is not None
    return replace(
        output,
        text="",
        token_ids=(),
        finish_reason=FinishReason.LENGTH if ended else None,
        stop_reason=None,
        logprobs=(),
    )


def speculation_body(stats: SpeculationStats, max_draft_tokens: int) -> Body:
    """Returns the statistics under vLLM's names, with fields of our own at the end.

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
        "is_synthetic": stats.is_synthetic,
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


def _prediction_usage(answers: Sequence[Answer], num_agreed: int) -> Body:
    """Returns the part of usage that tells what predictions were worth, if there were any."""
    if not any(answer.prediction for answer in answers):
        return {}
    return {
        "completion_tokens_details": {
            "accepted_prediction_tokens": num_agreed,
            "rejected_prediction_tokens": sum(len(one.prediction) for one in answers) - num_agreed,
        }
    }


def _usage(answers: Sequence[Answer]) -> Body:
    prompts = {answer.prompt_index: answer.prompt_token_ids for answer in answers}
    num_prompt = sum(map(len, prompts.values()))
    num_output = sum(len(answer.token_ids) for answer in answers)
    return {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_output,
        "completion_tokens": num_output,
    }
