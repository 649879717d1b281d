"""The proposer service over a real grpc.aio server, with a toy model in its engine thread."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from proposer_svc.draft_model import DraftModelDrafter
from proposer_svc.metrics import ProposerMetrics
from proposer_svc.proposer import ProposerCore
from proposer_svc.run_ahead import RunAhead
from proposer_svc.service import SERVICE_NAME, ProposerService
from proposer_svc.session_table import Session
from specgw import wire
from specgw.channel import open_channel, status_to_error
from specgw.engine.model_runner import SequenceChunk
from specgw.errors import Cancelled, IncompatibleModels, InvalidRequest, NotReady, SpecgwError
from specgw.server import ServiceServer
from specgw.types import (
    AnyBlock,
    BlocksAhead,
    Commit,
    DraftBlock,
    Hello,
    HelloAck,
    ModelDescription,
    OpenSession,
    ProposeStep,
    UndraftedReason,
)
from specgw.v1 import proposer_pb2, proposer_pb2_grpc
from tests.doubles import ToyRunner, toy_continuation

pytestmark = pytest.mark.usefixtures("single_thread")

_DEADLINE_S = 10.0


class Gate:
    """Holds the engine thread before a forward pass, so that a test decides what arrives."""

    def __init__(self, runner: ToyRunner) -> None:
        self._opened = threading.Event()
        self._reached = threading.Event()
        runner.fault = self._wait

    def _wait(self, chunks: Sequence[SequenceChunk]) -> None:
        self._reached.set()
        assert self._opened.wait(_DEADLINE_S)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, _DEADLINE_S)

    def open(self) -> None:
        self._opened.set()


class Running:
    """A proposer service, its runner, and a channel to it."""

    def __init__(self, runner: ToyRunner, channel: grpc.aio.Channel) -> None:
        self.runner = runner
        self.stub = proposer_pb2_grpc.ProposerServiceStub(channel)
        self.health: Any = health_pb2_grpc.HealthStub(channel)

    async def info(self) -> proposer_pb2.GetProposerInfoResponse:
        request = proposer_pb2.GetProposerInfoRequest()
        return await self.stub.GetProposerInfo(request, timeout=_DEADLINE_S)

    async def info_where(
        self, condition: Callable[[proposer_pb2.GetProposerInfoResponse], bool]
    ) -> proposer_pb2.GetProposerInfoResponse:
        """Asks until the condition holds."""
        async with asyncio.timeout(_DEADLINE_S):
            while not condition(info := await self.info()):
                pass
            return info


class Client:
    """A verifier's end of one `Propose` stream."""

    def __init__(self, running: Running, verifier_id: str) -> None:
        self.verifier_id = verifier_id
        self.call = running.stub.Propose()

    async def send(self, message: Hello | ProposeStep) -> None:
        await self.call.write(wire.propose_request_to_pb(message))

    async def receive(self) -> HelloAck | tuple[list[AnyBlock], int]:
        """Returns the next message, or raises the error that ended the stream."""
        try:
            async with asyncio.timeout(_DEADLINE_S):
                message: Any = await self.call.read()
                if message is grpc.aio.EOF:
                    raise EOFError(await self.call.code())
        except grpc.aio.AioRpcError as error:
            raise status_to_error(error) from None
        return wire.propose_response_from_pb(message)

    async def connect(self, **overrides: Any) -> HelloAck:
        await self.send(hello(self.verifier_id, **overrides))
        ack = await self.receive()
        assert isinstance(ack, HelloAck)
        return ack

    async def blocks(self) -> list[DraftBlock]:
        message = await self.receive()
        assert not isinstance(message, HelloAck)
        return [block for block in message[0] if isinstance(block, DraftBlock)]

    async def blocks_ahead(self) -> list[BlocksAhead]:
        """Returns those of the next message, which has no others."""
        message = await self.receive()
        assert not isinstance(message, HelloAck)
        found = [block for block in message[0] if isinstance(block, BlocksAhead)]
        assert len(found) == len(message[0])
        return found

    async def ask(self, *commits: Commit, open: Sequence[OpenSession] = ()) -> list[DraftBlock]:
        await self.send(ProposeStep(open=open, commit=commits))
        return await self.blocks()


def hello(
    verifier_id: str,
    fingerprint: str = "toy",
    max_draft_tokens: int = 8,
    version: int = 1,
    takes_blocks_ahead: bool = False,
) -> Hello:
    target = ModelDescription("target", "T", 50, fingerprint, 4096, "float32", "cpu")
    parts = verifier_id, target, max_draft_tokens, version
    return Hello(*parts, takes_blocks_ahead=takes_blocks_ahead)


@contextlib.asynccontextmanager
async def serve(
    runner: ToyRunner | None = None,
    metrics: ProposerMetrics | None = None,
    max_draft_tokens: int = 4,
    max_sessions: int = 8,
    run_ahead: RunAhead | None = None,
) -> AsyncIterator[tuple[Running, ServiceServer, ProposerService]]:
    runner = runner or ToyRunner()
    server = ServiceServer(SERVICE_NAME, ["127.0.0.1:0"])
    drafter = DraftModelDrafter(runner, 2048, run_ahead=run_ahead)
    service = ProposerService(ProposerCore(drafter, max_draft_tokens, max_sessions), metrics)
    service.register(server.grpc_server)
    service.start()
    await server.start()
    try:
        async with open_channel(server.addresses[0]) as channel:
            yield Running(runner, channel), server, service
    finally:
        service.drain()
        await server.stop(grace_s=_DEADLINE_S)
        await service.stop()


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    async with serve() as (running, _, _):
        yield running


# Greetings.


async def test_a_greeting_is_answered(running: Running) -> None:
    ack = await Client(running, "v").connect()

    assert (ack.method, ack.max_draft_tokens, ack.max_sessions) == ("draft_model", 4, 8)
    assert ack.draft_model == running.runner.description
    assert ack.proposer_id == (await running.info()).proposer_id


async def test_mismatches_are_refused_with_a_line_each(running: Running) -> None:
    client = Client(running, "v")

    with pytest.raises(IncompatibleModels) as caught:
        await client.connect(fingerprint="foreign", version=7)

    assert [line.split(":")[0] for line in caught.value.mismatches] == [
        "protocol_version",
        "vocabulary",
    ]


@pytest.mark.parametrize(
    "request_pb",
    [
        proposer_pb2.ProposeRequest(),
        proposer_pb2.ProposeRequest(step=proposer_pb2.ProposeStep()),
        proposer_pb2.ProposeRequest(hello=proposer_pb2.Hello()),
    ],
    ids=["nothing", "step", "hello without an id"],
)
async def test_a_stream_must_begin_with_a_greeting(
    running: Running, request_pb: proposer_pb2.ProposeRequest
) -> None:
    client = Client(running, "v")
    await client.call.write(request_pb)

    with pytest.raises(InvalidRequest):
        await client.receive()


async def test_a_stream_that_ends_before_its_greeting_is_refused(running: Running) -> None:
    client = Client(running, "v")
    await client.call.done_writing()

    with pytest.raises(InvalidRequest):
        await client.receive()


async def test_connecting_again_ends_the_former_stream_and_keeps_the_new_one(
    running: Running,
) -> None:
    former, later = Client(running, "v"), Client(running, "v")
    await former.connect()
    await former.ask(Commit(1, 2, [], 4), open=[OpenSession(1, [1, 2])])

    await later.connect()
    with pytest.raises(Cancelled, match="connected again"):
        await former.receive()
    [block] = await later.ask(Commit(1, 2, [], 4), open=[OpenSession(1, [1, 2])])
    [again] = await later.ask(Commit(1, 2, [], 4))

    assert list(block.token_ids) == list(again.token_ids) == toy_continuation([1, 2], 4)


# Drafting.


async def test_sessions_of_two_verifiers_are_drafted_in_one_batch() -> None:
    prompts = {number: [number, number + 1] for number in range(1, 4)}
    async with serve() as (running, _, service):
        gate = Gate(running.runner)
        first, v, w = (Client(running, name) for name in ("first", "v", "w"))
        for client in (first, v, w):
            await client.connect()
        await first.send(ProposeStep([OpenSession(1, [9, 9])], [Commit(1, 2, [], 1)]))
        await gate.reached()

        for client in (v, w):
            await client.send(
                ProposeStep(
                    [OpenSession(number, prompt) for number, prompt in prompts.items()],
                    [Commit(number, 2, [], 4) for number in prompts],
                )
            )
        await running.info_where(lambda info: service.engine.inbox_length == 2)
        gate.open()
        answers = [await v.blocks(), await w.blocks()]

    assert running.runner.passes == [[2], [2] * 6, [1] * 6, [1] * 6, [1] * 6]
    for blocks in answers:
        assert {block.session_id: list(block.token_ids) for block in blocks} == {
            number: toy_continuation(prompt, 4) for number, prompt in prompts.items()
        }


async def test_the_cache_is_kept_between_rounds(running: Running) -> None:
    client = Client(running, "v")
    await client.connect()
    [first] = await client.ask(Commit(1, 3, [], 4), open=[OpenSession(1, [1, 2, 3])])
    [accepted] = await client.ask(Commit(1, 3, [*first.token_ids, 5], 4))
    await client.ask(Commit(1, 8, [accepted.token_ids[0], 49], 4))

    assert [rows for passed in running.runner.passes for rows in passed] == [
        *(3, 1, 1, 1),  # the prompt
        *(2, 1, 1, 1),  # everything was accepted: the last draft token and the bonus token
        *(1, 1, 1, 1),  # the second was rejected: the recovered token
    ]


async def test_refusals_do_not_wait_for_a_batch(running: Running) -> None:
    gate = Gate(running.runner)
    client, other = Client(running, "v"), Client(running, "w")
    await client.connect()
    await other.connect()

    await client.send(
        ProposeStep([OpenSession(1, [1, 2])], [Commit(1, 2, [], 4), Commit(2, 2, [], 4)])
    )
    [refusal] = await client.blocks()
    gate.open()
    [block] = await client.blocks()

    assert (refusal.session_id, refusal.reason) == (2, UndraftedReason.RESYNC)
    assert (block.session_id, block.reason) == (1, None)


async def test_a_prompt_beyond_grpcs_default_limit_is_taken() -> None:
    """Bug R6."""
    prompt = [1] * 1_200_000
    async with serve() as (running, _, _):
        client = Client(running, "v")
        await client.connect()

        [block] = await client.ask(Commit(1, len(prompt), [], 4), open=[OpenSession(1, prompt)])

    assert block.reason is UndraftedReason.CONTEXT_LIMIT


async def test_slots_and_memory_are_refused_by_reason() -> None:
    async with serve(ToyRunner(kv_cache_tokens=32), max_sessions=2) as (running, _, _):
        client = Client(running, "v")
        await client.connect()
        opened = [OpenSession(1, [1] * 20), OpenSession(2, [2] * 20), OpenSession(3, [3] * 20)]

        blocks = await client.ask(*(Commit(i, 20, [], 4) for i in (1, 2, 3)), open=opened)
        while len(blocks) < 3:
            blocks += await client.blocks()

    assert {block.session_id: block.reason for block in blocks} == {
        1: None,
        2: UndraftedReason.NO_MEMORY,
        3: UndraftedReason.NO_SLOT,
    }


# Ends.


async def test_a_cancelled_stream_frees_its_sessions_and_no_others(running: Running) -> None:
    """Bugs B1 and B4."""
    v, w = Client(running, "v"), Client(running, "w")
    for client in (v, w):
        await client.connect()
        await client.ask(Commit(1, 2, [], 4), open=[OpenSession(1, [1, 2])])

    v.call.cancel()
    info = await running.info_where(lambda info: info.session_count == 1)
    [block] = await w.ask(Commit(1, 2, [7], 4))

    assert info.kv_used_tokens == running.runner.kv_cache.block_size
    assert list(block.token_ids) == toy_continuation([1, 2, 7], 4)


async def test_closing_the_requests_ends_the_stream(running: Running) -> None:
    client = Client(running, "v")
    await client.connect()

    await client.call.done_writing()

    with pytest.raises(EOFError, match="OK"):
        await client.receive()


@pytest.mark.parametrize(
    ("request_pb", "field"),
    [
        (wire.propose_request_to_pb(hello("v")), "message"),
        (proposer_pb2.ProposeRequest(), "message"),
        (
            wire.propose_request_to_pb(ProposeStep([OpenSession(1, [])])),
            r"step\.open\[0\]\.token_ids\.count",
        ),
        (
            wire.propose_request_to_pb(ProposeStep(commit=[Commit(1, 2, [], -4)])),
            r"step\.commit\[0\]\.max_draft_tokens",
        ),
    ],
    ids=["second hello", "nothing", "no tokens", "negative"],
)
async def test_a_malformed_step_ends_its_own_stream_only(
    running: Running, request_pb: proposer_pb2.ProposeRequest, field: str
) -> None:
    bad, good = Client(running, "bad"), Client(running, "good")
    await bad.connect()
    await good.connect()

    await bad.call.write(request_pb)
    with pytest.raises(InvalidRequest, match=field):
        await bad.receive()
    [block] = await good.ask(Commit(1, 2, [], 4), open=[OpenSession(1, [1, 2])])

    assert block.reason is None


async def test_bytes_that_are_no_message_end_their_own_stream_only(running: Running) -> None:
    client = Client(running, "v")
    await client.connect()
    token_ids = proposer_pb2.OpenSession(session_id=1)
    token_ids.token_ids.int32_le, token_ids.token_ids.count = b"\x00" * 7, 2

    step = proposer_pb2.ProposeStep(open=[token_ids])
    await client.call.write(proposer_pb2.ProposeRequest(step=step))

    with pytest.raises(InvalidRequest, match="must match 7 bytes"):
        await client.receive()


async def test_a_verifier_that_does_not_read_is_no_longer_read_from(running: Running) -> None:
    client = Client(running, "v")
    await client.connect()
    await client.ask(Commit(1, 2, [], 4), open=[OpenSession(1, [1, 2])])

    for _ in range(500):
        await client.send(ProposeStep(commit=[Commit(1, 2, [], 4)]))
    blocks: list[DraftBlock] = []
    await client.send(ProposeStep([OpenSession(2, [3, 4])], [Commit(2, 2, [], 4)]))
    while not any(block.session_id == 2 for block in blocks):
        blocks += await client.blocks()

    assert all(list(block.token_ids) for block in blocks)


# Operation.


async def test_health_and_info_answer_while_the_engine_works(running: Running) -> None:
    """Bug R8."""
    gate = Gate(running.runner)
    client = Client(running, "v")
    await client.connect()
    await client.send(ProposeStep([OpenSession(1, [1, 2])], [Commit(1, 2, [], 4)]))
    await gate.reached()

    check = await running.health.Check(
        health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=_DEADLINE_S
    )
    info = await running.info()
    gate.open()

    assert check.status == health_pb2.HealthCheckResponse.SERVING
    assert info.max_num_batched_tokens == 2048
    assert (await client.blocks())[0].reason is None


async def test_draining_ends_streams_with_unavailable_and_refuses_new_ones() -> None:
    async with serve() as (running, _, service):
        client = Client(running, "v")
        await client.connect()

        service.drain()

        for one in (client, Client(running, "w")):
            with pytest.raises(NotReady, match="draining"):
                await one.receive()


async def test_the_engine_drafts_ahead_while_nothing_is_asked_for() -> None:
    runner, ahead = ToyRunner(), RunAhead(is_enabled=True)
    async with serve(runner, run_ahead=ahead) as (running, _, _):
        client = Client(running, "v")
        await client.connect()
        [block] = await client.ask(Commit(1, 2, [], 4), open=[OpenSession(1, [1, 2])])
        async with asyncio.timeout(_DEADLINE_S):
            while ahead.counts.token_count < 5:  # noqa: ASYNC110  no event tells of it
                await asyncio.sleep(0)
        runner.passes.clear()
        committed = [*block.token_ids, toy_continuation([1, 2, *block.token_ids], 1)[0]]
        [block] = await client.ask(Commit(1, 2, committed, 4))

    assert list(block.token_ids) == toy_continuation([1, 2, *committed], 4)
    assert ahead.counts.hit_count == 1


async def test_blocks_go_out_before_they_are_asked_for() -> None:
    """The one for the outcome that comes is taken with the commit, and gone on from at once."""
    runner, metrics = ToyRunner(), ProposerMetrics(0)
    async with serve(runner, metrics, run_ahead=RunAhead(is_enabled=True)) as (running, _, _):
        client = Client(running, "v")
        await client.connect(takes_blocks_ahead=True)
        [block] = await client.ask(Commit(1, 2, [], 4), open=[OpenSession(1, [1, 2])])
        context = [1, 2]
        for _ in range(3):
            [ahead] = await client.blocks_ahead()
            committed = [*block.token_ids, toy_continuation([*context, *block.token_ids], 1)[0]]
            token_ids = ahead.find(4, committed[-1])
            taken = Commit(1, len(context), committed, 0, num_taken=len(token_ids))
            context += committed
            assert list(token_ids) == toy_continuation(context, 4)
            block = block._replace(token_ids=token_ids)
            await client.send(ProposeStep(commit=[taken]))
        await client.blocks_ahead()  # so that the last one has been counted

    assert metrics.draft_token_count == 4 + 3 * 4


async def test_a_session_that_cannot_be_opened_harms_no_other(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = DraftModelDrafter.open

    def open_session(drafter: DraftModelDrafter, session: Session) -> None:
        if session.session_id == 2:
            raise RuntimeError("a bug")
        healthy(drafter, session)

    monkeypatch.setattr(DraftModelDrafter, "open", open_session)
    client = Client(running, "v")
    await client.connect()
    blocks = await client.ask(
        Commit(1, 2, [], 4),
        Commit(2, 2, [], 4),
        open=[OpenSession(1, [1, 2]), OpenSession(2, [1, 2])],
    )
    blocks += await client.blocks()  # refusals do not wait for the batch

    by_id = {block.session_id: block for block in blocks}
    assert list(by_id[1].token_ids) == toy_continuation([1, 2], 4)
    assert by_id[2].reason is UndraftedReason.ERROR


async def test_a_failing_engine_ends_all_streams_and_takes_new_ones(
    running: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(running, "v")
    await client.connect()

    def fail(proposer: ProposerCore) -> bool:
        monkeypatch.undo()
        raise RuntimeError("a bug")

    monkeypatch.setattr(ProposerCore, "has_work", fail)
    await client.send(ProposeStep([OpenSession(1, [1, 2])], [Commit(1, 2, [], 4)]))
    with pytest.raises(SpecgwError, match="INTERNAL"):
        await client.receive()
    again = Client(running, "v")
    await again.connect()
    [block] = await again.ask(Commit(1, 2, [], 4), open=[OpenSession(1, [1, 2])])

    assert block.reason is None
    assert "every verifier must connect again" in caplog.text


async def test_info_and_metrics_count_what_was_done() -> None:
    metrics = ProposerMetrics(4096)
    async with serve(metrics=metrics) as (running, _, _):
        client = Client(running, "v")
        await client.connect()
        await client.ask(Commit(1, 2, [], 4), open=[OpenSession(1, [1, 2])])
        await client.ask(Commit(2, 2, [], 4))
        info = await running.info_where(lambda info: info.resync_count == 1)

        def sample(name: str, **labels: str) -> float | None:
            return metrics.registry.get_sample_value(f"specgw_proposer_{name}", labels)

        assert (info.draft_token_count, info.session_count) == (4, 1)
        assert sample("draft_tokens_total") == 4
        assert sample("resyncs_total") == 1
        assert sample("undrafted_total", reason="resync") == 1
        assert sample("undrafted_total", reason="no_slot") == 0
        assert sample("draft_seconds_count") == 1
        assert (sample("rounds_total"), sample("round_passes_total")) == (1, 4)
        assert sample("sessions") == 1
        assert sample("kv_used_tokens") == 16
        assert sample("kv_capacity_tokens") == 4096
