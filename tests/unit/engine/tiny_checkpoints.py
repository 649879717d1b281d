"""Checkpoints of any architecture, with random weights large enough for every part to matter."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.utils.logging import disable_progress_bar

from specgw.engine.loading import ModelOptions, load_model
from specgw.engine.model_runner import ModelRunner, SequenceChunk

VOCAB_SIZE = 101
MAX_MODEL_LEN = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "pad_token_id": 0,
}
TOKEN_IDS = [(31 * i + 5) % VOCAB_SIZE for i in range(50)]
OTHER_TOKEN_IDS = [(17 * i + 3) % VOCAB_SIZE for i in range(50)]


def save_checkpoint(config: PreTrainedConfig, model_dir: Path) -> Path:
    """Saves a random model; returns its directory."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        is_scale = "norm" in name and name.endswith("weight")
        parameter.data.normal_(1.0 if is_scale else 0.0, 0.2, generator=generator)
    model.save_pretrained(model_dir)
    return model_dir


def load(model_dir: Path, dtype: str = "float32", **options: Any) -> ModelRunner:
    """Loads a checkpoint."""
    return load_model(ModelOptions(str(model_dir), dtype=dtype, num_threads=1, **options))


def expected_logits(
    model_dir: Path, token_ids: Sequence[int] = TOKEN_IDS, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Returns the logits that transformers computes without a cache."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


def logits_in_chunks(
    runner: ModelRunner, sizes: Sequence[int], token_ids: Sequence[int] = TOKEN_IDS
) -> torch.Tensor:
    """Returns all logits of a sequence that is fed in chunks."""
    cache = runner.kv_cache.new_sequence()
    logits = []
    for size in sizes:
        chunk = token_ids[cache.length : cache.length + size]
        logits.append(runner.forward([SequenceChunk(cache, chunk, size)]))
    cache.release()
    return torch.cat(logits)
