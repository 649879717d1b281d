"""Drafts greedily with a small model, one token of every session per forward pass.

Where contexts become draft tokens. Whose contexts they are, and where blocks go, is `proposer.py`'s
business.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from proposer_svc.batching import build_batch
from proposer_svc.draft_rows import DraftRows
from proposer_svc.drafter import Draft
from proposer_svc.session_table import Session, SessionTable
from specgw.config import EngineArgs
from specgw.engine.loading import draft_options, load_model
from specgw.engine.model_runner import ModelRunner, SequenceChunk
from specgw.handshake import vocabulary_mismatches
from specgw.model_files import resolve_model
from specgw.types import ModelDescription, UndraftedReason
from specgw.vocab import tokenizer_size

logger = logging.getLogger(__name__)


def load_draft_model(args: EngineArgs) -> "DraftModelDrafter":
    """Loads the configured draft model.

    Raises:
        ConfigError: if it cannot be loaded.
    """
    assert args.speculative_config is not None, "there is no draft model without speculation"
    return DraftModelDrafter(
        load_model(draft_options(args)),
        args.specgw.proposer.max_num_batched_tokens,
        tokenizer_size(resolve_model(args.speculative_config.model)),
    )


class DraftModelDrafter:
    """Implements `Drafter` with a model that has the target's vocabulary."""

    method = "draft_model"
    parallel_drafting = False

    def __init__(
        self, runner: ModelRunner, max_num_batched_tokens: int, tokenizer_size: int | None = None
    ) -> None:
        """Takes a loaded model; `tokenizer_size` is the number of its ids that mean something."""
        self.description = runner.description
        self.max_num_batched_tokens = max_num_batched_tokens
        self.kv_capacity_tokens = runner.kv_cache.capacity_tokens
        self._runner = runner
        self._num_own_ids = tokenizer_size or runner.vocab_size
        self._rows: dict[Session, DraftRows] = {}

    @property
    def kv_used_tokens(self) -> int:
        return self._runner.kv_cache.used_tokens

    def mismatches(self, target: ModelDescription) -> list[str]:
        return vocabulary_mismatches(target, self.description)

    def num_context_ids(self, target: ModelDescription) -> int:
        return min(target.vocab_size, self._runner.vocab_size)

    def open(self, session: Session) -> None:
        length = len(session.token_ids)
        self._rows[session] = DraftRows(
            session,
            session.token_ids,
            self._runner.kv_cache.new_sequence(),
            num_draftable_ids=min(session.num_ids, self._num_own_ids),
            prefill_length=length if length <= self._runner.max_model_len else 0,
        )

    def commit(self, session: Session, token_ids: Sequence[int]) -> None:
        self._rows[session].keep_agreed(token_ids)

    def room(self, session: Session) -> int:
        # Every token of the context is fed, and every draft token but the last.
        return self._runner.max_model_len - len(self._rows[session].token_ids) + 1

    def stop(self, session: Session) -> None:
        self._rows[session].forget()

    def close(self, session: Session) -> None:
        self._rows.pop(session).cache.release()

    def enter_thread(self) -> None:
        torch.get_num_threads()  # without this call, OpenMP ignores torch's setting in this thread

    def has_work(self) -> bool:
        return any(rows.has_work for rows in self._rows.values())

    def step(self, table: SessionTable) -> list[Draft]:
        batch, starved = build_batch(
            self._rows.values(), table.idle_before, self.max_num_batched_tokens
        )
        for rows in starved:
            rows.forget()
        refusals = [Draft(rows.session, reason=UndraftedReason.NO_MEMORY) for rows in starved]
        if not batch:
            return refusals
        try:
            ready = draft(self._runner, batch)
        except Exception:
            logger.exception("drafting failed", extra={"session_count": len(batch)})
            return refusals + [
                Draft(rows.session, reason=UndraftedReason.ERROR) for rows, _ in batch
            ]
        return refusals + [_draft(rows) for rows in ready]


def _draft(rows: DraftRows) -> Draft:
    reason = None if rows.draft_token_ids else UndraftedReason.ERROR
    return Draft(rows.session, tuple(rows.draft_token_ids), reason)


def draft(runner: ModelRunner, batch: Sequence[tuple[DraftRows, int]]) -> list[DraftRows]:
    """Feeds the given number of missing rows of each session, and drafts where none is left.

    Returns:
        The sessions whose block is ready: `draft_token_ids`, empty if the model gave no usable
        logits.
    """
    ready = [one for one, rows in batch if _completes(one, rows)]
    logits = runner.forward([_missing_chunk(one, rows) for one, rows in batch])
    for one, _ in batch:
        one.publish()
    drafting = _append_most_probable(ready, logits)
    while drafting:
        last = [SequenceChunk(one.cache, one.draft_token_ids[-1:], 1) for one in drafting]
        drafting = _append_most_probable(drafting, runner.forward(last))
    return ready


def _completes(one: DraftRows, rows: int) -> bool:
    return one.session.num_wanted > 0 and rows == one.num_missing


def _missing_chunk(one: DraftRows, rows: int) -> SequenceChunk:
    start = one.cache.length
    token_ids = one.token_ids[start : start + rows]
    return SequenceChunk(one.cache, token_ids, num_logits=int(_completes(one, rows)))


def _append_most_probable(sessions: Sequence[DraftRows], logits: Tensor) -> list[DraftRows]:
    """Appends the most probable token to each block; returns the sessions that want more."""
    # logits: those of each session's last row, [num_sessions, vocab_size]
    if not sessions:
        return []
    limits = [one.num_draftable_ids for one in sessions]
    values, token_ids = _without_padding(logits, limits).max(dim=-1)  # both [num_sessions]
    are_finite = values.isfinite().tolist()
    for one, token_id, is_finite in zip(sessions, token_ids.tolist(), are_finite, strict=True):
        if is_finite:
            one.draft_token_ids.append(token_id)
        else:
            one.draft_token_ids = []
    return [one for one in sessions if 0 < len(one.draft_token_ids) < one.session.num_wanted]


def _without_padding(logits: Tensor, limits: Sequence[int]) -> Tensor:
    """Leaves each row the ids below its limit."""
    logits = logits[:, : max(limits)]  # [num_sessions, max limit]
    if min(limits) == max(limits):
        return logits
    ids = torch.arange(logits.shape[1], device=logits.device)
    beyond = ids >= torch.tensor(limits, device=logits.device).unsqueeze(1)
    return logits.masked_fill(beyond, -torch.inf)
