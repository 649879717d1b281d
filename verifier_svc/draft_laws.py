"""Verifies blocks whose tokens were drawn from known laws: accepts, then draws one token more.

Where draws come from: `accept` and `recover` numbers are keyed by the round too, since under block
verification a round looks at positions that the next one sees again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specgw.engine.laws import Laws, laws_of
from specgw.engine.rng import Keys, Stream, uniforms
from specgw.types import MAX_DRAFT_SUPPORT, TokenProbs
from verifier_svc.rejection_sampler import BlockProbs, residual

_SUM_TOLERANCE = 1e-5  # of the float32 probabilities of a law

Int64s = npt.NDArray[np.int64]
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
    """Whether each draft token may have been drawn from a law: what is not is tested as one-hot.

    The work is bounded: a law of more than `MAX_DRAFT_SUPPORT` tokens is none, whatever it says.
    """
    sizes = [len(law.token_ids) for law in laws]
    if sizes != [len(law.probs) for law in laws] or len(sizes) != len(token_ids):
        return False
    if not all(0 < size <= MAX_DRAFT_SUPPORT for size in sizes):
        return False
    return not sizes or _all_are_laws(
        np.asarray(token_ids),
        np.concatenate([law.token_ids for law in laws], dtype=np.int64),
        np.concatenate([law.probs for law in laws], dtype=np.float64),
        np.asarray(sizes),
        vocab_size,
    )


def _all_are_laws(
    token_ids: Int64s,  # [K]
    support: Int64s,  # [sum of sizes], one law after another
    probs: npt.NDArray[np.float64],  # [sum of sizes]
    sizes: Int64s,  # [K]
    vocab_size: int,
) -> bool:
    starts = np.cumsum(sizes) - sizes
    of_law = np.repeat(np.arange(len(sizes)), sizes)
    if support.min() < 0 or support.max() >= vocab_size or not np.isfinite(probs).all():
        return False
    in_order = np.sort(of_law * vocab_size + support)
    is_drawn = (support == token_ids[of_law]) & (probs > 0)
    return bool(
        (in_order[1:] != in_order[:-1]).all()
        and (probs >= 0).all()
        and (abs(np.add.reduceat(probs, starts) - 1) <= _SUM_TOLERANCE).all()
        and np.logical_or.reduceat(is_drawn, starts).all()
    )
