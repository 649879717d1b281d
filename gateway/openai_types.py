"""The bodies of OpenAI requests: fields and defaults of vLLM 0.32, plus `num_speculative_tokens`.

Like vLLM, lets fields pass that it does not know. Unlike it, refuses the ones that would change
the output and are not implemented, by name. The caller is `openai_api.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gateway.response_format import ResponseFormat, StructuredOutputs, renamed
from specgw.errors import InvalidRequest
from specgw.structured_outputs import StructuredOutputsParams
from specgw.types import SamplingParams

TokenId = Annotated[int, Field(ge=0)]

# Fields that mean the same in `SamplingParams`; null is its default, or the model's.
_PLAIN_PARAMS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "prompt_logprobs",
)

_OFF: tuple[object, ...] = (None, False)
_EMPTY: tuple[object, ...] = (None, [], {}, "")

# Fields that change the output and are not implemented, each with the values that change nothing.
_NOT_IMPLEMENTED: dict[str, tuple[object, ...]] = {
    "best_of": (None, 1),
    "early_stopping": _OFF,
    "ec_transfer_params": _EMPTY,
    "kv_transfer_params": _EMPTY,
    "length_penalty": (None, 1),
    "logits_processors": _EMPTY,
    "logit_processors": _EMPTY,
    "logprob_token_ids": _EMPTY,
    "mm_payload": _EMPTY,
    "prompt_embeds": (None,),
    "repetition_detection": (None,),
    "return_mm_kwargs": _OFF,
    "return_token_offsets": _OFF,
    "spaces_between_special_tokens": (None, True),
    "thinking_token_budget": (None, -1),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": _OFF,
    "vllm_xargs": _EMPTY,
    "watermarking": _OFF,
}

# Fields that vLLM has replaced, each with what says the same now.
_REPLACED = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_whitespace_pattern": "structured_outputs.whitespace_pattern",
    "guided_decoding_backend": "nothing: there is one",
}


class StreamOptions(BaseModel):
    """What a stream reports besides the output."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool = False
    continuous_usage_stats: bool = False


class PredictionPart(BaseModel):
    """A part of a prediction. Text is the only kind."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text"]
    text: str


class PredictedContent(BaseModel):
    """What the answer may turn out to be. Changes the speed, never the answer."""

    model_config = ConfigDict(extra="allow")

    type: Literal["content"]
    content: str | list[PredictionPart]

    @property
    def text(self) -> str:
        """The whole of it."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class _Request(BaseModel):
    """What both generation endpoints share."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    not_implemented: ClassVar[Mapping[str, tuple[object, ...]]] = _NOT_IMPLEMENTED

    model: str | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    num_speculative_tokens: int | None = None
    prediction: PredictedContent | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    min_tokens: int | None = None
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    echo: bool = False
    cache_salt: Annotated[str, Field(pattern=r"^[^@/\\\x00]{1,128}$")] | None = None

    @model_validator(mode="after")
    def _refuse_by_name(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name in _REPLACED and value is not None:
                rule = f"is no longer a field; what replaces it is {_REPLACED[name]}"
                raise InvalidRequest(name, value, rule)
            neutral = self.not_implemented.get(name)
            if neutral is not None and value not in neutral:
                raise InvalidRequest(name, value, "is not implemented, so it must be left out")
        if self.structured_outputs is not None and self.response_format is not None:
            rule = "cannot be set with structured_outputs"
            raise InvalidRequest("response_format", self.response_format.type, rule)
        if self.stream_options is not None and not self.stream:
            given = self.stream_options.model_dump()
            raise InvalidRequest("stream_options", given, "is only allowed with stream=true")
        if self.stream and self.prompt_logprobs:
            rule = "is only allowed with stream=false"
            raise InvalidRequest("prompt_logprobs", self.prompt_logprobs, rule)
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Most probable tokens to report beside each output token; None reports nothing."""
        return None

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of the stream carries usage."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    def constraint(self) -> StructuredOutputsParams | None:
        """Returns what the text of the output must be; none if it may be any."""
        if self.response_format is not None:
            try:
                return self.response_format.constraint()
            except InvalidRequest as error:
                raise renamed(error) from None
        return self.structured_outputs

    def sampling_params(self, defaults: Mapping[str, float]) -> SamplingParams:
        """Returns how to sample: the request's values, else the model's, else OpenAI's."""
        chosen = {
            name: value for name in _PLAIN_PARAMS if (value := getattr(self, name)) is not None
        }
        bias = {i: min(max(value, -100.0), 100.0) for i, value in (self.logit_bias or {}).items()}
        return SamplingParams(
            **{**defaults, **chosen},
            seed=None if self.seed == -1 else self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            structured_outputs=self.constraint(),
            logit_bias=bias,
            bad_words=tuple(self.bad_words or ()),
            allowed_token_ids=(
                None if self.allowed_token_ids is None else tuple(self.allowed_token_ids)
            ),
            logprobs=self.num_logprobs,
            max_tokens=self.max_tokens,
        )


class CompletionRequest(_Request):
    """The body of `POST /v1/completions`."""

    not_implemented: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **_NOT_IMPLEMENTED,
        "suffix": _EMPTY,
    }

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    add_special_tokens: bool = True
    logprobs: int | None = None
    _is_echo_only: bool = False

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def is_echo_only(self) -> bool:
        """Whether the prompt is all that is asked for: one token is generated and not shown."""
        return self._is_echo_only

    @model_validator(mode="after")
    def _allow_zero_tokens(self) -> Self:
        if self.echo and self.max_tokens == 0:
            self._is_echo_only = True
            self.max_tokens = 1
        return self

    def sampling_params(self, defaults: Mapping[str, float]) -> SamplingParams:
        params = super().sampling_params(defaults)
        if self.echo and params.prompt_logprobs is None:
            params = replace(params, prompt_logprobs=params.logprobs)
        return replace(params, logprobs=None) if self.is_echo_only else params

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str) or all(isinstance(one, int) for one in prompt):
            return [prompt]  # type: ignore[list-item]
        return list(prompt)  # type: ignore[arg-type]


class ChatMessage(BaseModel):
    """One message. Fields of its own reach the chat template, such as `name`."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None

    def for_template(self) -> dict[str, Any]:
        """Returns the message with its parts joined.

        Raises:
            InvalidRequest: for a part that is not text.
        """
        message = self.model_dump(exclude_unset=True)
        if isinstance(self.content, list):
            for part in self.content:
                if part.get("type") != "text" or not isinstance(part.get("text"), str):
                    rule = "must be text: the model takes nothing else"
                    raise InvalidRequest("messages.content.type", part.get("type"), rule)
            message["content"] = "\n".join(part["text"] for part in self.content)
        return message


class ChatOptions(BaseModel):
    """How a chat becomes a prompt."""

    model_config = ConfigDict(extra="allow")

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    def template_options(self) -> dict[str, Any]:
        """Returns the variables of the chat template.

        Raises:
            InvalidRequest: for a variable that is not the request's to set.
        """
        options = dict(self.chat_template_kwargs or {})
        for name in ("chat_template", "conversation", "tokenize", "tools", "documents"):
            if name in options:
                raise InvalidRequest(
                    f"chat_template_kwargs.{name}", options[name], "is not allowed"
                )
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequest(
                "continue_final_message", True, "is only allowed with add_generation_prompt=false"
            )
        if self.reasoning_effort is not None:
            options["reasoning_effort"] = self.reasoning_effort
        options["add_generation_prompt"] = self.add_generation_prompt
        options["continue_final_message"] = self.continue_final_message
        return options


class ChatCompletionRequest(ChatOptions, _Request):
    """The body of `POST /v1/chat/completions`."""

    not_implemented: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **_NOT_IMPLEMENTED,
        "audio": (None,),
        "chat_template": _EMPTY,
        "documents": _EMPTY,
        "function_call": (None, "none"),
        "functions": _EMPTY,
        "media_io_kwargs": _EMPTY,
        "mm_processor_kwargs": _EMPTY,
        "modalities": (None, ["text"]),
        "return_prompt_text": _OFF,
        "tool_choice": (None, "none", "auto"),
        "tools": _EMPTY,
        "web_search_options": (None,),
    }

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def echoed(self) -> str:
        """What the answer begins with: the last message, if asked for and the answer goes on it."""
        last = self.messages[-1]
        if not self.echo or (self.add_generation_prompt and last.role != "assistant"):
            return ""
        return str(last.for_template().get("content") or "")

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs", self.top_logprobs, "needs logprobs=true")
        return self

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        return self


class TokenizeRequest(BaseModel):
    """The body of `POST /tokenize` with a prompt."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ChatOptions):
    """The body of `POST /tokenize` with a chat."""

    model: str | None = None
    return_token_strs: bool = False


class DetokenizeRequest(BaseModel):
    """The body of `POST /detokenize`."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    tokens: list[TokenId]


def first_problem(error: ValidationError) -> InvalidRequest:
    """Returns the first wrong field as the error that names it."""
    errors = error.errors(include_url=False)
    field = errors[0]["loc"][:1]
    # Of a field's alternatives, the one that got furthest is what the caller meant. The path tells
    # them apart by type names, which say nothing to a caller.
    item = max((one for one in errors if one["loc"][:1] == field), key=lambda one: len(one["loc"]))
    path = ".".join(str(part) for part in item["loc"] if not _is_alternative(part))
    value = None if item["type"] == "missing" else _short(item["input"])
    return InvalidRequest(path or "body", value, item["msg"][:1].lower() + item["msg"][1:])


def _is_alternative(part: str | int) -> bool:
    return isinstance(part, str) and (part == "str" or "[" in part)


def _short(value: object) -> object:
    return value if len(text := repr(value)) <= 200 else f"{text[:200]}..."
