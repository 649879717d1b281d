"""Runs the target model over one ragged batch and verifies every session's block in it.

Knows nothing of sessions' lives, proposers or clocks: caches and tokens in, output tokens out.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from specgw.engine.kv_cache import SequenceCache
from specgw.engine.laws import block_maxima
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
from verifier_svc.rejection_sampler import count_matching


class VerifyRows(NamedTuple):
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


class Verified(NamedTuple):
    """What one session's rows gave: accepted draft tokens, then one token of the target's own.

    That last one is not there if its row cannot be processed; the next step tells why.

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


_NOTHING = Verified((), 0)  # from rows that are not verified


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
        self._widened = torch.empty(0, runner.vocab_size, device=runner.device)
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
        if not self.is_synthetic and all(map(_is_plain, batch)):
            results = _accept_greedily(batch, self.runner.argmax(logits).tolist())
            return results if hidden is None else _with_hidden(batch, results, hidden)
        sizes = [n for rows in batch for n in (len(rows.scored_token_ids), rows.num_verified)]
        parts = torch.split(logits, sizes)
        scored, raw = parts[::2], parts[1::2]
        results = list(map(_with_logprobs, batch, self._test(batch, raw, logits), scored, raw))
        return results if hidden is None else _with_hidden(batch, results, hidden)

    def _test(
        self,
        batch: Sequence[VerifyRows],
        parts: Sequence[Tensor],  # each [num_verified, vocab_size]
        logits: Tensor,  # what they are parts of
    ) -> list[Verified]:
        """Tests every block; those with processors apart, since only these need float32."""
        results = [_NOTHING] * len(batch)
        for is_processed in (False, True):
            chosen = [i for i, rows in enumerate(batch) if _is_processed(rows) == is_processed]
            if not chosen:
                continue
            some, own = [batch[i] for i in chosen], [parts[i] for i in chosen]
            if is_processed:
                judged = _process(some, logits := self._widen(own))
            else:
                judged = [
                    _Judged(len(rows.draft_token_ids), part)
                    for rows, part in zip(some, own, strict=True)
                ]
            left = _join([one.logits for one in judged], logits)
            outcomes = self._block_test.verify(list(map(_block, some, judged)), left)
            for i, verified in zip(chosen, map(_settle, some, judged, outcomes), strict=True):
                results[i] = verified
        return results

    def _widen(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns float32 copies of all rows, in memory that the next call uses again.

        New memory of that size would come from the system, page by page: longer than the copying.
        """
        sizes = [len(part) for part in parts]
        if len(self._widened) < sum(sizes):
            self._widened = self._widened.new_empty(sum(sizes), self._widened.shape[1])
        logits = self._widened[: sum(sizes)]
        for copy, part in zip(torch.split(logits, sizes), parts, strict=True):
            copy.copy_(part)
        return logits

    def _forward(self, batch: Sequence[VerifyRows]) -> tuple[Tensor, Tensor | None]:
        """Returns logits, [num_logits, vocab_size], and hidden states if anyone wants them."""
        chunks = [_chunk(rows) for rows in batch]
        if any(rows.wants_hidden for rows in batch):
            return self.runner.forward_with_hidden(chunks)
        return self.runner.forward(chunks), None


def _chunk(rows: VerifyRows) -> SequenceChunk:
    token_ids = [*rows.missing_token_ids, *rows.draft_token_ids]
    return SequenceChunk(rows.cache, token_ids, rows.num_logits)


@dataclass(frozen=True, slots=True)
class _Judged:
    """What is left of a session's block, and the logits that it is tested by.

    With an `error`, there is no token to draw after the last draft token.
    """

    num_drafts: int
    logits: Tensor  # [num_drafts + 1, vocab_size]; none of an incomplete context
    error: SpecgwError | None = None


def _join(parts: Sequence[Tensor], whole: Tensor) -> Tensor:
    """Returns the parts as one tensor: the whole itself if they are all of it, in order."""
    return whole if sum(map(len, parts)) == len(whole) else torch.cat(list(parts))


def _is_plain(rows: VerifyRows) -> bool:
    """Whether rows need nothing but their largest logits."""
    params = rows.sampling_params
    is_scored = params.logprobs is not None or bool(rows.scored_token_ids)
    return params.is_greedy and rows.processors is None and not is_scored


def _accept_greedily(batch: Sequence[VerifyRows], drawn: Sequence[int]) -> list[Verified]:
    """Does what `BlockTest` does with greedy rows, given the target's token in each."""
    results, end = [], 0
    for rows in batch:
        if not rows.is_complete:
            results.append(_NOTHING)
            continue
        start, end = end, end + len(rows.draft_token_ids) + 1
        num_accepted = count_matching(rows.draft_token_ids, drawn[start:end])
        output = (*rows.draft_token_ids[:num_accepted], drawn[start + num_accepted])
        rows.cache.truncate(rows.context_length + num_accepted)
        results.append(Verified(output, num_accepted))
    return results


def _is_processed(rows: VerifyRows) -> bool:
    return rows.processors is not None and rows.is_complete


def _process(
    batch: Sequence[VerifyRows],
    logits: Tensor,  # [sum of num_verified, vocab_size] float32, changed in place
) -> list[_Judged]:
    """Applies the sessions' processors and cuts each block at the first row that cannot be passed.

    Such a row forbids all tokens, or cannot be processed. The cut depends on the draft tokens
    before it alone, as a proposer's own choice to stop would, so that every rule stays exact.
    """
    parts = torch.split(logits, [rows.num_verified for rows in batch])
    failures = [_process_block(*one) for one in zip(batch, parts, strict=True)]
    is_dead = iter((block_maxima(logits).amax(dim=1) == -torch.inf).tolist())
    judged = []
    for part, (num_drafts, error) in zip(parts, failures, strict=True):
        first_dead = [*islice(is_dead, len(part)), True].index(True)
        if first_dead < num_drafts:
            num_drafts, error = first_dead, None
        judged.append(_Judged(num_drafts, part[: num_drafts + 1], error))
    return judged


def _process_block(rows: VerifyRows, logits: Tensor) -> tuple[int, SpecgwError | None]:
    """Returns how many draft tokens come before the row that fails, if any, and how it fails."""
    assert rows.processors is not None
    num_processed = 0
    try:
        for _ in rows.processors.rows(logits, rows.draft_token_ids):
            num_processed += 1
    except SpecgwError as error:
        return num_processed, error
    return len(rows.draft_token_ids), None


def _block(rows: VerifyRows, judged: _Judged) -> Block:
    params, num_drafts = rows.sampling_params, judged.num_drafts
    sampling = [
        RowSampling(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=rows.seed,
            position=rows.context_length + offset,
        )
        for offset in range(len(judged.logits))
    ]
    return Block(
        rows.draft_token_ids[:num_drafts],
        rows.draft_probs[:num_drafts],
        sampling,
        rows.processors is not None,
    )


def _settle(rows: VerifyRows, judged: _Judged, outcome: Outcome) -> Verified:
    """Commits what was accepted to the cache and the processors."""
    if not rows.is_complete:
        return _NOTHING
    output = tuple(rows.draft_token_ids[: outcome.num_accepted])
    if judged.error is None or outcome.num_accepted < judged.num_drafts:
        output = (*output, outcome.token_id)
    if not output:
        return Verified((), 0, error=judged.error)
    rows.cache.truncate(rows.context_length + len(output) - 1)
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
        verified = verified._replace(prompt_logprobs=scored)
    if params.logprobs is not None and output:
        scored = token_logprobs(logits[: len(output)], output, params.logprobs)
        verified = verified._replace(logprobs=scored)
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
            last = first + len(rows.missing_token_ids) + max(len(result.output_token_ids) - 1, 0)
            result = result._replace(hidden=hidden[first:last])
        added.append(result)
        first += rows.num_rows
    return added
