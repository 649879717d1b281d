"""The verifier behind its contract: a real server, a real client, a tiny random model."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specgw import wire
from specgw.channel import open_channel
from specgw.engine.model_runner import ModelRunner
from specgw.lookup.prediction import _ends_of
from specgw.server import ServiceServer
from specgw.types import GenerateRequest, SamplingParams
from specgw.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from tests.conftest import VOCAB_SIZE
from tests.running_services import (
    LOOPBACK,
    RunningVerifier,
    running_verifier,
    scripted_proposer,
    token_ids,
    verifier_args,
)
from tests.scripted_proposers import DeadProposer, ScriptedProposer, script
from verifier_svc.service import SERVICE_NAME, VerifierService

_Call = grpc.aio.UnaryStreamCall[verifier_pb2.GenerateRequest, verifier_pb2.GenerateResponse]

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
ENDLESS = SamplingParams(temperature=0.8, seed=1, max_tokens=None, ignore_eos=True)
SHORT = SamplingParams(temperature=0.8, max_tokens=8, ignore_eos=True)


@pytest.fixture
async def verifier(long_runner: ModelRunner) -> AsyncIterator[RunningVerifier]:
    async with running_verifier(long_runner, verifier_args()) as running:
        yield running


def start(verifier: RunningVerifier, params: SamplingParams, timeout_s: float = 60) -> _Call:
    request = GenerateRequest("test", PROMPT, params)
    return verifier.stub.Generate(wire.generate_request_to_pb(request), timeout=timeout_s)


async def idle(verifier: RunningVerifier) -> verifier_pb2.GetVerifierInfoResponse:
    """Returns the verifier's description once nothing runs or waits on it."""
    async with asyncio.timeout(10):
        while True:
            info = await verifier.info()
            if info.running_count == info.waiting_count == 0:
                return info


async def test_a_client_that_goes_away_frees_the_session_on_both_services(
    long_runner: ModelRunner,
) -> None:
    proposer = ScriptedProposer(script(1, 2, 3))
    async with (
        scripted_proposer(proposer) as address,
        running_verifier(long_runner, verifier_args([address])) as verifier,
    ):
        await verifier.connected()
        call = start(verifier, ENDLESS)
        for _ in range(3):
            await call.read()
        assert len(proposer.contexts) == 1

        call.cancel()
        info = await idle(verifier)
        steps = info.step_count

        assert info.kv_used_tokens == 0
        async with asyncio.timeout(10):
            while proposer.contexts:
                await verifier.info()
        assert (await verifier.info()).step_count == steps


async def test_a_prediction_is_read_neither_by_the_engine_nor_on_the_event_loop(
    verifier: RunningVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def build(token_ids: Sequence[int], size: int) -> dict[int, list[int]]:
        threads.append(threading.current_thread())
        return _ends_of(token_ids, size)

    monkeypatch.setattr("specgw.lookup.prediction._ends_of", build)
    request = GenerateRequest("test", PROMPT, SHORT, prediction=[7] * 20)
    call = verifier.stub.Generate(wire.generate_request_to_pb(request), timeout=60)
    _ = [response async for response in call]

    assert len(threads) == 3
    assert not {"engine", "MainThread"} & {thread.name for thread in threads}


async def test_a_session_that_waits_for_a_draft_is_freed_too(long_runner: ModelRunner) -> None:
    proposer = DeadProposer()
    async with (
        scripted_proposer(proposer) as address,
        running_verifier(long_runner, verifier_args([address])) as verifier,
    ):
        await verifier.connected()
        call = start(verifier, ENDLESS)
        await call.read()
        call.cancel()
        info = await idle(verifier)

        assert info.step_count == 1
        async with asyncio.timeout(10):
            while proposer.contexts:
                await verifier.info()


async def test_a_passed_deadline_ends_the_work(long_runner: ModelRunner) -> None:
    proposer = DeadProposer()  # the client's time passes while its session waits for a draft
    async with (
        scripted_proposer(proposer) as address,
        running_verifier(long_runner, verifier_args([address])) as verifier,
    ):
        await verifier.connected()
        call = start(verifier, ENDLESS, timeout_s=0.3)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [response async for response in _rest(call)]

        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        info = await idle(verifier)
        assert info.kv_used_tokens == 0
        assert info.step_count == 1


async def test_the_seed_is_reported_and_gives_the_same_output_again(
    verifier: RunningVerifier,
) -> None:
    first = await verifier.generate(PROMPT, SHORT)
    seed = first[0].seed
    assert seed is not None
    again = await verifier.generate(PROMPT, SamplingParams(
        temperature=0.8, max_tokens=8, ignore_eos=True, seed=seed
    ))  # fmt: skip

    assert token_ids(again) == token_ids(first)
    assert all(output.seed is None for output in first[1:])


async def test_unseeded_requests_one_after_another_differ(verifier: RunningVerifier) -> None:
    texts = {tuple(token_ids(await verifier.generate(PROMPT, SHORT))) for _ in range(20)}

    assert len(texts) > 15


async def test_the_same_server_seed_gives_the_same_unseeded_outputs(
    long_runner: ModelRunner,
) -> None:
    outputs = []
    for _ in range(2):
        async with running_verifier(long_runner, verifier_args()) as verifier:
            outputs.append([token_ids(await verifier.generate(PROMPT, SHORT)) for _ in range(3)])

    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("request_pb", "field"),
    [
        (verifier_pb2.GenerateRequest(request_id=""), "request_id"),
        (verifier_pb2.GenerateRequest(request_id="r"), "prompt_token_ids"),
        (
            wire.generate_request_to_pb(GenerateRequest("r", (VOCAB_SIZE,), SHORT)),
            "prompt_token_ids",
        ),
        (
            verifier_pb2.GenerateRequest(
                request_id="r",
                prompt_token_ids=wire.token_ids_to_pb([1]),
                sampling_params=types_pb2.SamplingParams(temperature=3.0),
            ),
            "temperature",
        ),
    ],
)
async def test_bad_requests_are_refused_by_field_before_any_step(
    request_pb: verifier_pb2.GenerateRequest, field: str, verifier: RunningVerifier
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await verifier.stub.Generate(request_pb, timeout=10).read()

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in (caught.value.details() or "")
    assert (await verifier.info()).step_count == 0


async def test_a_full_queue_is_resource_exhausted(long_runner: ModelRunner) -> None:
    args = verifier_args(max_waiting_requests=0).model_copy(update={"max_num_seqs": 1})
    async with running_verifier(long_runner, args) as verifier:
        running = start(verifier, ENDLESS)
        await running.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await start(verifier, SHORT).read()
        running.cancel()

    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "1 requests run or wait already, of at most 1 and 0" in (caught.value.details() or "")


async def test_the_description_says_what_runs(long_runner: ModelRunner) -> None:
    async with (
        scripted_proposer(ScriptedProposer(script(1))) as address,
        running_verifier(long_runner, verifier_args([address], 3)) as verifier,
    ):
        await verifier.connected()
        await verifier.generate(PROMPT, SHORT)
        info = await verifier.info()

    assert info.target_model.vocab_size == VOCAB_SIZE
    assert info.target_model.architecture == "LlamaForCausalLM"
    assert info.max_draft_tokens == 3
    assert info.output_token_count == 8
    assert [(p.address, p.method) for p in info.proposers] == [(address, "draft_model")]
    assert info.speculation.draft_count > 0


async def test_a_proposer_that_loaded_another_model_is_refused_and_decoding_goes_on(
    long_runner: ModelRunner,
) -> None:
    right, wrong = ScriptedProposer(script(1)), ScriptedProposer(script(1), model="other")
    async with (
        scripted_proposer(wrong) as address,
        running_verifier(long_runner, verifier_args([address])) as verifier,
    ):
        async with asyncio.timeout(10):
            while "draft model" not in (await verifier.info()).proposers[0].detail:
                pass
        outputs = await verifier.generate(PROMPT, SHORT)
        [refused] = (await verifier.info()).proposers
    async with (
        scripted_proposer(right) as address,
        running_verifier(long_runner, verifier_args([address])) as verifier,
    ):
        await verifier.connected()
        [welcome] = (await verifier.info()).proposers

    assert refused.detail == (
        "draft model: the verifier is configured with scripted, the proposer has loaded other"
    )
    assert not refused.connected
    assert len(token_ids(outputs)) == 8
    assert (welcome.max_sessions, welcome.extra_slots_per_session) == (1_000, 1)
    assert wrong.num_opened == 0


async def test_a_proposer_restarted_with_another_model_is_refused(
    long_runner: ModelRunner,
) -> None:
    async with scripted_proposer(ScriptedProposer(script(1))) as address:
        context = running_verifier(long_runner, verifier_args([address]))
        verifier = await context.__aenter__()
        await verifier.connected()
    try:
        other = ScriptedProposer(script(1), model="other")
        async with scripted_proposer(other, address), asyncio.timeout(20):
            while "loaded other" not in (await verifier.info()).proposers[0].detail:
                pass
    finally:
        await context.__aexit__(None, None, None)

    assert other.num_opened == 0


async def test_health_stays_serving_without_a_proposer(long_runner: ModelRunner) -> None:
    server = ServiceServer(SERVICE_NAME, [LOOPBACK])
    service = VerifierService(long_runner, [], verifier_args(["127.0.0.1:1"]))
    service.register(server.grpc_server)
    service.start()
    await server.start()
    try:
        async with open_channel(server.addresses[0]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for name in ("", SERVICE_NAME):
                answer = await stub.Check(  # type: ignore[attr-defined]
                    health_pb2.HealthCheckRequest(service=name), timeout=10
                )
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await server.stop(0)
        await service.stop()


async def test_draining_finishes_what_runs_and_refuses_what_comes(
    long_runner: ModelRunner,
) -> None:
    server = ServiceServer(SERVICE_NAME, [LOOPBACK])
    service = VerifierService(long_runner, [], verifier_args())
    service.register(server.grpc_server)
    service.start()
    await server.start()
    async with open_channel(server.addresses[0]) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        request = wire.generate_request_to_pb(GenerateRequest("r", PROMPT, params))
        call = stub.Generate(request, timeout=60)
        received = [await anext(_rest(call))]
        stopping = asyncio.create_task(server.stop(30))
        received += [response async for response in _rest(call)]
        await stopping
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(request, timeout=10).read()
    await service.stop()

    outputs = [wire.generate_output_from_pb(response) for response in received]
    assert len(token_ids(outputs)) == 200
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_stopping_ends_open_calls_as_unavailable(long_runner: ModelRunner) -> None:
    async with contextlib.AsyncExitStack() as stack:
        verifier = await stack.enter_async_context(running_verifier(long_runner, verifier_args()))
        call = start(verifier, ENDLESS)
        await call.read()
        await verifier.service.stop()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [response async for response in _rest(call)]

    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def _rest(call: _Call) -> AsyncIterator[verifier_pb2.GenerateResponse]:
    while isinstance(response := await call.read(), verifier_pb2.GenerateResponse):
        yield response
