"""What is said of each configuration in the table, and why it is not what vLLM says."""

from collections import Counter
from pathlib import Path

import pytest

from specgw.vllm_differences import DIFFERENCES
from tests.speculative_configs import Row, judge, rows, save_checkpoints

ROWS = rows()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    save_checkpoints(directory)
    return directory


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_verdict_and_message(row: Row, checkpoints: Path) -> None:
    said = judge(row.raw(checkpoints))

    assert said.verdict == row.verdict, said.messages
    assert any(row.says in message for message in said.messages) or not said.messages
    assert row.method in (None, said.method)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_verdict_other_than_vllms_has_a_reason(row: Row) -> None:
    assert (row.difference is not None) == row.differs
    assert row.difference in {None, *(one.id for one in DIFFERENCES)}


def test_the_table_is_whole() -> None:
    assert len(ROWS) >= 120
    assert max(Counter(row.id for row in ROWS).values()) == 1
    assert {one.id for one in DIFFERENCES} == {row.difference for row in ROWS} - {None}
    assert all(row.says for row in ROWS if row.verdict != "runs")
