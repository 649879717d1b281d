"""One session's context in the draft model: its token ids and their rows in the KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from proposer_svc.session_table import Session
from specgw.engine.block_hashes import BlockHashes
from specgw.engine.kv_cache import SequenceCache


@dataclass(slots=True, eq=False)
class DraftRows:
    """The rows of `cache` are those of `token_ids` and then of the leading `draft_token_ids`.

    As far as they were fed; they are kept from round to round. `token_ids` are the draft model's
    ids: the session's own list where both models share a vocabulary. They only grow.
    """

    session: Session
    token_ids: list[int]
    cache: SequenceCache
    num_draftable_ids: int  # ids from here on must not be drafted
    prefill_length: int  # rows to feed even if no block is asked for
    draft_token_ids: list[int] = field(default_factory=list)
    block_hashes: BlockHashes = field(init=False)

    def __post_init__(self) -> None:
        self.block_hashes = BlockHashes(self.session.cache_salt)

    @property
    def num_missing(self) -> int:
        """Rows to feed before the next token can be drafted. At least one while a block is due."""
        return len(self.token_ids) - self.cache.length

    @property
    def has_work(self) -> bool:
        """Whether a block is asked for, or the first prefill is not over."""
        return self.session.num_wanted > 0 or self.cache.length < self.prefill_length

    def reuse(self) -> None:
        """Begins an empty cache with rows that other sessions have left, but for the last token's.

        Its logits are needed.
        """
        if not self.cache.length:
            self.cache.adopt(self.block_hashes.within(self.token_ids, len(self.token_ids) - 1))

    def publish(self) -> None:
        """Lets other sessions use the rows of `token_ids`, never those of draft tokens."""
        length = min(self.cache.length, len(self.token_ids))
        self.cache.publish(self.block_hashes.within(self.token_ids, length))

    def keep_agreed(self, committed: Sequence[int]) -> None:
        """Drops the rows of draft tokens that differ from what was appended to `token_ids`."""
        num_agreed = 0
        for drafted, token_id in zip(self.draft_token_ids, committed, strict=False):
            if drafted != token_id:
                break
            num_agreed += 1
        self.draft_token_ids = []
        num_right = len(self.token_ids) - len(committed) + num_agreed
        # The last token is always fed again: the next draft token comes from its logits.
        self.cache.truncate(min(num_right, len(self.token_ids) - 1))

    def forget(self) -> None:
        """Gives the KV cache back; the next block begins with a prefill."""
        self.cache.release()
        self.draft_token_ids = []
        self.prefill_length = 0
