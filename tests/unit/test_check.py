"""What `specgw check` finds and prints."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from specgw.check import check
from specgw.check_report import as_json, as_text
from specgw.cli import main
from specgw.config import parse_config
from specgw.exit_codes import CONFIG_EXIT_CODE
from tests.speculative_configs import save_checkpoints


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    save_checkpoints(directory)
    return directory


def pair(checkpoints: Path, draft: str = "sibling", **drafting: Any) -> dict[str, Any]:
    return {
        "model": str(checkpoints / "target"),
        "speculative_config": {
            "model": str(checkpoints / draft),
            "num_speculative_tokens": 12,
            **drafting,
        },
    }


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["check", *arguments])


def flags(raw: dict[str, Any]) -> list[str]:
    return [raw["model"], "--speculative-config", json.dumps(raw["speculative_config"])]


def test_the_slots_table_at_twelve_draft_tokens(checkpoints: Path) -> None:
    result = run(*flags(pair(checkpoints)))
    lines = [line.split() for line in result.stdout.splitlines()]
    start = next(i for i, words in enumerate(lines) if words[:1] == ["slots"])
    columns = {" ".join(words[:-4]): words[-2:] for words in lines[start + 2 : start + 8]}
    draft_model = lines[start + 8]
    pard = lines[start + 9]

    assert result.exit_code == 0
    assert [columns[name][0] for name in ("EAGLE3", "P-EAGLE", "DFlash", "DSpark", "MTP")] == [
        "0", "11", "12", "11", "0",
    ]  # fmt: skip
    assert columns["N-gram"][0] == "0"
    assert draft_model == ["Draft", "model", "draft_model", "no", "1", "12", "<-", "here"]
    assert pard == ["PARD", "draft_model", "yes", "12", "12"]


def test_the_report_for_machines(checkpoints: Path) -> None:
    raw = pair(checkpoints) | {"max_num_seqs": 3, "api_key": ["secret"]}
    report = json.loads(as_json(check(raw)))

    assert report["valid"]
    assert report["problems"] == report["notices"] == []
    assert [line["extra_slots"] for line in report["slots"]] == [0, 11, 12, 11, 0, 0, 1, 12]
    assert [line["algorithm"] for line in report["slots"] if line["is_used"]] == ["Draft model"]
    assert report["effective_config"]["speculative_config"]["method"] == "draft_model"
    assert report["effective_config"]["api_key"] == ["(hidden)"]
    assert report["vocabulary"]["kinship"] == "same"
    verifier, proposer = report["budgets"]
    assert (verifier["rows_per_request"], proposer["rows_per_request"]) == (13, 2)
    assert verifier["kv_cache_tokens"] == 3 * 256
    assert verifier["kv_bytes_per_token"] == 2 * 2 * 4 * 8 * 2  # layers, K and V, heads, size, bf16
    assert (verifier["max_requests"], verifier["requests_per_step"]) == (3, 3)


def test_what_text_says_of_a_foreign_vocabulary(checkpoints: Path) -> None:
    report = check(pair(checkpoints, "foreign", use_heterogeneous_vocab=True))

    assert "foreign: 64 ids of the target, 64 of the draft, 0 tokens in both" in as_text(report)
    assert "id 0 is 'w0' to the target and 'x0' to the draft" in as_text(report)


def test_the_mask_token_is_named(checkpoints: Path) -> None:
    report = check(pair(checkpoints, "dflash-mask", parallel_drafting=True))

    assert "mask token 5 from dflash_config.mask_token_id" in as_text(report)
    assert [line.algorithm for line in report.slots if line.is_used] == ["PARD"]
    assert report.problems == report.notices == []


def test_more_tokens_than_a_parallel_draft_was_trained_for_are_noticed() -> None:
    drafting = {"model": "tiny/pard", "parallel_drafting": True}
    [notice] = check(
        {"model": "tiny/target", "speculative_config": {**drafting, "num_speculative_tokens": 12}}
    ).notices
    fitting = check(
        {"model": "tiny/target", "speculative_config": {**drafting, "num_speculative_tokens": 8}}
    )

    assert "tiny/pard was trained for 8 tokens a pass" in notice
    assert fitting.notices == []


def test_keys_without_effect_are_named(checkpoints: Path) -> None:
    report = check(pair(checkpoints, attention_backend="TRITON_ATTN", prompt_lookup_max=3))

    assert report.problems == []
    assert [notice.split(":")[0] for notice in report.notices] == [
        "speculative_config.attention_backend",
        "speculative_config.prompt_lookup_max",
    ]


def test_a_step_too_small_for_all_is_noticed(checkpoints: Path) -> None:
    report = check(pair(checkpoints) | {"max_num_batched_tokens": 64})

    assert report.notices == [
        "verifier: a step of 64 rows holds 2 of 16 requests with 13 rows each"
    ]


def test_all_problems_of_keys_rules_and_models_are_told_at_once(checkpoints: Path) -> None:
    raw = pair(checkpoints, "foreign") | {
        "port": "x", "max_num_seqs": 8, "max_num_batched_tokens": 12, "prot": 1,
    }  # fmt: skip
    result = run("--config", str(write_yaml(checkpoints / "wrong.yaml", raw)))

    assert result.exit_code == CONFIG_EXIT_CODE
    lines = result.stderr.splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        "port", "prot", "max_num_batched_tokens", "speculative_config.model",
    ]  # fmt: skip


def test_both_models_are_told_to_be_absent() -> None:
    raw = {
        "model": "/no/target",
        "speculative_config": {"model": "/no/draft", "num_speculative_tokens": 2},
    }

    assert check(raw).problems == [
        "model: /no/target: there is no such directory",
        "speculative_config.model: /no/draft: there is no such directory",
    ]


def test_without_speculation_there_is_nothing_about_drafts(checkpoints: Path) -> None:
    report = check({"model": str(checkpoints / "target")})

    assert report.problems == []
    assert report.slots == []
    assert [budget.service for budget in report.budgets] == ["verifier"]
    assert report.vocabulary == {}


def write_yaml(file: Path, raw: dict[str, Any]) -> Path:
    file.write_text(yaml.safe_dump(raw))
    return file


def test_flag_file_and_dict_mean_the_same(checkpoints: Path) -> None:
    raw = pair(checkpoints)
    hyphened = {
        "model": raw["model"],
        "speculative-config": {
            key.replace("_", "-"): value for key, value in raw["speculative_config"].items()
        },
    }
    drafting = raw["speculative_config"]
    aliases = [
        raw["model"],
        *("--spec-model", drafting["model"], "--spec-tokens", "12", "--spec-method", "draft_model"),
    ]
    ways = [
        flags(raw),
        [raw["model"], "-sc", json.dumps(drafting)],
        ["--config", str(write_yaml(checkpoints / "nested.yaml", raw))],
        ["--config", str(write_yaml(checkpoints / "hyphened.yaml", hyphened))],
        aliases,
        [
            raw["model"],
            *("--speculative_config.model", drafting["model"]),
            "--speculative-config.num-speculative-tokens=12",
        ],
    ]

    reports = [json.loads(run(*way, "--json").stdout) for way in ways]

    for report in reports:
        assert report == reports[0]
    assert reports[0]["effective_config"] == parse_config(raw).model_dump(
        mode="json", exclude_none=True
    )


def test_an_alias_beside_the_key_is_refused_from_any_source(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_yaml(checkpoints / "pair.yaml", pair(checkpoints))
    monkeypatch.setenv("SPECGW_SPEC_TOKENS", "3")

    result = run("--config", str(file))

    assert result.exit_code == CONFIG_EXIT_CODE
    assert (
        "--spec-tokens and speculative_config.num_speculative_tokens are mutually exclusive"
        in result.stderr
    )


def test_a_variable_holds_json_and_loses_to_the_flag(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = pair(checkpoints)
    monkeypatch.setenv("SPECGW_SPECULATIVE_CONFIG", json.dumps(raw["speculative_config"]))

    by_variable = json.loads(run(raw["model"], "--json").stdout)
    three = json.dumps({**raw["speculative_config"], "num_speculative_tokens": 3})
    by_flag = json.loads(run(raw["model"], "-sc", three, "--json").stdout)

    tokens = [
        report["effective_config"]["speculative_config"]["num_speculative_tokens"]
        for report in (by_variable, by_flag)
    ]
    assert tokens == [12, 3]


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--speculative-model", "--spec-model"),
        ("--num-speculative-tokens", "--spec-tokens"),
        ("--ngram-prompt-lookup-max", "prompt_lookup_max"),
        ("--speculative-disable-by-batch-size", "num_speculative_tokens_per_batch_size"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "check"])
def test_a_retired_flag_names_its_replacement(command: str, flag: str, hint: str) -> None:
    result = CliRunner().invoke(main, [command, "m", flag, "x"])

    assert result.exit_code == CONFIG_EXIT_CODE
    assert f"specgw: {flag}: use --speculative-config" in result.stderr
    assert hint in result.stderr


def test_retired_flags_need_no_value_and_are_told_together() -> None:
    flags = ["--speculative-disable-mqa-scorer", "--use-v2-block-manager"]

    result = CliRunner().invoke(main, ["serve", "m", *flags])

    assert result.exit_code == CONFIG_EXIT_CODE
    for flag in flags:
        assert f"{flag}: was removed from vLLM" in result.stderr


def test_no_service_that_runs_is_a_problem(checkpoints: Path) -> None:
    raw = pair(checkpoints)
    raw["specgw"] = {
        "gateway": {"verifiers": ["127.0.0.1:1"]},
        "verifier": {"proposers": ["127.0.0.1:2"]},
    }
    file = write_yaml(checkpoints / "split.yaml", raw)

    result = run("--config", str(file), "--online", "--timeout", "0.3", "--port", "1")

    assert result.exit_code == CONFIG_EXIT_CODE
    problems = result.stderr.splitlines()
    assert problems[0] == "specgw: gateway http://127.0.0.1:1: does not serve"
    assert problems[1].startswith("specgw: verifier 127.0.0.1:1: UNAVAILABLE")
    assert problems[2].startswith("specgw: proposer 127.0.0.1:2: UNAVAILABLE")


def test_nothing_of_it_needs_torch(checkpoints: Path) -> None:
    code = (
        "import sys; from specgw.cli import main\n"
        f"main({['check', *flags(pair(checkpoints))]!r}, standalone_mode=False)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert result.returncode == 0, result.stderr
