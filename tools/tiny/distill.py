"""What drafts learn: next tokens, the target's opinion of them and, for PARD, several at once."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.tiny.model import HIDDEN_FROM_VIEW, TinyLlama
from tools.tiny.tokenizers import MASK_ID
from tools.tiny.training import Batch

PARD_DEPTH = 8  # places predicted in one pass
PARD_RETENTION = 0.7  # of the anchors of one depth, the part that the next depth keeps
PARD_DISCOUNT = 0.6  # weight of one depth's loss over that of the depth before
PARD_WINDOW = 192


def next_token_loss(model: TinyLlama, batch: Batch) -> Tensor:
    (token_ids,) = batch  # [batch, length]
    logits = model(token_ids[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), token_ids[:, 1:].flatten())


def distillation_loss(model: TinyLlama, batch: Batch) -> Tensor:
    token_ids, top_ids, top_logprobs = batch
    return opinion_loss(model(token_ids), top_ids, top_logprobs)


def opinion_loss(logits: Tensor, top_ids: Tensor, top_logprobs: Tensor) -> Tensor:
    """Returns the mean cross-entropy with the target's distribution and with its favorite.

    The favorite is what a greedy target accepts; the distribution carries more signal per token.

    Args:
        logits: [batch, rows, vocab_size].
        top_ids: [batch, rows, TOP], most likely first.
        top_logprobs: [batch, rows, TOP].
    """
    top_probs = top_logprobs.float().softmax(-1)
    logprobs = logits.float().log_softmax(-1).gather(-1, top_ids.long())
    favorite = -logprobs[..., 0]
    distribution = -(top_probs * logprobs).sum(-1)
    return 0.5 * (favorite + distribution).mean()


class PardLayout:
    """One packed sequence that holds every sub-task of PARD (An et al., 2025, arXiv:2504.18583).

    Row (anchor a, depth d) sits at position a + d - 1 and predicts token a + d from the real tokens
    up to a and d - 1 masks after them. Depth 1 is the real token itself. Conditional drop: a depth
    keeps PARD_RETENTION of the anchors of the depth before, so every row finds the masks it sees.
    """

    def __init__(self, length: int, generator: torch.Generator) -> None:
        order = torch.randperm(length - PARD_DEPTH, generator=generator)
        anchors = [torch.arange(length - 1)]
        depths = [torch.ones(length - 1, dtype=torch.long)]
        for depth in range(2, PARD_DEPTH + 1):
            kept = order[: int(len(order) * PARD_RETENTION ** (depth - 1))].sort().values
            anchors.append(kept)
            depths.append(torch.full_like(kept, depth))
        self.anchor = torch.cat(anchors)  # [rows]
        self.depth = torch.cat(depths)  # [rows]
        self.position = self.anchor + self.depth - 1  # [rows]
        real_before = (self.depth == 1)[None, :] & (self.anchor[None, :] <= self.anchor[:, None])
        own_masks = (self.anchor[None, :] == self.anchor[:, None]) & (
            self.depth[None, :] <= self.depth[:, None]
        )
        hidden = ~(real_before | own_masks)
        self.mask = hidden.to(torch.bfloat16) * HIDDEN_FROM_VIEW  # [rows, rows]

    def token_ids(self, real: Tensor) -> Tensor:  # [batch, length] -> [batch, rows]
        return torch.where(self.depth == 1, real[:, self.anchor], MASK_ID)


def pard_loss(model: TinyLlama, batch: Batch) -> Tensor:
    """Distills all sub-tasks; `batch` ends with a layout seed per sequence, of which one counts."""
    token_ids, top_ids, top_logprobs, seeds = batch
    generator = torch.Generator().manual_seed(int(seeds[0]))
    layout = PardLayout(token_ids.shape[1], generator)
    logits = model(layout.token_ids(token_ids), layout.position, layout.mask)
    losses = [
        opinion_loss(
            logits[:, layout.depth == depth],
            top_ids[:, layout.position[layout.depth == depth]],
            top_logprobs[:, layout.position[layout.depth == depth]],
        )
        for depth in range(1, PARD_DEPTH + 1)
    ]
    # A place counts only if all before it are accepted, so the first ones matter most.
    weights = [PARD_DISCOUNT ** (depth - 1) for depth in range(1, PARD_DEPTH + 1)]
    return (torch.stack(losses) * torch.tensor(weights)).sum() / sum(weights)
