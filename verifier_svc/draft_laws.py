"""Verifies blocks whose tokens were drawn from known laws: accepts, then draws one token more.

Where draws come from: `accept` and `recover` numbers are keyed by the round too, since under block
verification a round looks at positions that the next one sees again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specgw.engine.laws import Laws, laws_of
from specgw.engine.rng import Keys, Stream, uniforms
from specgw.types import TokenProbs
from verifier_svc.rejection_sampler import BlockProbs, residual

_SUM_TOLERANCE = 1e-5  # of the float32 probabilities of a law

Accept = Callable[[BlockProbs, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class DraftLaws:
    """Blocks of draft tokens and their laws, padded to one size; probabilities are 0 there."""

    lengths: Tensor  # [num_blocks]
    token_ids: Tensor  # [num_blocks, K]
    support: Tensor  # [num_blocks, K, support], int64
    probs: Tensor  # [num_blocks, K, support], float64


@dataclass(frozen=True, slots=True)
class Rounds:
    """Which round of which request each block is verified in."""

    seeds: Tensor  # [num_blocks], int64
    context_lengths: Tensor  # [num_blocks], int64

    def keys(self, stream: Stream, offsets: Tensor, of: Tensor | slice = slice(None)) -> Keys:
        """Returns what numbers for positions after the context are for; of some blocks."""
        lengths = self.context_lengths[of]
        rounds = torch.zeros_like(lengths) if stream is Stream.BONUS else lengths
        return Keys(stream, self.seeds[of], lengths + offsets, rounds)


def verify_by_laws(
    laws: Laws,  # of the target, [num_rows]
    first_rows: Tensor,  # [num_blocks], where each block's rows begin
    drafts: DraftLaws,
    rounds: Rounds,
    accept: Accept,
) -> tuple[Tensor, Tensor]:
    """Returns how many tokens of each block are accepted, and the token that follows them.

    That is the recovered token after a rejection and the bonus token otherwise; [num_blocks] both.
    """
    numbers = torch.stack(
        [
            uniforms(rounds.keys(Stream.ACCEPT, torch.full_like(drafts.lengths, offset)))
            for offset in range(drafts.token_ids.shape[1])
        ],
        dim=1,
    )
    num_accepted, scale = accept(_block_probs(laws, first_rows, drafts), numbers)
    rows = first_rows + num_accepted
    token_ids = torch.empty_like(num_accepted)
    is_bonus = num_accepted == drafts.lengths
    [bonus], [rejected] = is_bonus.nonzero(as_tuple=True), (~is_bonus).nonzero(as_tuple=True)
    if len(bonus):
        keys = rounds.keys(Stream.BONUS, num_accepted[bonus], bonus)
        token_ids[bonus] = laws[rows[bonus]].draw(keys)
    if len(rejected):
        at = num_accepted[rejected]
        weights = residual(
            laws[rows[rejected]].probs(),
            scale[rejected],
            drafts.support[rejected, at],
            drafts.probs[rejected, at],
        )
        keys = rounds.keys(Stream.RECOVER, at, rejected)
        token_ids[rejected] = laws_of(weights).draw(keys)
    return num_accepted, token_ids


def _block_probs(laws: Laws, first_rows: Tensor, drafts: DraftLaws) -> BlockProbs:
    """Looks up the target's probabilities."""
    offsets = torch.arange(drafts.token_ids.shape[1], device=first_rows.device)
    rows = first_rows.unsqueeze(1) + torch.minimum(offsets, drafts.lengths.unsqueeze(1))
    target = laws.probs_of(rows.flatten(), drafts.support.flatten(0, 1))
    has_probs = drafts.probs > 0
    target = torch.where(has_probs, target.view_as(drafts.probs), 0)  # [num_blocks, K, support]
    is_drafted = (drafts.support == drafts.token_ids.unsqueeze(2)) & has_probs
    return BlockProbs(
        lengths=drafts.lengths,
        target=torch.where(is_drafted, target, 0).sum(dim=2),
        draft=torch.where(is_drafted, drafts.probs, 0).sum(dim=2),
        target_on_support=target,
        draft_on_support=drafts.probs,
    )


def build_draft_laws(
    blocks: Sequence[tuple[Sequence[int], Sequence[TokenProbs]]], device: torch.device
) -> DraftLaws:
    """Pads the token ids and laws of some blocks, each of at least one token."""
    length = max(len(token_ids) for token_ids, _ in blocks)
    size = max(len(law.probs) for _, laws in blocks for law in laws)
    ids = np.zeros((len(blocks), length), np.int64)
    support = np.zeros((len(blocks), length, size), np.int64)
    probs = np.zeros((len(blocks), length, size), np.float64)
    for block, (token_ids, laws) in enumerate(blocks):
        ids[block, : len(token_ids)] = token_ids
        for offset, law in enumerate(laws):
            support[block, offset, : len(law.token_ids)] = law.token_ids
            probs[block, offset, : len(law.probs)] = law.probs
    lengths = np.array([len(token_ids) for token_ids, _ in blocks])
    return DraftLaws(*(torch.from_numpy(one).to(device) for one in (lengths, ids, support, probs)))


def are_laws(token_ids: Sequence[int], laws: Sequence[TokenProbs], vocab_size: int) -> bool:
    """Whether each draft token may have been drawn from a law: what is not is tested as one-hot."""
    return len(token_ids) == len(laws) and all(
        _is_law(token_id, law, vocab_size) for token_id, law in zip(token_ids, laws, strict=True)
    )


def _is_law(token_id: int, law: TokenProbs, vocab_size: int) -> bool:
    ids, probs = law.token_ids, law.probs
    return bool(
        len(ids) == len(probs) > 0
        and ids.min() >= 0
        and ids.max() < vocab_size
        and len(np.unique(ids)) == len(ids)
        and np.isfinite(probs).all()
        and (probs >= 0).all()
        and abs(probs.sum(dtype=np.float64) - 1) <= _SUM_TOLERANCE
        and (probs[ids == token_id] > 0).any()
    )
