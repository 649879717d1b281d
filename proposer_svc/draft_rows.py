"""One session's context in the draft model: its token ids and their rows in the KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from proposer_svc.draft_sampling import DraftToken
from proposer_svc.draft_vocabulary import DraftContext, SessionVocabulary
from proposer_svc.session_table import Session
from specgw.engine.block_hashes import BlockHashes
from specgw.engine.kv_cache import SequenceCache
from specgw.types import TokenProbs


@dataclass(slots=True, eq=False)
class DraftRows:
    """The rows of `cache` are those of `token_ids` and then of the leading `draft_token_ids`.

    As far as they were fed; they are kept from round to round, and so far as they are right.
    """

    session: Session
    vocabulary: SessionVocabulary
    context: DraftContext
    cache: SequenceCache
    num_choices: int  # ids that draft tokens are chosen from
    prefill_length: int  # rows to feed even if no block is asked for
    max_length: int  # rows that there may be
    keeps_drafts: bool = True  # whether draft tokens have rows when a block is done
    draft_token_ids: list[int] = field(default_factory=list)
    draft_probs: list[TokenProbs] = field(default_factory=list)  # of all draft tokens, or of none
    num_sent: int = 0  # leading draft tokens that the verifier has; those after them run ahead
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
        return 0 < len(self.draft_token_ids) < self.max_draft_tokens and not self.context.is_enough(
            self.draft_token_ids, num_wanted
        )

    @property
    def num_missing(self) -> int:
        """Rows to feed before the next token can be drafted.

        At least one while a block is due, unless it has begun already.
        """
        return len(self.token_ids) - self.cache.length

    @property
    def num_ahead(self) -> int:
        """Draft tokens that the verifier has not seen."""
        return len(self.draft_token_ids) - self.num_sent

    @property
    def has_begun(self) -> bool:
        """Whether the block that is asked for was begun ahead."""
        return self.session.num_wanted > 0 and self.num_sent == 0 and bool(self.draft_token_ids)

    @property
    def can_run_ahead(self) -> bool:
        """Whether the block was sent, and less than a guess and another block follow it."""
        is_done = self.num_ahead > self.num_sent or len(self.draft_token_ids) >= self.room
        return self.num_sent > 0 and not (is_done or self.is_stopped or self.has_work)

    def take_block(self) -> tuple[list[int], list[TokenProbs]]:
        """Returns the draft tokens of the block that is asked for, and notes that they are sent."""
        self.num_sent = min(len(self.draft_token_ids), self.max_draft_tokens)
        return self.draft_token_ids[: self.num_sent], self.draft_probs[: self.num_sent]

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

    def extend_draft(self, tokens: Sequence[DraftToken | None]) -> None:
        """Appends draft tokens; a missing one makes the whole block unusable: it is dropped."""
        usable = [token for token in tokens if token is not None]
        if len(usable) < len(tokens):
            self._drop_draft()
            return
        self.draft_token_ids += [token.token_id for token in usable]
        self.draft_probs += [token.probs for token in usable if token.probs is not None]

    def extend(self, committed: Sequence[int]) -> None:
        """Brings the context up to date with the target's tokens; keeps the rows still right."""
        start, replaced = self.context.extend(committed)
        held = [*replaced, *self.draft_token_ids]
        agreed = takewhile(
            lambda pair: pair[0] == pair[1], zip(held, self.token_ids[start:], strict=False)
        )
        num_right = start + sum(1 for _ in agreed)
        self.is_stopped = False
        has_more = len(held) > num_right - start and self.cache.length >= num_right
        num_agreed = num_right - start - len(replaced)
        # A token with a law must not be offered once more if the verifier has looked at it, nor at
        # another place than the one whose random numbers it was drawn with.
        is_unseen = num_agreed > self.num_sent and num_agreed == len(committed)
        is_usable = is_unseen or not self.draft_probs
        if self.keeps_drafts and num_right == len(self.token_ids) and has_more and is_usable:
            self._keep_ahead(num_agreed)
            return
        self._drop_draft()
        # The last token is always fed again: the next draft token comes from its logits.
        self.cache.truncate(max(min(num_right, len(self.token_ids) - 1), 0))

    def _keep_ahead(self, num_committed: int) -> None:
        """Lets the draft tokens beyond those committed begin the next block."""
        self.num_sent = 0
        del self.draft_token_ids[:num_committed]
        del self.draft_probs[:num_committed]

    def drop_ahead(self) -> None:
        """Gives up a block that has begun."""
        self._drop_draft()
        self.cache.truncate(len(self.token_ids) - 1)

    def _drop_draft(self) -> None:
        self.draft_token_ids, self.draft_probs, self.num_sent = [], [], 0

    def forget(self) -> None:
        """Gives the KV cache back; the next block begins with a prefill."""
        self.cache.release()
        self._drop_draft()
        self.prefill_length = 0
