"""A draft model with another vocabulary than the target: its contexts and what becomes of drafts.

Timor et al., 2025, arXiv:2502.05202. With `token` (their TLI) only tokens are drafted that the
target has too, one for one. With `string` (their SLEM) anything is drafted, and the target's
tokenizer reads the text of it. Which of them is better may depend on the request.
"""

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from proposer_svc.draft_vocabulary import SessionVocabulary
from proposer_svc.retokenizer import Retokenizer
from proposer_svc.session_table import Session
from specgw.types import ModelDescription, VocabMappingSummary
from specgw.vocab_mapping import VocabMapping, VocabMethods

logger = logging.getLogger(__name__)

_MAX_DRAFTS_PER_TOKEN = 2  # of a block; a word of many draft tokens would hold the others up


class ForeignVocabulary:
    """Implements `DraftVocabulary`; a session's temperature says by which method it is drafted."""

    def __init__(
        self, mapping: VocabMapping, methods: VocabMethods, target_fingerprint: str
    ) -> None:
        """Takes the mapping of the target whose vocabulary has that fingerprint."""
        coverage = mapping.coverage
        self.summary = VocabMappingSummary(
            methods.summary, mapping.fingerprint, coverage.of_target, coverage.of_draft
        )
        self._methods = methods
        self._num_target_ids = num_target_ids(mapping)
        self._target_fingerprint = target_fingerprint
        self._vocabularies = {
            method: SESSION_VOCABULARIES[method](mapping) for method in methods.all
        }

    @property
    def takes_samples(self) -> bool:
        return "token" in self._vocabularies

    def mismatches(self, target: ModelDescription) -> list[str]:
        mismatches = []
        if target.vocab_size < self._num_target_ids:
            mismatches.append(
                f"vocabulary: drafts may have {self._num_target_ids} ids, {target.name} has "
                f"{target.vocab_size}"
            )
        if target.vocab_fingerprint not in ("", self._target_fingerprint):
            mismatches.append(
                f"vocabulary: the proposer maps that of sha256 {self._target_fingerprint[:12]}, "
                f"{target.name} has that of sha256 {target.vocab_fingerprint[:12]}"
            )
        return mismatches

    def num_context_ids(self, target: ModelDescription) -> int:
        return target.vocab_size

    def of(self, session: Session) -> SessionVocabulary:
        method = self._methods.at(session.temperature)
        logger.debug(
            "a session is drafted for", extra={"session_id": session.session_id, "method": method}
        )
        return self._vocabularies[method]


def num_target_ids(mapping: VocabMapping) -> int:
    """Returns how many leading ids of the target may be drafted, gaps included."""
    return int(mapping.draft_to_target.max()) + 1


class TokenVocabulary:
    """Implements `SessionVocabulary`: draft tokens are chosen among the target's ids.

    The draft's law is that of the tokens in common, renormalized: q' of the paper.
    """

    has_target_ids, has_draft_ids = True, False

    def __init__(self, mapping: VocabMapping) -> None:
        self._mapping = mapping
        self._num_target_ids = num_target_ids(mapping)
        draft_ids = np.flatnonzero(mapping.draft_to_target >= 0)
        self._draft_ids = torch.from_numpy(draft_ids)  # [num_common]
        self._target_ids = torch.from_numpy(mapping.draft_to_target[draft_ids])  # [num_common]
        self._draft_id_of: dict[int, int] = dict(
            zip(self._target_ids.tolist(), draft_ids.tolist(), strict=True)
        )

    def num_choices(self, session: Session) -> int:
        return self._num_target_ids

    def choices(self, logits: Tensor) -> Tensor:
        self._draft_ids = self._draft_ids.to(logits.device)
        self._target_ids = self._target_ids.to(logits.device)
        choices = logits.new_full((len(logits), self._num_target_ids), -torch.inf)
        return choices.index_copy(1, self._target_ids, logits[:, self._draft_ids])

    def draft_token_id(self, choice: int) -> int:
        return self._draft_id_of[choice]

    def open_context(self, session: Session) -> "TokenContext":
        context = TokenContext(self._mapping)
        context.extend(session.token_ids)
        return context


class StringVocabulary:
    """Implements `SessionVocabulary`: all text may be drafted, and what ends it for the target too.

    What the target makes of a text is no sample of any law known here, so drafts are greedy; and
    it is known for whole words only, so a grammar of the target's tokens has no say in a draft.
    """

    has_target_ids, has_draft_ids = False, True

    def __init__(self, mapping: VocabMapping) -> None:
        self._mapping = mapping
        is_drafted = mapping.draft_to_target >= 0
        is_drafted[[i for i in mapping.draft.token_bytes if i < len(is_drafted)]] = True
        self._is_forbidden = torch.from_numpy(~is_drafted)  # [vocab_size]

    def num_choices(self, session: Session) -> int:
        return len(self._is_forbidden)

    def choices(self, logits: Tensor) -> Tensor:
        self._is_forbidden = self._is_forbidden.to(logits.device)
        return logits.masked_fill(self._is_forbidden, -torch.inf)

    def draft_token_id(self, choice: int) -> int:
        return choice

    def open_context(self, session: Session) -> "StringContext":
        context = StringContext(self._mapping)
        context.extend(session.token_ids)
        return context


SESSION_VOCABULARIES: dict[str, Callable[[VocabMapping], SessionVocabulary]] = {
    "token": TokenVocabulary,
    "string": StringVocabulary,
}
"""By method."""


class TokenContext(Retokenizer):
    """Implements `DraftContext`: each draft token is one of the target's."""

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
