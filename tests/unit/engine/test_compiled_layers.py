"""All layers in one compiled call, against the same layers one operator after the other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from specgw.engine import cpu_kernels, decoder
from specgw.engine.compiled_layers import CompiledLayers
from specgw.engine.loading import ModelOptions, load_model
from tests.unit.engine.tiny_checkpoints import SIZES, logits_in_chunks, save_checkpoint

pytestmark = pytest.mark.skipif(
    not cpu_kernels.is_usable(torch.empty(0, dtype=torch.bfloat16)),
    reason="no compiled operators here, or a CPU without AVX-512 BF16",
)

WIDE: dict[str, Any] = {**SIZES, "head_dim": 32}
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**WIDE, attention_bias=True, mlp_bias=True),
    "llama-no-groups": LlamaConfig(**WIDE | {"num_key_value_heads": 4}),
    "mistral": MistralConfig(**WIDE, sliding_window=7),
    "qwen2": Qwen2Config(**SIZES | {"hidden_size": 128, "num_attention_heads": 4}, **WINDOW),
    "qwen3": Qwen3Config(**WIDE),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def logits(model_dir: Path, sizes: list[int], quantization: str | None) -> Tensor:
    options = ModelOptions(str(model_dir), "bfloat16", max_model_len=64, quantization=quantization)
    return logits_in_chunks(load_model(options), sizes)


@each_config
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_compiled_layers_compute_what_the_operators_do(
    config: PreTrainedConfig,
    quantization: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model_dir = save_checkpoint(config, tmp_path)
    calls: list[int] = []
    run = CompiledLayers.__call__

    def count(self: CompiledLayers, hidden: Tensor, *others: Any) -> Tensor:
        calls.append(len(hidden))
        return run(self, hidden, *others)

    monkeypatch.setattr(CompiledLayers, "__call__", count)
    compiled = logits(model_dir, [30, 9, 1, 10], quantization)
    assert calls == [30, 9, 1, 10]
    monkeypatch.setattr(decoder, "can_compile", lambda *_: False)
    expected = logits(model_dir, [30, 9, 1, 10], quantization)

    assert len(calls) == 4
    # Logits spread over about +-5. In int8 a last bit may move a value by a whole step.
    atol = 0.25 if quantization is None else 1.0
    torch.testing.assert_close(compiled, expected, rtol=0.1, atol=atol)
    assert (compiled - expected).abs().float().mean() < atol / 5


@each_config
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_row_does_not_depend_on_the_pieces_of_its_prompt(
    config: PreTrainedConfig, quantization: str | None, tmp_path: Path
) -> None:
    """Bit for bit: also where pieces have fewer or more rows than are computed together."""
    model_dir = save_checkpoint(config, tmp_path)

    whole = logits(model_dir, [50], quantization)

    for sizes in ([30, 9, 1, 10], [8, 1, 1, 40], [49, 1]):
        assert torch.equal(logits(model_dir, sizes, quantization), whole)
