"""The real draft model behind both links: lossless whatever it is, and perfect if it is the target.

Draft = target must be accepted throughout, and an unrelated draft must still change nothing: these
two find most bugs. Drafted one token after another, and all in one pass.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from proposer_svc.draft_model import DraftModelDrafter
from proposer_svc.parallel_draft import ParallelDrafter
from proposer_svc.proposer import ProposerCore
from proposer_svc.service import SERVICE_NAME, ProposerService
from specgw.engine.loading import ModelOptions, load_model
from specgw.engine.model_runner import ModelRunner
from specgw.link import InProcessLink
from specgw.server import ServiceServer
from specgw.types import SamplingParams, SpeculationStats
from tests.conformance.test_lossless_greedy import PROMPTS
from tests.conftest import VOCAB_SIZE
from tests.running_services import LOOPBACK, running_verifier, speculation, token_ids, verifier_args
from tests.verifier_harness import GREEDY, InlineVerifier, plain_answers


@pytest.fixture(scope="module")
def answers(random_runner: ModelRunner) -> dict[tuple[int, ...], list[int]]:
    return plain_answers(random_runner, PROMPTS)


@pytest.fixture
def twin(random_model_dir: Path, single_thread: None) -> ModelRunner:
    """The target's weights once more, with a cache of their own."""
    return load_model(ModelOptions(str(random_model_dir), dtype="float32", kv_cache_tokens=4096))


@pytest.fixture(scope="module")
def stranger(unrelated_model_dir: Path, single_thread: None) -> ModelRunner:
    """Another random model with the target's vocabulary."""
    return load_model(ModelOptions(str(unrelated_model_dir), dtype="float32", kv_cache_tokens=4096))


def core(
    runner: ModelRunner, num_draft_tokens: int, parallel_drafting: bool = False
) -> ProposerCore:
    drafter = DraftModelDrafter(runner, 512)
    if parallel_drafting:
        drafter = ParallelDrafter(
            runner, 512, mask_token_id=VOCAB_SIZE - 1, max_draft_tokens=num_draft_tokens
        )
    return ProposerCore(drafter, num_draft_tokens, max_sessions=64)


@asynccontextmanager
async def served(proposer: ProposerCore) -> AsyncIterator[str]:
    server = ServiceServer(SERVICE_NAME, [LOOPBACK])
    service = ProposerService(proposer)
    service.register(server.grpc_server)
    service.start()
    await server.start()
    try:
        yield server.addresses[0]
    finally:
        service.drain()
        await server.stop(1)
        await service.stop()


def accepted_share(stats: SpeculationStats | None) -> float:
    assert stats is not None
    return stats.accepted_token_count / stats.draft_token_count


def accepted_first(stats: SpeculationStats | None) -> float:
    """Returns the accepted share of the first tokens, which follow no mask."""
    assert stats is not None
    return stats.accepted_per_position[0] / stats.draft_count


both_ways = pytest.mark.parametrize("parallel_drafting", [False, True], ids=["serial", "parallel"])


@both_ways
@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
def test_a_draft_that_is_the_target_is_always_accepted(
    num_draft_tokens: int,
    parallel_drafting: bool,
    random_runner: ModelRunner,
    twin: ModelRunner,
    answers: dict[tuple[int, ...], list[int]],
) -> None:
    link = InProcessLink(core(twin, num_draft_tokens, parallel_drafting))
    verifier = InlineVerifier(random_runner, [link], max_draft_tokens=num_draft_tokens)

    together = verifier.generate(PROMPTS)
    alone = verifier.generate(PROMPTS[3:4])

    assert [answer.token_ids for answer in [*together, *alone]] == [
        *answers.values(),
        answers[tuple(PROMPTS[3])],
    ]
    assert accepted_first(together[3].speculation) == 1
    assert parallel_drafting or accepted_share(together[3].speculation) == 1
    assert twin.kv_cache.used_tokens == 0


@both_ways
@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
def test_an_unrelated_draft_changes_nothing(
    num_draft_tokens: int,
    parallel_drafting: bool,
    random_runner: ModelRunner,
    stranger: ModelRunner,
    answers: dict[tuple[int, ...], list[int]],
) -> None:
    link = InProcessLink(core(stranger, num_draft_tokens, parallel_drafting))
    verifier = InlineVerifier(random_runner, [link], max_draft_tokens=num_draft_tokens)

    together = verifier.generate(PROMPTS)
    alone = verifier.generate(PROMPTS[3:4])

    assert [answer.token_ids for answer in [*together, *alone]] == [
        *answers.values(),
        answers[tuple(PROMPTS[3])],
    ]
    assert accepted_share(together[3].speculation) < 0.5
    assert stranger.kv_cache.used_tokens == 0


@both_ways
@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
async def test_the_same_holds_over_grpc(
    num_draft_tokens: int,
    parallel_drafting: bool,
    random_runner: ModelRunner,
    twin: ModelRunner,
    stranger: ModelRunner,
    answers: dict[tuple[int, ...], list[int]],
) -> None:
    for draft, is_twin in ((twin, True), (stranger, False)):
        name = draft.description.name
        async with (
            served(core(draft, num_draft_tokens, parallel_drafting)) as address,
            running_verifier(
                random_runner,
                verifier_args([address], num_draft_tokens, name, parallel_drafting),
            ) as verifier,
        ):
            await verifier.connected()
            together = await asyncio.gather(*(verifier.generate(p, GREEDY) for p in PROMPTS))
            alone = await verifier.generate(PROMPTS[3], GREEDY)

        assert [token_ids(outputs) for outputs in [*together, alone]] == [
            *answers.values(),
            answers[tuple(PROMPTS[3])],
        ]
        assert (accepted_first(speculation(together[3])) == 1) is is_twin


def test_acceptance_does_not_decay_over_a_long_answer(
    long_runner: ModelRunner, long_twin: ModelRunner
) -> None:
    """A draft cache that drifted from the committed tokens would lose acceptance slowly."""
    verifier = InlineVerifier(long_runner, [InProcessLink(core(long_twin, 4))], max_draft_tokens=4)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=500, ignore_eos=True)

    [answer] = verifier.generate([[5, 6, 7]], params)

    sizes = [len(block) for block in answer.blocks[1:]]
    quarter = len(sizes) // 4
    first, last = sum(sizes[:quarter]) / quarter, sum(sizes[-quarter:]) / quarter
    assert min(sizes) < 5, "rejections must happen for this to test anything"
    assert last > 0.8 * first


def test_a_draft_with_a_shorter_context_stops_drafting_and_nothing_else(
    long_runner: ModelRunner, twin: ModelRunner
) -> None:
    """The draft's context is 64 tokens; answers go on for hundreds past it, beside others."""
    prompts = [[5, 6, 7], [8] * 60, [9] * 100]
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    expected = plain_answers(long_runner, prompts, params)
    verifier = InlineVerifier(long_runner, [InProcessLink(core(twin, 4))], max_draft_tokens=4)

    answers = verifier.generate(prompts, params)

    assert [answer.token_ids for answer in answers] == list(expected.values())
    assert answers[0].speculation is not None
    assert answers[0].speculation.draft_count > 5
