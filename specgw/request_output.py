"""What `specgw.LLM` returns, under vLLM's names. Plain values, no I/O."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specgw.types import SpeculationStats, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Logprob:
    """How probable a token was: natural logarithm, place among all from 1, and its text."""

    logprob: float
    rank: int
    decoded_token: str


Logprobs = Mapping[int, Logprob]  # by token id: the token itself, then the most probable ones


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation of a prompt. Log probabilities are there if they were asked for."""

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: str
    stop_reason: int | str | None
    cumulative_logprob: float | None = None
    logprobs: Sequence[Logprobs] | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its continuations; `speculation` says what became of the drafts of all.

    `prompt_logprobs`, if asked for, begins with None: nothing predicts the first token.
    Prediction tokens are accepted if an output has them where they were expected.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    speculation: SpeculationStats
    prompt_logprobs: Sequence[Logprobs | None] | None = None
    finished: bool = True
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


def logprobs_by_token(scored: TokenLogprobs, text_of: Callable[[int], str]) -> Logprobs:
    """Returns the log probabilities at one position. `text_of` gives the text of one token."""
    ranks = (scored.rank, *range(1, len(scored.token_ids)))
    entries: dict[int, Logprob] = {}
    for token_id, logprob, rank in zip(scored.token_ids, scored.logprobs, ranks, strict=True):
        entries.setdefault(token_id, Logprob(logprob, rank, text_of(token_id)))
    return entries
