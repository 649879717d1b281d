"""Output ends where it must inside a block: not a token too many or too few, and counted so.

Every end at each of the first positions, under an oracle, one that is right for two tokens and a
liar, with 1, 3 and 7 draft tokens: limit of tokens, limit of the context, stop tokens,
end-of-sequence. `tests/integration/test_llm.py` does the same for stop strings.
"""

from dataclasses import replace

import pytest

from specgw.engine.model_runner import ModelRunner
from specgw.link import InProcessLink
from specgw.types import FinishReason, SamplingParams
from tests.conformance.test_lossless_parameters import EOS, PROPOSERS
from tests.conftest import MAX_MODEL_LEN
from tests.verifier_harness import GREEDY, Answer, InlineVerifier, plain_answers

PROMPT = [4, 8, 15, 16, 23, 42]
POSITIONS = range(1, 13)

pytestmark = [
    pytest.mark.parametrize("num_draft_tokens", [1, 3, 7]),
    pytest.mark.parametrize("proposer", PROPOSERS),
]


def generate(
    runner: ModelRunner,
    proposer: str,
    num_draft_tokens: int,
    requests: list[tuple[list[int], SamplingParams]],
) -> list[Answer]:
    """Answers the requests together; the proposer knows what the target says without an end."""
    endless = [
        plain_answers(runner, [prompt], replace(GREEDY, max_tokens=None)) for prompt, _ in requests
    ]
    scripts = {prompt: answer for one in endless for prompt, answer in one.items()}
    link = InProcessLink(PROPOSERS[proposer](scripts))
    verifier = InlineVerifier(runner, [link], max_draft_tokens=num_draft_tokens)
    ids = [verifier.submit(prompt, params) for prompt, params in requests]
    verifier.run()
    return [verifier.answers[session_id] for session_id in ids]


def assert_counted(answer: Answer, proposer: str, num_draft_tokens: int, *, is_limit: bool) -> None:
    """Checks accepted counts: a round adds its accepted tokens and one, unless its end cut it."""
    stats = answer.speculation
    assert stats is not None
    assert stats.accepted_token_count == sum(stats.accepted_per_position)
    rounds, rest = divmod(len(answer.token_ids) - 1, num_draft_tokens + 1)
    if proposer == "oracle":
        # No more is asked for than a limit allows, so there the last token is the round's own.
        accepted = max(rest - 1, 0) if is_limit else rest
        assert stats.accepted_token_count == rounds * num_draft_tokens + accepted
    if proposer == "liar":
        assert stats.accepted_token_count == 0


def test_max_tokens(proposer: str, num_draft_tokens: int, random_runner: ModelRunner) -> None:
    [expected] = plain_answers(random_runner, [PROMPT]).values()
    requests = [(PROMPT, replace(GREEDY, max_tokens=count)) for count in POSITIONS]

    answers = generate(random_runner, proposer, num_draft_tokens, requests)

    for count, answer in zip(POSITIONS, answers, strict=True):
        assert answer.token_ids == expected[:count]
        assert (answer.finish_reason, answer.stop_token_id) == (FinishReason.LENGTH, None)
        assert_counted(answer, proposer, num_draft_tokens, is_limit=True)


def test_context_limit(proposer: str, num_draft_tokens: int, random_runner: ModelRunner) -> None:
    prompts = [[(5 * i) % EOS for i in range(MAX_MODEL_LEN - count)] for count in POSITIONS]
    requests = [(prompt, replace(GREEDY, max_tokens=None)) for prompt in prompts]

    answers = generate(random_runner, proposer, num_draft_tokens, requests)

    for count, answer in zip(POSITIONS, answers, strict=True):
        assert len(answer.token_ids) == count
        assert (answer.finish_reason, answer.stop_token_id) == (FinishReason.LENGTH, None)
        assert_counted(answer, proposer, num_draft_tokens, is_limit=True)


def test_stop_tokens(proposer: str, num_draft_tokens: int, random_runner: ModelRunner) -> None:
    [whole] = plain_answers(random_runner, [PROMPT], replace(GREEDY, max_tokens=40)).values()
    stops = list(dict.fromkeys(whole))
    assert len(stops) > 8
    requests = [
        (PROMPT, replace(GREEDY, max_tokens=None, stop_token_ids=(stop,))) for stop in stops
    ]

    answers = generate(random_runner, proposer, num_draft_tokens, requests)

    for stop, answer in zip(stops, answers, strict=True):
        assert answer.token_ids == whole[: whole.index(stop) + 1]
        assert (answer.finish_reason, answer.stop_token_id) == (FinishReason.STOP, stop)
        assert_counted(answer, proposer, num_draft_tokens, is_limit=False)


def test_end_of_sequence(proposer: str, num_draft_tokens: int, random_runner: ModelRunner) -> None:
    """The end wins over all at the position where `min_tokens` lets it."""
    requests = [
        (
            PROMPT,
            SamplingParams(
                temperature=0, max_tokens=40, min_tokens=count, logit_bias={EOS: 1000.0}
            ),
        )
        for count in POSITIONS
    ]

    answers = generate(random_runner, proposer, num_draft_tokens, requests)

    for count, answer in zip(POSITIONS, answers, strict=True):
        assert len(answer.token_ids) == count + 1
        assert answer.token_ids.index(EOS) == count
        assert (answer.finish_reason, answer.stop_token_id) == (FinishReason.STOP, EOS)
