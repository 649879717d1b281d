"""`draft_sample_method: coupled`: the same seed gives the same text, whoever drafts.

Draft and target choose by the same noise (Daliri et al., 2024, arXiv:2408.07978), so they agree
often; but the text is a function of seed, prompt and target alone. In float32.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from proposer_svc.draft_chooser import DraftChooser
from proposer_svc.draft_model import DraftModelDrafter
from proposer_svc.draft_sampling import DraftSampler
from proposer_svc.proposer import ProposerCore
from specgw.engine.loading import ModelOptions, load_model
from specgw.engine.model_runner import ModelRunner
from specgw.engine.sampling import RowSampling, sample
from specgw.errors import NotReady
from specgw.link import InProcessLink
from specgw.types import DraftBlock, Hello, HelloAck, ProposeStep, SamplingParams
from tests.conftest import VOCAB_SIZE
from tests.scripted_proposers import ScriptedProposer, liar
from tests.verifier_harness import InlineVerifier, plain_answers

PROMPTS = [[9], [4, 8, 15, 16, 23, 42], [7] * 20, list(range(30)), *([i, i + 1] for i in range(4))]
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=30, ignore_eos=True)
SAMPLING = {
    "plain": PARAMS,
    "cool": replace(PARAMS, temperature=0.6),
    "top-k": replace(PARAMS, top_k=20),
    "top-p": replace(PARAMS, top_p=0.8),
    "min-p": replace(PARAMS, min_p=0.05),
    "all": replace(PARAMS, temperature=0.8, top_k=30, top_p=0.9, min_p=0.01),
    "penalties": replace(PARAMS, repetition_penalty=1.2, frequency_penalty=0.5),
    "greedy": replace(PARAMS, temperature=0),
}

Answers = dict[tuple[int, ...], list[int]]


@pytest.fixture(scope="module")
def twin(random_model_dir: Path, single_thread: None) -> ModelRunner:
    """The target's weights once more."""
    return load_model(ModelOptions(str(random_model_dir), dtype="float32", kv_cache_tokens=4096))


@pytest.fixture(scope="module")
def stranger(unrelated_model_dir: Path, single_thread: None) -> ModelRunner:
    """Another random model with the target's vocabulary."""
    return load_model(ModelOptions(str(unrelated_model_dir), dtype="float32", kv_cache_tokens=4096))


@pytest.fixture(scope="module")
def answers(random_runner: ModelRunner) -> Answers:
    return plain_answers(random_runner, PROMPTS, PARAMS)


def coupled(runner: ModelRunner, max_draft_tokens: int = 4) -> ProposerCore:
    drafter = DraftModelDrafter(runner, 512, chooser=DraftChooser(DraftSampler("coupled")))
    return ProposerCore(drafter, max_draft_tokens, max_sessions=64)


def text(verifier: InlineVerifier, params: SamplingParams = PARAMS) -> list[list[int]]:
    return [answer.token_ids for answer in verifier.generate(PROMPTS, params)]


class Dying:
    """A proposer that works for some steps, then is gone for good."""

    def __init__(self, inner: ProposerCore, num_steps: int) -> None:
        self.num_left = num_steps
        self._inner = inner

    def connect(self, hello: Hello) -> HelloAck:
        if self.num_left <= 0:
            raise NotReady("the proposer is gone")
        return self._inner.connect(hello)

    def disconnect(self, verifier_id: str) -> None:
        self._inner.disconnect(verifier_id)

    def apply(self, verifier_id: str, step: ProposeStep) -> Sequence[DraftBlock]:
        self.num_left -= 1
        if self.num_left <= 0:
            raise NotReady("the proposer is gone")
        return self._inner.apply(verifier_id, step)

    def step(self) -> Sequence[tuple[str, DraftBlock]]:
        return self._inner.step()

    def has_work(self) -> bool:
        return self._inner.has_work()


@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
def test_any_number_of_drafts_of_any_model_leaves_the_text_unchanged(
    num_draft_tokens: int,
    random_runner: ModelRunner,
    twin: ModelRunner,
    stranger: ModelRunner,
    answers: Answers,
) -> None:
    for draft in (twin, stranger):
        link = InProcessLink(coupled(draft, num_draft_tokens))
        verifier = InlineVerifier(random_runner, [link], max_draft_tokens=num_draft_tokens)

        assert text(verifier) == list(answers.values())


def test_a_liar_leaves_the_text_unchanged(random_runner: ModelRunner, answers: Answers) -> None:
    link = InProcessLink(ScriptedProposer(liar(answers, VOCAB_SIZE)))

    assert text(InlineVerifier(random_runner, [link])) == list(answers.values())


@pytest.mark.parametrize("name", SAMPLING)
def test_a_draft_that_is_the_target_agrees_always(
    name: str, random_runner: ModelRunner, twin: ModelRunner
) -> None:
    params = SAMPLING[name]
    expected = plain_answers(random_runner, PROMPTS, params)
    verifier = InlineVerifier(random_runner, [InProcessLink(coupled(twin))])

    answers = verifier.generate(PROMPTS, params)

    assert [answer.token_ids for answer in answers] == list(expected.values())
    if name != "penalties":  # a draft's law knows nothing of them
        for answer in answers:
            assert answer.speculation is not None
            assert answer.speculation.accepted_token_count == answer.speculation.draft_token_count


def test_a_proposer_killed_half_way_leaves_the_text_unchanged(
    random_runner: ModelRunner, twin: ModelRunner, answers: Answers
) -> None:
    proposer = Dying(coupled(twin), num_steps=5)
    verifier = InlineVerifier(random_runner, [InProcessLink(proposer)])

    together = verifier.generate(PROMPTS, PARAMS)

    assert [answer.token_ids for answer in together] == list(answers.values())
    assert proposer.num_left <= 0
    for answer in together:
        assert answer.speculation is not None
        assert answer.speculation.draft_count > 0
        assert sum(answer.speculation.undrafted.values()) > 0


@pytest.mark.parametrize("num_committed", [1, 7, 29])
def test_a_second_verifier_goes_on_from_what_was_committed(
    num_committed: int, random_runner: ModelRunner, stranger: ModelRunner, answers: Answers
) -> None:
    verifier = InlineVerifier(random_runner, [InProcessLink(coupled(stranger))])

    ids = [
        verifier.submit(prompt, PARAMS, output=answer[:num_committed])
        for prompt, answer in answers.items()
    ]
    verifier.run()

    found = [verifier.answers[session_id].token_ids for session_id in ids]
    assert found == [answer[num_committed:] for answer in answers.values()]


@pytest.mark.parametrize("vocab_size", [3, 20])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_drafts_are_accepted_as_often_as_the_formula_says(
    temperature: float, vocab_size: int
) -> None:
    """Sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i), within 2 standard errors.

    A false-alarm rate of 5 % for another seed; this one is fixed.
    """
    count = 40_000
    generator = torch.Generator().manual_seed(3)
    p_logits, q_logits = 1.5 * torch.randn(2, vocab_size, generator=generator)
    rows = [RowSampling(temperature, 1.0, 0, seed=8, position=i) for i in range(count)]
    p, q = ((logits.double() / temperature).softmax(0) for logits in (p_logits, q_logits))
    ratios = torch.maximum(p / p.unsqueeze(1), q / q.unsqueeze(1))  # [i, j]
    expected = float((1 / ratios.sum(dim=1)).sum())

    drafts = DraftSampler("coupled").choose(q_logits.expand(count, -1), rows)
    targets = sample(p_logits.expand(count, -1), rows)

    pairs = zip(drafts, targets, strict=True)
    rate = sum(draft is not None and draft.token_id == target for draft, target in pairs) / count
    assert abs(rate - expected) < 2 * (expected * (1 - expected) / count) ** 0.5
