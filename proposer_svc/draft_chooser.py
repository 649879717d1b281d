"""Chooses draft tokens from logits: each session's by its vocabulary, its sampling, its grammar."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from proposer_svc.draft_grammar import DraftGrammars
from proposer_svc.draft_rows import DraftRows
from proposer_svc.draft_sampling import DraftSampler, DraftToken, row_sampling
from proposer_svc.draft_vocabulary import SessionVocabulary
from proposer_svc.session_table import Session
from specgw.types import AcceptanceRule

Row = tuple[DraftRows, int]  # a session, and how many draft tokens are before the row's


class DraftChooser:
    """One for all sessions of a drafter."""

    def __init__(
        self, sampler: DraftSampler | None = None, grammars: DraftGrammars | None = None
    ) -> None:
        """Takes what chooses among the target's ids; without a sampler greedily.

        Where the choices are other ids, drafts are greedy and no grammar has a say.
        """
        self._text_sampler = DraftSampler()
        self._sampler = sampler or self._text_sampler
        self._grammars = grammars

    @property
    def method(self) -> str:
        """How tokens are chosen where they can be sampled: `draft_sample_method`."""
        return self._sampler.method

    def open(self, session: Session, vocabulary: SessionVocabulary) -> None:
        """Begins a session."""
        if self._grammars is not None and vocabulary.has_target_ids:
            self._grammars.open(session)

    def close(self, session: Session) -> None:
        """Forgets a session."""
        if self._grammars is not None:
            self._grammars.close(session)

    def is_constrained(self, session: Session) -> bool:
        """Whether a draft token may depend on those before it beyond what the logits say."""
        return self._grammars is not None and self._grammars.applies_to(session)

    def rule(self, one: DraftRows, has_probs: bool) -> AcceptanceRule:
        """Returns how a session's block was chosen."""
        return self._sampler_of(one.vocabulary).rule(has_probs)

    def choose(
        self,
        logits: Tensor,  # [num_rows, vocab_size], the draft model's; may be changed
        rows: Sequence[Row],
    ) -> list[DraftToken | None]:
        """Chooses a draftable token for each row; None where the logits are not numbers."""
        chosen: list[DraftToken | None] = [None] * len(rows)
        for vocabulary in dict.fromkeys(one.vocabulary for one, _ in rows):
            places = [i for i, (one, _) in enumerate(rows) if one.vocabulary is vocabulary]
            own = logits if len(places) == len(rows) else logits[places]
            tokens = self._choose_by(vocabulary, own, [rows[i] for i in places])
            for i, token in zip(places, tokens, strict=True):
                chosen[i] = token
        return chosen

    def _choose_by(
        self,
        vocabulary: SessionVocabulary,
        logits: Tensor,  # [num_rows, vocab_size]
        rows: Sequence[Row],
    ) -> list[DraftToken | None]:
        choices = vocabulary.choices(logits)
        choices = _without_padding(choices, [one.num_choices for one, _ in rows])
        for choice, (one, num_drafted) in zip(choices, rows, strict=True):
            if num_drafted == len(one.draft_token_ids):  # else those before are not known yet
                self._keep_to_grammar(choice, one)
        sampling = [row_sampling(one.session, num_drafted) for one, num_drafted in rows]
        return [
            token and replace(token, token_id=vocabulary.draft_token_id(token.token_id))
            for token in self._sampler_of(vocabulary).choose(choices, sampling)
        ]

    def _keep_to_grammar(
        self,
        choices: Tensor,  # [num_choices]
        one: DraftRows,
    ) -> None:
        if self.is_constrained(one.session):
            assert self._grammars is not None
            drafted = one.context.to_target(one.draft_token_ids, len(one.draft_token_ids))
            self._grammars.mask(choices[: one.num_choices], one.session, list(drafted))

    def _sampler_of(self, vocabulary: SessionVocabulary) -> DraftSampler:
        return self._sampler if vocabulary.has_target_ids else self._text_sampler


def _without_padding(logits: Tensor, limits: Sequence[int]) -> Tensor:
    """Leaves each row the ids below its limit."""
    logits = logits[:, : max(limits)]  # [num_rows, max limit]
    if min(limits) == max(limits):
        return logits
    ids = torch.arange(logits.shape[1], device=logits.device)
    beyond = ids >= torch.tensor(limits, device=logits.device).unsqueeze(1)
    return logits.masked_fill(beyond, -torch.inf)
