"""Run-ahead with branches changes neither answers nor blocks: scheduler, link and models."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from proposer_svc.draft_chooser import DraftChooser
from proposer_svc.draft_model import DraftModelDrafter
from proposer_svc.draft_sampling import DraftSampler
from proposer_svc.proposer import ProposerCore
from proposer_svc.run_ahead import RunAhead
from specgw.engine.loading import ModelOptions, load_model
from specgw.engine.model_runner import ModelRunner
from specgw.link import InProcessLink
from specgw.types import AnyBlock, DraftBlock, ProposeStep, SamplingParams
from tests.verifier_harness import GREEDY, InlineVerifier, plain_answers
from verifier_svc.acceptance import Acceptance

PROMPTS = [[9], [4, 8, 15, 16, 23, 42], [7] * 20, list(range(30))]
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def twin(random_model_dir: Path, single_thread: None) -> ModelRunner:
    """The target's weights once more."""
    return load_model(ModelOptions(str(random_model_dir), dtype="float32", kv_cache_tokens=8192))


@pytest.fixture(scope="module")
def stranger(unrelated_model_dir: Path, single_thread: None) -> ModelRunner:
    """Another random model with the target's vocabulary."""
    return load_model(ModelOptions(str(unrelated_model_dir), dtype="float32", kv_cache_tokens=8192))


class AheadLink(InProcessLink):
    """Runs ahead after each step for as long as there is something to do; keeps all answers."""

    def __init__(self, proposer: ProposerCore) -> None:
        super().__init__(proposer)
        self.blocks: list[tuple[int, int, list[int], list[list[int]]]] = []
        self.num_taken = 0
        self._core = proposer

    def _propose(self, verifier_id: str, step: ProposeStep) -> Sequence[AnyBlock]:
        blocks = super()._propose(verifier_id, step)
        self.num_taken += sum(commit.num_taken > 0 for commit in step.commit)
        while self._core.can_run_ahead():
            self._core.run_ahead()
        self.blocks += sorted(
            (
                block.session_id,
                block.base_length,
                list(block.token_ids),
                [law.token_ids.tolist() for law in block.draft_probs],
            )
            for block in blocks
            if isinstance(block, DraftBlock)
        )
        return [*blocks, *(ahead for _, ahead in self._core.blocks_ahead())]


def link(runner: ModelRunner, method: str, max_branches: int) -> tuple[AheadLink, RunAhead]:
    ahead = RunAhead(max_branches > 0, max(max_branches, 1), clock=lambda: 0.0)
    ahead.pass_cost.observe(10_000, 0.0)  # rows are known to be free
    drafter = DraftModelDrafter(
        runner, 2048, chooser=DraftChooser(DraftSampler(method)), run_ahead=ahead
    )
    core = ProposerCore(drafter, 4, max_sessions=16)
    return AheadLink(core), ahead


@pytest.mark.parametrize("method", ["greedy", "coupled", "probabilistic"])
@pytest.mark.parametrize("params", [GREEDY, PARAMS], ids=["greedy", "sampled"])
def test_answers_and_blocks_are_those_without_it(
    method: str,
    params: SamplingParams,
    random_runner: ModelRunner,
    twin: ModelRunner,
    stranger: ModelRunner,
) -> None:
    acceptance = Acceptance(uses_draft_probs=True) if method == "probabilistic" else None
    for draft in (twin, stranger):
        found = []
        for max_branches in (0, 1, 22):
            link_, ahead = link(draft, method, max_branches)
            verifier = InlineVerifier(
                random_runner, [link_], acceptance=acceptance, takes_blocks_ahead=False
            )
            answers = [answer.token_ids for answer in verifier.generate(PROMPTS, params)]
            found.append((answers, link_.blocks))
            if max_branches and draft is twin and (params is GREEDY or method == "coupled"):
                assert ahead.counts.hit_count > 0

        assert found[1] == found[0]
        assert found[2] == found[0]


@pytest.mark.parametrize("method", ["greedy", "coupled", "probabilistic"])
@pytest.mark.parametrize("params", [GREEDY, PARAMS], ids=["greedy", "sampled"])
def test_blocks_that_come_ahead_change_no_round(
    method: str,
    params: SamplingParams,
    random_runner: ModelRunner,
    twin: ModelRunner,
    stranger: ModelRunner,
) -> None:
    """Each round tests as many tokens and accepts as many as where all blocks are asked for."""
    acceptance = Acceptance(uses_draft_probs=True) if method == "probabilistic" else None
    for draft in (twin, stranger):
        found, taken = [], []
        for takes_blocks_ahead in (False, True):
            link_, _ = link(draft, method, 22)
            verifier = InlineVerifier(
                *(random_runner, [link_]),
                acceptance=acceptance,
                takes_blocks_ahead=takes_blocks_ahead,
            )
            answers = verifier.generate(PROMPTS, params)
            found.append([(answer.blocks, answer.speculation) for answer in answers])
            taken.append(link_.num_taken)

        assert found[1] == found[0]
        assert taken[0] == 0
        has_laws = method == "probabilistic" and params is PARAMS
        if draft is twin and (params is GREEDY or method == "coupled"):
            assert taken[1] > 0
        assert not (has_laws and taken[1])


@pytest.mark.parametrize("max_branches", [1, 22])
def test_greedy_answers_are_the_target_s_own(
    max_branches: int, random_runner: ModelRunner, stranger: ModelRunner
) -> None:
    link_, ahead = link(stranger, "greedy", max_branches)

    answers = InlineVerifier(random_runner, [link_]).generate(PROMPTS)

    assert [answer.token_ids for answer in answers] == list(
        plain_answers(random_runner, PROMPTS).values()
    )
    assert ahead.counts.token_count > 0
