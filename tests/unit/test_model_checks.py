"""The mask token of a parallel draft, and what a checkpoint says of its method."""

from typing import Any

import pytest

from specgw.errors import ConfigError
from specgw.method_detection import detect_method, num_predicted_tokens
from specgw.model_checks import mask_token, resolve_mask_token, trained_draft_tokens

ALL_FIELDS = {
    "dflash_config": {"mask_token_id": 1},
    "mask_token_id": 2,
    "dspark_noise_token_id": 3,
    "pard_token": 4,
    "ptd_token_id": 5,
}


def test_the_first_field_names_the_mask_token() -> None:
    config: dict[str, Any] = dict(ALL_FIELDS)
    found = []
    while config:
        found.append(mask_token(config))
        del config[next(iter(config))]

    assert found == [
        ("dflash_config.mask_token_id", 1),
        ("mask_token_id", 2),
        ("dspark_noise_token_id", 3),
        ("pard_token", 4),
        ("ptd_token_id", 5),
    ]
    assert mask_token({}) is None


def test_a_null_is_no_mask_token() -> None:
    assert mask_token({"dflash_config": {}, "mask_token_id": None, "pard_token": 0}) == (
        "pard_token",
        0,
    )


@pytest.mark.parametrize("config", [{}, {"pard_token": 8}, {"pard_token": -1}, {"pard_token": "m"}])
def test_a_mask_token_outside_the_vocabulary_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"parallel_drafting: .*pard_token.*"):
        resolve_mask_token("draft", config, vocab_size=8)

    assert resolve_mask_token("draft", {"pard_token": 7}, vocab_size=8) == 7


@pytest.mark.parametrize("value", [0, -1, "8", True])
def test_a_trained_length_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="pard_num_tokens: must be at least 1"):
        trained_draft_tokens({"pard_num_tokens": value})

    assert trained_draft_tokens({"pard_num_tokens": 8}) == 8
    assert trained_draft_tokens({}) is None


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({}, "draft_model"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "draft_model"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        ({"architectures": ["DFlashDraftModel"]}, "dflash"),
        ({"architectures": ["Qwen3DSparkModel"]}, "dspark"),
        ({"model_type": "medusa"}, "medusa"),
        ({"model_type": "mlp_speculator"}, "mlp_speculator"),
        ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}, "mtp"),
        ({"model_type": "deepseek_v3"}, "draft_model"),
        ({"model_type": "qwen3_5", "text_config": {"mtp_num_hidden_layers": 1}}, "mtp"),
    ],
)
def test_config_json_says_the_method(config: dict[str, Any], method: str) -> None:
    assert detect_method(config)[0] == method


@pytest.mark.parametrize(
    ("method", "config", "count"),
    [
        ("draft_model", {"n_predict": 3}, 3),
        ("draft_model", {"num_nextn_predict_layers": 3}, None),
        ("mtp", {"num_nextn_predict_layers": 3}, 3),
        ("mtp", {"text_config": {"mtp_num_hidden_layers": 2}}, 2),
        ("dspark", {"n_predict": 3, "block_size": 7}, 7),
        ("dspark", {"dspark_block_size": 5}, 5),
        ("eagle3", {}, None),
    ],
)
def test_config_json_says_how_many_tokens_are_predicted(
    method: str, config: dict[str, Any], count: int | None
) -> None:
    assert num_predicted_tokens(method, config) == count
