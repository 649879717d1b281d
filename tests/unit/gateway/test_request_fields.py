"""Every field of vLLM 0.32.0's requests is known, refused by name, or said to have no effect."""

import re
from pathlib import Path
from typing import Any

import pytest

from gateway.openai_types import ChatCompletionRequest, CompletionRequest
from specgw.errors import InvalidRequest

DOCUMENT = Path(__file__).parents[3] / "docs" / "sampling.md"

# Copied from `vllm/entrypoints/openai/completion/protocol.py` and `chat_completion/protocol.py`.
BOTH = [
    "model", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n",
    "presence_penalty", "response_format", "seed", "stop", "stream", "stream_options",
    "temperature", "top_p", "user", "use_beam_search", "top_k", "min_p", "repetition_penalty",
    "watermarking", "length_penalty", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens",
    "truncate_prompt_tokens", "truncation_side", "prompt_logprobs", "logprob_token_ids",
    "allowed_token_ids", "bad_words", "echo", "add_special_tokens", "structured_outputs",
    "priority", "request_id", "session_id", "return_tokens_as_token_ids", "return_token_ids",
    "routed_experts_prompt_start", "return_token_offsets", "mm_payload", "return_mm_kwargs",
    "cache_salt", "kv_transfer_params", "ec_transfer_params", "vllm_xargs",
    "repetition_detection", "thinking_token_budget", "stream_interval",
]  # fmt: skip
COMPLETION = [*BOTH, "prompt", "suffix", "prompt_embeds"]
CHAT = [
    *BOTH,
    "messages", "top_logprobs", "max_completion_tokens", "tools", "tool_choice",
    "reasoning_effort", "include_reasoning", "parallel_tool_calls", "add_generation_prompt",
    "continue_final_message", "documents", "chat_template", "chat_template_kwargs",
    "media_io_kwargs", "mm_processor_kwargs", "return_prompt_text",
]  # fmt: skip
BODIES: dict[type[CompletionRequest] | type[ChatCompletionRequest], dict[str, Any]] = {
    CompletionRequest: {"prompt": "x"},
    ChatCompletionRequest: {"messages": [{"role": "user", "content": "x"}]},
}
FIELDS = [(CompletionRequest, name) for name in COMPLETION] + [
    (ChatCompletionRequest, name) for name in CHAT
]


def without_effect() -> set[str]:
    text = DOCUMENT.read_text(encoding="utf-8")
    _, _, rest = text.partition("Taken without effect: ")
    return set(re.findall("`([a-z_]+)`", rest.partition("\n\n")[0]))


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_no_field_of_vllms_is_ignored_in_silence(
    kind: type[CompletionRequest] | type[ChatCompletionRequest], name: str
) -> None:
    is_known = name in kind.model_fields
    is_refused = name in kind.not_implemented
    is_documented = name in without_effect()

    assert [is_known, is_refused, is_documented].count(True) == 1


@pytest.mark.parametrize("kind", BODIES)
def test_what_is_refused_is_so_for_any_value_that_would_change_something(
    kind: type[CompletionRequest] | type[ChatCompletionRequest],
) -> None:
    for name, neutral in kind.not_implemented.items():
        for value in neutral:
            kind.model_validate({**BODIES[kind], name: value})
        with pytest.raises(InvalidRequest, match=f"^{name}: .*is not implemented"):
            kind.model_validate({**BODIES[kind], name: ["anything else"]})
