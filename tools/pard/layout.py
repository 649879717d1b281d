"""All sub-tasks of PARD in one training pass (An et al., 2025, arXiv:2504.18583)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from tools.training import Batch


@dataclass(frozen=True)
class Places:
    """The draft tokens of one pass, and how much each is learnt.

    Attributes:
        mask_token_id: Stands where a draft token will be.
        num_tokens: Draft tokens of one pass.
        retention: Of the anchors of one depth, the part that the next depth keeps.
        discount: Weight of one depth's loss over that of the depth before: a place counts only if
            all before it are accepted, so the first ones matter most.
    """

    mask_token_id: int
    num_tokens: int = 8
    retention: float = 0.7
    discount: float = 0.6


class PardLayout:
    """One packed sequence that holds every sub-task.

    Row (anchor a, depth d) sits at position a + d - 1 and predicts token a + d from the real tokens
    up to a and d - 1 masks after them. Depth 1 is the real token itself. Conditional drop: a depth
    keeps a part of the anchors of the depth before, so every row finds the masks it sees.
    """

    def __init__(self, places: Places, length: int, generator: torch.Generator) -> None:
        order = torch.randperm(length - places.num_tokens, generator=generator)
        anchors = [torch.arange(length - 1)]
        depths = [torch.ones(length - 1, dtype=torch.long)]
        for depth in range(2, places.num_tokens + 1):
            kept = order[: int(len(order) * places.retention ** (depth - 1))].sort().values
            anchors.append(kept)
            depths.append(torch.full_like(kept, depth))
        self._mask_token_id = places.mask_token_id
        self.anchor = torch.cat(anchors)  # [rows]
        self.depth = torch.cat(depths)  # [rows]
        self.position = self.anchor + self.depth - 1  # [rows]
        real_before = (self.depth == 1)[None, :] & (self.anchor[None, :] <= self.anchor[:, None])
        own_masks = (self.anchor[None, :] == self.anchor[:, None]) & (
            self.depth[None, :] <= self.depth[:, None]
        )
        self.sees = real_before | own_masks  # [rows, rows]

    def token_ids(self, real: Tensor) -> Tensor:  # [batch, length] -> [batch, rows]
        depth = self.depth.to(real.device)
        return torch.where(depth == 1, real[:, self.anchor], self._mask_token_id)


def opinion_loss(logits: Tensor, top_ids: Tensor, top_logprobs: Tensor) -> Tensor:
    """Returns the mean cross-entropy with the target's distribution and with its favorite.

    The favorite is what a greedy target accepts; the distribution carries more signal per token.

    Args:
        logits: [batch, rows, vocab_size].
        top_ids: [batch, rows, TOP], most likely first.
        top_logprobs: [batch, rows, TOP].
    """
    top_probs = top_logprobs.float().softmax(-1)
    logprobs = F.log_softmax(logits.float(), -1).gather(-1, top_ids.long())
    favorite = -logprobs[..., 0]
    distribution = -(top_probs * logprobs).sum(-1)
    return 0.5 * (favorite + distribution).mean()


def pard_loss(places: Places, model: PreTrainedModel, batch: Batch) -> Tensor:
    """Distills all sub-tasks; `batch` ends with a layout seed per sequence, of which one counts."""
    token_ids, top_ids, top_logprobs, seeds = batch
    generator = torch.Generator().manual_seed(int(seeds[0]))
    layout = PardLayout(places, token_ids.shape[1], generator)
    logits = model(
        input_ids=layout.token_ids(token_ids),
        position_ids=layout.position[None].to(token_ids.device),
        attention_mask=layout.sees[None, None].to(token_ids.device),
        use_cache=False,
    ).logits  # [batch, rows, vocab_size]
    depths = range(1, places.num_tokens + 1)
    losses = []
    for depth in depths:
        rows = layout.depth == depth
        at = layout.position[rows]
        losses.append(opinion_loss(logits[:, rows], top_ids[:, at], top_logprobs[:, at]))
    weights = torch.tensor([places.discount ** (depth - 1) for depth in depths])
    return (torch.stack(losses) * weights.to(logits.device)).sum() / weights.sum()
