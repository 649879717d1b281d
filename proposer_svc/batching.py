"""Chooses which rows the next forward pass feeds, and finds the memory for them."""

from collections.abc import Collection, Iterable

from proposer_svc.draft_rows import DraftRows
from specgw.budget import PREFILL_CHUNK
from specgw.engine.kv_cache import OutOfBlocks


def build_batch(
    sessions: Collection[DraftRows],
    idle_before: int,
    max_num_batched_tokens: int,
    mask_rows: int = 0,
) -> tuple[list[tuple[DraftRows, int]], list[DraftRows]]:
    """Returns sessions with the number of rows to feed, and sessions without memory for theirs.

    First come those that wait for a block and are nearly ready, the longest waiting first. A long
    prefill takes what they leave, in small chunks so that it does not delay them much.

    Args:
        sessions: The rows of every session.
        idle_before: Sessions last used before this count give their memory to others.
        max_num_batched_tokens: Most rows of the pass, those that drafting adds included.
        mask_rows: Most rows that drafting adds to a session's own missing ones.
    """
    work = [one for one in sessions if one.has_work]
    for one in work:
        one.reuse()
    work.sort(key=_urgency)
    rows_left = prefill_left = max_num_batched_tokens
    if work and _is_nearly_ready(work[0]):
        prefill_left = PREFILL_CHUNK
    batch, starved = [], []
    for one in work:
        is_prefill = not _is_nearly_ready(one)
        # As in vLLM: a session whose extra rows do not fit waits for the next pass.
        extra = min(mask_rows, max(one.session.num_wanted - 1, 0))
        rows_free = rows_left - extra
        rows = min(one.num_missing, rows_free, prefill_left if is_prefill else rows_free)
        if rows <= 0:
            continue
        if not _reserve(one, sessions, idle_before):
            starved.append(one)
            continue
        batch.append((one, rows))
        rows_left -= rows + (extra if rows == one.num_missing else 0)
        prefill_left -= rows if is_prefill else 0
    return batch, starved


def _is_nearly_ready(one: DraftRows) -> bool:
    return one.session.num_wanted > 0 and one.num_missing <= PREFILL_CHUNK


def _urgency(one: DraftRows) -> tuple[bool, bool, int]:
    return not _is_nearly_ready(one), one.session.num_wanted == 0, one.session.last_used


def reserve(one: DraftRows, num_draft_rows: int, sessions: Iterable[DraftRows]) -> bool:
    """Makes room for so many rows beyond a session's context, if need be in place of branches."""
    while True:
        try:
            one.cache.reserve(len(one.token_ids) + num_draft_rows)
        except OutOfBlocks:
            if not _drop_branches(sessions):
                return False
        else:
            return True


def _reserve(one: DraftRows, sessions: Collection[DraftRows], idle_before: int) -> bool:
    """Takes all the memory that the session's block needs, if need be from idle sessions."""
    while not reserve(one, max(one.max_draft_tokens - 1, 0), sessions):
        if not _forget_an_idle_session(sessions, idle_before):
            return False
    return True


def _drop_branches(sessions: Iterable[DraftRows]) -> bool:
    """Ends all branches, until the next commits; returns whether there were any."""
    branching = [one for one in sessions if one.branches is not None]
    for one in branching:
        one.drop_branches()
        one.is_stopped = True
    return bool(branching)


def _forget_an_idle_session(sessions: Collection[DraftRows], idle_before: int) -> bool:
    """Frees the rows of the session that was not asked for the longest time, if one is idle."""
    idle = [
        one
        for one in sessions
        if one.cache.length and not one.has_work and one.session.last_used < idle_before
    ]
    if not idle:
        return False
    min(idle, key=lambda one: one.session.last_used).forget()
    return True
