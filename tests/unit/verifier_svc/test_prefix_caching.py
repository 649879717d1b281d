"""Requests that begin alike share rows, and answer as if they did not."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgw.engine.kv_cache import BLOCK_SIZE
from specgw.engine.loading import ModelOptions, load_model
from specgw.engine.model_runner import ModelRunner
from specgw.link import InProcessLink
from specgw.types import GenerateOutput, GenerateRequest
from tests.conftest import MAX_MODEL_LEN, VOCAB_SIZE
from tests.doubles import ToyRunner
from tests.scripted_proposers import ScriptedProposer, liar, oracle
from tests.verifier_harness import GREEDY, InlineVerifier, plain_answers

STEM = [(7 * i + 3) % VOCAB_SIZE for i in range(2 * BLOCK_SIZE)]
SHORT = replace(GREEDY, max_tokens=12)


def load(model_dir: Path, kv_cache_tokens: int, *, enable_prefix_caching: bool) -> ModelRunner:
    return load_model(
        ModelOptions(
            str(model_dir),
            dtype="float32",
            kv_cache_tokens=kv_cache_tokens,
            enable_prefix_caching=enable_prefix_caching,
        )
    )


@pytest.fixture(scope="module")
def plain_runner(random_model_dir: Path, single_thread: None) -> ModelRunner:
    return load(random_model_dir, 4096, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def tight_runner(random_model_dir: Path, single_thread: None) -> ModelRunner:
    """With a cache for two and a half contexts, so that prefixes are forgotten all the time."""
    return load(random_model_dir, 10 * BLOCK_SIZE, enable_prefix_caching=True)


def test_a_request_computes_only_what_no_other_has_computed() -> None:
    runner = ToyRunner()
    verifier = InlineVerifier(runner)
    verifier.generate([[5] * 3 * BLOCK_SIZE + [6]])
    del runner.passes[:]

    verifier.generate([[5] * 3 * BLOCK_SIZE + [7, 8]])

    assert runner.passes[0] == [2]


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    runner = ToyRunner()
    verifier = InlineVerifier(runner)
    for _ in range(2):
        del runner.passes[:]
        verifier.generate([[5] * 2 * BLOCK_SIZE])

    assert runner.passes[0] == [BLOCK_SIZE]


def test_an_answer_is_a_prefix_too() -> None:
    runner = ToyRunner()
    verifier = InlineVerifier(runner)
    [first] = verifier.generate([[5] * 10])
    del runner.passes[:]

    verifier.generate([[5] * 10 + first.token_ids + [1, 2]])

    assert runner.passes[0] == [36 - 2 * BLOCK_SIZE]


def test_the_first_output_and_the_counters_tell_how_much_was_cached() -> None:
    verifier = InlineVerifier(ToyRunner())
    outputs: list[GenerateOutput] = []
    verifier.scheduler._deliver = lambda many: outputs.extend(
        output for _, output in many if isinstance(output, GenerateOutput)
    )
    for number in (1, 2):
        request = GenerateRequest(f"r{number}", [5] * 40, SHORT)
        verifier.scheduler.inbox.submit(number, request, 0)
        while not outputs or outputs[-1].finish_reason is None:
            verifier.step()
        assert [one.cached_token_count for one in outputs[1:]] == [None] * 11
        assert outputs[0].cached_token_count == (0 if number == 1 else 32)
        outputs.clear()

    snapshot = verifier.scheduler.snapshot
    assert (snapshot.prefix_query_count, snapshot.prefix_hit_count) == (80, 32)


def test_without_a_prefix_cache_nothing_is_counted(plain_runner: ModelRunner) -> None:
    verifier = InlineVerifier(plain_runner)

    verifier.generate([STEM, STEM], SHORT)
    verifier.generate([STEM], SHORT)

    assert verifier.scheduler.snapshot.prefix_query_count == 0


def test_sessions_that_share_and_then_part_answer_as_if_alone(
    random_runner: ModelRunner, plain_runner: ModelRunner
) -> None:
    prompts = [[*STEM, number] for number in range(5)]
    expected = plain_answers(plain_runner, prompts)
    verifier = InlineVerifier(
        random_runner, [InProcessLink(ScriptedProposer(liar(expected, VOCAB_SIZE)))]
    )
    verifier.generate([[*STEM, 90]])

    together = verifier.generate(prompts)

    assert [answer.token_ids for answer in together] == list(expected.values())
    assert verifier.scheduler.snapshot.prefix_hit_count == 5 * len(STEM)


def test_rows_of_drafts_that_were_refused_are_nobodys_prefix(
    random_runner: ModelRunner, plain_runner: ModelRunner
) -> None:
    """Lies cross the ends of blocks; then the truth is asked for, one request for each length."""
    prompt = STEM[:13]
    expected = plain_answers(plain_runner, [prompt])
    truth = expected[tuple(prompt)]
    link = InProcessLink(ScriptedProposer(liar(expected, VOCAB_SIZE)))
    InlineVerifier(random_runner, [link], max_draft_tokens=6).generate([prompt])

    longer = [prompt + truth[:length] for length in range(1, 20)]
    answers = InlineVerifier(random_runner).generate(longer, SHORT)

    expected_longer = plain_answers(plain_runner, longer, SHORT)
    assert [answer.token_ids for answer in answers] == list(expected_longer.values())


def test_a_preempted_session_goes_on_from_what_is_left_of_its_rows() -> None:
    runner = ToyRunner(kv_cache_tokens=6 * BLOCK_SIZE)
    verifier = InlineVerifier(runner)
    old, young = verifier.submit([4] * 40), verifier.submit([9] * 40)
    verifier.step(9)

    verifier.run()

    assert verifier.scheduler.snapshot.preemption_count > 0
    alone = plain_answers(ToyRunner(), [[4] * 40, [9] * 40])
    assert verifier.answers[old].token_ids == alone[(4,) * 40]
    assert verifier.answers[young].token_ids == alone[(9,) * 40]
    assert verifier.scheduler.snapshot.prefix_query_count == 80


requests = st.lists(
    st.tuples(
        st.integers(0, 2 * BLOCK_SIZE),  # tokens of the stem
        st.lists(st.integers(0, 3), min_size=1, max_size=20),  # and what follows
        st.integers(1, 12),
        st.sampled_from(["truth", "lies", "nothing"]),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40)
@given(requests=requests)
def test_answers_are_those_without_a_prefix_cache(
    tight_runner: ModelRunner,
    plain_runner: ModelRunner,
    requests: Sequence[tuple[int, list[int], int, str]],
) -> None:
    """Requests of two at a time share, part, are preempted and push one another's rows out."""
    prompts = [STEM[:length] + rest for length, rest, _, _ in requests]
    assert max(len(prompt) for prompt in prompts) + 12 <= MAX_MODEL_LEN
    params = [replace(GREEDY, max_tokens=count) for _, _, count, _ in requests]
    expected = [
        plain_answers(plain_runner, [prompt], one)[tuple(prompt)]
        for prompt, one in zip(prompts, params, strict=True)
    ]
    known = {tuple(p): answer for p, answer in zip(prompts, expected, strict=True)}
    proposer = ScriptedProposer(
        oracle(known) if requests[0][3] == "truth" else liar(known, VOCAB_SIZE)
    )
    verifier = InlineVerifier(tight_runner, [InProcessLink(proposer)], max_num_seqs=3)

    ids = [
        verifier.submit(prompt, one, max_draft_tokens=0 if draft == "nothing" else None)
        for prompt, one, (_, _, _, draft) in zip(prompts, params, requests, strict=True)
    ]
    verifier.run()

    assert [verifier.answers[session_id].token_ids for session_id in ids] == expected
    assert tight_runner.kv_cache.used_tokens == 0


def test_a_request_that_waits_for_room_holds_no_prefix_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = ToyRunner(kv_cache_tokens=6 * BLOCK_SIZE)
    verifier = InlineVerifier(runner)
    verifier.generate([[5] * 3 * BLOCK_SIZE], replace(GREEDY, max_tokens=1))
    verifier.submit([9] * 2 * BLOCK_SIZE)
    verifier.step()
    held: list[int] = []
    hold = runner.kv_cache.hold_prefix

    def count(hashes: Sequence[bytes]) -> list[int]:
        held.append(len(hashes))
        return hold(hashes)

    monkeypatch.setattr(runner.kv_cache, "hold_prefix", count)

    verifier.submit([5] * 4 * BLOCK_SIZE)
    verifier.step(5)
    assert verifier.scheduler.snapshot.waiting_count == 1
    assert held == []
    verifier.run()

    assert len(held) == 1
