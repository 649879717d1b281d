"""Lookup drafts leave the output unchanged, wherever they are looked up, greedy and seeded."""

from collections.abc import Callable

import pytest

from proposer_svc.lookup import LookupDrafter
from proposer_svc.proposer import ProposerCore
from specgw.engine.model_runner import ModelRunner
from specgw.link import InProcessLink
from specgw.llm import LLM
from specgw.lookup.match import Lookup
from specgw.lookup.ngram import NgramLookup
from specgw.lookup.suffix import SuffixLookup, SuffixSettings
from specgw.types import SamplingParams, UndraftedReason
from tests.conftest import MAX_MODEL_LEN
from tests.scripted_proposers import DeadProposer, FlakyProposer, ScriptedProposer, liar, oracle
from tests.verifier_harness import GREEDY, InlineVerifier, plain_answers
from verifier_svc.local_drafts import LocalDrafts

Answers = dict[tuple[int, ...], list[int]]

# Their greedy answers repeat themselves, sooner or later.
PROMPTS = [[9], [4, 8, 15, 16, 23, 42], [5, 6, 7] * 5, [1, 2] * 10, [3, 3, 7, 3, 3]]
PARAMS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=0.7, top_k=3, seed=5, max_tokens=30, ignore_eos=True),
}

LOOKUPS: dict[str, Callable[[], Lookup]] = {
    "ngram": lambda: NgramLookup(1, 3),
    "suffix": lambda: SuffixLookup(SuffixSettings(24, 100, 2.0, 0.1)),
    "suffix-of-its-own": lambda: SuffixLookup(SuffixSettings(24, 0, 2.0, 0.1)),
}


def verifier_with(
    place: str, method: str, runner: ModelRunner, max_draft_tokens: int
) -> InlineVerifier:
    lookup = LOOKUPS[method]()
    if place == "verifier":
        local = LocalDrafts(lookup)
        return InlineVerifier(runner, max_draft_tokens=max_draft_tokens, local=local)
    drafter = LookupDrafter(lookup, 16, 512, MAX_MODEL_LEN)
    link = InProcessLink(ProposerCore(drafter, max_draft_tokens, 16))
    return InlineVerifier(runner, [link], max_draft_tokens=max_draft_tokens)


@pytest.fixture(scope="module")
def answers(random_runner: ModelRunner) -> dict[str, Answers]:
    return {name: plain_answers(random_runner, PROMPTS, one) for name, one in PARAMS.items()}


@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
@pytest.mark.parametrize("method", LOOKUPS)
@pytest.mark.parametrize("place", ["verifier", "proposer"])
def test_lookup_leaves_output_unchanged(
    place: str,
    method: str,
    num_draft_tokens: int,
    random_runner: ModelRunner,
    answers: dict[str, Answers],
) -> None:
    verifier = verifier_with(place, method, random_runner, num_draft_tokens)
    ids = {name: [verifier.submit(one, PARAMS[name]) for one in PROMPTS] for name in PARAMS}

    verifier.run()

    for name, expected in answers.items():
        found = [verifier.answers[session_id].token_ids for session_id in ids[name]]
        assert found == list(expected.values())
    stats = verifier.scheduler.snapshot.speculation
    assert stats.accepted_token_count > 0
    assert len(stats.accepted_per_position) <= num_draft_tokens
    assert random_runner.kv_cache.used_tokens == 0


@pytest.mark.parametrize("method", ["ngram", "suffix-of-its-own"])
def test_the_verifier_and_the_proposer_look_up_the_same(
    method: str, random_runner: ModelRunner
) -> None:
    inside, outside = (
        verifier_with(place, method, random_runner, 4).generate(PROMPTS)
        for place in ("verifier", "proposer")
    )

    assert [one.speculation for one in inside] == [one.speculation for one in outside]


def test_an_earlier_answer_is_drafted_from(random_runner: ModelRunner) -> None:
    verifier = verifier_with("verifier", "suffix", random_runner, 8)

    first, second = (verifier.generate(PROMPTS[1:2])[0] for _ in range(2))

    assert first.speculation is not None
    assert second.speculation is not None
    assert second.speculation.accepted_token_count > first.speculation.accepted_token_count
    assert len(second.blocks) < len(first.blocks)


def best_of_two(
    proposer: ScriptedProposer, runner: ModelRunner, min_match_length: int, **options: float
) -> InlineVerifier:
    local = LocalDrafts(NgramLookup(1, 5), min_match_length=min_match_length)
    return InlineVerifier(runner, [InProcessLink(proposer)], local=local, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", PARAMS)
@pytest.mark.parametrize("min_match_length", [1, 3, 8])
@pytest.mark.parametrize("name", ["oracle", "liar", "flaky"])
def test_best_of_two_leaves_output_unchanged(
    name: str,
    min_match_length: int,
    sampling: str,
    random_runner: ModelRunner,
    answers: dict[str, Answers],
) -> None:
    expected = answers[sampling]
    proposers: dict[str, Callable[[], ScriptedProposer]] = {
        "oracle": lambda: ScriptedProposer(oracle(expected)),
        "liar": lambda: ScriptedProposer(liar(expected, random_runner.vocab_size)),
        "flaky": lambda: FlakyProposer(oracle(expected), every=3),
    }
    verifier = best_of_two(proposers[name](), random_runner, min_match_length)

    found = verifier.generate(PROMPTS, PARAMS[sampling])

    assert [one.token_ids for one in found] == list(expected.values())
    if min_match_length == 1:
        assert set(verifier.scheduler.snapshot.drafts_by_source) >= {"ngram"}


def test_a_dead_proposer_is_replaced(
    random_runner: ModelRunner, answers: dict[str, Answers]
) -> None:
    verifier = best_of_two(DeadProposer(), random_runner, 50, draft_timeout_s=0.001)

    found = verifier.generate(PROMPTS)

    assert [one.token_ids for one in found] == list(answers["greedy"].values())
    assert set(verifier.scheduler.snapshot.drafts_by_source) == {"ngram"}
    stats = verifier.scheduler.snapshot.speculation
    assert stats.accepted_token_count > 0
    assert UndraftedReason.UNAVAILABLE not in stats.undrafted


@pytest.mark.parametrize("sampling", PARAMS)
@pytest.mark.parametrize("num_draft_tokens", [1, 4, 8])
@pytest.mark.parametrize("kind", ["right", "edited", "wrong"])
def test_a_prediction_leaves_output_unchanged(
    kind: str,
    num_draft_tokens: int,
    sampling: str,
    random_runner: ModelRunner,
    answers: dict[str, Answers],
) -> None:
    verifier = InlineVerifier(random_runner, max_draft_tokens=num_draft_tokens)
    for prompt, expected in answers[sampling].items():
        predicted = {
            "right": expected,
            "edited": [*expected[:5], 90, 91, *expected[6:]],
            "wrong": [(token_id + 1) % 97 for token_id in expected],
        }
        verifier.submit(prompt, PARAMS[sampling], prediction=predicted[kind])

    verifier.run()

    found = [one.token_ids for one in verifier.answers.values()]
    assert found == list(answers[sampling].values())
    stats = verifier.scheduler.snapshot.speculation
    assert set(verifier.scheduler.snapshot.drafts_by_source) == {"prediction"}
    if kind == "right":
        assert stats.accepted_token_count == stats.draft_token_count
    if kind == "edited":
        assert stats.accepted_token_count > stats.draft_token_count / 2


def test_a_prediction_is_preferred_to_a_proposer(
    random_runner: ModelRunner, answers: dict[str, Answers]
) -> None:
    link = InProcessLink(ScriptedProposer(liar(answers["greedy"], random_runner.vocab_size)))
    verifier = InlineVerifier(random_runner, [link])
    [(prompt, expected), *_] = answers["greedy"].items()

    verifier.submit(prompt, prediction=expected)
    verifier.run()

    assert verifier.answers[1].token_ids == expected
    assert set(verifier.scheduler.snapshot.drafts_by_source) == {"prediction"}


def test_the_offline_interface_takes_predictions() -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    config = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 20}
    llm = LLM("tiny/target", dtype="float32", speculative_config=config)
    [plain] = llm.generate("import os\n", params)
    text = plain.outputs[0].text

    [answer] = llm.generate({"prompt": "import os\n", "prediction": text}, params)

    assert answer.outputs[0].text == text
    assert answer.accepted_prediction_tokens > 12
    assert answer.speculation.accepted_token_count > plain.speculation.accepted_token_count
    assert (plain.accepted_prediction_tokens, plain.rejected_prediction_tokens) == (0, 0)
