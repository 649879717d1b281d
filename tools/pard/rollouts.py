"""What a parallel draft learns from: token sequences, and the target's opinion of each place.

A draft is judged on text that the target writes, so it learns best from text that the target
writes. Without a target it learns the text as it is.
"""

import inspect
from dataclasses import astuple, dataclass
from pathlib import Path

import click
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

TOP = 12  # the target's most likely tokens kept for each position
BATCH = 64


@dataclass(frozen=True)
class Rollouts:
    """Sequences, with the most likely tokens for the place after each of their tokens."""

    token_ids: Tensor  # [num_rollouts, length]
    top_ids: Tensor  # [num_rollouts, length, TOP or 1] int32, most likely first
    top_logprobs: Tensor  # [num_rollouts, length, TOP or 1] float16

    def rows(self, step: int, batch_size: int, seed: int) -> Tensor:  # [batch_size]
        """Returns which rollouts make up a step's batch: a new order each epoch."""
        total = len(self.token_ids)
        batch_size = min(batch_size, total)
        epoch, place = divmod(step, total // batch_size)
        generator = torch.Generator().manual_seed(seed + epoch)
        order = torch.randperm(total, generator=generator)
        return order[place * batch_size : (place + 1) * batch_size]


def load_or_generate(
    path: Path, target: PreTrainedModel, prompts: Tensor, num_new_tokens: int
) -> Rollouts:
    """Returns the rollouts of an earlier run, or makes and keeps them."""
    if not path.exists():
        partial = path.with_suffix(".partial")
        torch.save(astuple(generate(target, prompts, num_new_tokens)), partial)
        partial.replace(path)
    return Rollouts(*torch.load(path, weights_only=True))


def generate(target: PreTrainedModel, prompts: Tensor, num_new_tokens: int) -> Rollouts:
    """Continues prompts, [num_rollouts, prompt_length], greedily and past any end of text."""
    parts = []
    with click.progressbar(torch.split(prompts, BATCH), label="rollouts") as batches:
        for batch in batches:
            parts.append(astuple(continue_greedily(target, batch, num_new_tokens, TOP)))
    return Rollouts(*(torch.cat(part) for part in zip(*parts, strict=True)))


@torch.inference_mode()
def continue_greedily(
    model: PreTrainedModel, prompts: Tensor, num_new_tokens: int, top: int = 1
) -> Rollouts:
    """Continues prompts of one length by argmax alone: none of the model's generation defaults."""
    cache = DynamicCache(config=model.config)
    takes_cache = "cache" in inspect.signature(type(model).forward).parameters
    name = "cache" if takes_cache else "past_key_values"  # what transformers called it before
    token_ids, opinions = [prompts.to(model.device)], []
    while True:
        logits = model(input_ids=token_ids[-1], use_cache=True, **{name: cache}).logits
        opinions.append(logits.float().log_softmax(-1).topk(top, dim=-1))
        if len(opinions) > num_new_tokens:
            break
        token_ids.append(opinions[-1].indices[:, -1:, 0])
    return Rollouts(
        torch.cat(token_ids, dim=1).cpu(),
        torch.cat([opinion.indices for opinion in opinions], dim=1).int().cpu(),
        torch.cat([opinion.values for opinion in opinions], dim=1).half().cpu(),
    )


def as_written(windows: Tensor) -> Rollouts:
    """Returns text as rollouts: the only opinion of a place is what follows there.

    Args:
        windows: [num_rollouts, length + 1].
    """
    following = windows[:, 1:, None].int()
    return Rollouts(windows[:, :-1], following, torch.zeros_like(following).half())
