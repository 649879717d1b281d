"""Drafts whole blocks in one forward pass, with a model that reads masks as places to fill: PARD.

An et al., 2025, arXiv:2504.18583. After a context follow K - 1 mask tokens; the logits of its last
row and of the masks are those of K draft tokens, none of which depends on another. The rows of the
masks are dropped after the pass, so the next one feeds what was committed since, and masks anew.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from proposer_svc.draft_chooser import DraftChooser, Place
from proposer_svc.draft_model import DraftModelDrafter, completes, missing_chunk
from proposer_svc.draft_rows import DraftRows
from proposer_svc.draft_vocabulary import DraftVocabulary
from proposer_svc.session_table import Session
from specgw.budget import mask_rows
from specgw.engine.model_runner import ModelRunner, SequenceChunk
from specgw.slots import extra_slots

logger = logging.getLogger(__name__)


class ParallelDrafter(DraftModelDrafter):
    """Implements `Drafter` with a model that was trained for parallel drafting."""

    parallel_drafting = True
    keeps_drafts = False

    def __init__(
        self,
        runner: ModelRunner,
        max_num_batched_tokens: int,
        vocabulary: DraftVocabulary | None = None,
        *,
        mask_token_id: int,
        max_draft_tokens: int,
        num_trained_tokens: int | None = None,
        chooser: DraftChooser | None = None,
        yields_cores: bool = False,
    ) -> None:
        """Takes a loaded model.

        Args:
            runner: The model.
            max_num_batched_tokens: Most input rows of one forward pass, masks included.
            vocabulary: What its ids are to the target; None for the same.
            mask_token_id: The token that it reads as a place to fill; never drafted.
            max_draft_tokens: Most draft tokens that will be asked for.
            num_trained_tokens: Most draft tokens that it was trained for, if known.
            chooser: How tokens are chosen; None for greedily.
            yields_cores: Whether it computes while nobody else wants to.
        """
        super().__init__(
            runner, max_num_batched_tokens, vocabulary, chooser, yields_cores=yields_cores
        )
        self._mask_token_id = mask_token_id
        self._max_block = max_draft_tokens
        if num_trained_tokens is not None and num_trained_tokens < max_draft_tokens:
            self._max_block = num_trained_tokens
            logger.warning(
                "the draft model was trained for shorter blocks: they are cut",
                extra={"asked": max_draft_tokens, "trained": num_trained_tokens},
            )
        self.mask_rows = mask_rows(extra_slots(self.method, self._max_block, True))

    def room(self, session: Session) -> int:
        return min(super().room(session), self._max_block)

    def can_run_ahead(self) -> bool:
        return False

    @torch.inference_mode()
    def _draft(
        self, batch: Sequence[tuple[DraftRows, int]], begun: Sequence[DraftRows]
    ) -> list[DraftRows]:
        ready = [one for one, rows in batch if completes(one, rows)]
        logits = self._forward([self._masked_chunk(one, rows) for one, rows in batch])
        for one, _ in batch:
            one.cache.truncate(len(one.token_ids))
            one.publish()
        if not ready:
            return []
        logits[:, self._mask_token_id] = -torch.inf  # [sum of num_wanted, vocab_size]
        places = [
            Place(one, one, offset) for one in ready for offset in range(one.session.num_wanted)
        ]
        tokens = iter(self._chooser.choose(logits, places)[0])
        for one in ready:
            one.extend_block([next(tokens) for _ in range(one.session.num_wanted)])
        blocks = torch.split(logits, [one.session.num_wanted for one in ready])
        for one, block in zip(ready, blocks, strict=True):
            if self._chooser.is_constrained(one.session):
                self._draft_in_order(one, block)
        return ready

    def _draft_in_order(
        self,
        one: DraftRows,
        rows: Tensor,  # [num_wanted, vocab_size]
    ) -> None:
        """Chooses a block's tokens anew, each among those that its constraint lets follow."""
        one.drafted.clear()
        for offset, row in enumerate(torch.split(rows, 1)):
            one.extend_block(self._chooser.choose(row, [Place(one, one, offset)])[0])
            if not one.drafted.token_ids:
                return

    def _masked_chunk(self, one: DraftRows, rows: int) -> SequenceChunk:
        chunk = missing_chunk(one, rows)
        if not completes(one, rows):
            return chunk
        num_wanted = one.session.num_wanted
        masks = [self._mask_token_id] * (num_wanted - 1)
        return SequenceChunk(one.cache, [*chunk.token_ids, *masks], num_logits=num_wanted)
