"""On-policy text: greedy continuations by the target, and its opinion of each place.

A draft is judged on text that the target writes, so it learns from text that the target writes.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tools.tiny.model import Cache, TinyLlama
from tools.tiny.training import WORKERS

PROMPT_LENGTH, CONTINUATION_LENGTH = 128, 256
TOP = 12  # the target's most likely tokens kept for each position
BATCH = 64


@dataclass(frozen=True)
class Rollouts:
    """Prompt and continuation, with the target's top tokens for the place after each token."""

    token_ids: Tensor  # [num_rollouts, length]
    top_ids: Tensor  # [num_rollouts, length, TOP] int16, most likely first
    top_logprobs: Tensor  # [num_rollouts, length, TOP] float16


def load_or_generate(path: Path, target: TinyLlama, prompts: Tensor) -> Rollouts:
    if not path.exists():
        torch.save(generate(target, prompts), path)
    return Rollouts(*torch.load(path, weights_only=True))


@torch.inference_mode()
def generate(target: TinyLlama, prompts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Continues `prompts`, [num_rollouts, PROMPT_LENGTH], all batches spread over the workers."""
    model = target.to(torch.bfloat16)
    with ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        parts = list(pool.map(lambda batch: _continue(model, batch), torch.split(prompts, BATCH)))
    token_ids, top_ids, top_logprobs = (torch.cat(part) for part in zip(*parts, strict=True))
    return token_ids, top_ids, top_logprobs


@torch.inference_mode()
def _continue(model: TinyLlama, prompts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    length = PROMPT_LENGTH + CONTINUATION_LENGTH
    cache = Cache.empty(model.shape, len(prompts), length)
    token_ids, opinions = [prompts], []
    for _ in range(CONTINUATION_LENGTH + 1):
        logits = model(token_ids[-1], cache=cache)
        opinions.append(logits.float().log_softmax(-1).topk(TOP, dim=-1))
        token_ids.append(opinions[-1].indices[:, -1:, 0])
        if cache.length == length:
            break
    return (
        torch.cat(token_ids, dim=1)[:, :length],
        torch.cat([opinion.indices for opinion in opinions], dim=1).short(),
        torch.cat([opinion.values for opinion in opinions], dim=1).half(),
    )
