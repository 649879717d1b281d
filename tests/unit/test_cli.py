"""The command line: what it refuses, how, and with which exit code."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from specgw.cli import main
from specgw.exit_codes import CONFIG_EXIT_CODE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--config", "absent.yaml"], "--config absent.yaml: No such file or directory"),
        (["serve", "m", "--port", "x"], "port: Input should be a valid integer"),
        (["serve", "m", "-tp", "2"], "tensor_parallel_size: specgw does not run 2"),
        (
            ["serve", "m", "--speculative-config", '{"model": "d"}'],
            "speculative_config.num_speculative_tokens: Field required",
        ),
        (["verifier", "--config", "absent.yaml"], "--config absent.yaml: No such file"),
        (["proposer", "--config", "absent.yaml"], "--config absent.yaml: No such file"),
        (["health", "--config", "absent.yaml", "x:1"], "--config absent.yaml: No such file"),
    ],
)
def test_a_wrong_configuration_ends_with_2_and_says_why(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    result = CliRunner().invoke(main, arguments)

    assert result.exit_code == CONFIG_EXIT_CODE
    assert message in result.stderr


def test_health_of_nobody_fails() -> None:
    result = CliRunner().invoke(main, ["health", "127.0.0.1:1", "--timeout", "0.2"])

    assert result.exit_code == 1
    assert "127.0.0.1:1 does not serve" in result.stderr


def test_health_of_no_http_server_fails() -> None:
    result = CliRunner().invoke(main, ["health", "http://127.0.0.1:1", "--timeout", "0.2"])

    assert result.exit_code == 1
