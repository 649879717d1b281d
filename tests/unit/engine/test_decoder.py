"""The native decoder against transformers' modeling code, on random models of each kind."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from specgw.engine.decoder import is_supported
from specgw.engine.model_runner import SequenceChunk
from tests.unit.engine.tiny_checkpoints import (
    OTHER_TOKEN_IDS,
    SIZES,
    TOKEN_IDS,
    expected_logits,
    load,
    logits_in_chunks,
    save_checkpoint,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama-no-groups": LlamaConfig(**SIZES | {"num_key_value_heads": 4}),
    "llama-head-size": LlamaConfig(**SIZES, head_dim=16),
    "llama-biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama3-rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "linear-rope": LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 2.0}),
    "yarn-rope": LlamaConfig(**SIZES, rope_parameters=YARN_ROPE),
    "smollm": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral-window": MistralConfig(**SIZES, sliding_window=7),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-window": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
}
TOLERANCE: dict[torch.dtype, Any] = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.bfloat16: {"rtol": 0.1, "atol": 0.25},  # logits spread over about +-5
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


@each_config
@pytest.mark.parametrize("sizes", [[50], [17, 16, 17], [30, *20 * [1]]], ids=["1", "3", "21"])
def test_logits_equal_those_of_transformers_in_any_number_of_chunks(
    config: PreTrainedConfig, sizes: list[int], tmp_path: Path
) -> None:
    model_dir = save_checkpoint(config, tmp_path)

    logits = logits_in_chunks(load(model_dir), sizes)

    assert is_supported(config)
    torch.testing.assert_close(logits, expected_logits(model_dir), **TOLERANCE[torch.float32])


@each_config
def test_bfloat16_logits_are_close_to_those_of_transformers(
    config: PreTrainedConfig, tmp_path: Path
) -> None:
    model_dir = save_checkpoint(config, tmp_path)

    logits = logits_in_chunks(load(model_dir, "bfloat16"), [30, 5, 1, 14])

    expected = expected_logits(model_dir, dtype=torch.bfloat16)
    torch.testing.assert_close(logits, expected, **TOLERANCE[torch.bfloat16])


@each_config
def test_a_ragged_batch_gives_each_sequence_its_own_logits(
    config: PreTrainedConfig, tmp_path: Path
) -> None:
    model_dir = save_checkpoint(config, tmp_path)
    runner = load(model_dir)
    one, other = runner.kv_cache.new_sequence(), runner.kv_cache.new_sequence()

    runner.forward([SequenceChunk(one, TOKEN_IDS[:20], 0)])
    logits = runner.forward(
        [
            SequenceChunk(one, TOKEN_IDS[20:21], 1),
            SequenceChunk(other, OTHER_TOKEN_IDS[:50], 3),
        ]
    )

    expected = torch.cat(
        (
            expected_logits(model_dir)[20:21],
            expected_logits(model_dir, OTHER_TOKEN_IDS)[47:],
        )
    )
    torch.testing.assert_close(logits, expected, **TOLERANCE[torch.float32])


def test_a_middle_chunk_gives_no_logits(tmp_path: Path) -> None:
    runner = load(save_checkpoint(CONFIGS["llama"], tmp_path))
    cache = runner.kv_cache.new_sequence()

    logits = runner.forward([SequenceChunk(cache, TOKEN_IDS[:20], 0)])

    assert logits.shape == (0, runner.vocab_size)
    assert cache.length == 20


def test_truncated_rows_leave_no_trace(tmp_path: Path) -> None:
    model_dir = save_checkpoint(CONFIGS["llama"], tmp_path)
    runner = load(model_dir)
    cache = runner.kv_cache.new_sequence()
    runner.forward([SequenceChunk(cache, [*TOKEN_IDS[:20], *OTHER_TOKEN_IDS[20:40]], 0)])

    cache.truncate(20)
    logits = runner.forward([SequenceChunk(cache, TOKEN_IDS[20:], 30)])

    expected = expected_logits(model_dir)[20:]
    torch.testing.assert_close(logits, expected, **TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, hidden_act="gelu"),
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
    ],
    ids=["activation", "rope"],
)
def test_what_it_does_not_compute_it_does_not_claim(config: PreTrainedConfig) -> None:
    config.architectures = ["LlamaForCausalLM"]

    assert not is_supported(config)
