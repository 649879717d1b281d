"""Blocks drafted while the target tests the one before them, one for each likely outcome of that.

Speculative speculative decoding (SSD, 2026, arXiv:2603.03251). An outcome is the number of draft
tokens that are accepted and the target's own token after them. Where a draft token is rejected,
the target's is likely one of the draft's next choices; where all are accepted, the first choice is
the best guess. A branch is the block that follows one outcome, drafted exactly as it would be after
that outcome was committed: which one is used depends on the committed tokens alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from proposer_svc.draft_sampling import DraftToken
from proposer_svc.drafted import Drafted
from specgw.engine.kv_cache import SequenceCache


@dataclass(slots=True, eq=False)
class Branch:
    """The block after one outcome; the rows of `cache` go on with those of the guess and of it."""

    num_accepted: int  # draft tokens of the block that is being tested
    token_id: int  # the guess: the target's own token after those
    length: int  # of the context with both
    cache: SequenceCache
    num_wanted: int
    drafted: Drafted = field(default_factory=Drafted)

    @property
    def last_token_id(self) -> int:
        """The token to feed next."""
        return self.drafted.token_ids[-1] if self.drafted.token_ids else self.token_id

    @property
    def is_drafting(self) -> bool:
        """Whether tokens are missing."""
        return len(self.drafted.token_ids) < self.num_wanted

    def extend_draft(self, token: DraftToken | None, runner_ups: Sequence[int]) -> None:
        """Appends a draft token; a missing one ends the branch."""
        self.drafted.extend(token, runner_ups)
        if token is None:
            self.num_wanted = 0


class Branches:
    """Those of one session, for a block that was sent.

    The trunk is what they all grow from: the session's own rows, which are fed the last token of
    the block first, to see what may follow all of it. There the first branch that follows all of it
    goes on; the others have rows of their own.
    """

    def __init__(
        self, context_length: int, block: Drafted, cache: SequenceCache, max_length: int
    ) -> None:
        """Takes a session's context, the block and its rows, and the most rows there may be."""
        self.context_length = context_length
        self.fan_out: Sequence[int] = ()  # how many guesses to follow after 0, 1, ... all tokens
        self._block = block
        self._cache = cache
        self._max_length = max_length
        self._branches: list[Branch] = []
        self._drafting: list[Branch] = []  # those that were not complete when last looked at
        self._complete: list[Branch] = []  # since they were last taken
        self._has_guesses = self._has_last_guesses = True  # not taken yet
        # As a branch it follows all tokens but the last, guesses that, and drafts one token.
        num_tokens = len(block.token_ids)
        self.trunk = Branch(
            *(num_tokens - 1, block.token_ids[-1], context_length + num_tokens, cache),
            num_wanted=min(1, self.num_wanted(num_tokens)),
        )
        self._drafting.append(self.trunk)

    def num_wanted(self, num_accepted: int) -> int:
        """Returns how many tokens a branch may have: as many as the block before it, or less."""
        room = self._max_length - (self.context_length + num_accepted)
        return max(min(len(self._block.token_ids), room), 0)

    def take_guesses(self) -> list[tuple[int, int]]:
        """Returns outcomes to follow that have just become known: tokens accepted, and the next."""
        guesses: list[tuple[int, int]] = []
        if self._has_guesses:
            self._has_guesses = False
            for rank in range(max(self.fan_out)):  # the best guesses at all places first
                for number, known in enumerate(self._block.runner_ups):
                    if rank < min(self.fan_out[number], len(known)):
                        guesses.append((number, known[rank]))
        if self._has_last_guesses and (first := self.trunk.drafted).token_ids:
            self._has_last_guesses = False
            known = [*first.token_ids, *(first.runner_ups[0] if first.runner_ups else ())]
            number = len(self._block.token_ids)
            guesses += [(number, token_id) for token_id in known[: self.fan_out[number]]]
        return guesses

    def needs_fork(self, num_accepted: int) -> bool:
        """Whether the next branch after so many tokens needs rows of its own."""
        is_last = num_accepted == len(self._block.token_ids)
        return not is_last or any(one.cache is self._cache for one in self._branches)

    def add(self, num_accepted: int, token_id: int, cache: SequenceCache) -> None:
        """Begins a branch."""
        length = self.context_length + num_accepted + 1
        num_wanted = self.num_wanted(num_accepted)
        branch = Branch(num_accepted, token_id, length, cache, num_wanted)
        self._branches.append(branch)
        self._drafting.append(branch)

    def drafting(self) -> list[Branch]:
        """Returns the branches to feed a token to, the trunk among them."""
        complete = [branch for branch in self._drafting if not branch.is_drafting]
        if complete:
            self._drafting = [branch for branch in self._drafting if branch.is_drafting]
            self._complete += complete
        return self._drafting

    def take_complete(self) -> list[Branch]:
        """Returns the branches that have become complete since the last call."""
        self.drafting()
        complete, self._complete = self._complete, []
        return [one for one in complete if one is not self.trunk and one.drafted.token_ids]

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to draft."""
        has_guesses = self._has_last_guesses and bool(self.trunk.drafted.token_ids)
        return not (has_guesses or self.drafting())

    def find(self, num_accepted: int, token_id: int) -> Branch | None:
        """Returns the branch of an outcome, if it has at least one token."""
        for branch in self._branches:
            if branch.num_accepted == num_accepted and branch.token_id == token_id:
                return branch if branch.drafted.token_ids else None
        return None

    def count_tokens(self) -> int:
        """Returns how many tokens were drafted ahead."""
        lines = (self.trunk, *self._branches)
        return sum(len(branch.drafted.token_ids) for branch in lines)

    def forks(self) -> list[SequenceCache]:
        """Returns the rows of the branches that have their own."""
        return [branch.cache for branch in self._branches if branch.cache is not self._cache]
