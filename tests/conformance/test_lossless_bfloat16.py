"""In bfloat16 answers are the same to the bit where the compiled operators run.

They compute each row alike whatever is beside it: drafts, other sequences, pieces of a prompt.
Elsewhere the shape of a batch may turn a near tie; nothing else may change.

Teacher-forced: what speculation wrote is fed back to the target in one pass, and every token must
be its most probable one, or within the noise of the data type of it.
"""

from dataclasses import replace

import pytest
import torch

from proposer_svc.draft_model import DraftModelDrafter
from proposer_svc.proposer import ProposerCore
from specgw.engine import cpu_kernels
from specgw.engine.loading import ModelOptions, load_model
from specgw.engine.model_runner import ModelRunner, SequenceChunk
from specgw.link import InProcessLink
from specgw.types import SamplingParams
from tests.verifier_harness import InlineVerifier

# Logits are of the order of 10, where bfloat16 has steps of 1/16; a few roundings may add up.
EPSILON = 0.25
PROMPTS = [
    [250 + (11 * number + 7 * place) % 600 for place in range(6 + 23 * number)]
    for number in range(8)
]
PARAMS = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def target(single_thread: None) -> ModelRunner:
    return load_model(ModelOptions("tiny/target", dtype="bfloat16"))


@pytest.mark.slow
@pytest.mark.skipif(
    not cpu_kernels.is_usable(torch.empty(0, dtype=torch.bfloat16)),
    reason="only the compiled operators compute a row alike whatever is beside it",
)
@pytest.mark.parametrize("num_draft_tokens", [1, 4, 8])
@pytest.mark.parametrize("temperature", [0, 1])
def test_answers_equal_those_of_plain_decoding_to_the_bit(
    num_draft_tokens: int, temperature: float, target: ModelRunner
) -> None:
    """Also those of one prompt alone and of many together."""
    draft = load_model(ModelOptions("tiny/draft", dtype="bfloat16"))
    proposer = ProposerCore(DraftModelDrafter(draft, 512), num_draft_tokens, max_sessions=64)
    params = replace(PARAMS, temperature=temperature, seed=1)
    plain = [InlineVerifier(target).generate([prompt], params)[0] for prompt in PROMPTS]

    verifier = InlineVerifier(target, [InProcessLink(proposer)], max_draft_tokens=num_draft_tokens)
    answers = verifier.generate(PROMPTS, params)

    assert [one.token_ids for one in answers] == [one.token_ids for one in plain]


@pytest.mark.slow
@pytest.mark.parametrize("num_draft_tokens", [1, 4, 8])
def test_every_token_is_the_targets_choice(num_draft_tokens: int, target: ModelRunner) -> None:
    draft = load_model(ModelOptions("tiny/draft", dtype="bfloat16"))
    proposer = ProposerCore(DraftModelDrafter(draft, 512), num_draft_tokens, max_sessions=64)
    verifier = InlineVerifier(target, [InProcessLink(proposer)], max_draft_tokens=num_draft_tokens)

    answers = verifier.generate(PROMPTS, PARAMS)

    for prompt, answer in zip(PROMPTS, answers, strict=True):
        logits = _teacher_forced(target, prompt, answer.token_ids)
        chosen = logits.gather(1, torch.tensor(answer.token_ids)[:, None]).squeeze(1)
        assert (logits.amax(-1) - chosen).max() <= EPSILON
        stats = answer.speculation
        assert stats is not None
        assert stats.draft_count > 0


def _teacher_forced(
    runner: ModelRunner, prompt: list[int], output: list[int]
) -> torch.Tensor:  # [num_output_tokens, vocab_size]
    cache = runner.kv_cache.new_sequence()
    chunk = SequenceChunk(cache, [*prompt, *output[:-1]], num_logits=len(output))
    logits = runner.forward([chunk]).float()
    cache.release()
    return logits
