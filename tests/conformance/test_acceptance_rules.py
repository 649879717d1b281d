"""The rules that need more than the drafts' ids, through scheduler, link and draft model."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from proposer_svc.draft_chooser import DraftChooser
from proposer_svc.draft_model import DraftModelDrafter
from proposer_svc.draft_sampling import DraftSampler
from proposer_svc.proposer import ProposerCore
from specgw.config import parse_config
from specgw.engine.loading import ModelOptions, load_model
from specgw.engine.model_runner import ModelRunner
from specgw.link import InProcessLink
from specgw.service_settings import ProposerSettings
from specgw.types import MAX_DRAFT_SUPPORT, SamplingParams, TokenProbs
from tests.verifier_harness import GREEDY, InlineVerifier, plain_answers
from verifier_svc.acceptance import Acceptance, build_acceptance
from verifier_svc.draft_laws import are_laws
from verifier_svc.rejection_sampler import BlockProbs, accept_at_rates, accept_block, residual

PROMPTS = [[9], [4, 8, 15, 16, 23, 42], [7] * 20, list(range(30))]
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=24, ignore_eos=True)
BY_LAWS = [Acceptance(uses_draft_probs=True), Acceptance(uses_draft_probs=True, by_block=True)]


def law(token_ids: Sequence[int], probs: Sequence[float]) -> TokenProbs:
    return TokenProbs(np.array(token_ids, np.int32), np.array(probs, np.float32))


@pytest.fixture(scope="module")
def twin(random_model_dir: Path, single_thread: None) -> ModelRunner:
    """The target's weights once more."""
    return load_model(ModelOptions(str(random_model_dir), dtype="float32", kv_cache_tokens=4096))


def probabilistic(runner: ModelRunner, max_support: int = 1_000) -> InProcessLink:
    sampler = DraftSampler("probabilistic", max_support)
    drafter = DraftModelDrafter(runner, 512, chooser=DraftChooser(sampler))
    return InProcessLink(ProposerCore(drafter, 4, max_sessions=64))


@pytest.mark.parametrize("acceptance", BY_LAWS, ids=["standard", "block"])
def test_drafts_with_the_law_of_the_target_are_all_accepted(
    acceptance: Acceptance, random_runner: ModelRunner, twin: ModelRunner
) -> None:
    verifier = InlineVerifier(random_runner, [probabilistic(twin)], acceptance=acceptance)

    for answer in verifier.generate(PROMPTS, PARAMS):
        stats = answer.speculation
        assert stats is not None
        assert stats.draft_token_count > 0
        assert stats.accepted_token_count == stats.draft_token_count


@pytest.mark.parametrize("acceptance", BY_LAWS, ids=["standard", "block"])
def test_greedy_requests_beside_sampled_ones_keep_the_argmax_rule(
    acceptance: Acceptance, random_runner: ModelRunner, twin: ModelRunner
) -> None:
    expected = plain_answers(random_runner, PROMPTS)
    verifier = InlineVerifier(random_runner, [probabilistic(twin, 3)], acceptance=acceptance)

    ids = [verifier.submit(p, params) for p in PROMPTS for params in (GREEDY, PARAMS)]
    verifier.run()

    answers = [verifier.answers[session_id].token_ids for session_id in ids]
    assert answers[::2] == list(expected.values())


def test_laws_that_come_unasked_for_are_not_used(
    random_runner: ModelRunner, twin: ModelRunner
) -> None:
    expected = plain_answers(random_runner, PROMPTS, PARAMS)

    together = InlineVerifier(random_runner, [probabilistic(twin)]).generate(PROMPTS, PARAMS)

    assert [answer.token_ids for answer in together] == list(expected.values())


@pytest.mark.parametrize(
    ("wrong", "token_id"),
    [
        (law([1, 2], [0.5, 0.5]), 3),
        (law([1, 2], [0.0, 1.0]), 1),
        (law([1, 1], [0.5, 0.5]), 1),
        (law([1, 9], [0.5, 0.5]), 1),
        (law([1, -1], [0.5, 0.5]), 1),
        (law([1, 2], [0.5, 0.6]), 1),
        (law([1, 2], [1.5, -0.5]), 1),
        (law([1, 2], [0.5, np.nan]), 1),
        (law([1, 2], [0.5, np.inf]), 1),
        (law([1], [0.5, 0.5]), 1),
        (law([], []), 1),
    ],
)
def test_what_is_no_law_of_the_token_is_found_out(wrong: TokenProbs, token_id: int) -> None:
    right = law([1, 2], [0.25, 0.75])

    assert are_laws([1, 2], [right, right], vocab_size=9)
    assert not are_laws([token_id], [wrong], vocab_size=9)
    assert not are_laws([1, token_id], [right, wrong], vocab_size=9)
    assert not are_laws([1, 2], [right], vocab_size=9)


def test_a_law_has_no_more_tokens_than_a_proposer_may_send() -> None:
    size = MAX_DRAFT_SUPPORT
    largest = law(range(size), [1 / size] * size)
    too_large = law(range(size + 1), [*largest.probs, 0])

    assert are_laws([3, 4], [largest, largest], vocab_size=2 * size)
    assert not are_laws([3], [too_large], vocab_size=2 * size)
    with pytest.raises(ValidationError):
        ProposerSettings(max_draft_support=size + 1)


def test_an_empty_residual_gives_way_to_the_target() -> None:
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    q = torch.tensor([[0.25, 0.75], [1.0, 0.0]], dtype=torch.float64)

    weights = residual(p, torch.ones(2), torch.tensor([[0, 1], [0, 1]]), q)

    assert weights.tolist() == [[0.25, 0.75], [0.0, 0.5]]


def test_block_verification_accepts_as_much_as_in_the_paper() -> None:
    """P = (1/3, 2/3), q = (2/3, 1/3), two drafts: 11/9 accepted on average, against 10/9.

    Exact: every pair of drafts, and a fine grid of the two uniforms.
    """
    p, q = (torch.tensor(law, dtype=torch.float64) for law in ([1 / 3, 2 / 3], [2 / 3, 1 / 3]))
    grid = (torch.arange(300, dtype=torch.float64) + 0.5) / 300
    uniforms = torch.cartesian_prod(grid, grid)
    count = len(uniforms)
    mean = 0.0
    for first in range(2):
        for second in range(2):
            drafts = torch.tensor([first, second])
            blocks = BlockProbs(
                torch.full((count,), 2),
                p[drafts].expand(count, -1),
                q[drafts].expand(count, -1),
                p.expand(count, 2, -1),
                q.expand(count, 2, -1),
            )
            accepted, _ = accept_block(blocks, uniforms)
            mean += float(q[first] * q[second] * accepted.double().mean())

    assert mean == pytest.approx(11 / 9, abs=0.01)


def synthetic(**options: object) -> Acceptance:
    speculation = {
        "model": "m",
        "num_speculative_tokens": 4,
        "rejection_sample_method": "synthetic",
        **options,
    }
    config = parse_config({"model": "m", "speculative_config": speculation}).speculative_config
    return build_acceptance(config)


def test_a_synthetic_length_becomes_rates_of_least_variance() -> None:
    rates = synthetic(synthetic_acceptance_length=3.25).synthetic_rates

    assert rates == (1.0, 1.0, 0.25, 0.0)
    assert synthetic(synthetic_acceptance_length=5).synthetic_rates == (1.0, 1.0, 1.0, 1.0)
    assert synthetic(synthetic_acceptance_length=1).synthetic_rates == (0.0, 0.0, 0.0, 0.0)


def test_synthetic_rates_are_those_asked_for() -> None:
    """Each within 5 standard errors: a false-alarm rate of 3e-6."""
    count, asked = 100_000, torch.tensor([0.9, 0.6, 0.6, 0.1], dtype=torch.float64)
    numbers = torch.rand(count, 4, generator=torch.Generator().manual_seed(1)).double()

    accepted = accept_at_rates(torch.full((count,), 4), asked, numbers)

    for position, rate in enumerate(asked.tolist()):
        found = float((accepted > position).double().mean())
        assert abs(found - rate) < 5 * (rate * (1 - rate) / count) ** 0.5


@pytest.mark.parametrize("params", [GREEDY, PARAMS], ids=["greedy", "sampled"])
def test_synthetic_acceptance_does_not_look_at_the_drafts(
    params: SamplingParams,
    random_runner: ModelRunner,
    twin: ModelRunner,
    caplog: pytest.LogCaptureFixture,
) -> None:
    acceptance = Acceptance(synthetic_rates=(1.0, 1.0, 0.0, 0.0))
    verifier = InlineVerifier(random_runner, [probabilistic(twin)], acceptance=acceptance)

    for answer in verifier.generate(PROMPTS, params):
        assert answer.speculation is not None
        assert answer.speculation.is_synthetic
        rounds = answer.speculation.draft_count
        assert answer.speculation.accepted_per_position[2:] == [0, 0]
        assert answer.speculation.accepted_per_position[0] == rounds
    assert caplog.text.count("output is synthetic") == len(PROMPTS)
