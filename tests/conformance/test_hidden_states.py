"""Hidden states of the target reach a proposer that needs them, over both links, and nobody else.

The proposer is scripted: it keeps what commits bring and drafts like an oracle that errs.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specgw.engine.hidden_rows import to_tensor
from specgw.engine.loading import ModelOptions, load_model
from specgw.engine.model_runner import ModelRunner, SequenceChunk
from specgw.hidden import LAST, HiddenFormat
from specgw.link import InProcessLink
from tests.conformance.test_lossless_greedy import PROMPTS
from tests.conftest import VOCAB_SIZE
from tests.running_services import running_verifier, scripted_proposer, token_ids, verifier_args
from tests.scripted_proposers import HiddenProposer, ScriptedProposer, half
from tests.verifier_harness import GREEDY, InlineVerifier, plain_answers

HIDDEN_SIZE = 32
BOTH = pytest.mark.parametrize("kind", ["inproc", "grpc"])
Answers = dict[tuple[int, ...], list[int]]


@pytest.fixture(scope="module")
def runner(random_model_dir: Path, single_thread: None) -> ModelRunner:
    """The random model without a prefix cache: every row is computed."""
    return load_model(
        ModelOptions(
            str(random_model_dir),
            dtype="float32",
            kv_cache_tokens=4096,
            enable_prefix_caching=False,
        )
    )


@pytest.fixture(scope="module")
def answers(runner: ModelRunner) -> Answers:
    return plain_answers(runner, PROMPTS)


async def generate(
    kind: str, runner: ModelRunner, proposer: ScriptedProposer, prompts: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Answers the prompts together."""
    if kind == "inproc":
        verifier = InlineVerifier(runner, [InProcessLink(proposer)])
        return [answer.token_ids for answer in verifier.generate(prompts)]
    async with (
        scripted_proposer(proposer) as address,
        running_verifier(runner, verifier_args([address])) as running,
    ):
        async with asyncio.timeout(10):
            while (state := (await running.info()).proposers[0]).detail == "not connected yet":
                pass
        assert state.connected or "hidden states" in state.detail
        outputs = await asyncio.gather(*(running.generate(prompt, GREEDY) for prompt in prompts))
    return [token_ids(one) for one in outputs]


def all_rows(runner: ModelRunner, context: Sequence[int]) -> Tensor:
    """Returns the hidden states of a context, computed at once: [num_tokens, hidden_size]."""
    cache = runner.kv_cache.new_sequence()
    _, hidden = runner.forward_with_hidden([SequenceChunk(cache, context, 1)])
    cache.release()
    return hidden


@BOTH
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.05)])
async def test_every_commit_brings_the_rows_of_the_tokens_since_the_one_before(
    kind: str, dtype: str, tolerance: float, runner: ModelRunner, answers: Answers
) -> None:
    needed = HiddenFormat((LAST,), HIDDEN_SIZE, dtype)
    proposer = HiddenProposer(half(answers, 2, VOCAB_SIZE), needed)

    said = await generate(kind, runner, proposer, PROMPTS)

    assert said == list(answers.values())
    assert runner.kv_cache.used_tokens == 0
    contexts = {
        len(prompt): (*prompt, *answer)
        for prompt, answer in zip(PROMPTS, answers.values(), strict=True)
    }
    num_compared = 0
    for received in proposer.received.values():
        rows: list[Tensor] = []
        for length, states in received:
            assert states is not None
            assert states.has_format(needed)
            rows.append(to_tensor(states).float())
            # The newest token has no hidden state yet; every other has sent its own once.
            assert sum(map(len, rows)) == length - 1
        context = contexts[received[0][0] - 1][: received[-1][0]]
        expected = all_rows(runner, context)[:-1]
        torch.testing.assert_close(torch.cat(rows), expected, rtol=tolerance, atol=tolerance)
        num_compared += len(received)
    assert num_compared > 20


async def test_rows_out_of_the_prefix_cache_are_missing(
    random_model_dir: Path, single_thread: None
) -> None:
    runner = load_model(ModelOptions(str(random_model_dir), dtype="float32"))
    prompt = list(range(33))
    answers = plain_answers(runner, [prompt])  # leaves two blocks of 16 rows
    proposer = HiddenProposer(
        half(answers, 2, VOCAB_SIZE), HiddenFormat((LAST,), HIDDEN_SIZE, "float32")
    )

    said = await generate("inproc", runner, proposer, [prompt])

    assert said == list(answers.values())
    [received] = proposer.received.values()
    _, states = received[0]
    assert states is not None
    torch.testing.assert_close(
        to_tensor(states), all_rows(runner, prompt)[32:], rtol=1e-3, atol=1e-3
    )


@BOTH
async def test_a_proposer_that_needs_what_cannot_be_sent_is_not_used(
    kind: str, runner: ModelRunner, answers: Answers
) -> None:
    proposer = HiddenProposer(
        half(answers, 2, VOCAB_SIZE), HiddenFormat((3,), HIDDEN_SIZE, "float32")
    )

    said = await generate(kind, runner, proposer, PROMPTS[:2])

    assert said == list(answers.values())[:2]
    assert proposer.received == {}


async def test_nothing_is_computed_that_no_proposer_needs(
    runner: ModelRunner, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ModelRunner, chunks: Sequence[SequenceChunk]) -> tuple[Tensor, Tensor]:
        raise AssertionError("hidden states were asked for")

    monkeypatch.setattr(ModelRunner, "forward_with_hidden", fail)
    proposer = ScriptedProposer(half(answers, 2, VOCAB_SIZE))

    said = await generate("inproc", runner, proposer, PROMPTS)

    assert said == list(answers.values())
