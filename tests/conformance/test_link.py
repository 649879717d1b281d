"""What every link promises, held against all implementations with the same scripted proposer."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from specgw import wire
from specgw.errors import IncompatibleModels
from specgw.link import InProcessLink, ProposerLink
from specgw.server import ServiceServer
from specgw.types import (
    AnyBlock,
    BlocksAhead,
    Commit,
    DraftBlock,
    Hello,
    HelloAck,
    OpenSession,
    ProposeStep,
    UndraftedReason,
)
from specgw.v1 import proposer_pb2
from tests.running_services import LOOPBACK, scripted_proposer
from tests.scripted_proposers import SCRIPTED_MODEL, FlakyProposer, ScriptedProposer, script
from verifier_svc.delayed_link import DelayedLink
from verifier_svc.proposer_link import GrpcProposerLink

HELLO = Hello("verifier-1", SCRIPTED_MODEL, max_draft_tokens=4)
OPEN = OpenSession(1, (5, 6, 7))


class Listener:
    """Collects what a link reports, in order."""

    def __init__(self) -> None:
        self._reports: asyncio.Queue[HelloAck | str | Sequence[AnyBlock]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def link_up(self, link: ProposerLink, ack: HelloAck) -> None:
        self._put(ack)

    def link_down(self, link: ProposerLink, detail: str) -> None:
        self._put(detail)

    def blocks_arrived(self, link: ProposerLink, blocks: Sequence[AnyBlock]) -> None:
        self._put(blocks)

    def _put(self, report: HelloAck | str | Sequence[AnyBlock]) -> None:
        self._loop.call_soon_threadsafe(self._reports.put_nowait, report)

    async def next(self) -> HelloAck | str | Sequence[AnyBlock]:
        return await asyncio.wait_for(self._reports.get(), 10)

    async def up(self) -> HelloAck:
        report = await self.next()
        assert isinstance(report, HelloAck)
        return report

    async def down(self) -> str:
        report = await self.next()
        assert isinstance(report, str)
        return report

    async def blocks(self) -> list[DraftBlock]:
        report = await self.next()
        assert not isinstance(report, HelloAck | str)
        assert not any(isinstance(block, BlocksAhead) for block in report)
        return [block for block in report if isinstance(block, DraftBlock)]

    @property
    def is_silent(self) -> bool:
        return self._reports.empty()


class RefusingProposer(ScriptedProposer):
    """Greets nobody."""

    def connect(self, hello: Hello) -> HelloAck:
        raise IncompatibleModels(["vocabulary: differs", "protocol_version: differs"])


@asynccontextmanager
async def linked(kind: str, proposer: ScriptedProposer) -> AsyncIterator[ProposerLink]:
    if kind != "grpc":
        link: ProposerLink = InProcessLink(proposer)
        if kind == "delayed":
            link = DelayedLink(link, delay_s=0.002)
        yield link
        link.stop()
        return
    async with scripted_proposer(proposer) as address:
        link = GrpcProposerLink(address)
        yield link
        link.stop()
        await link.wait_stopped()


ALL = pytest.mark.parametrize("kind", ["inproc", "grpc", "delayed"])


@ALL
async def test_blocks_come_back_for_what_was_committed(kind: str) -> None:
    async with linked(kind, ScriptedProposer(script(8, 9))) as link:
        listener = Listener()
        link.start(HELLO, listener)
        ack = await listener.up()

        link.send(ProposeStep(open=[OPEN], commit=[Commit(1, 3, (7,), 4)]), ack)

        [block] = await listener.blocks()
        assert (block.base_length, list(block.token_ids)) == (4, [8, 9])


@ALL
async def test_an_unknown_session_is_answered_with_resync(kind: str) -> None:
    async with linked(kind, ScriptedProposer(script(8))) as link:
        listener = Listener()
        link.start(HELLO, listener)
        ack = await listener.up()

        link.send(ProposeStep(commit=[Commit(1, 3, (7,), 4)]), ack)

        [block] = await listener.blocks()
        assert (block.base_length, block.reason) == (4, UndraftedReason.RESYNC)


@ALL
async def test_a_failing_proposer_takes_the_link_down_and_it_comes_up_again(kind: str) -> None:
    async with linked(kind, FlakyProposer(script(8), every=2)) as link:
        listener = Listener()
        link.start(HELLO, listener)
        first = await listener.up()
        link.send(ProposeStep(open=[OPEN]), first)
        link.send(ProposeStep(commit=[Commit(1, 3, (7,), 4)]), first)
        assert "fails by script" in await listener.down()
        second = await listener.up()

        link.send(ProposeStep(open=[OPEN], commit=[Commit(1, 3, (), 4)]), second)

        assert [block.base_length for block in await listener.blocks()] == [3]


@ALL
async def test_a_step_of_an_ended_connection_does_not_reach_the_next(kind: str) -> None:
    proposer = FlakyProposer(script(8), every=2)
    async with linked(kind, proposer) as link:
        listener = Listener()
        link.start(HELLO, listener)
        first = await listener.up()
        link.send(ProposeStep(close=[9]), first)
        link.send(ProposeStep(close=[9]), first)
        await listener.down()
        second = await listener.up()

        link.send(ProposeStep(open=[OPEN]), first)
        link.send(ProposeStep(commit=[Commit(1, 3, (), 4)]), second)

        [block] = await listener.blocks()
        assert block.reason is UndraftedReason.RESYNC
        assert proposer.num_opened == 0


@ALL
async def test_a_refused_greeting_says_why_in_lines(kind: str) -> None:
    async with linked(kind, RefusingProposer(script())) as link:
        listener = Listener()
        link.start(HELLO, listener)

        assert await listener.down() == "vocabulary: differs\nprotocol_version: differs"


@ALL
async def test_a_stopped_link_reports_nothing_and_frees_its_sessions(kind: str) -> None:
    proposer = ScriptedProposer(script(8))
    async with linked(kind, proposer) as link:
        listener = Listener()
        link.start(HELLO, listener)
        ack = await listener.up()
        link.send(ProposeStep(open=[OPEN], commit=[Commit(1, 3, (), 4)]), ack)
        await listener.blocks()

        link.stop()
        await link.wait_stopped()
        link.send(ProposeStep(commit=[Commit(1, 3, (), 4)]), ack)

    assert listener.is_silent
    assert proposer.contexts == {}


@pytest.mark.parametrize(
    ("ack", "rest", "detail"),
    [
        ({"max_draft_tokens": 0}, b"", "max_draft_tokens: must be at least 1, got 0"),
        ({"max_draft_tokens": -1}, b"", "must be at least 1, got -1"),
        ({"protocol_version": 2}, b"", "speaks 1, the proposer 2"),
        ({}, b"\xff\xff\xff", "cannot be read"),
    ],
)
async def test_a_proposer_that_talks_nonsense_is_left_and_tried_again(
    ack: dict[str, Any], rest: bytes, detail: str
) -> None:
    good = wire.hello_ack_to_pb(ScriptedProposer(script()).connect(HELLO))
    bad = proposer_pb2.HelloAck()
    bad.CopyFrom(good)
    for name, value in ack.items():
        setattr(bad, name, value)
    greeted: list[bytes] = []

    async def propose(request_iterator: Any, context: Any) -> AsyncIterator[bytes]:
        async for request in request_iterator:
            greeted.append(request)
            chosen = bad if len(greeted) == 1 else good
            yield proposer_pb2.ProposeResponse(hello_ack=chosen).SerializeToString()
            if rest and len(greeted) == 1:
                yield rest

    server = ServiceServer("specgw.v1.ProposerService", [LOOPBACK])
    handler = grpc.method_handlers_generic_handler(
        "specgw.v1.ProposerService", {"Propose": grpc.stream_stream_rpc_method_handler(propose)}
    )
    server.grpc_server.add_generic_rpc_handlers((handler,))
    await server.start()
    link = GrpcProposerLink(server.addresses[0])
    listener = Listener()
    link.start(HELLO, listener)
    try:
        if not ack:
            await listener.up()
        assert detail in await listener.down()
        await listener.up()
    finally:
        link.stop()
        await link.wait_stopped()
        await server.stop(0)
