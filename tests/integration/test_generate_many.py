"""Many requests over one stream between a gateway and a verifier: a real server, a real client."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import grpc
import pytest

from gateway.verifier_stream import VerifierStream
from specgw import wire, wire_many
from specgw.channel import open_channel
from specgw.engine.model_runner import ModelRunner
from specgw.errors import DeadlineExceeded, InvalidRequest, NotReady, Overloaded, SpecgwError
from specgw.types import GenerateOutput, GenerateRequest, Round, SamplingParams
from specgw.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from tests.conftest import VOCAB_SIZE
from tests.running_services import (
    RunningVerifier,
    running_verifier,
    scripted_proposer,
    speculation,
    token_ids,
    verifier_args,
)
from tests.scripted_proposers import ScriptedProposer, script
from tests.scripted_verifier import ScriptedVerifier, serving
from verifier_svc import client_stream

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8], [1, 6, 1, 8, 0, 3]]
ENDLESS = SamplingParams(temperature=0.8, seed=1, max_tokens=None, ignore_eos=True)
SHORT = SamplingParams(
    temperature=0.8, seed=1, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=1
)


@pytest.fixture
async def verifier(long_runner: ModelRunner) -> AsyncIterator[RunningVerifier]:
    async with running_verifier(long_runner, verifier_args()) as running:
        yield running


def request(prompt: Sequence[int], params: SamplingParams) -> GenerateRequest:
    return GenerateRequest("test", prompt, params)


def start(call_id: int, params: SamplingParams) -> verifier_pb2.GenerateManyRequest:
    return wire_many.start_call_to_pb(call_id, request(PROMPTS[0], params), timeout_s=60)


async def kept_open(
    *messages: verifier_pb2.GenerateManyRequest,
) -> AsyncIterator[verifier_pb2.GenerateManyRequest]:
    """Sends messages, and then nothing."""
    for message in messages:
        yield message
    await asyncio.Event().wait()


async def running(verifier: RunningVerifier, count: int) -> verifier_pb2.GetVerifierInfoResponse:
    """Returns the verifier's description once so many requests run and none waits on it."""
    async with asyncio.timeout(10):
        while True:
            info = await verifier.info()
            if (info.running_count, info.waiting_count) == (count, 0):
                return info


async def started(
    verifier: RunningVerifier, params: SamplingParams
) -> AsyncGenerator[GenerateOutput, None]:
    """Begins a request that is never over, and reads its first output."""
    outputs = verifier.stream.generate(request(PROMPTS[0], params), time.monotonic() + 60)
    await anext(outputs)
    return outputs


async def ended(outputs: AsyncIterator[Any]) -> None:
    """Reads to the end."""
    async with asyncio.timeout(10):
        async for _ in outputs:
            pass


async def test_outputs_are_those_of_calls_of_their_own(long_runner: ModelRunner) -> None:
    async with (
        scripted_proposer(ScriptedProposer(script(1, 2, 3))) as address,
        running_verifier(long_runner, verifier_args([address])) as verifier,
    ):
        await verifier.connected()
        for prompt in PROMPTS:
            outputs = await verifier.generate(prompt, SHORT)
            call = verifier.stub.Generate(
                wire.generate_request_to_pb(request(prompt, SHORT)), timeout=60
            )
            responses = [response async for response in call]
            alone = [wire.generate_output_from_pb(response) for response in responses]
            totals = wire.speculation_stats_from_pb(responses[-1].speculation)

            assert [one._replace(round=Round()) for one in outputs] == alone
            assert outputs[0].seed == 1
            assert speculation(outputs) == totals
            assert totals.draft_count > 0


async def test_a_request_that_cannot_be_served_ends_alone(verifier: RunningVerifier) -> None:
    outside = request([VOCAB_SIZE], SHORT)
    good = asyncio.create_task(verifier.generate(PROMPTS[0], SHORT))
    with pytest.raises(InvalidRequest, match=rf"prompt_token_ids: .*, got {VOCAB_SIZE}"):
        await anext(verifier.stream.generate(outside, time.monotonic() + 60))

    assert len(token_ids(await good)) == 8


async def test_a_request_beyond_the_queue_is_told_to_come_back(long_runner: ModelRunner) -> None:
    args = verifier_args(max_waiting_requests=0).model_copy(update={"max_num_seqs": 1})
    async with running_verifier(long_runner, args) as verifier:
        stays = await started(verifier, ENDLESS)
        with pytest.raises(Overloaded) as caught:
            await verifier.generate(PROMPTS[1], SHORT)
        assert await anext(stays)

    assert caught.value.retry_after_s == 1.0


async def test_leaving_frees_one_session_and_no_other(verifier: RunningVerifier) -> None:
    stays, leaves = await started(verifier, ENDLESS), await started(verifier, ENDLESS)
    await leaves.aclose()
    await running(verifier, 1)

    assert await anext(stays)


async def test_the_client_ends_a_call_whose_deadline_passes(
    verifier: RunningVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_stream, "timeout_from_pb", lambda pb: None)  # out of reach
    stays = await started(verifier, ENDLESS)
    late = verifier.stream.generate(request(PROMPTS[1], ENDLESS), time.monotonic() + 0.3)
    with pytest.raises(DeadlineExceeded):
        await ended(late)
    await running(verifier, 1)

    assert await anext(stays)


async def test_the_verifier_ends_a_call_whose_deadline_passes(verifier: RunningVerifier) -> None:
    stays = await started(verifier, ENDLESS)
    late = wire_many.start_call_to_pb(7, request(PROMPTS[1], ENDLESS), timeout_s=0.3)
    call = verifier.stub.GenerateMany(kept_open(late))
    errors: list[tuple[int, wire_many.Answer]] = []
    async with asyncio.timeout(10):
        while not errors:
            response = await call.read()
            assert isinstance(response, verifier_pb2.GenerateManyResponse)
            answers = wire_many.answers_from_pb(response)
            errors = [one for one in answers if isinstance(one[1], SpecgwError)]
    await running(verifier, 1)
    call.cancel()

    [(call_id, answer)] = errors
    assert call_id == 7
    assert isinstance(answer, DeadlineExceeded)
    assert await anext(stays)


async def test_a_client_that_dies_frees_all_its_sessions(verifier: RunningVerifier) -> None:
    before = (await verifier.info()).kv_used_tokens
    for _ in range(3):
        await started(verifier, ENDLESS)
    await verifier.stream.close()

    assert (await running(verifier, 0)).kv_used_tokens == before


async def test_a_stream_that_is_lost_ends_every_call_and_the_next_opens_another(
    verifier: RunningVerifier,
) -> None:
    calls = [await started(verifier, ENDLESS) for _ in range(3)]
    await verifier.stream.close()
    for call in calls:
        with pytest.raises(NotReady):
            await ended(call)

    assert len(token_ids(await verifier.generate(PROMPTS[0], SHORT))) == 8


async def test_a_client_that_does_not_read_loses_its_stream_and_delays_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_stream, "_MAX_UNREAD_BYTES", 2**20)
    verifier = ScriptedVerifier(
        [1] * 2_000_000, block_size=100_000, vocab_size=8, vocab_fingerprint=""
    )
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    async with (
        serving(verifier) as server,
        open_channel(server.addresses[0]) as slow_channel,
        open_channel(server.addresses[0]) as channel,
    ):
        slow = verifier_pb2_grpc.VerifierServiceStub(slow_channel).GenerateMany(
            kept_open(start(1, params))
        )
        await verifier.opened()
        await verifier.closed()
        other = VerifierStream(verifier_pb2_grpc.VerifierServiceStub(channel), "other")
        quick = request(PROMPTS[0], SamplingParams(max_tokens=3))
        outputs = [one async for one in other.generate(quick, time.monotonic() + 10)]
        await other.close()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ended(aiter(slow))

    assert token_ids(outputs) == [1, 1, 1]
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "unread" in str(caught.value.details())


async def test_an_output_that_no_message_can_carry_is_an_error_of_its_call(
    verifier: RunningVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    stays = await started(verifier, ENDLESS)
    monkeypatch.setattr(wire_many, "MAX_MESSAGE_BYTES", 600)
    long = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=20)
    with pytest.raises(InvalidRequest, match="message: must fit"):
        await verifier.generate(PROMPTS[0], long)

    assert await anext(stays)


async def test_a_request_that_is_too_large_is_not_sent(
    verifier: RunningVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    stays = await started(verifier, ENDLESS)
    monkeypatch.setattr(wire_many, "MAX_MESSAGE_BYTES", 600)
    with pytest.raises(InvalidRequest, match="message: must fit"):
        await verifier.generate([1] * 200, SHORT)

    assert await anext(stays)


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        ([verifier_pb2.GenerateManyRequest()], "message"),
        ([start(2, ENDLESS), start(2, ENDLESS)], "call_id"),
        ([start(0, ENDLESS)], "call_id"),
    ],
)
async def test_a_client_that_breaks_the_rules_loses_its_stream(
    verifier: RunningVerifier, sent: list[verifier_pb2.GenerateManyRequest], problem: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ended(aiter(verifier.stub.GenerateMany(kept_open(*sent))))

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(caught.value.details()).startswith(problem)
    await running(verifier, 0)


async def test_draining_finishes_what_runs_and_refuses_what_comes(
    verifier: RunningVerifier,
) -> None:
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    outputs = verifier.stream.generate(request(PROMPTS[0], params), time.monotonic() + 60)
    received = [await anext(outputs)]
    verifier.service.drain()
    with pytest.raises(NotReady, match="draining"):
        await verifier.generate(PROMPTS[1], SHORT)
    async with aclosing(outputs):
        received += [output async for output in outputs]

    assert len(token_ids(received)) == 200
    async with asyncio.timeout(10):
        while verifier.service.stream_count:
            await verifier.info()


async def test_stopping_ends_open_calls_as_unavailable(verifier: RunningVerifier) -> None:
    call = await started(verifier, ENDLESS)
    await verifier.service.stop()
    with pytest.raises(NotReady, match="the verifier has stopped"):
        await ended(call)


@pytest.mark.parametrize(
    "broken",
    [
        verifier_pb2.GenerateManyResponse(call_ids=[1]),
        verifier_pb2.GenerateManyResponse(
            call_ids=[1],
            token_counts=[-1],
            draft_token_counts=[0],
            accepted_token_counts=[0],
            undrafted_reasons=[types_pb2.UNDRAFTED_REASON_UNSPECIFIED],
        ),
        verifier_pb2.GenerateManyResponse(details=[verifier_pb2.OutputDetails(index=0)]),
    ],
)
def test_lists_that_do_not_match_are_refused(broken: verifier_pb2.GenerateManyResponse) -> None:
    with pytest.raises(InvalidRequest):
        wire_many.answers_from_pb(broken)


def test_errors_stay_what_they_are() -> None:
    errors: list[SpecgwError] = [
        InvalidRequest("top_p", 2, "must be in (0, 1]"),
        NotReady("gone"),
        Overloaded("full", 2.5),
        DeadlineExceeded("late"),
    ]
    [message] = wire_many.answers_to_pb(list(enumerate(errors)))
    for (_, answer), error in zip(wire_many.answers_from_pb(message), errors, strict=True):
        assert type(answer) is type(error)
        assert str(answer) == str(error)
