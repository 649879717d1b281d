"""One session's context in the draft model: its token ids and their rows in the KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from proposer_svc.branches import Branch, Branches
from proposer_svc.draft_sampling import DraftToken
from proposer_svc.draft_vocabulary import DraftContext, SessionVocabulary
from proposer_svc.drafted import Drafted
from proposer_svc.session_table import Session
from specgw.engine.block_hashes import BlockHashes
from specgw.engine.kv_cache import SequenceCache
from specgw.types import TokenProbs


@dataclass(slots=True, eq=False)
class DraftRows:
    """The rows of `cache` are those of `token_ids`, then of the tokens that `drafted` begins with.

    As far as they were fed; they are kept from round to round, and so far as they are right. Behind
    them may be those of a branch.
    """

    session: Session
    vocabulary: SessionVocabulary
    context: DraftContext
    cache: SequenceCache
    num_choices: int  # ids that draft tokens are chosen from
    prefill_length: int  # rows to feed even if no block is asked for
    max_length: int  # rows that there may be
    keeps_drafts: bool = True  # whether draft tokens have rows when a block is done
    drafted: Drafted = field(default_factory=Drafted)
    is_sent: bool = False  # whether the verifier has what was drafted
    sent_at: float = 0.0
    branches: Branches | None = None  # what may follow the block that was sent
    is_stopped: bool = False  # no memory to run ahead until the next commit
    block_hashes: BlockHashes = field(init=False)

    def __post_init__(self) -> None:
        self.block_hashes = BlockHashes(self.session.cache_salt)

    @property
    def token_ids(self) -> list[int]:
        """The context in the draft model's ids."""
        return self.context.token_ids

    @property
    def room(self) -> int:
        """Most draft tokens that may follow the context."""
        if not self.token_ids:
            return 0  # all that the target has is special tokens that are no text to the draft
        # Every token of the context is fed, and every draft token but the last.
        return self.max_length - len(self.token_ids) + 1

    @property
    def max_draft_tokens(self) -> int:
        """Most draft tokens of the block that is asked for."""
        return min(self.context.most_draft_tokens(self.session.num_wanted), self.room)

    @property
    def is_drafting(self) -> bool:
        """Whether the block has begun and is not complete."""
        num_wanted = self.session.num_wanted
        token_ids = self.drafted.token_ids
        return 0 < len(token_ids) < self.max_draft_tokens and not self.context.is_enough(
            token_ids, num_wanted
        )

    @property
    def num_missing(self) -> int:
        """Rows to feed before the next token can be drafted.

        At least one while a block is due, unless it has begun already.
        """
        return len(self.token_ids) - self.cache.length

    @property
    def length(self) -> int:
        """Tokens of the context that the draft tokens follow."""
        return len(self.token_ids)

    @property
    def last_token_id(self) -> int:
        """The draft token to feed next."""
        return self.drafted.token_ids[-1]

    @property
    def num_ahead(self) -> int:
        """Tokens drafted beyond the block that was sent."""
        return self.branches.count_tokens() if self.branches is not None else 0

    @property
    def has_begun(self) -> bool:
        """Whether the block that is asked for was begun ahead."""
        return self.session.num_wanted > 0 and not self.is_sent and bool(self.drafted.token_ids)

    @property
    def may_run_ahead(self) -> bool:
        """Whether a block was sent, and nothing else is to be done.

        What follows an outcome is known only where draft tokens are tokens of the target.
        """
        is_free = self.is_sent and not (self.is_stopped or self.has_work)
        return is_free and self.vocabulary.has_target_ids

    @property
    def can_run_ahead(self) -> bool:
        """Whether there is something to draft that may follow the block that was sent."""
        return self.may_run_ahead and (self.branches is None or not self.branches.is_done)

    def begin_ahead(self) -> Branches:
        """Begins what may follow the block that was sent."""
        self.branches = Branches(len(self.token_ids), self.drafted, self.cache, self.max_length)
        return self.branches

    def take_block(self) -> tuple[list[int], list[TokenProbs]]:
        """Returns the draft tokens of the block that is asked for, and notes that they are sent."""
        num_sent = min(len(self.drafted.token_ids), self.max_draft_tokens)
        self.drafted.cut(num_sent)
        self.cache.truncate(len(self.token_ids) + num_sent - 1)
        self.is_sent = True
        return self.drafted.token_ids, self.drafted.probs

    def take_ahead(self, num_tokens: int) -> int:
        """Notes that the verifier tests the first tokens of the block that it was sent ahead.

        Returns how many those are: none if the block is not known.
        """
        if not self.drafted.token_ids or self.is_sent:
            return 0
        self.drafted.cut(num_tokens)
        num_taken = len(self.drafted.token_ids)
        self.cache.truncate(len(self.token_ids) + num_taken - 1)
        self.is_sent = True
        return num_taken

    @property
    def has_work(self) -> bool:
        """Whether a block is asked for, or the first prefill is not over."""
        # A re-tokenized context may have become shorter than what was to be fed first.
        prefill_length = min(self.prefill_length, len(self.token_ids))
        return self.session.num_wanted > 0 or self.cache.length < prefill_length

    def reuse(self) -> None:
        """Begins an empty cache with rows that other sessions have left, but for the last token's.

        Its logits are needed.
        """
        if not self.cache.length:
            length = min(self.context.num_settled, len(self.token_ids) - 1)
            self.cache.adopt(self.block_hashes.within(self.token_ids, length))

    def publish(self) -> None:
        """Lets other sessions use the rows that stay, never those of draft tokens."""
        length = min(self.cache.length, self.context.num_settled)
        self.cache.publish(self.block_hashes.within(self.token_ids, length))

    def extend_draft(self, token: DraftToken | None, runner_ups: Sequence[int] = ()) -> None:
        """Appends a draft token; a missing one makes the whole block unusable: it is dropped."""
        self.drafted.extend(token, runner_ups)

    def extend_block(self, tokens: Sequence[DraftToken | None]) -> None:
        """Appends draft tokens; if one is missing, all are dropped."""
        for token in tokens:
            self.drafted.extend(token)
        if None in tokens:
            self.drafted.clear()

    def extend(self, committed: Sequence[int]) -> None:
        """Brings the context up to date with the target's tokens; keeps the rows still right."""
        start, replaced = self.context.extend(committed)
        self.is_stopped = False
        branch = self._branch_of(len(committed), start, replaced)
        if branch is not None:
            self._take_up(branch)
            return
        self.drop_branches()
        held = [*replaced, *self.drafted.token_ids]
        agreed = takewhile(
            lambda pair: pair[0] == pair[1], zip(held, self.token_ids[start:], strict=False)
        )
        num_right = start + sum(1 for _ in agreed)
        has_more = len(held) > num_right - start and self.cache.length >= num_right
        # A token with a law that the verifier has looked at must not be offered once more.
        may_keep = self.keeps_drafts and not self.drafted.probs
        if may_keep and num_right == len(self.token_ids) and has_more:
            self._keep_rest(num_right - start - len(replaced))
            return
        self._drop_draft()
        # The last token is always fed again: the next draft token comes from its logits.
        self.cache.truncate(max(min(num_right, len(self.token_ids) - 1), 0))

    def rank_of(self, committed: Sequence[int]) -> tuple[int, int | None, int]:
        """Returns the place of a committed token among the runner-ups of the one that it replaces.

        Returns:
            How many draft tokens were accepted, the place, none if it is not among them, and the
            number of runner-ups.
        """
        num_accepted = len(committed) - 1
        known: Sequence[int] = ()
        if num_accepted < len(self.drafted.runner_ups):
            known = self.drafted.runner_ups[num_accepted]
        rank = known.index(committed[-1]) if committed[-1] in known else None
        return num_accepted, rank, len(known)

    def _branch_of(self, num_committed: int, start: int, replaced: Sequence[int]) -> Branch | None:
        """Returns the branch of the outcome that was committed.

        None if its tokens read otherwise than they were drafted, be it only as fewer or more: each
        was drafted for one place.
        """
        num_accepted = num_committed - 1
        if self.branches is None or num_accepted < 0:
            return None
        if num_accepted > len(self.drafted.token_ids):
            return None
        read = self.token_ids[start:]
        if read[:-1] != [*replaced, *self.drafted.token_ids[:num_accepted]]:
            return None
        return self.branches.find(num_accepted, read[-1]) if read else None

    def _take_up(self, branch: Branch) -> None:
        """Goes on with a branch; the others are dropped."""
        assert self.branches is not None
        self.cache.pool.release_forks(
            [cache for cache in self.branches.forks() if cache is not branch.cache]
        )
        if branch.cache is not self.cache:
            self.cache.become(branch.cache)
        self.branches, self.drafted, self.is_sent = None, branch.drafted, False

    def drop_branches(self) -> None:
        """Gives up what was drafted beyond the block that was sent."""
        if self.branches is not None:
            self.cache.pool.release_forks(self.branches.forks())
            self.cache.truncate(self.branches.trunk.length)
            self.branches = None

    def _keep_rest(self, num_committed: int) -> None:
        """Lets the draft tokens beyond those committed begin the next block."""
        self.is_sent = False
        self.drafted.drop_first(num_committed)
        self.cache.truncate(len(self.token_ids) + len(self.drafted.token_ids) - 1)

    def drop_ahead(self) -> None:
        """Gives up a block that has begun."""
        self._drop_draft()
        self.cache.truncate(len(self.token_ids) - 1)

    def _drop_draft(self) -> None:
        self.drafted, self.is_sent = Drafted(), False

    def forget(self) -> None:
        """Gives the KV cache back; the next block begins with a prefill."""
        self.drop_branches()
        self.cache.release()
        self._drop_draft()
        self.prefill_length = 0
