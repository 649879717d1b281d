"""Chooses which rows the next forward pass feeds, and finds the memory for them."""

from proposer_svc.session_table import Session, SessionTable
from specgw.budget import PREFILL_CHUNK
from specgw.engine.kv_cache import OutOfBlocks


def build_batch(
    table: SessionTable, max_num_batched_tokens: int, mask_rows: int = 0
) -> tuple[list[tuple[Session, int]], list[Session]]:
    """Returns sessions with the number of rows to feed, and sessions without memory for theirs.

    First come those that wait for a block and are nearly ready, the longest waiting first. A long
    prefill takes what they leave, in small chunks so that it does not delay them much.

    Args:
        table: The sessions.
        max_num_batched_tokens: Most rows of the pass, those that drafting adds included.
        mask_rows: Rows that drafting adds to a session's own missing ones.
    """
    work = sorted((session for session in table if session.has_work), key=_urgency)
    rows_left = prefill_left = max_num_batched_tokens
    if work and _is_nearly_ready(work[0]):
        prefill_left = PREFILL_CHUNK
    batch, starved = [], []
    for session in work:
        is_prefill = not _is_nearly_ready(session)
        # As in vLLM: a session whose extra rows do not fit waits for the next pass.
        extra = mask_rows if session.num_wanted else 0
        rows_free = rows_left - extra
        rows = min(session.num_missing, rows_free, prefill_left if is_prefill else rows_free)
        if rows <= 0:
            continue
        if not _reserve(session, table):
            starved.append(session)
            continue
        batch.append((session, rows))
        rows_left -= rows + (extra if rows == session.num_missing else 0)
        prefill_left -= rows if is_prefill else 0
    return batch, starved


def _is_nearly_ready(session: Session) -> bool:
    return session.num_wanted > 0 and session.num_missing <= PREFILL_CHUNK


def _urgency(session: Session) -> tuple[bool, bool, int]:
    return not _is_nearly_ready(session), session.num_wanted == 0, session.last_used


def _reserve(session: Session, table: SessionTable) -> bool:
    """Takes all the memory that the session's block needs, if need be from idle sessions."""
    length = len(session.token_ids) + max(session.num_wanted - 1, 0)
    while True:
        try:
            session.cache.reserve(length)
        except OutOfBlocks:
            if not table.forget_an_idle_session():
                return False
        else:
            return True
