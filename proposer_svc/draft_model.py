"""Drafts with a small model, one token of every session per forward pass.

Where contexts become draft tokens. Whose contexts they are, and where blocks go, is `proposer.py`'s
business.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from proposer_svc.batching import build_batch
from proposer_svc.draft_chooser import DraftChooser
from proposer_svc.draft_rows import DraftRows
from proposer_svc.draft_vocabulary import DraftVocabulary, SharedVocabulary
from proposer_svc.drafter import Draft
from proposer_svc.run_ahead import RunAhead
from proposer_svc.session_table import Session, SessionTable
from specgw.engine.kv_cache import OutOfBlocks
from specgw.engine.model_runner import ModelRunner, SequenceChunk
from specgw.hidden import HiddenFormat
from specgw.types import ModelDescription, UndraftedReason, VocabMappingSummary

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
    ) -> None:
        """Takes a loaded model.

        Its vocabulary is the target's unless told otherwise. Without a chooser it drafts greedily,
        and without `run_ahead` never beyond a block.
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
        num_ahead = rows.num_ahead if rows.num_sent else 0
        rows.extend(token_ids)
        self.ahead.count_round(num_ahead, len(rows.draft_token_ids))

    def room(self, session: Session) -> int:
        return self._rows[session].room

    def stop(self, session: Session) -> None:
        self._rows[session].forget()

    def close(self, session: Session) -> None:
        if rows := self._rows.pop(session, None):
            rows.cache.release()
        self._chooser.close(session)

    def enter_thread(self) -> None:
        torch.get_num_threads()  # without this call, OpenMP ignores torch's setting in this thread

    def has_work(self) -> bool:
        return any(rows.has_work for rows in self._rows.values())

    def can_run_ahead(self) -> bool:
        if not self.ahead.is_on or self.has_work():
            return False
        return any(rows.can_run_ahead for rows in self._rows.values())

    def run_ahead(self) -> None:
        sessions = [one for one in self._rows.values() if one.can_run_ahead]
        for one in sessions:
            one.is_stopped = not _has_memory(one, len(one.draft_token_ids))
        sessions = [one for one in sessions if not one.is_stopped]
        if not sessions:
            return
        try:
            self._append(sessions, self._forward_last(sessions))
            self.ahead.count_pass(len(sessions))
        except Exception:
            logger.exception("running ahead failed", extra={"session_count": len(sessions)})
            for one in sessions:
                one.forget()

    def step(self, table: SessionTable) -> list[Draft]:
        begun = [one for one in self._rows.values() if one.has_begun]
        for one in begun:
            if not _has_memory(one, one.max_draft_tokens - 1):
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
            return refusals + [Draft(one.session, reason=UndraftedReason.ERROR) for one in sessions]
        return refusals + [self._answer(rows) for rows in ready]

    def _draft(
        self, batch: Sequence[tuple[DraftRows, int]], begun: Sequence[DraftRows]
    ) -> list[DraftRows]:
        """Feeds the given number of missing rows of each session, and drafts where none is left.

        Goes on with blocks that were begun ahead.

        Returns:
            The sessions whose block is ready: `draft_token_ids`, empty if the model gave no usable
            logits.
        """
        ready = [one for one, rows in batch if completes(one, rows)]
        drafting = [one for one in begun if one.is_drafting]
        if batch:
            logits = self._forward([missing_chunk(one, rows) for one, rows in batch])
            for one, _ in batch:
                one.publish()
            drafting += self._append(ready, logits)
        while drafting:
            drafting = self._append(drafting, self._forward_last(drafting))
        return [*ready, *begun]

    def _answer(self, rows: DraftRows) -> Draft:
        if not rows.draft_token_ids:
            return Draft(rows.session, reason=UndraftedReason.ERROR)
        token_ids, draft_probs = rows.take_block()
        block = rows.context.to_target(token_ids, rows.session.num_wanted)
        if not block:
            return Draft(rows.session, reason=UndraftedReason.EMPTY)
        rule = self._chooser.rule(rows, has_probs=bool(draft_probs))
        return Draft(rows.session, block, rule=rule, draft_probs=tuple(draft_probs))

    def _append(self, sessions: Sequence[DraftRows], logits: Tensor) -> list[DraftRows]:
        """Appends a token to each block; returns the sessions that want more."""
        # logits: those of each session's last row, [num_sessions, vocab_size]
        if not sessions:
            return []
        rows = [(one, len(one.draft_token_ids)) for one in sessions]
        tokens = self._chooser.choose(logits, rows)
        for one, token in zip(sessions, tokens, strict=True):
            one.extend_draft([token])
        return [one for one in sessions if one.is_drafting]

    def _forward_last(self, sessions: Sequence[DraftRows]) -> Tensor:
        """Feeds the last draft token of each session."""
        return self._forward(
            [SequenceChunk(one.cache, one.draft_token_ids[-1:], 1) for one in sessions]
        )

    def _forward(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        self.num_passes += 1
        return self._runner.forward(chunks)


def _has_memory(one: DraftRows, num_draft_rows: int) -> bool:
    """Whether the cache could be made to hold so many draft rows beyond the context."""
    try:
        one.cache.reserve(len(one.token_ids) + num_draft_rows)
    except OutOfBlocks:
        return False
    return True


def completes(one: DraftRows, rows: int) -> bool:
    """Whether a block is asked for that can be drafted once so many rows are fed."""
    return one.session.num_wanted > 0 and rows == one.num_missing


def missing_chunk(one: DraftRows, rows: int) -> SequenceChunk:
    """Returns the next rows to feed; the last one's logits are wanted if they complete it."""
    start = one.cache.length
    token_ids = one.token_ids[start : start + rows]
    return SequenceChunk(one.cache, token_ids, num_logits=int(completes(one, rows)))
