"""Log probabilities in the shapes of OpenAI's responses, filled as vLLM does. No I/O.

The caller is `openai_responses.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from specgw.request_output import logprobs_by_token
from specgw.types import TokenLogprobs

TokenText = Callable[[int], str]  # of a token alone

_LEAST = -9999.0  # what JSON has for the logarithm of zero


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    text_of: TokenText,
    text_offset: int = 0,
) -> dict[str, Any]:
    """Returns the `logprobs` of a completion's choice.

    Args:
        token_ids: The tokens.
        logprobs: Of each; None for the first one of a prompt, which nothing predicts.
        text_of: What a token is called.
        text_offset: Length of the text of the tokens before.
    """
    tokens = [text_of(token_id) for token_id in token_ids]
    offsets = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    return {
        "text_offset": offsets,
        "token_logprobs": [one and _finite(one.logprobs[0]) for one in logprobs],
        "tokens": tokens,
        "top_logprobs": [one and _by_text(one, text_of) for one in logprobs],
    }


def chat_logprobs(logprobs: Sequence[TokenLogprobs], text_of: TokenText) -> dict[str, Any]:
    """Returns the `logprobs` of a chat completion's choice."""
    return {
        "content": [
            {
                **_chat_entry(one.token_ids[0], one.logprobs[0], text_of),
                "top_logprobs": [
                    _chat_entry(token_id, logprob, text_of)
                    for token_id, logprob in zip(one.token_ids[1:], one.logprobs[1:], strict=True)
                ],
            }
            for one in logprobs
        ]
    }


def prompt_logprobs(
    logprobs: Sequence[TokenLogprobs], text_of: TokenText
) -> list[dict[str, Any] | None]:
    """Returns the `prompt_logprobs` of an answer: for each token by id, None for the first."""
    return [None, *(_by_id(one, text_of) for one in logprobs)]


def _by_text(one: TokenLogprobs, text_of: TokenText) -> dict[str, float]:
    """Tokens that look the same keep the larger value: the more probable one comes first."""
    values: dict[str, float] = {}
    for token_id, logprob in zip(one.token_ids, one.logprobs, strict=True):
        values.setdefault(text_of(token_id), _finite(logprob))
    return values


def _by_id(one: TokenLogprobs, text_of: TokenText) -> dict[str, Any]:
    return {
        str(token_id): {**asdict(entry), "logprob": _finite(entry.logprob)}
        for token_id, entry in logprobs_by_token(one, text_of).items()
    }


def _chat_entry(token_id: int, logprob: float, text_of: TokenText) -> dict[str, Any]:
    text = text_of(token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
