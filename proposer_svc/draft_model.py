"""Drafts with a small model, one token of every session per forward pass.

Where contexts become draft tokens. Whose contexts they are, and where blocks go, is `proposer.py`'s
business.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from proposer_svc.batching import build_batch, reserve
from proposer_svc.branching import Branching, Line
from proposer_svc.draft_chooser import DraftChooser, Place
from proposer_svc.draft_rows import DraftRows
from proposer_svc.draft_vocabulary import DraftVocabulary, SharedVocabulary
from proposer_svc.drafter import Draft
from proposer_svc.run_ahead import RunAhead
from proposer_svc.session_table import Session, SessionTable
from specgw.engine.model_runner import ModelRunner, SequenceChunk
from specgw.hidden import HiddenFormat
from specgw.threads import yield_cores
from specgw.types import (
    BlocksAhead,
    ModelDescription,
    UndraftedReason,
    VocabMappingSummary,
)

logger = logging.getLogger(__name__)


class DraftModelDrafter:
    """Implements `Drafter` with a model that reads what the target reads."""

    method = "draft_model"
    parallel_drafting = False
    hidden: HiddenFormat | None = None
    keeps_drafts = True  # whether the rows of a block stay, so that it can be gone on with
    mask_rows = 0  # most rows that a block takes beside the missing ones of its session

    def __init__(
        self,
        runner: ModelRunner,
        max_num_batched_tokens: int,
        vocabulary: DraftVocabulary | None = None,
        chooser: DraftChooser | None = None,
        run_ahead: RunAhead | None = None,
        yields_cores: bool = False,
    ) -> None:
        """Takes a loaded model.

        Its vocabulary is the target's unless told otherwise. Without a chooser it drafts greedily,
        and without `run_ahead` never beyond a block. With `yields_cores` it computes while nobody
        else wants to.
        """
        self.description = runner.description
        self.max_num_batched_tokens = max_num_batched_tokens
        self.kv_capacity_tokens = runner.kv_cache.capacity_tokens
        self.num_passes = 0
        self.ahead = run_ahead or RunAhead()
        self._chooser = chooser or DraftChooser()
        self._runner = runner
        self._vocabulary = vocabulary or SharedVocabulary(runner.description)
        self._rows: dict[Session, DraftRows] = {}
        self._branching = Branching(self.ahead, runner.kv_cache)
        self._yields_cores = yields_cores

    @property
    def vocab_mapping(self) -> VocabMappingSummary | None:
        return self._vocabulary.summary

    @property
    def draft_sample_method(self) -> str:
        return self._chooser.method if self._vocabulary.takes_samples else "greedy"

    @property
    def kv_used_tokens(self) -> int:
        return self._runner.kv_cache.used_tokens

    def mismatches(self, target: ModelDescription) -> list[str]:
        return self._vocabulary.mismatches(target)

    def num_context_ids(self, target: ModelDescription) -> int:
        return self._vocabulary.num_context_ids(target)

    def open(self, session: Session) -> None:
        vocabulary = self._vocabulary.of(session)
        context = vocabulary.open_context(session)
        length, max_length = len(context.token_ids), self._runner.max_model_len
        self._rows[session] = DraftRows(
            session,
            vocabulary,
            context,
            self._runner.kv_cache.new_sequence(),
            num_choices=vocabulary.num_choices(session),
            prefill_length=length if length <= max_length else 0,
            max_length=max_length,
            keeps_drafts=self.keeps_drafts,
        )
        self._chooser.open(session, vocabulary)

    def commit(self, session: Session, token_ids: Sequence[int]) -> None:
        rows = self._rows[session]
        if rows.is_sent and token_ids and rows.vocabulary.has_target_ids:
            self._observe(rows, token_ids)
        num_ahead = rows.num_ahead
        rows.extend(token_ids)
        self.ahead.count_round(num_ahead, len(rows.drafted.token_ids))

    def _observe(self, rows: DraftRows, token_ids: Sequence[int]) -> None:
        """Learns from what became of the block that was sent."""
        self.ahead.observe_gap(self.ahead.clock() - rows.sent_at)
        num_drafted = len(rows.drafted.token_ids)
        num_accepted, rank, num_known = rows.rank_of(token_ids)
        self.ahead.outcomes.observe(num_drafted, num_accepted)
        if num_accepted < num_drafted:
            self.ahead.outcomes.observe_rejection(rank, num_known)

    def take_ahead(self, session: Session, num_tokens: int) -> int:
        rows = self._rows[session]
        rows.sent_at = self.ahead.clock()
        return rows.take_ahead(num_tokens)

    def room(self, session: Session) -> int:
        return self._rows[session].room

    def stop(self, session: Session) -> None:
        self._rows[session].forget()

    def close(self, session: Session) -> None:
        if rows := self._rows.pop(session, None):
            rows.drop_branches()
            rows.cache.release()
        self._chooser.close(session)

    def enter_thread(self) -> None:
        if self._yields_cores:
            yield_cores()
        torch.get_num_threads()  # without this call, OpenMP ignores torch's setting in this thread

    def has_work(self) -> bool:
        return any(rows.has_work for rows in self._rows.values())

    def can_run_ahead(self) -> bool:
        if not self.ahead.is_on or self.has_work():
            return False
        return any(rows.can_run_ahead for rows in self._rows.values())

    def run_ahead(self) -> None:
        try:
            self._feed_last(())
        except Exception:
            logger.exception("running ahead failed", extra={"session_count": len(self._rows)})
            self._forget_branches()

    def blocks_ahead(self) -> list[tuple[Session, BlocksAhead]]:
        found = [(one, self._blocks_ahead(one)) for one in self._rows.values() if one.branches]
        return [(one.session, blocks) for one, blocks in found if blocks is not None]

    def _blocks_ahead(self, one: DraftRows) -> BlocksAhead | None:
        """Returns a session's branches that have become complete; none if laws go with them."""
        assert one.branches is not None
        size = len(one.drafted.token_ids)
        complete = [
            branch
            for branch in one.branches.take_complete()
            if len(branch.drafted.token_ids) == size and not branch.drafted.probs
        ]
        if not complete:
            return None
        guesses = [branch.token_id for branch in complete]
        drafted = [token_id for branch in complete for token_id in branch.drafted.token_ids]
        return BlocksAhead(
            one.session.session_id,
            len(one.session.token_ids),
            [branch.num_accepted for branch in complete],
            one.context.to_target(guesses, len(guesses)),
            one.context.to_target(drafted, len(drafted)),
        )

    def step(self, table: SessionTable) -> list[Draft]:
        begun = [one for one in self._rows.values() if one.has_begun]
        if done := [one for one in begun if not one.is_drafting]:
            # They need not wait for the others.
            return [replace(self._answer(one), was_ready=True) for one in done]
        for one in begun:
            if not reserve(one, one.max_draft_tokens - 1, self._rows.values()):
                one.drop_ahead()
        begun = [one for one in begun if one.has_begun]
        batch, starved = build_batch(
            self._rows.values(), table.idle_before, self.max_num_batched_tokens, self.mask_rows
        )
        for rows in starved:
            rows.forget()
        refusals = [Draft(rows.session, reason=UndraftedReason.NO_MEMORY) for rows in starved]
        sessions = [*(one for one, _ in batch), *begun]
        if not sessions:
            return refusals
        try:
            ready = self._draft(batch, begun)
        except Exception:
            logger.exception("drafting failed", extra={"session_count": len(sessions)})
            self._forget_branches()
            return refusals + [Draft(one.session, reason=UndraftedReason.ERROR) for one in sessions]
        return refusals + [self._answer(rows) for rows in ready]

    def _draft(
        self, batch: Sequence[tuple[DraftRows, int]], begun: Sequence[DraftRows]
    ) -> list[DraftRows]:
        """Feeds the given number of missing rows of each session, and drafts where none is left.

        Goes on with blocks that were begun ahead, and beside all that with branches.

        Returns:
            The sessions whose block is ready: `drafted`, empty if the model gave no usable logits.
        """
        ready = [one for one, rows in batch if completes(one, rows)]
        drafting = [*begun]
        if batch:
            logits = self._forward([missing_chunk(one, rows) for one, rows in batch])
            for one, _ in batch:
                one.publish()
            self._append([(one, one) for one in ready], logits)
            drafting += ready
        while drafting := [one for one in drafting if one.is_drafting]:
            self._feed_last(drafting)
        return [*ready, *begun]

    def _feed_last(self, drafting: Sequence[DraftRows]) -> None:
        """Drafts one token more for each session, and for branches of others."""
        began = self.ahead.clock()
        room = self.max_num_batched_tokens - len(drafting)
        ahead = self._branching.lines(self._rows.values(), room)
        lines: list[Line] = [*((one, one) for one in drafting), *ahead]
        if not lines:
            return
        chunks = [SequenceChunk(line.cache, (line.last_token_id,), 1) for _, line in lines]
        self._append(lines, self._forward(chunks))
        self.ahead.count_pass(len(ahead))
        self.ahead.pass_cost.observe(len(lines), self.ahead.clock() - began)

    def _forget_branches(self) -> None:
        """Gives up the rows of sessions with branches: what a failed pass left is not known."""
        for one in self._rows.values():
            if one.branches is not None:
                one.forget()

    def _answer(self, rows: DraftRows) -> Draft:
        if not rows.drafted.token_ids:
            return Draft(rows.session, reason=UndraftedReason.ERROR)
        token_ids, draft_probs = rows.take_block()
        rows.sent_at = self.ahead.clock()
        block = rows.context.to_target(token_ids, rows.session.num_wanted)
        if not block:
            return Draft(rows.session, reason=UndraftedReason.EMPTY)
        rule = self._chooser.rule(rows, has_probs=bool(draft_probs))
        return Draft(rows.session, block, rule=rule, draft_probs=tuple(draft_probs))

    def _append(
        self,
        lines: Sequence[Line],
        logits: Tensor,  # those of each line's last row, [num_lines, vocab_size]
    ) -> None:
        """Appends a token to each block or branch."""
        if not lines:
            return
        places = [Place(owner, line, len(line.drafted.token_ids)) for owner, line in lines]
        tokens, runner_ups = self._chooser.choose(logits, places, self.ahead.num_runner_ups)
        for (_, line), token, others in zip(lines, tokens, runner_ups, strict=True):
            line.extend_draft(token, others)

    def _forward(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        self.num_passes += 1
        return self._runner.forward(chunks)


def completes(one: DraftRows, rows: int) -> bool:
    """Whether a block is asked for that can be drafted once so many rows are fed."""
    return one.session.num_wanted > 0 and rows == one.num_missing


def missing_chunk(one: DraftRows, rows: int) -> SequenceChunk:
    """Returns the next rows to feed; the last one's logits are wanted if they complete it."""
    start = one.cache.length
    token_ids = one.token_ids[start : start + rows]
    return SequenceChunk(one.cache, token_ids, num_logits=int(completes(one, rows)))
