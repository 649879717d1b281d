"""Greedy output with speculation equals output without it, token for token, in float32.

Every scripted proposer, every draft length from 1 to 8, batches of 1 and 8, and prompts from one
token to the context limit, over the in-process link. `test_lossless_over_grpc.py` does the same
over the other link.
"""

from collections.abc import Callable

import pytest

from specgw.engine.model_runner import ModelRunner
from specgw.link import InProcessLink
from specgw.types import SamplingParams, UndraftedReason
from tests.conftest import MAX_MODEL_LEN, VOCAB_SIZE
from tests.scripted_proposers import (
    Answers,
    DeadProposer,
    FlakyProposer,
    ScriptedProposer,
    half,
    liar,
    oracle,
    script,
)
from tests.verifier_harness import GREEDY, InlineVerifier, plain_answers

PROMPTS = [
    [(7 * length + 3 * position) % VOCAB_SIZE for position in range(length)]
    for length in (1, 2, 5, 17, 33, MAX_MODEL_LEN - 9, MAX_MODEL_LEN - 2, MAX_MODEL_LEN - 1)
]

PROPOSERS: dict[str, Callable[[Answers], ScriptedProposer]] = {
    "oracle": lambda answers: ScriptedProposer(oracle(answers)),
    "liar": lambda answers: ScriptedProposer(liar(answers, VOCAB_SIZE)),
    "half-1": lambda answers: ScriptedProposer(half(answers, 1, VOCAB_SIZE)),
    "half-3": lambda answers: ScriptedProposer(half(answers, 3, VOCAB_SIZE)),
    "script": lambda answers: ScriptedProposer(script(5, 6, 7, 8, 9, 10, 11, 12)),
    "script-out-of-range": lambda answers: ScriptedProposer(script(-1, 2**30, VOCAB_SIZE)),
    "script-empty": lambda answers: ScriptedProposer(script()),
    "script-too-long": lambda answers: ScriptedProposer(script(*range(60))),
    "flaky": lambda answers: FlakyProposer(oracle(answers), every=3),
}


@pytest.fixture(scope="module")
def answers(random_runner: ModelRunner) -> dict[tuple[int, ...], list[int]]:
    return plain_answers(random_runner, PROMPTS)


@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
@pytest.mark.parametrize("name", PROPOSERS)
def test_any_proposer_leaves_greedy_output_unchanged(
    name: str,
    num_draft_tokens: int,
    random_runner: ModelRunner,
    answers: dict[tuple[int, ...], list[int]],
) -> None:
    link = InProcessLink(PROPOSERS[name](answers))
    verifier = InlineVerifier(random_runner, [link], max_draft_tokens=num_draft_tokens)

    together = verifier.generate(PROMPTS)
    alone = verifier.generate(PROMPTS[3:4])

    assert [answer.token_ids for answer in together] == list(answers.values())
    assert alone[0].token_ids == together[3].token_ids
    assert random_runner.kv_cache.used_tokens == 0


@pytest.mark.parametrize("num_draft_tokens", [1, 4, 8])
def test_a_dead_proposer_leaves_greedy_output_unchanged(
    num_draft_tokens: int,
    random_runner: ModelRunner,
    answers: dict[tuple[int, ...], list[int]],
) -> None:
    verifier = InlineVerifier(
        random_runner,
        [InProcessLink(DeadProposer())],
        max_draft_tokens=num_draft_tokens,
        draft_timeout_s=0.001,
    )

    together = verifier.generate(PROMPTS)

    assert [answer.token_ids for answer in together] == list(answers.values())
    stats = together[0].speculation
    assert stats is not None
    assert stats.draft_count == 0
    assert stats.undrafted[UndraftedReason.LATE] > 0


@pytest.mark.parametrize(
    ("name", "per_position"),
    [
        ("oracle", [1.0, 1.0, 1.0, 1.0]),
        ("half-1", [1.0, 0.0, 0.0, 0.0]),
        ("half-3", [1.0, 1.0, 1.0, 0.0]),
        ("liar", [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_acceptance_is_counted_without_recovered_and_bonus_tokens(
    name: str,
    per_position: list[float],
    random_runner: ModelRunner,
    answers: dict[tuple[int, ...], list[int]],
) -> None:
    link = InProcessLink(PROPOSERS[name](answers))
    verifier = InlineVerifier(random_runner, [link], max_draft_tokens=4)
    # 21 = 1 + 4 * 5: with an oracle every round fits; the others are cut at the end.
    params = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True)

    [answer] = verifier.generate(PROMPTS[3:4], params)

    stats = answer.speculation
    assert stats is not None
    full_rounds = stats.draft_token_count // 4
    assert full_rounds >= 4
    for position, rate in enumerate(per_position):
        accepted = (stats.accepted_per_position + [0] * 4)[position]
        assert accepted == pytest.approx(rate * stats.draft_count, abs=3)
    assert stats.accepted_token_count == sum(stats.accepted_per_position)
    rounds = stats.draft_count + sum(stats.undrafted.values())
    assert len(answer.token_ids) == 1 + stats.accepted_token_count + rounds


def test_an_oracle_needs_one_round_for_each_block(
    random_runner: ModelRunner, answers: dict[tuple[int, ...], list[int]]
) -> None:
    proposer = ScriptedProposer(oracle(answers))
    verifier = InlineVerifier(random_runner, [InProcessLink(proposer)], max_draft_tokens=5)
    params = SamplingParams(temperature=0, max_tokens=19, ignore_eos=True)

    [answer] = verifier.generate(PROMPTS[3:4], params)

    assert [len(block) for block in answer.blocks] == [1, 6, 6, 6]


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_no_more_tokens_than_asked_for(
    max_tokens: int, random_runner: ModelRunner, answers: dict[tuple[int, ...], list[int]]
) -> None:
    proposer = ScriptedProposer(oracle(answers))
    verifier = InlineVerifier(random_runner, [InProcessLink(proposer)], max_draft_tokens=8)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)

    [answer] = verifier.generate(PROMPTS[2:3], params)

    assert answer.token_ids == answers[tuple(PROMPTS[2])][:max_tokens]
    assert proposer.num_asked == (0 if max_tokens < 3 else 1)


def test_baseline_differs_between_prompts(answers: dict[tuple[int, ...], list[int]]) -> None:
    """Guards the suite: a target that always said the same would pass every test above."""
    assert len({tuple(answer[:4]) for answer in answers.values()}) > 3
    assert len(set(answers[tuple(PROMPTS[3])])) > 5
    assert GREEDY.max_tokens is not None
    assert len(answers[tuple(PROMPTS[0])]) == GREEDY.max_tokens
