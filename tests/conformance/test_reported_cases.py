"""What users of other engines reported of drafts and sampling, and no other file here shows.

On the random model in float32, so that no near tie can be an excuse.
"""

from collections.abc import Sequence
from dataclasses import replace

from specgw.engine.model_runner import ModelRunner
from specgw.link import InProcessLink
from specgw.types import SamplingParams
from tests.conftest import VOCAB_SIZE
from tests.scripted_proposers import ScriptedProposer, half, oracle
from tests.verifier_harness import GREEDY, InlineVerifier, plain_answers

REPEATED = [7] * 39
OTHERS = [[9], [4, 8, 15, 16, 23, 42]]


def test_a_prompt_of_one_word_beside_a_session_without_a_draft(random_runner: ModelRunner) -> None:
    """Rows stay with their sessions: one of three is never drafted for, all hold back the end."""
    params = replace(GREEDY, ignore_eos=False, min_tokens=12, max_tokens=20)
    prompts = [OTHERS[0], REPEATED, OTHERS[1]]
    answers = plain_answers(random_runner, prompts, params)
    right = oracle(answers)

    def draft(context: Sequence[int], count: int) -> Sequence[int]:
        return () if list(context[:1]) == OTHERS[0] else right(context, count)

    verifier = InlineVerifier(random_runner, [InProcessLink(ScriptedProposer(draft))])

    together = verifier.generate(prompts, params)

    assert [one.token_ids for one in together] == list(answers.values())
    accepted = [one.speculation.accepted_token_count for one in together if one.speculation]
    assert accepted[0] == 0 < min(accepted[1:])


def test_ten_times_the_same_request_is_ten_times_the_same_rounds(
    random_runner: ModelRunner,
) -> None:
    answers = plain_answers(random_runner, OTHERS)
    found = []
    for _ in range(10):
        link = InProcessLink(ScriptedProposer(half(answers, 2, VOCAB_SIZE)))
        [answer] = InlineVerifier(random_runner, [link]).generate(OTHERS[1:])
        found.append((answer.token_ids, answer.blocks, answer.speculation))

    assert all(one == found[0] for one in found)


def test_a_slight_repetition_penalty_changes_no_answer_of_many(random_runner: ModelRunner) -> None:
    """Counts of drafts that were rejected do not stay."""
    params = replace(GREEDY, repetition_penalty=1.05, max_tokens=12)
    prompts = [[seed % VOCAB_SIZE, 3 * seed % VOCAB_SIZE, seed // 5] for seed in range(200)]
    answers = plain_answers(random_runner, prompts, params)
    link = InProcessLink(ScriptedProposer(half(answers, 1, VOCAB_SIZE)))

    together = InlineVerifier(random_runner, [link]).generate(prompts, params)

    assert [one.token_ids for one in together] == [answers[tuple(prompt)] for prompt in prompts]


def test_twenty_seeds_give_many_texts_and_greedy_one(random_runner: ModelRunner) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    texts = {
        how: {
            tuple(InlineVerifier(random_runner).generate(OTHERS[:1], one)[0].token_ids)
            for one in (replace(params, seed=seed, temperature=how) for seed in range(20))
        }
        for how in (0.0, 1.0)
    }

    assert len(texts[0.0]) == 1
    assert len(texts[1.0]) > 15
