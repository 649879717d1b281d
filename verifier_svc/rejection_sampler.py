"""Decides which draft tokens survive. Pure functions of tensors: no model, no session, no clock.

In symbols: x_1..x_K are a block's draft tokens, q_i the law that x_i was drawn from, p_i the
target's law at the position of x_i after all logits processing, tau the number accepted, u_i
uniform in (0, 1).

- One-hot rule (Leviathan et al., 2023, arXiv:2211.17192, with q_i a point mass on x_i): draw
  y_i ~ p_i at every position, accept x_i iff x_i = y_i, emit y_i at the first mismatch. Lossless
  for any proposer, since y_i never depends on x_i; and y_i is a function of (seed, position), so
  that the output does not depend on the drafts at all.
- Ratio test (the same paper): accept x_i iff u_i <= p_i(x_i) / q_i(x_i); at the first rejection
  emit a token of the residual, norm((p_i - q_i)+).
- Block verification (Sun et al., 2025, arXiv:2403.10444): accepts or rejects prefixes as wholes.

The last two are lossless if x_i was drawn from q_i with randomness of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockProbs:
    """What the ratio test and block verification see of some blocks, padded to one size.

    Probabilities are float64; those beyond a block's length or a law's support are 0.
    """

    lengths: Tensor  # [num_blocks]
    target: Tensor  # [num_blocks, K], p_i(x_i)
    draft: Tensor  # [num_blocks, K], q_i(x_i)
    target_on_support: Tensor  # [num_blocks, K, support], p_i on the ids of q_i
    draft_on_support: Tensor  # [num_blocks, K, support], q_i


def count_matching(draft_token_ids: Sequence[int], target_token_ids: Sequence[int]) -> int:
    """Applies the one-hot rule to one block: returns how many draft tokens are accepted.

    Args:
        draft_token_ids: The draft tokens x_1..x_K.
        target_token_ids: Draws y_1..y_K+1 from the target. The output tokens are those up to the
            first that differs from its draft token, or all.
    """
    pairs = zip(draft_token_ids, target_token_ids, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(draft_token_ids))


def accept_tokens(
    blocks: BlockProbs,
    uniforms: Tensor,  # [num_blocks, K]
) -> tuple[Tensor, Tensor]:
    """Applies the ratio test. Returns how many tokens are accepted, and the residual's scale: 1."""
    passes = (uniforms * blocks.draft <= blocks.target) & _within(blocks)
    num_accepted = passes.cumprod(dim=1).sum(dim=1)
    return num_accepted, torch.ones_like(blocks.target[:, 0])


def accept_block(
    blocks: BlockProbs,
    uniforms: Tensor,  # [num_blocks, K]
) -> tuple[Tensor, Tensor]:
    """Applies block verification. Returns tau and P_tau, the residual's scale; [num_blocks] each.

    P_0 = 1, P_i = min(P_i-1 * p_i(x_i) / q_i(x_i), 1); Z_i = sum over x of
    (P_i * p_i+1(x) - q_i+1(x))+; h_i = Z_i / (Z_i + 1 - P_i) for i < K, 1 if that is 0 / 0;
    h_K = P_K; tau is the largest i with u_i <= h_i, 0 if there is none. It goes on after a failure:
    a later success accepts all before it.
    """
    kept = torch.ones_like(blocks.target[:, 0])  # P_0
    num_accepted = torch.zeros_like(blocks.lengths)
    scale = kept
    for i in range(blocks.target.shape[1]):  # 0-based: this is x_i+1
        ratio = blocks.target[:, i] / blocks.draft[:, i]
        kept = torch.where(blocks.lengths > i, (kept * ratio).clamp(max=1), 0)
        chance = torch.where(blocks.lengths == i + 1, kept, _chance(blocks, i + 1, kept))
        passes = (uniforms[:, i] <= chance) & (blocks.lengths > i)
        num_accepted = torch.where(passes, i + 1, num_accepted)
        scale = torch.where(passes, kept, scale)
    return num_accepted, scale


def _chance(blocks: BlockProbs, i: int, kept: Tensor) -> Tensor:
    """Returns h_i of every block, [num_blocks]; of no meaning for the last token."""
    if i == blocks.target.shape[1]:
        return kept
    p, q = blocks.target_on_support[:, i], blocks.draft_on_support[:, i]  # [num_blocks, support]
    off_support = (1 - p.sum(dim=1)).clamp(min=0)
    left = (kept.unsqueeze(1) * p - q).clamp(min=0).sum(dim=1) + kept * off_support  # Z_i
    chance = left / (left + 1 - kept)
    return torch.where(left + 1 - kept == 0, 1.0, chance)


def residual(
    target_probs: Tensor,  # [num_blocks, vocab_size], p at the position after the accepted tokens
    scale: Tensor,  # [num_blocks]
    support: Tensor,  # [num_blocks, support], int64
    draft_probs: Tensor,  # [num_blocks, support], q at that position, 0 where padded
) -> Tensor:
    """Returns (scale * p - q)+, not normalized, [num_blocks, vocab_size]; p where that is empty."""
    weights = target_probs * scale.unsqueeze(1).to(target_probs.dtype)
    weights = weights.scatter_add(1, support, -draft_probs.to(weights.dtype)).clamp_(min=0)
    is_empty = weights.amax(dim=1, keepdim=True) == 0
    return torch.where(is_empty, target_probs, weights)


def accept_at_rates(
    draft_lengths: Tensor,  # [num_blocks]
    rates: Tensor,  # [K], the chance that the first 1, 2, .. K tokens are all accepted
    uniforms: Tensor,  # [num_blocks, K]
) -> Tensor:
    """Accepts tokens at given rates, whatever they are, as vLLM's `synthetic` does; [num_blocks].

    The i-th is accepted, given those before it, with chance rate_i / rate_i-1. Not lossless.
    """
    before = torch.cat((torch.ones_like(rates[:1]), rates[:-1]))
    chances = torch.where(before > 0, rates / before, 0)
    count = uniforms.shape[1]
    is_drafted = torch.arange(count, device=rates.device) < draft_lengths.unsqueeze(1)
    return ((uniforms < chances[:count]) & is_drafted).cumprod(dim=1).sum(dim=1)


def _within(blocks: BlockProbs) -> Tensor:
    """Returns where the blocks have tokens, [num_blocks, K]."""
    positions = torch.arange(blocks.target.shape[1], device=blocks.lengths.device)
    return positions < blocks.lengths.unsqueeze(1)
