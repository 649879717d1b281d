"""`python -m benchmarks.acceptance` measures every method, and notices an answer that changed."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.acceptance import METHODS, TARGET, Models, main, measure, prompt_token_ids
from specgw.types import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("single_thread")]


def test_every_method_is_lossless(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = {"--num-prompts": 2, "--max-tokens": 16, "--draft-tokens": 4, "--batch": 2}
    arguments = [f"{name}={value}" for name, value in (options | {"--json": file}).items()]

    result = CliRunner().invoke(main, arguments)

    assert result.exit_code == 0, result.output
    rows = {row["method"]: row for row in json.loads(file.read_text())}
    assert list(rows) == [method.name for method in METHODS]
    assert all(row["is_lossless"] for row in rows.values())
    assert rows["PARD"]["draft_passes_per_round"] == 1 < rows["AR"]["draft_passes_per_round"] <= 4


def test_sampled_answers_are_compared_too() -> None:
    options = {
        "--num-prompts": 2,
        "--max-tokens": 16,
        "--draft-tokens": 4,
        "--batch": 2,
        "--temperature": 1,
        "--draft-sample-method": "coupled",
        "--method": "TLI token",
    }

    result = CliRunner().invoke(main, [f"{name}={value}" for name, value in options.items()])

    assert result.exit_code == 0, result.output
    assert "| TLI token | 4 | 2 |" in result.output


def test_another_answer_is_noticed() -> None:
    [prompt] = prompt_token_ids(TARGET, None, raw=False, count=1)
    params = SamplingParams(temperature=0, max_tokens=4)

    row = measure(Models(), METHODS[0], 2, 1, [prompt], params, expected=[[5, 5, 5, 5]])

    assert not row.is_lossless


def test_an_unknown_method_is_refused() -> None:
    result = CliRunner().invoke(main, ["--method", "EAGLE"])

    assert result.exit_code == 2
    assert "no such method: EAGLE" in result.output
