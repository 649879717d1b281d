"""Greedy output with speculation equals output without it, over the gRPC link, in float32.

The same claims, proposers and prompts as `test_lossless_greedy.py`; here proposer and verifier are
real services that talk over a socket.
"""

import asyncio
import contextlib

import pytest

from specgw.engine.model_runner import ModelRunner
from specgw.link import InProcessLink
from specgw.types import SamplingParams, UndraftedReason
from tests.conformance.test_lossless_greedy import PROMPTS, PROPOSERS
from tests.running_services import (
    running_verifier,
    scripted_proposer,
    speculation,
    token_ids,
    verifier_args,
)
from tests.scripted_proposers import DeadProposer, ScriptedProposer, oracle
from tests.verifier_harness import GREEDY, plain_answers
from verifier_svc.delayed_link import DelayedLink
from verifier_svc.proposer_link import GrpcProposerLink


@pytest.fixture(scope="module")
def answers(random_runner: ModelRunner) -> dict[tuple[int, ...], list[int]]:
    return plain_answers(random_runner, PROMPTS)


@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
@pytest.mark.parametrize("name", PROPOSERS)
async def test_any_proposer_leaves_greedy_output_unchanged(
    name: str,
    num_draft_tokens: int,
    random_runner: ModelRunner,
    answers: dict[tuple[int, ...], list[int]],
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        proposer = PROPOSERS[name](answers)
        address = await stack.enter_async_context(scripted_proposer(proposer))
        args = verifier_args([address], num_draft_tokens)
        verifier = await stack.enter_async_context(running_verifier(random_runner, args))
        await verifier.connected()

        together = await asyncio.gather(*(verifier.generate(p, GREEDY) for p in PROMPTS))
        alone = await verifier.generate(PROMPTS[3], GREEDY)

    assert [token_ids(outputs) for outputs in together] == list(answers.values())
    assert token_ids(alone) == answers[tuple(PROMPTS[3])]
    assert random_runner.kv_cache.used_tokens == 0


async def test_an_oracle_over_grpc_is_used(
    random_runner: ModelRunner, answers: dict[tuple[int, ...], list[int]]
) -> None:
    """Guards the suite: a link that never delivered would pass every test above."""
    async with (
        scripted_proposer(ScriptedProposer(oracle(answers))) as address,
        running_verifier(random_runner, verifier_args([address])) as verifier,
    ):
        await verifier.connected()
        outputs = await verifier.generate(PROMPTS[3], GREEDY)

    assert [len(output.token_ids) for output in outputs] == [1, 5, 5, 5, 5, 3]


async def test_a_dead_proposer_leaves_greedy_output_unchanged(
    random_runner: ModelRunner, answers: dict[tuple[int, ...], list[int]]
) -> None:
    async with (
        scripted_proposer(DeadProposer()) as address,
        running_verifier(random_runner, verifier_args([address], draft_timeout_s=0.01)) as verifier,
    ):
        await verifier.connected()
        together = await asyncio.gather(*(verifier.generate(p, GREEDY) for p in PROMPTS))

    assert [token_ids(outputs) for outputs in together] == list(answers.values())
    stats = speculation(together[0])
    assert stats.undrafted == {UndraftedReason.LATE: 22, UndraftedReason.DISABLED: 1}


@pytest.mark.parametrize("link", ["grpc", "inproc"])
@pytest.mark.parametrize("wait", [True, False])
async def test_a_slow_proposer_leaves_greedy_output_unchanged(
    link: str,
    wait: bool,
    random_runner: ModelRunner,
    answers: dict[tuple[int, ...], list[int]],
) -> None:
    proposer = ScriptedProposer(oracle(answers))
    async with scripted_proposer(proposer) as address:
        inner = GrpcProposerLink(address) if link == "grpc" else InProcessLink(proposer)
        slow = DelayedLink(inner, delay_s=0.02)
        args = verifier_args([address], wait_for_slow_drafts=wait)
        async with running_verifier(random_runner, args, [slow]) as verifier:
            await verifier.connected()
            together = await asyncio.gather(*(verifier.generate(p, GREEDY) for p in PROMPTS))

    assert [token_ids(outputs) for outputs in together] == list(answers.values())
    stats = speculation(together[0])
    if wait:
        assert stats.accepted_token_count == stats.draft_token_count > 0
    else:  # 20 ms for a block that saves a fraction of that
        assert stats.undrafted[UndraftedReason.NO_GAIN] > 5


async def test_a_proposer_that_is_not_there_leaves_greedy_output_unchanged(
    random_runner: ModelRunner, answers: dict[tuple[int, ...], list[int]]
) -> None:
    args = verifier_args(["127.0.0.1:1"])  # nobody may listen there
    async with running_verifier(random_runner, args) as verifier:
        outputs = await verifier.generate(PROMPTS[3], GREEDY)

    assert token_ids(outputs) == answers[tuple(PROMPTS[3])]
    stats = speculation(outputs)
    assert stats.undrafted == {UndraftedReason.UNAVAILABLE: 22, UndraftedReason.DISABLED: 1}


async def test_a_seeded_request_says_the_same_alone_and_among_others(
    random_runner: ModelRunner, answers: dict[tuple[int, ...], list[int]]
) -> None:
    params = SamplingParams(temperature=0.8, seed=11, max_tokens=24, ignore_eos=True)
    others = SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True)
    async with (
        scripted_proposer(ScriptedProposer(oracle(answers))) as address,
        running_verifier(random_runner, verifier_args([address])) as verifier,
    ):
        alone = await verifier.generate(PROMPTS[3], params)
        plain = await verifier.generate(PROMPTS[3], params, max_draft_tokens=0)
        among = await asyncio.gather(
            verifier.generate(PROMPTS[3], params),
            *(verifier.generate(PROMPTS[3], others) for _ in range(7)),
        )

    assert token_ids(plain) == token_ids(alone) == token_ids(among[0])
    assert alone[0].seed == 11
    assert len({tuple(token_ids(outputs)) for outputs in among}) == 8
