"""What a draft model's token ids are to a target: the seam between vocabularies and drafting.

A drafter works in the draft model's ids. A `DraftVocabulary` says how a session's context reads in
those, and what a block of them is to the target.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from proposer_svc.session_table import Session
from specgw.handshake import vocabulary_mismatches
from specgw.types import ModelDescription, VocabMappingSummary


class DraftContext(Protocol):
    """One session's context in the draft model's ids.

    Attributes:
        token_ids: The context. One list, changed in place.
        num_settled: Leading ids that stay, whatever is committed.
    """

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def num_settled(self) -> int: ...

    def extend(self, committed: Sequence[int]) -> tuple[int, list[int]]:
        """Takes the target's tokens that were just committed.

        Returns:
            How many leading ids stay what they were, and the ids that were there after those.
        """

    def most_draft_tokens(self, num_wanted: int) -> int:
        """Returns the most draft tokens that a block of as many tokens of the target may take."""

    def is_enough(self, draft_token_ids: Sequence[int], num_wanted: int) -> bool:
        """Whether draft tokens make a block."""

    def to_target(self, draft_token_ids: Sequence[int], num_wanted: int) -> Sequence[int]:
        """Returns the block in the target's ids: at most `num_wanted`, maybe none."""


class SessionVocabulary(Protocol):
    """How a session is drafted for: what may be chosen, and how its context reads.

    Attributes:
        has_target_ids: Whether the choices are the target's ids, so that they may be sampled by the
            request's noise and kept to its grammar. Else drafts are greedy.
        has_draft_ids: Whether the choices are the draft model's ids.
    """

    has_target_ids: bool
    has_draft_ids: bool

    def num_choices(self, session: Session) -> int:
        """Returns how many leading ids a draft token may be chosen from."""

    def choices(self, logits: Tensor) -> Tensor:
        """Returns the logits of what may be drafted, -inf for all else.

        Args:
            logits: The draft model's, [num_rows, vocab_size]. The result may have other columns.
        """

    def draft_token_id(self, choice: int) -> int:
        """Returns the draft model's id of a column that was chosen."""

    def open_context(self, session: Session) -> DraftContext:
        """Returns a session's context as it is."""


class DraftVocabulary(Protocol):
    """A draft model's vocabulary as against that of the target that it drafts for.

    Attributes:
        summary: How another vocabulary is mapped; None if it is the target's own.
        takes_samples: Whether the drafts of any session may be sampled.
    """

    @property
    def takes_samples(self) -> bool: ...

    @property
    def summary(self) -> VocabMappingSummary | None: ...

    def mismatches(self, target: ModelDescription) -> list[str]:
        """Returns one readable line for each reason why it is not this target's vocabulary."""

    def num_context_ids(self, target: ModelDescription) -> int:
        """Returns how many of the target's leading token ids a context may have."""

    def of(self, session: Session) -> SessionVocabulary:
        """Returns how a session is drafted for, which stays so."""


class SharedVocabulary:
    """Implements both for models with the same tokens under the same ids."""

    summary = None
    takes_samples = has_target_ids = has_draft_ids = True

    def __init__(self, draft_model: ModelDescription, tokenizer_size: int | None = None) -> None:
        """Takes the draft model; `tokenizer_size` is how many of its ids mean something."""
        self._draft_model = draft_model
        self._num_own_ids = tokenizer_size or draft_model.vocab_size

    def mismatches(self, target: ModelDescription) -> list[str]:
        return vocabulary_mismatches(target, self._draft_model)

    def num_context_ids(self, target: ModelDescription) -> int:
        return min(target.vocab_size, self._draft_model.vocab_size)

    def of(self, session: Session) -> SessionVocabulary:
        return self

    def num_choices(self, session: Session) -> int:
        return min(session.num_ids, self._num_own_ids)

    def choices(self, logits: Tensor) -> Tensor:
        return logits

    def draft_token_id(self, choice: int) -> int:
        return choice

    def open_context(self, session: Session) -> "SharedContext":
        return SharedContext(session.token_ids)


class SharedContext:
    """Implements `DraftContext`: the session's own list, which its owner has extended."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids

    @property
    def num_settled(self) -> int:
        return len(self.token_ids)

    def extend(self, committed: Sequence[int]) -> tuple[int, list[int]]:
        return len(self.token_ids) - len(committed), []

    def most_draft_tokens(self, num_wanted: int) -> int:
        return num_wanted

    def is_enough(self, draft_token_ids: Sequence[int], num_wanted: int) -> bool:
        return len(draft_token_ids) >= num_wanted

    def to_target(self, draft_token_ids: Sequence[int], num_wanted: int) -> Sequence[int]:
        return tuple(draft_token_ids)
