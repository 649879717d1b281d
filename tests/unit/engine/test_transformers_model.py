"""transformers' modeling code on the block cache against itself on its own."""

from pathlib import Path

import pytest
import torch
from transformers import (
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    MixtralConfig,
    OlmoConfig,
    PhiConfig,
    PreTrainedConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from specgw.engine.decoder import is_supported
from specgw.engine.model_runner import SequenceChunk
from specgw.errors import ConfigError
from tests.unit.engine.tiny_checkpoints import (
    OTHER_TOKEN_IDS,
    SIZES,
    TOKEN_IDS,
    VOCAB_SIZE,
    expected_logits,
    load,
    save_checkpoint,
)

CONFIGS: dict[str, PreTrainedConfig] = {
    "gemma": GemmaConfig(**SIZES, head_dim=16),
    "gemma3-windows": Gemma3TextConfig(
        **SIZES,
        head_dim=16,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt2": GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "gpt-neox": GPTNeoXConfig(**SIZES | {"num_key_value_heads": 4}),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, sliding_window=None),
    "olmo": OlmoConfig(**SIZES),
    "phi": PhiConfig(**SIZES),
    "smollm3": SmolLM3Config(**SIZES),
    "starcoder2-window": Starcoder2Config(**SIZES, sliding_window=7),
}
REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "bloom": (
        BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4),
        "takes no attention function but its own",
    ),
    "gemma2": (Gemma2Config(**SIZES, head_dim=16), "its attention uses softcap"),
    "gpt-oss": (GptOssConfig(**SIZES, head_dim=8, num_local_experts=4), "its attention uses s_aux"),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.5)], ids=str
)
def test_logits_of_a_ragged_batch_equal_those_of_transformers(
    config: PreTrainedConfig, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    model_dir = save_checkpoint(config, tmp_path)
    runner = load(model_dir, str(dtype).removeprefix("torch."))
    one, other = runner.kv_cache.new_sequence(), runner.kv_cache.new_sequence()

    runner.forward([SequenceChunk(one, TOKEN_IDS[:20], 0)])
    logits = runner.forward(
        [
            SequenceChunk(other, OTHER_TOKEN_IDS[:30], 2),
            SequenceChunk(one, TOKEN_IDS[20:], 30),
        ]
    )

    expected = torch.cat(
        (
            expected_logits(model_dir, OTHER_TOKEN_IDS, dtype)[28:30],
            expected_logits(model_dir, TOKEN_IDS, dtype)[20:],
        )
    )
    assert not is_supported(config)
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("config", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_model_that_needs_another_attention_is_refused_by_name(
    config: PreTrainedConfig, reason: str, tmp_path: Path
) -> None:
    model_dir = save_checkpoint(config, tmp_path)

    with pytest.raises(ConfigError, match=reason):
        load(model_dir, max_model_len=64)
