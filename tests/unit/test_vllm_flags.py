"""Command lines that vLLM's parser understands."""

import pytest

from specgw.vllm_flags import normalized


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["m", "--port", "1"], ["m", "--port", "1"]),
        (["m", "--max_model_len=2_048"], ["m", "--max-model-len=2_048"]),
        (["my_model", "--spec_model", "a_b.c"], ["my_model", "--spec-model", "a_b.c"]),
        (["--host", "0.0.0.0", "-tp", "1"], ["--host", "0.0.0.0", "-tp", "1"]),
        (["--seed", "-1.5"], ["--seed", "-1.5"]),
        (["--spec-model=org/model.v1"], ["--spec-model=org/model.v1"]),
        (
            ["-sc.model", "d", "--port", "1", "-sc.num_speculative_tokens=3"],
            ["--port", "1", "-sc", '{"model": "d", "num_speculative_tokens": 3}'],
        ),
        (
            ["--speculative_config.draft_load_config.load_format", "auto"],
            ["--speculative-config", '{"draft_load_config": {"load_format": "auto"}}'],
        ),
        (
            ["--structured-outputs-config.disable_any_whitespace", "true"],
            ["--structured-outputs-config", '{"disable_any_whitespace": true}'],
        ),
        (["-sc.a+", "x,y", "-sc.b", "[1]"], ["-sc", '{"a": ["x", "y"], "b": [1]}']),
        (["-sc", '{"model": "a.b"}', "--", "-x.y"], ["-sc", '{"model": "a.b"}', "--", "-x.y"]),
    ],
)
def test_flags_are_rewritten(arguments: list[str], expected: list[str]) -> None:
    assert normalized(arguments) == expected
