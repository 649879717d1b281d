"""A draft model with another vocabulary than the target: its contexts and what becomes of drafts.

Timor et al., 2025, arXiv:2502.05202. With `token` (their TLI) only tokens are drafted that the
target has too, one for one. With `string` (their SLEM) anything is drafted, and the target's
tokenizer reads the text of it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from proposer_svc.draft_vocabulary import DraftContext
from proposer_svc.retokenizer import Retokenizer
from proposer_svc.session_table import Session
from specgw.types import ModelDescription, VocabMappingSummary
from specgw.vocab_mapping import VocabMapping

_MAX_DRAFTS_PER_TOKEN = 2  # of a block; a word of many draft tokens would hold the others up


class ForeignVocabulary:
    """Implements `DraftVocabulary` with a mapping between two tokenizers."""

    def __init__(self, mapping: VocabMapping, method: str, target_fingerprint: str) -> None:
        """Takes a mapping.

        Args:
            mapping: Between the target's tokenizer and the draft model's.
            method: `token` or `string`.
            target_fingerprint: Of the target's vocabulary.
        """
        coverage = mapping.coverage
        self.summary = VocabMappingSummary(
            method, mapping.fingerprint, coverage.of_target, coverage.of_draft
        )
        self._mapping = mapping
        self._target_fingerprint = target_fingerprint
        self._context_type = TokenContext if method == "token" else StringContext
        self._forbidden = torch.from_numpy(~self._context_type.draftable(mapping))  # [vocab_size]

    def mismatches(self, target: ModelDescription) -> list[str]:
        mismatches = []
        size = int(self._mapping.draft_to_target.max()) + 1
        if target.vocab_size < size:
            mismatches.append(
                f"vocabulary: drafts may have {size} ids, {target.name} has {target.vocab_size}"
            )
        if target.vocab_fingerprint not in ("", self._target_fingerprint):
            mismatches.append(
                f"vocabulary: the proposer maps that of sha256 {self._target_fingerprint[:12]}, "
                f"{target.name} has that of sha256 {target.vocab_fingerprint[:12]}"
            )
        return mismatches

    def num_context_ids(self, target: ModelDescription) -> int:
        return target.vocab_size

    def num_draftable_ids(self, session: Session) -> int:
        return len(self._forbidden)

    def constrain(self, logits: Tensor) -> Tensor:
        self._forbidden = self._forbidden.to(logits.device)
        return logits.masked_fill(self._forbidden, -torch.inf)

    def open_context(self, session: Session) -> DraftContext:
        context = self._context_type(self._mapping)
        context.extend(session.token_ids)
        return context


class TokenContext(Retokenizer):
    """Implements `DraftContext`: each draft token is one of the target's."""

    @staticmethod
    def draftable(mapping: VocabMapping) -> npt.NDArray[np.bool_]:
        """Returns which draft tokens may be drafted: those of the intersection."""
        return mapping.draft_to_target >= 0

    def most_draft_tokens(self, num_wanted: int) -> int:
        return num_wanted

    def is_enough(self, draft_token_ids: Sequence[int], num_wanted: int) -> bool:
        return len(draft_token_ids) >= num_wanted

    def to_target(self, draft_token_ids: Sequence[int], num_wanted: int) -> Sequence[int]:
        return tuple(self.mapping.draft_to_target[list(draft_token_ids)].tolist())


class StringContext(Retokenizer):
    """Implements `DraftContext`: the target's tokenizer reads what was drafted.

    Several draft tokens may make one of the target's, and the reverse. The last word may still
    grow: what the target would make of it is known once the next one begins.
    """

    @staticmethod
    def draftable(mapping: VocabMapping) -> npt.NDArray[np.bool_]:
        """Returns which draft tokens may be drafted: text, and what ends it for the target too."""
        may = mapping.draft_to_target >= 0
        may[[i for i in mapping.draft.token_bytes if i < len(may)]] = True
        return may

    def most_draft_tokens(self, num_wanted: int) -> int:
        return _MAX_DRAFTS_PER_TOKEN * num_wanted

    def is_enough(self, draft_token_ids: Sequence[int], num_wanted: int) -> bool:
        token_ids, num_final = self._read(draft_token_ids)
        return min(len(token_ids), num_final) >= num_wanted or self._ends(draft_token_ids[-1])

    def to_target(self, draft_token_ids: Sequence[int], num_wanted: int) -> Sequence[int]:
        return tuple(self._read(draft_token_ids)[0][:num_wanted])

    def _read(self, draft_token_ids: Sequence[int]) -> tuple[list[int], int]:
        """Returns the target's tokens, and how many of them no later draft token will change."""
        draft, target = self.mapping.draft, self.mapping.target
        tokens = target.encode(draft.spell(draft_token_ids))
        if not self._ends(draft_token_ids[-1]):
            return tokens.ids, tokens.starts[-1] if tokens.starts else 0
        marker = int(self.mapping.draft_to_target[draft_token_ids[-1]])
        return [*tokens.ids, marker], len(tokens.ids) + 1

    def _ends(self, draft_token_id: int) -> bool:
        return draft_token_id not in self.mapping.draft.token_bytes
