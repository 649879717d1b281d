"""Chooses draft tokens from logits: each session's by its vocabulary, its sampling, its grammar."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from proposer_svc.branches import Branch
from proposer_svc.branching import tokens_beyond_context
from proposer_svc.draft_grammar import DraftGrammars
from proposer_svc.draft_rows import DraftRows
from proposer_svc.draft_sampling import DraftSampler, DraftToken, row_sampling
from proposer_svc.draft_vocabulary import SessionVocabulary
from proposer_svc.session_table import Session
from specgw.engine.sampling import RowSampling
from specgw.types import AcceptanceRule


class Place(NamedTuple):
    """Where a draft token comes to be: after so many others of a session's block or branch."""

    owner: DraftRows
    line: DraftRows | Branch
    num_drafted: int


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
        places: Sequence[Place],
        num_runner_ups: int = 0,
    ) -> tuple[list[DraftToken | None], list[Sequence[int]]]:
        """Chooses a draftable token for each row; None where the logits are not numbers.

        Returns:
            The tokens and their runner-ups; of other vocabularies than the target's those are not
            known.
        """
        vocabularies = dict.fromkeys(place.owner.vocabulary for place in places)
        if len(vocabularies) == 1:
            tokens, others = self._choose_by(
                next(iter(vocabularies)), logits, places, num_runner_ups
            )
            return tokens, list(others) or [()] * len(places)
        chosen: list[DraftToken | None] = [None] * len(places)
        runner_ups: list[Sequence[int]] = [()] * len(places)
        for vocabulary in vocabularies:
            rows = [i for i, place in enumerate(places) if place.owner.vocabulary is vocabulary]
            tokens, others = self._choose_by(
                vocabulary, logits[rows], [places[i] for i in rows], num_runner_ups
            )
            for i, token in zip(rows, tokens, strict=True):
                chosen[i] = token
            for i, known in zip(rows, others, strict=False):
                runner_ups[i] = known
        return chosen, runner_ups

    def _choose_by(
        self,
        vocabulary: SessionVocabulary,
        logits: Tensor,  # [num_rows, vocab_size]
        places: Sequence[Place],
        num_runner_ups: int,
    ) -> tuple[list[DraftToken | None], Sequence[Sequence[int]]]:
        choices = vocabulary.choices(logits)
        choices = _without_padding(choices, [place.owner.num_choices for place in places])
        for i, place in enumerate(places):
            if self.is_constrained(place.owner.session):
                self._keep_to_grammar(choices[i], place)
        sampler = self._sampler_of(vocabulary)
        sampling = [self._sampling(place) for place in places] if sampler.uses_sampling else []
        is_shared = vocabulary.has_draft_ids and vocabulary.has_target_ids
        if is_shared and num_runner_ups:
            return sampler.choose_with_runner_ups(choices, sampling, num_runner_ups)
        tokens = sampler.choose(choices, sampling)
        if not vocabulary.has_draft_ids:
            tokens = [
                token and token._replace(token_id=vocabulary.draft_token_id(token.token_id))
                for token in tokens
            ]
        return tokens, ()

    def _keep_to_grammar(
        self,
        choices: Tensor,  # [num_choices]
        place: Place,
    ) -> None:
        owner, line = place.owner, place.line
        if place.num_drafted > len(line.drafted.token_ids):
            return  # the tokens before it are not known yet
        assert self._grammars is not None
        token_ids = tokens_beyond_context(owner, line)
        target_ids = owner.context.to_target(token_ids, len(token_ids))
        self._grammars.mask(choices[: owner.num_choices], owner.session, list(target_ids))

    def _sampling(self, place: Place) -> RowSampling:
        """Returns how the token is chosen: as of its own context, in tokens of the target."""
        owner, line = place.owner, place.line
        sampling = owner.session.sampling
        if owner.branches is not None and line is owner.branches.trunk:
            sampling = self._sampler.guesses_by(sampling)
        length = len(owner.session.token_ids) + line.length - owner.length
        return row_sampling(sampling, length, place.num_drafted)

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
