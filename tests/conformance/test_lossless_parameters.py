"""Output with speculation equals output without it for every parameter that changes logits.

For each, greedy and seeded, under an oracle, a liar and one that is right for two tokens, with 1, 3
and 7 draft tokens, and in one batch with requests that have no such parameter. In float32.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specgw.engine.loading import ModelOptions, load_model
from specgw.engine.model_runner import ModelRunner
from specgw.engine.sampling import RowSampling, sample
from specgw.link import InProcessLink
from specgw.types import SamplingParams
from tests.conftest import VOCAB_SIZE
from tests.scripted_proposers import Answers, ScriptedProposer, half, liar, oracle, script
from tests.verifier_harness import GREEDY, InlineVerifier, plain_answers
from verifier_svc import block_test

EOS = VOCAB_SIZE - 1
PROMPTS = [[9], [4, 8, 15, 16, 23, 42], [7] * 20, list(range(30))]
PROPOSERS = {
    "oracle": lambda answers: ScriptedProposer(oracle(answers)),
    "half": lambda answers: ScriptedProposer(half(answers, 2, VOCAB_SIZE)),
    "liar": lambda answers: ScriptedProposer(liar(answers, VOCAB_SIZE)),
}
PARAMETERS: dict[str, dict[str, object]] = {
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "negative frequency_penalty": {"frequency_penalty": -2.0},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "logit_bias": {"logit_bias": {11: 5.0, 12: 4.0, EOS: -100.0}},
    "bad_words": {"bad_words_token_ids": [(i,) for i in range(0, 60, 2)] + [(1, 3), (5, 7, 9)]},
    "allowed_token_ids": {"allowed_token_ids": range(0, VOCAB_SIZE, 3)},
    "min_tokens": {"min_tokens": 9, "ignore_eos": False, "logit_bias": {EOS: 9.0}},
    "all": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": {20: 3.0},
        "bad_words_token_ids": [(20, 21), (40,)],
        "min_tokens": 5,
    },
}
BASES = {
    "greedy": replace(GREEDY, max_tokens=30),
    "seeded": SamplingParams(temperature=0.9, seed=3, max_tokens=30, ignore_eos=True),
}


def _params(base: str, name: str) -> SamplingParams:
    return replace(BASES[base], **PARAMETERS[name])  # type: ignore[arg-type]


@functools.cache
def _cached_answers(runner: ModelRunner, base: str, name: str) -> dict[tuple[int, ...], list[int]]:
    return plain_answers(runner, PROMPTS, _params(base, name))


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 7])
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", PARAMETERS)
def test_any_proposer_leaves_output_unchanged(
    name: str, base: str, proposer: str, num_draft_tokens: int, random_runner: ModelRunner
) -> None:
    params = _params(base, name)
    answers = _cached_answers(random_runner, base, name)
    link = InProcessLink(PROPOSERS[proposer](answers))
    verifier = InlineVerifier(random_runner, [link], max_draft_tokens=num_draft_tokens)

    together = verifier.generate(PROMPTS, params)

    assert [answer.token_ids for answer in together] == list(answers.values())
    stats = together[1].speculation
    assert stats is not None
    assert stats.draft_count > 0
    if proposer == "oracle" and len(together[1].token_ids) > 9:
        assert stats.accepted_token_count > 0


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("base", BASES)
def test_each_parameter_changes_the_output(
    base: str, name: str, random_runner: ModelRunner
) -> None:
    """Guards the suite: a parameter that did nothing would pass the test above."""
    without = plain_answers(random_runner, PROMPTS, BASES[base])

    assert _cached_answers(random_runner, base, name) != without


def test_a_neighbour_without_parameters_is_not_touched(random_runner: ModelRunner) -> None:
    plain, strange = BASES["greedy"], replace(BASES["greedy"], repetition_penalty=1.3)
    expected = plain_answers(random_runner, PROMPTS, plain)
    scripts: Answers = {**expected}
    verifier = InlineVerifier(random_runner, [InProcessLink(ScriptedProposer(oracle(scripts)))])

    ids = [
        verifier.submit(prompt, params, max_draft_tokens=num_drafts)
        for prompt in PROMPTS
        for params, num_drafts in ((plain, 4), (strange, 2))
    ]
    verifier.run()

    untouched = [verifier.answers[session_id].token_ids for session_id in ids[::2]]
    assert untouched == list(expected.values())
    penalized = [verifier.answers[session_id].token_ids for session_id in ids[1::2]]
    assert penalized == list(plain_answers(random_runner, PROMPTS, strange).values())


@pytest.mark.parametrize("min_tokens", range(3, 9))
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_the_end_comes_at_once_after_min_tokens(
    min_tokens: int, proposer: str, random_runner: ModelRunner
) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=20, min_tokens=min_tokens, logit_bias={EOS: 100.0}
    )
    answers = plain_answers(random_runner, PROMPTS, params)
    link = InProcessLink(PROPOSERS[proposer](answers))

    for answer in InlineVerifier(random_runner, [link]).generate(PROMPTS, params):
        assert EOS not in answer.token_ids[:min_tokens]
        assert answer.token_ids[min_tokens:] == [EOS]


def test_a_request_that_moves_goes_on_as_if_it_had_not(random_runner: ModelRunner) -> None:
    params = _params("seeded", "all")
    whole = _cached_answers(random_runner, "seeded", "all")
    verifier = InlineVerifier(random_runner)

    for prompt, answer in whole.items():
        session_id = verifier.submit(prompt, params, output=answer[:11])
        verifier.run()

        assert verifier.answers[session_id].token_ids == answer[11:]


class OddAfterEven:
    """A custom processor whose rule depends on the token before and on the prompt."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __call__(
        self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int], logits: Tensor
    ) -> Tensor:
        last = [*prompt_token_ids, *output_token_ids][-1]
        logits[last % 2 :: 2] -= 50
        return logits


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 7])
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("base", BASES)
def test_custom_processors_see_the_drafts_before_their_row(
    base: str, proposer: str, num_draft_tokens: int, random_runner: ModelRunner
) -> None:
    custom = [OddAfterEven(VOCAB_SIZE)]
    plain = InlineVerifier(random_runner, custom_processors=custom)
    expected = [answer.token_ids for answer in plain.generate(PROMPTS, BASES[base])]
    answers = {tuple(prompt): one for prompt, one in zip(PROMPTS, expected, strict=True)}
    verifier = InlineVerifier(
        random_runner,
        [InProcessLink(PROPOSERS[proposer](answers))],
        max_draft_tokens=num_draft_tokens,
        custom_processors=custom,
    )

    together = verifier.generate(PROMPTS, BASES[base])

    assert [answer.token_ids for answer in together] == expected
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        parities = [token_id % 2 for token_id in (prompt[-1], *tokens)]
        assert all(one != other for one, other in itertools.pairwise(parities))


class Failing:
    """A custom processor that fails on one prompt and returns too little for another."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __call__(
        self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int], logits: Tensor
    ) -> Tensor:
        if len(prompt_token_ids) == 1 and len(output_token_ids) == 3:
            raise KeyError("by script")
        return logits[:5] if len(prompt_token_ids) == 20 else logits


def test_a_custom_processor_that_fails_ends_its_own_session_only(
    random_runner: ModelRunner,
) -> None:
    expected = list(plain_answers(random_runner, PROMPTS, BASES["greedy"]).values())
    verifier = InlineVerifier(random_runner, custom_processors=[Failing(VOCAB_SIZE)])

    answers = verifier.generate(PROMPTS, BASES["greedy"])

    assert [str(answer.error) for answer in answers if answer.error] == [
        "the logits processor Failing failed"
    ] * 2
    assert answers[0].token_ids == expected[0][:3]
    assert answers[2].token_ids == []
    assert [answers[1].token_ids, answers[3].token_ids] == [expected[1], expected[3]]
    assert random_runner.kv_cache.used_tokens == 0


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 7])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_a_custom_processor_that_fails_does_so_at_the_same_token_with_drafts(
    proposer: str, num_draft_tokens: int, random_runner: ModelRunner
) -> None:
    """It fails on a prefix of the output; a draft may come to it early, but not instead."""
    answers = plain_answers(random_runner, PROMPTS, BASES["greedy"])
    verifier = InlineVerifier(
        random_runner,
        [InProcessLink(PROPOSERS[proposer](answers))],
        max_draft_tokens=num_draft_tokens,
        custom_processors=[Failing(VOCAB_SIZE)],
    )

    answer, *_ = verifier.generate(PROMPTS, BASES["greedy"])

    assert str(answer.error) == "the logits processor Failing failed"
    assert answer.token_ids == answers[tuple(PROMPTS[0])][:3]


class FailingAfter:
    """A custom processor that fails behind a token that the target does not say."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def __call__(
        self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int], logits: Tensor
    ) -> Tensor:
        if self._token_id in output_token_ids:
            raise KeyError("by script")
        return logits


@pytest.mark.parametrize("base", BASES)
def test_a_rejected_draft_ends_no_request(base: str, random_runner: ModelRunner) -> None:
    answers = plain_answers(random_runner, PROMPTS, BASES[base])
    never = min(set(range(VOCAB_SIZE)) - {i for answer in answers.values() for i in answer})
    verifier = InlineVerifier(
        random_runner,
        [InProcessLink(ScriptedProposer(script(never, 1, 2)))],
        custom_processors=[FailingAfter(never)],
    )

    together = verifier.generate(PROMPTS, BASES[base])

    assert [answer.error for answer in together] == [None] * len(PROMPTS)
    assert [answer.token_ids for answer in together] == list(answers.values())


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(
    "changes",
    [
        {"min_tokens": 4, "allowed_token_ids": [EOS]},
        {"allowed_token_ids": [5], "bad_words_token_ids": [(5,)]},
        {"allowed_token_ids": [5, 6], "bad_words_token_ids": [(5, 5), (5, 6), (6, 5), (6, 6)]},
    ],
    ids=str,
)
@pytest.mark.parametrize("drafts", [(0,), (0, 0, 0, 0), (5, 0, 276), (6, 0, 276)], ids=str)
def test_where_nothing_is_allowed_drafts_change_nothing(
    drafts: tuple[int, ...],
    changes: dict[str, object],
    base: str,
    random_runner: ModelRunner,
) -> None:
    params = replace(BASES[base], max_tokens=6, **changes)  # type: ignore[arg-type]
    answers = plain_answers(random_runner, PROMPTS, params)
    link = InProcessLink(ScriptedProposer(script(*drafts)))

    together = InlineVerifier(random_runner, [link]).generate(PROMPTS, params)

    assert [answer.token_ids for answer in together] == list(answers.values())


def test_only_sessions_with_such_parameters_are_tested_in_float32(
    random_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary of float32 logits for every row would cost all others time."""
    runner = load_model(ModelOptions(str(random_model_dir), dtype="bfloat16", kv_cache_tokens=4096))
    tested: list[tuple[int, torch.dtype]] = []

    def record(logits: Tensor, rows: Sequence[RowSampling]) -> list[int]:
        tested.append((len(logits), logits.dtype))
        return sample(logits, rows)

    monkeypatch.setattr(block_test, "sample", record)
    verifier = InlineVerifier(runner)
    for prompt in PROMPTS[:3]:
        verifier.submit(prompt, replace(GREEDY, max_tokens=1))
    verifier.submit(PROMPTS[3], replace(_params("greedy", "logit_bias"), max_tokens=1))

    verifier.run()

    assert tested == [(3, torch.bfloat16), (1, torch.float32)]
