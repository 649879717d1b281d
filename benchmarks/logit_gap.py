"""Asks a neutral third how close a call was where two answers part: transformers, in float32."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measurement import Difference


@dataclass(frozen=True)
class TopTwo:
    """The two likeliest next tokens of a context and how far their logits lie apart."""

    first_token_id: int
    second_token_id: int
    gap: float


def top_two(model_folder: Path, differences: Sequence[Difference]) -> list[TopTwo]:
    """Returns the reference's two likeliest tokens at each difference's position."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with torch.inference_mode():
        return [_top_two(model, difference.context_token_ids) for difference in differences]


def _top_two(model: Any, context_token_ids: Sequence[int]) -> TopTwo:
    import torch

    logits = model(torch.tensor([context_token_ids]), logits_to_keep=1).logits[0, -1]  # [vocab]
    values, token_ids = logits.topk(2)
    return TopTwo(int(token_ids[0]), int(token_ids[1]), float(values[0] - values[1]))
