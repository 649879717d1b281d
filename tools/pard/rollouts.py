"""What a parallel draft learns from: token sequences, and the target's opinion of each place.

A draft is judged on text that the target writes, so it learns best from text that the target
writes. Without a target it learns the text as it is.
"""

from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

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


@torch.inference_mode()
def generate(target: PreTrainedModel, prompts: Tensor, num_new_tokens: int) -> Rollouts:
    """Continues prompts, [num_rollouts, prompt_length], greedily and past any end of text."""
    parts = []
    with click.progressbar(torch.split(prompts, BATCH), label="rollouts") as batches:
        for batch in batches:
            token_ids = continue_greedily(target, batch, num_new_tokens, stops=False)
            logits = target(input_ids=token_ids).logits
            opinion = logits.float().log_softmax(-1).topk(TOP, dim=-1)
            parts.append((token_ids, opinion.indices.int(), opinion.values.half()))
    return Rollouts(*(torch.cat(part).cpu() for part in zip(*parts, strict=True)))


@torch.inference_mode()
def continue_greedily(model: Any, prompts: Tensor, num_new_tokens: int, *, stops: bool) -> Tensor:
    """Returns prompts and continuations, [batch, prompt_length + num_new_tokens or less]."""
    end_id = model.generation_config.eos_token_id if stops else None
    first_end = end_id[0] if isinstance(end_id, list) else end_id
    config: Any = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=num_new_tokens,
        do_sample=False,
        eos_token_id=end_id,
        pad_token_id=0 if first_end is None else first_end,
    )
    prompts = prompts.to(model.device)
    mask = torch.ones_like(prompts)
    generated: Tensor = model.generate(prompts, attention_mask=mask, generation_config=config)
    return generated


def as_written(windows: Tensor) -> Rollouts:
    """Returns text as rollouts: the only opinion of a place is what follows there.

    Args:
        windows: [num_rollouts, length + 1].
    """
    following = windows[:, 1:, None].int()
    return Rollouts(windows[:, :-1], following, torch.zeros_like(following).half())
