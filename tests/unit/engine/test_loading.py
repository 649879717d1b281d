"""What is loaded, what is refused, and what the refusal says."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen2VLConfig, T5Config

from specgw.config import parse_config
from specgw.engine.loading import ModelOptions, draft_options, load_model, target_options
from specgw.errors import ConfigError
from tests.unit.engine.tiny_checkpoints import (
    SIZES,
    TOKEN_IDS,
    expected_logits,
    load,
    logits_in_chunks,
    save_checkpoint,
)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return save_checkpoint(LlamaConfig(**SIZES, eos_token_id=7), tmp_path)


def edit_json(file: Path, **changes: Any) -> None:
    values = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(values | changes))


def edit_weights(model_dir: Path, **changes: torch.Tensor | None) -> None:
    """Replaces tensors, by their name with __ for a dot; None removes one."""
    file = model_dir / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, file, {"format": "pt"})


def test_a_model_describes_itself(model_dir: Path) -> None:
    runner = load(model_dir, "bfloat16")

    assert runner.description.name == str(model_dir)
    assert runner.description.architecture == "LlamaForCausalLM"
    assert (runner.description.dtype, runner.description.device) == ("bfloat16", "cpu")
    assert (runner.vocab_size, runner.max_model_len) == (101, 64)


def test_the_data_type_is_the_checkpoints_unless_told_otherwise(model_dir: Path) -> None:
    edit_json(model_dir / "config.json", dtype="bfloat16")

    assert load(model_dir, "auto").description.dtype == "bfloat16"
    assert load(model_dir, "float32").description.dtype == "float32"


def test_end_tokens_come_from_the_generation_config_before_the_config(model_dir: Path) -> None:
    (model_dir / "generation_config.json").unlink()
    from_config = load(model_dir).eos_token_ids
    edit_json(model_dir / "generation_config.json", eos_token_id=[3, 5])
    from_generation_config = load(model_dir).eos_token_ids

    assert (from_config, from_generation_config) == ((7,), (3, 5))


def test_weights_in_several_files_are_found(model_dir: Path) -> None:
    expected = expected_logits(model_dir)
    tensors = list(load_file(model_dir / "model.safetensors").items())
    (model_dir / "model.safetensors").unlink()
    for i, part in enumerate((tensors[::2], tensors[1::2])):
        save_file(dict(part), model_dir / f"model-0000{i + 1}-of-00002.safetensors")

    logits = logits_in_chunks(load(model_dir), [50])

    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_vocabulary_padded_beyond_the_tokenizer_keeps_all_its_logits(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES | {"vocab_size": 128}, tie_word_embeddings=True)
    model_dir = save_checkpoint(config, tmp_path)

    runner = load(model_dir)

    assert runner.vocab_size == 128
    assert logits_in_chunks(runner, [50]).shape == (len(TOKEN_IDS), 128)


def test_pickled_weights_are_refused(model_dir: Path) -> None:
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")

    with pytest.raises(ConfigError, match=r"pickles \(pytorch_model.bin\).* safetensors"):
        load(model_dir)


def test_a_directory_without_weights_is_refused(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()

    with pytest.raises(ConfigError, match=r"there is no \*\.safetensors file"):
        load(model_dir)


def test_a_damaged_file_is_named(model_dir: Path) -> None:
    (model_dir / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")

    with pytest.raises(ConfigError, match=r"model.safetensors: cannot be read as safetensors"):
        load(model_dir)


def test_a_missing_tensor_is_named(model_dir: Path) -> None:
    edit_weights(model_dir, model__layers__1__mlp__up_proj__weight=None)

    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load(model_dir)


def test_a_tensor_of_another_shape_is_named(model_dir: Path) -> None:
    edit_weights(model_dir, model__norm__weight=torch.ones(33))

    with pytest.raises(ConfigError, match=r"model\.norm\.weight has shape \[33\].* says \[32\]"):
        load(model_dir)


def test_a_tensor_that_the_model_does_not_know_is_named(model_dir: Path) -> None:
    edit_weights(model_dir, model__layers__0__self_attn__q_norm__weight=torch.ones(8))

    with pytest.raises(ConfigError, match=r"self_attn\.q_norm\.weight is unknown"):
        load(model_dir)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "is quantized"),
        (
            {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
            "multimodal positions",
        ),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "of type chunked_attention"),
        (
            {
                "rope_parameters": {
                    "rope_type": "dynamic",
                    "factor": 2.0,
                    "original_max_position_embeddings": 32,
                }
            },
            "RoPE type dynamic.* max_model_len up to 32",
        ),
        ({"model_type": "no-such-model"}, "config.json cannot be used"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    changes: dict[str, Any], reason: str, model_dir: Path
) -> None:
    edit_json(model_dir / "config.json", **changes)

    with pytest.raises(ConfigError, match=reason):
        load(model_dir)


@pytest.mark.parametrize(
    ("config", "reason"),
    [(T5Config(), "is an encoder-decoder model"), (Qwen2VLConfig(), "is a multimodal model")],
)
def test_another_kind_of_model_is_refused(config: Any, reason: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match=reason):
        load(tmp_path, max_model_len=64)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "int8"}, "dtype: 'int8' is not a floating point type"),
        ({"device": "abacus"}, "device: 'abacus' cannot be used"),
        ({"max_model_len": 65}, "supports 64, got 65"),
        (
            {"max_model_len": 64, "kv_cache_tokens": 48},
            "holds 48 tokens.* up to 64: raise specgw.verifier.kv_cache_tokens or lower max_model",
        ),
        (
            {"max_model_len": 64, "cpu_memory_fraction": 1e-9, "section": "proposer"},
            "up to 64: raise specgw.proposer.cpu_memory_fraction or lower max_model_len",
        ),
    ],
)
def test_an_option_that_does_not_fit_the_model_is_refused(
    options: dict[str, Any], reason: str, model_dir: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_model(ModelOptions(str(model_dir), **options))


def test_a_draft_may_be_made_for_less_than_the_target(model_dir: Path) -> None:
    assert load(model_dir, max_model_len=1000, accept_shorter=True).max_model_len == 64


def test_without_a_wish_the_context_shrinks_to_the_kv_cache(model_dir: Path) -> None:
    assert load(model_dir, kv_cache_tokens=48).max_model_len == 48


def test_the_kv_cache_holds_every_sequence_at_full_length_by_default(model_dir: Path) -> None:
    assert load(model_dir, max_num_seqs=5).kv_cache.capacity_tokens == 5 * 64


def test_the_kv_cache_takes_no_more_of_the_memory_than_allowed(model_dir: Path) -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    whole = load(model_dir, max_num_seqs=5).kv_cache
    bytes_per_token = sum(layer[0].nbytes for layer in whole.layers)

    capped = load(model_dir, max_num_seqs=5, cpu_memory_fraction=100 * bytes_per_token / memory)

    assert 96 <= capped.kv_cache.capacity_tokens <= 112 < whole.capacity_tokens


def test_options_follow_from_the_configuration() -> None:
    args = parse_config(
        {
            "model": "target",
            "dtype": "bfloat16",
            "max_model_len": 512,
            "max_num_seqs": 3,
            "attention_backend": "flash_attn",
            "max_cudagraph_capture_size": 100,
            "speculative_config": {
                "model": "draft",
                "num_speculative_tokens": 4,
                "attention_backend": "TORCH_SDPA",
                "enforce_eager": True,
            },
            "specgw": {
                "verifier": {"num_threads": 1, "kv_cache_tokens": 1024},
                "proposer": {"num_threads": 2, "max_sessions": 5, "cpu_memory_fraction": 0.5},
            },
        }
    )

    shared: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": 512,
        "max_decode_rows": 5,
        "max_cudagraph_capture_size": 100,
    }
    assert target_options(args) == ModelOptions(
        "target",
        **shared,
        kv_cache_tokens=1024,
        max_num_seqs=3,
        num_threads=1,
        attention_backend="FLASH_ATTN",
    )
    assert draft_options(args) == ModelOptions(
        "draft",
        **shared,
        accept_shorter=True,
        cpu_memory_fraction=0.5,
        max_num_seqs=5,
        num_threads=2,
        attention_backend="TORCH_SDPA",
        enforce_eager=True,
        section="proposer",
    )


@pytest.mark.parametrize(("is_parallel", "num_rows"), [(False, 5), (True, 8)])
def test_a_draft_decodes_rows_for_all_that_a_round_accepts_and_for_masks(
    is_parallel: bool, num_rows: int
) -> None:
    drafting = {"model": "d", "num_speculative_tokens": 4, "parallel_drafting": is_parallel}
    args = parse_config({"model": "t", "speculative_config": drafting})

    assert draft_options(args).max_decode_rows == num_rows
