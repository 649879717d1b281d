"""Begins the branches of all sessions, and says which are to be fed next. Runs no model."""

import itertools
from collections.abc import Collection, Sequence

from proposer_svc.branches import Branch, Branches
from proposer_svc.draft_rows import DraftRows
from proposer_svc.run_ahead import RunAhead
from specgw.engine.kv_cache import Fork, KVCache, OutOfBlocks

Line = tuple[DraftRows, DraftRows | Branch]
"""What a row of a pass is for: a session's block, or one of its branches."""


class Branching:
    """Branches live in the room that nobody else needs: they end where there is none."""

    def __init__(self, ahead: RunAhead, pool: KVCache) -> None:
        self._ahead = ahead
        self._pool = pool

    def lines(self, sessions: Collection[DraftRows], num_rows: int) -> list[Line]:
        """Returns what to feed a token to, at most so many, of sessions whose block was sent."""
        if not self._ahead.is_on or num_rows <= 0:
            return []
        idle = [one for one in sessions if one.may_run_ahead]
        for one in idle:
            if one.branches is None:
                self._begin(one, len(idle))
        self._grow([one for one in idle if one.branches is not None])
        lines: list[Line] = [
            (one, branch)
            for one in idle
            if one.branches is not None
            for branch in one.branches.drafting()
        ]
        return lines[:num_rows]

    def _begin(self, one: DraftRows, num_sessions: int) -> None:
        """Makes room behind a block for its last row, and for what may follow all of it."""
        branches = one.begin_ahead()
        num_tokens = len(one.drafted.token_ids)
        branches.fan_out = self._ahead.fan_out(num_tokens, num_sessions)
        num_rows = branches.trunk.length + branches.num_wanted(num_tokens)
        try:
            one.cache.reserve(num_rows)
        except OutOfBlocks:
            one.is_stopped, one.branches = True, None

    def _grow(self, sessions: Sequence[DraftRows]) -> None:
        """Begins the branches whose guesses are known, as far as there is memory for their rows."""
        forks: list[tuple[Branches, int, int, Fork]] = []
        for one, (num_accepted, token_id) in _guesses(sessions):
            branches = one.branches
            assert branches is not None
            if branches.needs_fork(num_accepted):
                num_shared = branches.context_length + num_accepted
                fork = Fork(one.cache, num_shared, num_shared + branches.num_wanted(num_accepted))
                forks.append((branches, num_accepted, token_id, fork))
            else:
                branches.add(num_accepted, token_id, one.cache)
        del forks[self._pool.num_fitting([fork for *_, fork in forks]) :]
        caches = self._pool.fork([fork for *_, fork in forks])
        for (branches, num_accepted, token_id, _), cache in zip(forks, caches, strict=True):
            branches.add(num_accepted, token_id, cache)


def _guesses(sessions: Sequence[DraftRows]) -> list[tuple[DraftRows, tuple[int, int]]]:
    """Returns the guesses to follow of all sessions, each session's first one first."""
    taken = [one.branches.take_guesses() if one.branches is not None else [] for one in sessions]
    turns = itertools.zip_longest(*taken)
    return [
        (one, guess)
        for turn in turns
        for one, guess in zip(sessions, turn, strict=True)
        if guess is not None
    ]


def tokens_beyond_context(owner: DraftRows, line: DraftRows | Branch) -> list[int]:
    """Returns what follows the committed context in a line's rows: the tokens of an outcome too."""
    if isinstance(line, DraftRows):
        return line.drafted.token_ids
    accepted = owner.drafted.token_ids[: line.num_accepted]
    return [*accepted, line.token_id, *line.drafted.token_ids]
