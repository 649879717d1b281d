"""Drafts greedily with a small model, one token of every session per forward pass.

Where tokens become draft tokens. Which sessions take part, and what becomes of their blocks, is
`proposer.py`'s business.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from proposer_svc.session_table import Session
from specgw.engine.model_runner import ModelRunner, SequenceChunk


def draft(runner: ModelRunner, batch: Sequence[tuple[Session, int]]) -> list[Session]:
    """Feeds the given number of missing rows of each session, and drafts where none is left.

    Returns:
        The sessions whose block is ready: `draft_token_ids`, empty if the model gave no usable
        logits.
    """
    ready = [session for session, rows in batch if _completes(session, rows)]
    logits = runner.forward([_missing_chunk(session, rows) for session, rows in batch])
    drafting = _append_most_probable(ready, logits)
    while drafting:
        last = [SequenceChunk(one.cache, one.draft_token_ids[-1:], 1) for one in drafting]
        drafting = _append_most_probable(drafting, runner.forward(last))
    return ready


def _completes(session: Session, rows: int) -> bool:
    return session.num_wanted > 0 and rows == session.num_missing


def _missing_chunk(session: Session, rows: int) -> SequenceChunk:
    start = session.cache.length
    token_ids = session.token_ids[start : start + rows]
    return SequenceChunk(session.cache, token_ids, num_logits=int(_completes(session, rows)))


def _append_most_probable(sessions: Sequence[Session], logits: Tensor) -> list[Session]:
    """Appends the most probable token to each block; returns the sessions that want more."""
    # logits: those of each session's last row, [num_sessions, vocab_size]
    if not sessions:
        return []
    limits = [session.num_draftable_ids for session in sessions]
    values, token_ids = _without_padding(logits, limits).max(dim=-1)  # both [num_sessions]
    are_finite = values.isfinite().tolist()
    for session, token_id, is_finite in zip(sessions, token_ids.tolist(), are_finite, strict=True):
        if is_finite:
            session.draft_token_ids.append(token_id)
        else:
            session.draft_token_ids = []
    return [one for one in sessions if 0 < len(one.draft_token_ids) < one.num_wanted]


def _without_padding(logits: Tensor, limits: Sequence[int]) -> Tensor:
    """Leaves each row the ids below its limit."""
    logits = logits[:, : max(limits)]  # [num_sessions, max limit]
    if min(limits) == max(limits):
        return logits
    ids = torch.arange(logits.shape[1], device=logits.device)
    beyond = ids >= torch.tensor(limits, device=logits.device).unsqueeze(1)
    return logits.masked_fill(beyond, -torch.inf)
