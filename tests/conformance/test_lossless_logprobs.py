"""Log probabilities are those of the target's own distribution, with speculation and without.

For accepted, recovered and bonus tokens and for prompts in one chunk or many, compared with one
forward pass of the target over the whole context. Float32; a wrong row is off by far more than the
tolerance of 1e-4.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specgw.engine.model_runner import ModelRunner, SequenceChunk
from specgw.link import InProcessLink
from specgw.types import SamplingParams, TokenLogprobs
from tests.conformance.test_lossless_parameters import PROMPTS, PROPOSERS
from tests.conftest import VOCAB_SIZE
from tests.scripted_proposers import ScriptedProposer, oracle
from tests.verifier_harness import InlineVerifier, plain_answers

SAMPLING = {
    "greedy": SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.5, seed=5, max_tokens=20, ignore_eos=True),
    "processed": SamplingParams(
        temperature=0.5,
        seed=5,
        max_tokens=20,
        ignore_eos=True,
        logit_bias={3: 4.0},
        repetition_penalty=1.5,
        top_k=9,
    ),
}


def expected_logprobs(runner: ModelRunner, context: Sequence[int]) -> Tensor:
    """Returns the target's log probabilities at every position: [length, vocab_size]."""
    cache = runner.kv_cache.new_sequence()
    cache.reserve(len(context))
    logits = runner.forward([SequenceChunk(cache, context, len(context))])
    cache.release()
    return logits.float().log_softmax(-1)


def assert_logprobs(
    scored: Sequence[TokenLogprobs], token_ids: Sequence[int], expected: Tensor, num_top: int
) -> None:
    assert len(scored) == len(token_ids)
    for one, token_id, row in zip(scored, token_ids, expected, strict=False):
        assert one.token_ids[0] == token_id
        assert one.logprobs == pytest.approx(row[list(one.token_ids)].tolist(), abs=1e-4)
        best = row.topk(num_top)
        assert one.logprobs[1:] == pytest.approx(best.values.tolist(), abs=1e-4)
        near = (row - row[token_id]).abs() < 1e-4
        above = int((row > row[token_id]).sum())
        assert above - int(near.sum()) < one.rank <= above + int(near.sum())


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 7])
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_logprobs_do_not_depend_on_drafts(
    sampling: str, proposer: str, num_draft_tokens: int, random_runner: ModelRunner
) -> None:
    params = replace(SAMPLING[sampling], logprobs=3)
    answers = plain_answers(random_runner, PROMPTS, SAMPLING[sampling])
    link = InProcessLink(PROPOSERS[proposer](answers))
    verifier = InlineVerifier(random_runner, [link], max_draft_tokens=num_draft_tokens)

    together = verifier.generate(PROMPTS, params)

    for prompt, answer in zip(PROMPTS, together, strict=True):
        assert answer.token_ids == answers[tuple(prompt)]
        expected = expected_logprobs(random_runner, [*prompt, *answer.token_ids])
        assert_logprobs(answer.logprobs, answer.token_ids, expected[len(prompt) - 1 :], 3)
        assert answer.prompt_logprobs == []
        assert answer.speculation is not None
        assert answer.speculation.draft_count > 0


@pytest.mark.parametrize("max_num_batched_tokens", [16, 21, 512])
@pytest.mark.parametrize("num_top", [0, 2, -1])
def test_prompts_are_scored_in_chunks_of_any_size(
    num_top: int, max_num_batched_tokens: int, random_runner: ModelRunner
) -> None:
    prompts = [[5], *PROMPTS, [(11 * i) % VOCAB_SIZE for i in range(50)]]
    params = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=num_top, logprobs=num_top
    )
    answers = plain_answers(random_runner, prompts, replace(params, prompt_logprobs=None))
    verifier = InlineVerifier(
        random_runner,
        [InProcessLink(ScriptedProposer(oracle(answers)))],
        max_num_batched_tokens=max_num_batched_tokens,
    )

    together = verifier.generate(prompts, params)

    count = VOCAB_SIZE if num_top == -1 else num_top
    for prompt, answer in zip(prompts, together, strict=True):
        assert answer.token_ids == answers[tuple(prompt)]
        expected = expected_logprobs(random_runner, prompt)
        assert_logprobs(answer.prompt_logprobs, prompt[1:], expected, count)


def test_a_prompt_that_is_cached_is_scored_all_the_same(random_runner: ModelRunner) -> None:
    prompt = [(13 * i) % VOCAB_SIZE for i in range(50)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    verifier = InlineVerifier(random_runner)
    verifier.generate([prompt], params)
    assert random_runner.kv_cache.has_prefix_cache

    [answer] = verifier.generate([prompt], replace(params, prompt_logprobs=1))

    expected = expected_logprobs(random_runner, prompt)
    assert_logprobs(answer.prompt_logprobs, prompt[1:], expected, 1)


def test_a_preempted_prompt_is_scored_once(random_runner: ModelRunner) -> None:
    prompt = PROMPTS[3]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=1)
    verifier = InlineVerifier(random_runner, max_num_batched_tokens=16)
    verifier.submit(prompt, params)

    verifier.step()
    [session] = verifier.scheduler._running
    assert 0 < session.num_cached < len(prompt)
    verifier.scheduler._preempt(session)
    verifier.run()

    expected = expected_logprobs(random_runner, prompt)
    assert_logprobs(verifier.answers[1].prompt_logprobs, prompt[1:], expected, 1)


def test_a_request_that_moves_is_not_scored_again(random_runner: ModelRunner) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=9, ignore_eos=True, prompt_logprobs=1, logprobs=0
    )
    verifier = InlineVerifier(random_runner)
    [whole] = verifier.generate(PROMPTS[1:2], params)

    session_id = verifier.submit(PROMPTS[1], params, output=whole.token_ids[:4])
    verifier.run()

    rest = verifier.answers[session_id]
    assert rest.prompt_logprobs == []
    assert rest.token_ids == whole.token_ids[4:]
    values = torch.tensor([one.logprobs for one in rest.logprobs])
    assert torch.allclose(values, torch.tensor([one.logprobs for one in whole.logprobs[4:]]))


def test_logprobs_end_with_the_output(random_runner: ModelRunner) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
    [whole] = InlineVerifier(random_runner).generate(PROMPTS[1:2], params)
    stop = whole.token_ids[7]
    answers = {tuple(PROMPTS[1]): whole.token_ids}
    link = InProcessLink(ScriptedProposer(oracle(answers)))

    [answer] = InlineVerifier(random_runner, [link], max_draft_tokens=7).generate(
        PROMPTS[1:2], replace(params, stop_token_ids=(stop,))
    )

    assert answer.stop_token_id == stop
    assert [one.token_ids[0] for one in answer.logprobs] == answer.token_ids
