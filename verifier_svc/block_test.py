"""Tests the blocks of one step, each by its rule, and draws the token that follows what is kept."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice

import torch
from torch import Tensor

from specgw.engine.rng import Stream, uniforms
from specgw.engine.sampling import RowSampling, build_keys, build_laws, sample
from specgw.types import TokenProbs
from verifier_svc.acceptance import Acceptance
from verifier_svc.draft_laws import Rounds, build_draft_laws, verify_by_laws
from verifier_svc.rejection_sampler import (
    accept_at_rates,
    accept_block,
    accept_tokens,
    count_matching,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A session's draft tokens, their laws if known, and how the target's tokens are chosen.

    `sampling` has a row for each draft token and one more; none if there is nothing to verify.
    `is_masked` says that some tokens may be forbidden.
    """

    token_ids: Sequence[int]
    probs: Sequence[TokenProbs]
    sampling: Sequence[RowSampling]
    is_masked: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How many draft tokens are accepted, and the token of the target's own that follows them."""

    num_accepted: int
    token_id: int


_NOTHING = Outcome(0, -1)  # for a session without rows to verify


class BlockTest:
    """Applies the configured rule where it can, and the one-hot rule elsewhere."""

    def __init__(self, acceptance: Acceptance) -> None:
        self._acceptance = acceptance
        self._rates = torch.tensor(acceptance.synthetic_rates, dtype=torch.float64)

    def verify(
        self,
        blocks: Sequence[Block],
        logits: Tensor,  # [sum of rows, vocab_size], after all processing
    ) -> list[Outcome]:
        """Returns what became of each block."""
        first_rows = list(accumulate((len(block.sampling) for block in blocks), initial=0))
        has_laws = [self._has_laws(block) for block in blocks]
        by_laws = [i for i, has in enumerate(has_laws) if has]
        others = [i for i, has in enumerate(has_laws) if not has]
        outcomes = [_NOTHING] * len(blocks)
        for i, outcome in zip(
            others, self._by_draws(blocks, first_rows, others, logits), strict=True
        ):
            outcomes[i] = outcome
        if by_laws:
            for i, outcome in zip(
                by_laws, self._by_laws(blocks, first_rows, by_laws, logits), strict=True
            ):
                outcomes[i] = outcome
        return outcomes

    def _has_laws(self, block: Block) -> bool:
        uses_laws = self._acceptance.uses_draft_probs and bool(block.probs)
        return uses_laws and not block.sampling[0].is_greedy

    def _by_draws(
        self,
        blocks: Sequence[Block],
        first_rows: Sequence[int],
        chosen: Sequence[int],
        logits: Tensor,
    ) -> list[Outcome]:
        """Draws the target's token in every row; drafts that equal it are accepted."""
        rows = [r for i in chosen for r in range(first_rows[i], first_rows[i + 1])]
        own = logits if len(rows) == len(logits) else logits[rows]
        draws = iter(sample(own, [row for i in chosen for row in blocks[i].sampling]))
        outcomes = []
        for i in chosen:
            block, drawn = blocks[i], list(islice(draws, len(blocks[i].sampling)))
            if not drawn:
                outcomes.append(_NOTHING)
                continue
            if self._acceptance.synthetic_rates and block.token_ids:
                num_accepted = self._at_rates(block, logits[first_rows[i] : first_rows[i + 1]])
            else:
                num_accepted = count_matching(block.token_ids, drawn)
            outcomes.append(Outcome(num_accepted, drawn[num_accepted]))
        return outcomes

    def _by_laws(
        self,
        blocks: Sequence[Block],
        first_rows: Sequence[int],
        chosen: Sequence[int],
        logits: Tensor,
    ) -> list[Outcome]:
        """Tests drafts against the laws that they were drawn from."""
        device = logits.device
        rows = [r for i in chosen for r in range(first_rows[i], first_rows[i + 1])]
        sizes = [len(blocks[i].sampling) for i in chosen]
        starts = torch.tensor(list(accumulate(sizes[:-1], initial=0)), device=device)
        laws = build_laws(logits[rows], [row for i in chosen for row in blocks[i].sampling])
        first = [blocks[i].sampling[0] for i in chosen]
        accepted, token_ids = verify_by_laws(
            laws,
            starts,
            build_draft_laws([(blocks[i].token_ids, blocks[i].probs) for i in chosen], device),
            Rounds(
                torch.tensor([row.seed for row in first], device=device),
                torch.tensor([row.position for row in first], device=device),
            ),
            accept_block if self._acceptance.by_block else accept_tokens,
        )
        return [Outcome(*pair) for pair in torch.stack((accepted, token_ids), 1).tolist()]

    def _at_rates(self, block: Block, logits: Tensor) -> int:
        """Accepts tokens at the configured rates, up to the first that is forbidden."""
        round_ = block.sampling[0].position
        rows = [replace(row, round=round_) for row in block.sampling[: len(block.token_ids)]]
        numbers = uniforms(build_keys(Stream.ACCEPT, rows, self._rates.device))
        length = len(block.token_ids)
        if block.is_masked:
            at = torch.tensor(block.token_ids, device=logits.device).unsqueeze(1)
            is_allowed = logits[:-1].gather(1, at).squeeze(1) > -torch.inf
            length = int(is_allowed.cumprod(dim=0).sum())
        return int(accept_at_rates(torch.tensor([length]), self._rates, numbers.unsqueeze(0)))
