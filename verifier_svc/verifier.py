"""Runs the target model over one ragged batch and verifies every session's block in it.

Knows nothing of sessions' lives, proposers or clocks: caches and tokens in, output tokens out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specgw.engine.kv_cache import SequenceCache
from specgw.engine.model_runner import ModelRunner, SequenceChunk
from specgw.engine.sampling import RowSampling, sample
from specgw.types import SamplingParams
from verifier_svc.rejection_sampler import accept_matching


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """One session's part of a step: context tokens not yet in the cache, then its draft tokens.

    `is_complete` is false for a prefill chunk that stops short of the context's end; it has no
    drafts and gives no output.
    """

    cache: SequenceCache
    context_length: int
    missing_token_ids: Sequence[int]
    draft_token_ids: Sequence[int]
    is_complete: bool
    sampling_params: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True)
class Verified:
    """What one session's rows gave: accepted draft tokens, then one token of the target's own."""

    output_token_ids: Sequence[int]
    num_accepted: int


class Verifier:
    """The target model and the rule by which it accepts drafts."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def verify(self, batch: Sequence[VerifyRows]) -> list[Verified]:
        """Runs one forward pass and leaves exactly the accepted tokens in every cache."""
        logits = self.runner.forward([_chunk(rows) for rows in batch])
        sampled = sample(logits, [row for rows in batch for row in _sampling_rows(rows)])
        results = []
        first = 0
        for rows in batch:
            last = first + _num_logits(rows)
            results.append(_accept(rows, sampled[first:last]))
            first = last
        return results


def _num_logits(rows: VerifyRows) -> int:
    return len(rows.draft_token_ids) + 1 if rows.is_complete else 0


def _chunk(rows: VerifyRows) -> SequenceChunk:
    token_ids = [*rows.missing_token_ids, *rows.draft_token_ids]
    return SequenceChunk(rows.cache, token_ids, _num_logits(rows))


def _sampling_rows(rows: VerifyRows) -> list[RowSampling]:
    params = rows.sampling_params
    return [
        RowSampling(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=rows.seed,
            position=rows.context_length + offset,
        )
        for offset in range(_num_logits(rows))
    ]


def _accept(rows: VerifyRows, sampled: Sequence[int]) -> Verified:
    if not rows.is_complete:
        return Verified((), 0)
    output, num_accepted = accept_matching(rows.draft_token_ids, sampled)
    rows.cache.truncate(rows.context_length + num_accepted)
    return Verified(output, num_accepted)
