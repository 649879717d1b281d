"""Turns a causal language model into a parallel draft; `tools/pard_adapt.py` is its command."""

import json
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from specgw.model_checks import TRAINED_TOKENS_FIELD
from tools.pard.layout import Places, pard_loss
from tools.pard.rollouts import Rollouts
from tools.training import Batch, Schedule, micro_batches, train

_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*",
                    "merges.txt", "spiece.model", "chat_template*")  # fmt: skip


@dataclass(frozen=True)
class Lessons:
    """How the rollouts are gone through.

    Attributes:
        schedule: Steps and learning rates.
        window: Tokens of a rollout that one pass looks at.
        batch_size: Rollouts of a step.
        micro_batch_size: Rollouts of one pass.
        seed: Decides order, windows and anchors.
    """

    schedule: Schedule
    window: int = 192
    batch_size: int = 16
    micro_batch_size: int = 4
    seed: int = 1

    def batches(self, rollouts: Rollouts, step: int) -> list[Batch]:
        """Returns a step's micro-batches; a function of its arguments alone."""
        rows = rollouts.rows(step, self.batch_size, self.seed)
        generator = torch.Generator().manual_seed(self.seed + step)
        window = min(self.window, rollouts.token_ids.shape[1])
        slack = rollouts.token_ids.shape[1] - window
        start = int(torch.randint(slack + 1, (1,), generator=generator))
        cut = slice(start, start + window)
        seeds = torch.arange(len(rows)) + self.batch_size * step
        return micro_batches(
            rollouts.token_ids[rows, cut],
            rollouts.top_ids[rows, cut],
            rollouts.top_logprobs[rows, cut],
            seeds,
            size=self.micro_batch_size,
        )


def load_draft(directory: Path, device: str = "cpu") -> PreTrainedModel:
    """Loads a model in float32, with an attention that takes any mask."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa"
    )
    return cast(PreTrainedModel, model.to(device))


def adapt(
    model: PreTrainedModel, rollouts: Rollouts, places: Places, lessons: Lessons, checkpoint: Path
) -> list[float]:
    """Trains a model in place to fill masks; goes on from `checkpoint` where it exists.

    Returns:
        The loss of each step that was taken now.
    """
    return train(
        model,
        lessons.schedule,
        partial(lessons.batches, rollouts),
        partial(pard_loss, places),
        checkpoint,
    )


def save(model: PreTrainedModel, places: Places, source: Path, out: Path) -> None:
    """Writes a checkpoint that names its mask token, with the source's type and tokenizer."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
    model.config.pard_token = places.mask_token_id
    setattr(model.config, TRAINED_TOKENS_FIELD, places.num_tokens)
    model.to(dtype).save_pretrained(out)
    for pattern in _TOKENIZER_FILES:
        for file in source.glob(pattern):
            shutil.copyfile(file, out / file.name)
