"""The configuration's verdicts and messages, and what beats what."""

from pathlib import Path
from typing import Any

import pytest

from specgw.config import (
    DEFAULT_CONFIG,
    EngineArgs,
    load_config,
    parse_config,
    validate_config,
)
from specgw.errors import ConfigError

DRAFT = {"model": "tiny/draft", "num_speculative_tokens": 4}


def problems(raw: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    return list(caught.value.problems)


def draft(**changes: Any) -> dict[str, Any]:
    return {"model": "tiny/target", "speculative_config": {**DRAFT, **changes}}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "model: Field required"),
        ({"model": "m", "prt": 1}, "prt: unknown key; did you mean port?"),
        ({"model": "m", "port": 70000}, "port: Input should be less than or equal to 65535"),
        ({"model": "m", "port": "x"}, "port: Input should be a valid integer"),
        ({"model": "m", "dtype": "int4"}, "dtype: Input should be 'auto', 'bfloat16'"),
        ({"model": "m", "max_num_seqs": 0}, "max_num_seqs: Input should be greater than or"),
        ({"model": "m", "tensor_parallel_size": 2}, "tensor_parallel_size: specgw does not run 2"),
        (
            {"model": "m", "specgw": {"verifer": {}}},
            "specgw.verifer: unknown key; did you mean ver",
        ),
        (
            {"model": "m", "specgw": {"verifier": {"listn": "x"}}},
            "specgw.verifier.listn: unknown key; did you mean listen?",
        ),
        ({"model": "m", "speculative_config": "{"}, "speculative_config: is not JSON"),
        ({"model": "m", "speculative_config": "[1]"}, "speculative_config: Input should be a"),
        (
            draft(num_speculative_tokens=0),
            "speculative_config.num_speculative_tokens: Input should be greater than or equal to 1",
        ),
        (
            draft(num_speculative_tokens=129),
            "speculative_config.num_speculative_tokens: Input should be less than or equal to 128",
        ),
        (
            draft(method="eagle3"),
            "speculative_config.method: specgw does not run eagle3 yet; it runs draft_model",
        ),
        (draft(method="eagle4"), "speculative_config.method: Input should be 'draft_model'"),
        (draft(draft_sample_method="x"), "speculative_config.draft_sample_method: Input should"),
        (draft(temperature=1), "speculative_config.temperature: is a sampling parameter"),
        (draft(top_p=1), "speculative_config.top_p: is a sampling parameter"),
        (draft(tensor_parallel_size=2), "speculative_config.tensor_parallel_size: is a top-"),
        (draft(target_model_config={}), "speculative_config.target_model_config: is set by"),
        (draft(num_speculative_token=4), "did you mean num_speculative_tokens?"),
        (
            {**draft(), "max_num_seqs": 2, "max_num_batched_tokens": 4},
            "max_num_batched_tokens: must be more than num_speculative_tokens = 4, got 4",
        ),
        (
            {"model": "m", "max_num_seqs": 300, "max_num_batched_tokens": 256},
            "max_num_batched_tokens: must be at least max_num_seqs = 300, got 256",
        ),
        ({"model": "m", "api_key": ""}, "api_key.0: String should have at least 1 character"),
        (
            {"model": "m", "specgw": {"gateway": {"queue_timeout_s": float("inf")}}},
            "specgw.gateway.queue_timeout_s: Input should be less than or equal to 86400",
        ),
        (
            {"model": "m", "specgw": {"tls": {"certificate_file": "/a", "private_key_file": "/b"}}},
            "specgw.tls.certificate_file: Path does not point to a file",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_key(raw: dict[str, Any], message: str) -> None:
    assert any(message in problem for problem in problems(raw))


def test_all_problems_are_told_at_once() -> None:
    found = problems({"port": -1, "modle": "m", "specgw": {"proposer": {"max_sessions": 0}}})

    assert [problem.split(":")[0] for problem in found] == [
        "model", "port", "specgw.proposer.max_sessions", "modle",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "speculative_config",
    [
        {"model": "d", "num_speculative_tokens": 5, "method": "draft_model"},
        '{"model": "d", "num_speculative_tokens": 5, "method": "draft_model"}',
        '{"model": "d", "num-speculative-tokens": 5}',
    ],
)
def test_a_mapping_and_json_mean_the_same(speculative_config: Any) -> None:
    args = parse_config({"model": "m", "speculative_config": speculative_config})

    assert (
        args.speculative_config
        == parse_config(
            {"model": "m", "speculative_config": {"model": "d", "num_speculative_tokens": 5}}
        ).speculative_config
    )


@pytest.mark.parametrize("name", ["deepseek_mtp", "qwen3_next_mtp"])
def test_a_deprecated_method_warns_and_means_mtp(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    raw = {"model": "m", "speculative_config": {"method": name, "num_speculative_tokens": 1}}

    args = validate_config(raw)

    assert args.speculative_config is not None
    assert (args.speculative_config.method, args.speculative_config.model) == ("mtp", "m")
    assert "this method is deprecated: use mtp" in caplog.messages


def test_what_the_config_says_follows_once_more_from_its_dump() -> None:
    for drafting in (
        {"method": "ngram", "num_speculative_tokens": 3},
        {"method": "suffix"},
        {"method": "dflash", "model": "d", "num_speculative_tokens": 3},
        {"model": "d", "num_speculative_tokens": 3, "attention_backend": "flash_attn"},
    ):
        args = validate_config({"model": "m", "speculative_config": drafting})

        assert validate_config(args.model_dump(mode="json", exclude_none=True)) == args


@pytest.mark.parametrize("broken", [{"port": "x"}, {"speculative_config": {"temperature": 1}}])
def test_rules_hold_beside_wrong_keys(broken: dict[str, Any]) -> None:
    raw = draft(draft_tensor_parallel_size=3)
    drafting = raw["speculative_config"] | broken.get("speculative_config", {})

    found = problems(raw | broken | {"speculative_config": drafting})

    assert len(found) == 2
    assert found[1].startswith("speculative_config.draft_tensor_parallel_size: must be 1 or")


def test_other_names_of_data_types_are_those_of_vllm() -> None:
    assert parse_config({"model": "m", "dtype": "half"}).dtype == "float16"


def test_hyphens_are_underscores() -> None:
    args = parse_config({"model": "m", "max-num-seqs": 3, "specgw": {"allow-insecure": True}})

    assert args.max_num_seqs == 3
    assert args.specgw.allow_insecure


def test_flags_beat_variables_beat_the_file_beat_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: m\nport: 1\nmax-num-seqs: 2\nspecgw: {verifier: {listen: 'a:1'}}\n")
    monkeypatch.setenv("SPECGW_PORT", "2")
    monkeypatch.setenv("SPECGW_MAX_NUM_SEQS", "5")
    monkeypatch.setenv("SPECGW_VERIFIER__LISTEN", "b:2")
    monkeypatch.setenv("SPECGW_API_KEY", "[one, two]")

    args = load_config(file, {"port": "3", "host": None})

    assert args.port == 3
    assert args.max_num_seqs == 5
    assert args.specgw.verifier.listen == "b:2"
    assert args.api_key == ("one", "two")
    assert args.host == "127.0.0.1"


def test_an_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECGW_PROT", "2")

    with pytest.raises(ConfigError, match=r"prot: unknown key; did you mean port\?"):
        load_config(None)


def test_without_arguments_the_bundled_models_are_used() -> None:
    args = load_config(None)

    assert DEFAULT_CONFIG.name == "tiny.yaml"
    assert args.model == "tiny/target"
    assert args.speculative_config is not None
    assert args.speculative_config.model == "tiny/draft"


def test_a_model_on_the_command_line_leaves_the_bundled_configuration_alone() -> None:
    args = load_config(None, {"model": "some/model"})

    assert args == EngineArgs(model="some/model")


@pytest.mark.parametrize(
    ("text", "message"),
    [("- a\n", "must be a mapping"), ("a: [\n", "is not YAML"), (None, "No such file")],
)
def test_a_file_that_cannot_be_read_is_named(
    text: str | None, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    if text is not None:
        file.write_text(text)

    with pytest.raises(ConfigError, match=message) as caught:
        load_config(file)

    assert str(file) in str(caught.value)


@pytest.mark.parametrize("name", ["tiny.yaml", "pard.yaml", "split.yaml"])
def test_the_shipped_files_are_valid(name: str) -> None:
    args = load_config(DEFAULT_CONFIG.parent / name)

    assert args.max_draft_tokens == 4


@pytest.mark.parametrize(
    ("drafting", "fallback", "message"),
    [
        (None, {"method": "ngram"}, "fallback_proposer: needs speculative_config"),
        (
            {"method": "ngram", "num_speculative_tokens": 3},
            {"method": "suffix"},
            "fallback_proposer: needs a proposer to stand in for",
        ),
        (DRAFT, {"method": "eagle"}, "fallback_proposer.method: Input should be 'ngram' or"),
        (DRAFT, {}, "fallback_proposer.method: Field required"),
        (DRAFT, {"method": "suffix", "min_match": 3}, "did you mean min_match_length?"),
        (
            DRAFT,
            {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2},
            "fallback_proposer.prompt_lookup_min: must be at most prompt_lookup_max = 2, got 4",
        ),
    ],
)
def test_a_fallback_that_cannot_be_is_refused(
    drafting: dict[str, Any] | None, fallback: dict[str, Any], message: str
) -> None:
    raw = {
        "model": "tiny/target",
        "speculative_config": drafting,
        "specgw": {"fallback_proposer": fallback},
    }

    assert message in " ".join(problems(raw))


def test_a_fallback_has_the_n_gram_window_of_speculative_config() -> None:
    fallback = {"method": "ngram", "prompt_lookup_max": 3}
    args = parse_config(
        {"model": "m", "speculative_config": DRAFT, "specgw": {"fallback_proposer": fallback}}
    )

    assert args.specgw.fallback_proposer is not None
    assert args.specgw.fallback_proposer.prompt_lookup_min == 3
