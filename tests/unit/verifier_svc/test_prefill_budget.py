"""A long prompt beside sessions that decode: counted in rows, timed by the test's own clock."""

import itertools

import pytest

from tests.doubles import ToyRunner
from tests.verifier_harness import InlineVerifier
from verifier_svc.prefill_budget import PrefillBudget

LONG = [7] * 400


class Machine:
    """A clock that only a model's forward passes move, by what they would cost."""

    def __init__(self, runner: ToyRunner, step_s: float, row_s: float) -> None:
        self.now = 0.0
        runner.fault = lambda chunks: self._run(
            step_s + row_s * sum(len(chunk.token_ids) for chunk in chunks)
        )

    def _run(self, seconds: float) -> None:
        self.now += seconds

    def clock(self) -> float:
        return self.now


def build(step_s: float, row_s: float, fixed: int | None = None) -> tuple[InlineVerifier, Machine]:
    runner = ToyRunner()
    machine = Machine(runner, step_s, row_s)
    return (
        InlineVerifier(
            runner,
            clock=machine.clock,
            max_num_batched_tokens=512,
            max_prefill_tokens_beside_decodes=fixed,
        ),
        machine,
    )


def passes_of(verifier: InlineVerifier) -> list[list[int]]:
    runner = verifier.runner
    assert isinstance(runner, ToyRunner)
    return runner.passes


def test_a_running_session_gets_a_token_in_every_step_of_a_long_prefill() -> None:
    verifier, machine = build(step_s=0.04, row_s=0.003)
    running = verifier.submit([1] * 100)
    verifier.step(6)
    before, began = len(verifier.answers[running].token_ids), machine.now
    verifier.submit(LONG)

    steps = [machine.now]
    while not verifier.answers[2].token_ids:
        verifier.step()
        steps.append(machine.now)

    longest = max(after - before for before, after in itertools.pairwise(steps))
    assert len(verifier.answers[running].token_ids) - before == len(steps) - 1
    assert longest <= 3.3 * 0.043
    prefill_s = machine.now - began
    assert prefill_s < 2.0 * len(LONG) * 0.003  # and the prefill is not starved either


@pytest.mark.parametrize("most", [24, 512])
def test_rows_follow_what_the_machine_makes_of_them(most: int) -> None:
    """Fast rows are not held back, slow ones are; a step never has fewer than 16."""
    rows = []
    for step_s, row_s in ((0.01, 0.0001), (0.04, 0.002), (0.04, 1.0)):
        budget = PrefillBudget()
        budget.observe(0, 1, step_s, wait_s=0.0)
        budget.observe(400, 1, step_s + 400 * row_s, wait_s=0.0)
        rows.append(budget.rows(most, 1))

    assert rows == pytest.approx([min(most, 200), min(most, 40), 16], abs=1)


def test_rounds_that_wait_for_drafts_bear_more_rows() -> None:
    """Each of them is worth more tokens: prompts do not take the longer the better drafts are."""
    budget = PrefillBudget()
    budget.observe(0, 1, 0.1, wait_s=0.0)
    budget.observe(400, 1, 0.1 + 400 * 0.005, wait_s=0.0)
    without = budget.rows(512, 1)
    for _ in range(20):
        budget.observe(0, 1, 0.1, wait_s=0.2)

    assert without == pytest.approx(2 * 0.1 / 0.005, abs=1)
    assert budget.rows(512, 1) == pytest.approx(2 * (0.1 + 0.2) / 0.005, abs=2)


def test_many_sessions_bear_more_rows_than_the_few_that_were_left_before() -> None:
    """Each step is compared with one of about as many rows, not with the newest ones."""
    budget = PrefillBudget()
    for num_rows, step_s in ((16, 0.2), (8, 0.1), (1, 0.05)):
        for _ in range(20):
            budget.observe(0, num_rows, step_s, wait_s=0.0)
    budget.observe(400, 8, 0.1 + 400 * 0.005, wait_s=0.0)

    rows = [budget.rows(512, num_rows) for num_rows in (1, 8, 9, 16, 40)]

    assert rows == pytest.approx([20, 40, 40, 80, 80], abs=1)


def test_a_prompt_alone_takes_the_whole_step() -> None:
    verifier, _ = build(step_s=0.04, row_s=0.003)
    verifier.submit(LONG)

    verifier.step()

    assert passes_of(verifier) == [[400]]


def test_the_configured_number_holds_over_all_prompts_of_a_step() -> None:
    verifier, _ = build(step_s=0.04, row_s=0.0, fixed=50)
    verifier.submit([1] * 10)
    verifier.step(2)
    verifier.submit([2] * 30)
    verifier.submit([3] * 100)

    verifier.step(3)

    assert passes_of(verifier)[-3:] == [[1, 30, 20], [1, 1, 50], [1, 1, 30]]
