"""`python -m benchmarks.acceptance_rules` measures every rule; its estimates are right."""

import pytest
from click.testing import CliRunner

from benchmarks.acceptance_rules import (
    RULES,
    acceptance_by_support,
    accepted_per_round,
    difference,
    main,
)
from specgw.types import SpeculationStats

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("single_thread")]


def test_both_tables_are_printed() -> None:
    arguments = ["--num-prompts=2", "--max-tokens=8", "--draft-tokens=2", "--support=4"]

    result = CliRunner().invoke(main, arguments)

    assert result.exit_code == 0, result.output
    for method, test in RULES:
        assert f"| `{method}` | `{test}` | " in result.output
    assert "| 4 | 0." in result.output


def test_a_longer_law_is_accepted_more_often() -> None:
    few, some, whole = acceptance_by_support([[9, 8, 7, 6], [5, 4, 3, 2]], [1, 16, 4096])

    assert 0 < few.mean < some.mean < whole.mean < 1


def test_the_error_is_that_of_a_ratio_of_sums() -> None:
    """Of 2, 4 and 0 accepted in 2, 2 and 2 rounds: 1 on average; the deviations are 0, 2, -2."""
    stats = [SpeculationStats(draft_count=2, accepted_token_count=n) for n in (2, 4, 0)]

    found = accepted_per_round(stats)

    assert found.mean == 1
    assert found.error == pytest.approx((8 * 3 / 2) ** 0.5 / 6)


def test_a_difference_is_free_of_what_both_rules_have_in_common() -> None:
    some = [SpeculationStats(draft_count=2, accepted_token_count=n) for n in (2, 4, 0)]
    more = [SpeculationStats(draft_count=2, accepted_token_count=n + 1) for n in (2, 4, 0)]

    found = difference(more, some)

    assert (found.mean, found.error) == pytest.approx((0.5, 0))
