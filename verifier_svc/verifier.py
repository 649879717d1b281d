"""Runs the target model over one ragged batch and verifies every session's block in it.

Knows nothing of sessions' lives, proposers or clocks: caches and tokens in, output tokens out.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specgw.engine.kv_cache import SequenceCache
from specgw.engine.logprobs import token_logprobs
from specgw.engine.model_runner import ModelRunner, SequenceChunk
from specgw.engine.sampling import RowSampling
from specgw.errors import SpecgwError
from specgw.grammar import GrammarMatcher
from specgw.types import GenerateRequest, SamplingParams, TokenLogprobs, TokenProbs
from verifier_svc.acceptance import Acceptance
from verifier_svc.block_test import Block, BlockTest, Outcome
from verifier_svc.custom_processors import CustomLogitsProcessor
from verifier_svc.logits_processors import RowProcessors, build_processors


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """One session's part of a step: context tokens not yet in the cache, then its draft tokens.

    `is_complete` is false for a prefill chunk that stops short of the context's end; it has no
    drafts and gives no output. `scored_token_ids` are prompt tokens whose log probabilities are
    asked for; the rows that predict them are the last ones before those that are verified.
    """

    cache: SequenceCache
    context_length: int
    missing_token_ids: Sequence[int]
    draft_token_ids: Sequence[int]
    is_complete: bool
    sampling_params: SamplingParams
    seed: int
    processors: RowProcessors | None = None
    scored_token_ids: Sequence[int] = ()
    draft_probs: Sequence[TokenProbs] = ()  # laws of all draft tokens, or of none
    wants_hidden: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of the forward pass."""
        return len(self.missing_token_ids) + len(self.draft_token_ids)

    @property
    def num_logits(self) -> int:
        """Last rows whose logits are needed."""
        return len(self.scored_token_ids) + self.num_verified

    @property
    def num_verified(self) -> int:
        """Last rows that are verified: one for each draft token, and one more."""
        return len(self.draft_token_ids) + 1 if self.is_complete else 0


@dataclass(frozen=True, slots=True)
class Verified:
    """What one session's rows gave: accepted draft tokens, then one token of the target's own.

    Log probabilities are there if asked for: of the output tokens, and of the prompt's. So are the
    hidden states of the rows that stay in the cache, [num_rows, hidden_size]. With an `error`, the
    session cannot go on; others are none the worse for it.
    """

    output_token_ids: Sequence[int]
    num_accepted: int
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    hidden: Tensor | None = None
    error: SpecgwError | None = None


class Verifier:
    """The target model and the rule by which it accepts drafts."""

    def __init__(
        self,
        runner: ModelRunner,
        custom_processors: Sequence[CustomLogitsProcessor] = (),
        acceptance: Acceptance | None = None,
    ) -> None:
        """Takes a loaded model; without a rule, all drafts are tested by the one-hot rule."""
        self.runner = runner
        acceptance = acceptance or Acceptance()
        self.is_synthetic = bool(acceptance.synthetic_rates)
        self._block_test = BlockTest(acceptance)
        self.forward_s = 0.0  # of the last pass; on a GPU, until it is under way
        self._custom_processors = custom_processors

    def processors_for(
        self, request: GenerateRequest, grammar: GrammarMatcher | None = None
    ) -> RowProcessors | None:
        """Returns the session's processors of logits; None if it needs none."""
        runner = self.runner
        return build_processors(
            request,
            self._custom_processors,
            runner.vocab_size,
            runner.eos_token_ids,
            runner.device,
            grammar,
        )

    def verify(self, batch: Sequence[VerifyRows]) -> list[Verified]:
        """Runs one forward pass and leaves exactly the accepted tokens in every cache."""
        began = time.perf_counter()
        logits, hidden = self._forward(batch)
        self.forward_s = time.perf_counter() - began
        sizes = [n for rows in batch for n in (len(rows.scored_token_ids), rows.num_verified)]
        parts = torch.split(logits, sizes)
        scored, raw = parts[::2], parts[1::2]
        if any(rows.scored_token_ids for rows in batch):
            logits = torch.cat(raw)  # [sum of num_verified, vocab_size]
        logits, errors = _processed(logits, batch)
        outcomes = self._block_test.verify([_block(rows) for rows in batch], logits)
        results = list(map(_settle, batch, outcomes, errors))
        results = list(map(_with_logprobs, batch, results, scored, raw))
        return results if hidden is None else _with_hidden(batch, results, hidden)

    def _forward(self, batch: Sequence[VerifyRows]) -> tuple[Tensor, Tensor | None]:
        """Returns logits, [num_logits, vocab_size], and hidden states if anyone wants them."""
        chunks = [_chunk(rows) for rows in batch]
        if any(rows.wants_hidden for rows in batch):
            return self.runner.forward_with_hidden(chunks)
        return self.runner.forward(chunks), None


def _chunk(rows: VerifyRows) -> SequenceChunk:
    token_ids = [*rows.missing_token_ids, *rows.draft_token_ids]
    return SequenceChunk(rows.cache, token_ids, rows.num_logits)


def _processed(
    logits: Tensor,  # [sum of num_verified, vocab_size]
    batch: Sequence[VerifyRows],
) -> tuple[Tensor, list[SpecgwError | None]]:
    """Returns the logits after every session's processors, and what went wrong with each."""
    errors: list[SpecgwError | None] = [None] * len(batch)
    if all(rows.processors is None or not rows.is_complete for rows in batch):
        return logits, errors
    logits = logits.to(torch.float32, copy=True)
    first = 0
    for index, rows in enumerate(batch):
        last = first + rows.num_verified
        if rows.processors is not None and rows.is_complete:
            try:
                _process(rows.processors, rows.draft_token_ids, logits[first:last])
            except SpecgwError as error:
                errors[index] = error
        first = last
    return logits, errors


def _process(
    processors: RowProcessors,
    draft_token_ids: Sequence[int],
    logits: Tensor,  # [num_verified, vocab_size], changed in place
) -> None:
    """Applies a session's processors, down to a draft token that they forbid.

    It will be rejected, whatever the rule, so that no row after it counts.
    """
    processed = processors.rows(logits, draft_token_ids)
    for offset, row in enumerate(processed):
        logits[offset] = row
        if offset < len(draft_token_ids) and row[draft_token_ids[offset]] == -torch.inf:
            return


def _block(rows: VerifyRows) -> Block:
    params = rows.sampling_params
    sampling = [
        RowSampling(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=rows.seed,
            position=rows.context_length + offset,
        )
        for offset in range(rows.num_verified)
    ]
    return Block(rows.draft_token_ids, rows.draft_probs, sampling, rows.processors is not None)


def _settle(rows: VerifyRows, outcome: Outcome, error: SpecgwError | None) -> Verified:
    """Commits what was accepted to the cache and the processors."""
    if not rows.is_complete or error is not None:
        return Verified((), 0, error=error)
    output = (*rows.draft_token_ids[: outcome.num_accepted], outcome.token_id)
    rows.cache.truncate(rows.context_length + outcome.num_accepted)
    if rows.processors is not None:
        rows.processors.commit(output)
    return Verified(output, outcome.num_accepted)


def _with_logprobs(
    rows: VerifyRows,
    verified: Verified,
    scored_logits: Tensor,  # [len(scored_token_ids), vocab_size]
    logits: Tensor,  # [num_verified, vocab_size]
) -> Verified:
    """Adds the log probabilities asked for: raw, so that no parameter changes them, as in vLLM.

    Accepted, recovered and bonus tokens alike are drawn from the rows in order, one from each.
    """
    params, output = rows.sampling_params, verified.output_token_ids
    if params.prompt_logprobs is not None and rows.scored_token_ids:
        scored = token_logprobs(scored_logits, rows.scored_token_ids, params.prompt_logprobs)
        verified = replace(verified, prompt_logprobs=scored)
    if params.logprobs is not None and output:
        scored = token_logprobs(logits[: len(output)], output, params.logprobs)
        verified = replace(verified, logprobs=scored)
    return verified


def _with_hidden(
    batch: Sequence[VerifyRows],
    results: Sequence[Verified],
    hidden: Tensor,  # [num_rows of the batch, hidden_size]
) -> list[Verified]:
    """Adds the hidden states asked for: not those of rejected drafts."""
    added, first = [], 0
    for rows, result in zip(batch, results, strict=True):
        if rows.wants_hidden:
            last = first + len(rows.missing_token_ids) + result.num_accepted
            result = replace(result, hidden=hidden[first:last])
        added.append(result)
        first += rows.num_rows
    return added
