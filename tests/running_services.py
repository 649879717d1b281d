"""Real gRPC services in the test's own process, on ports that the operating system chooses."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from gateway.verifier_stream import VerifierStream
from specgw import wire
from specgw.channel import open_channel
from specgw.config import EngineArgs, parse_config
from specgw.engine.model_runner import ModelRunner
from specgw.errors import InvalidRequest
from specgw.link import ProposerLink
from specgw.server import ServiceServer
from specgw.types import (
    GenerateOutput,
    GenerateRequest,
    Hello,
    SamplingParams,
    SpeculationStats,
)
from specgw.v1 import proposer_pb2, proposer_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from tests.scripted_proposers import ScriptedProposer
from verifier_svc.proposer_link import GrpcProposerLink
from verifier_svc.service import SERVICE_NAME, VerifierService

LOOPBACK = "127.0.0.1:0"


class ScriptedProposerService(proposer_pb2_grpc.ProposerServiceServicer):
    """A scripted proposer behind the real contract."""

    def __init__(self, proposer: ScriptedProposer) -> None:
        self._proposer = proposer

    async def Propose(  # noqa: N802
        self,
        request_iterator: AsyncIterator[proposer_pb2.ProposeRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[proposer_pb2.ProposeResponse]:
        verifier_id = ""
        try:
            async for request in request_iterator:
                message = wire.propose_request_from_pb(request)
                if isinstance(message, Hello):
                    verifier_id = message.verifier_id
                    ack = wire.hello_ack_to_pb(self._proposer.connect(message))
                    yield proposer_pb2.ProposeResponse(hello_ack=ack)
                    continue
                blocks = list(self._proposer.apply(verifier_id, message))
                while self._proposer.has_work():
                    blocks += [block for _, block in self._proposer.step()]
                if blocks:
                    yield proposer_pb2.ProposeResponse(blocks=wire.draft_blocks_to_pb(blocks, 0))
        finally:
            self._proposer.disconnect(verifier_id)

    async def GetProposerInfo(  # noqa: N802
        self,
        request: proposer_pb2.GetProposerInfoRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> proposer_pb2.GetProposerInfoResponse:
        raise InvalidRequest("request", request, "is not scripted")


@asynccontextmanager
async def scripted_proposer(
    proposer: ScriptedProposer, listen: str = LOOPBACK
) -> AsyncIterator[str]:
    """Serves a scripted proposer; yields its address."""
    server = ServiceServer("specgw.v1.ProposerService", [listen])
    proposer_pb2_grpc.add_ProposerServiceServicer_to_server(
        ScriptedProposerService(proposer), server.grpc_server
    )
    await server.start()
    try:
        yield server.addresses[0]
    finally:
        await server.stop(0)


@dataclass
class RunningVerifier:
    """A verifier service and a client of it."""

    service: VerifierService
    stub: "verifier_pb2_grpc.VerifierServiceAsyncStub"
    stream: VerifierStream
    address: str

    async def info(self) -> verifier_pb2.GetVerifierInfoResponse:
        """Returns what the verifier says of itself."""
        return await self.stub.GetVerifierInfo(verifier_pb2.GetVerifierInfoRequest(), timeout=10)

    async def connected(self, count: int = 1) -> None:
        """Returns when `count` proposers can be asked."""
        async with asyncio.timeout(10):
            while sum(p.connected for p in (await self.info()).proposers) < count:
                pass

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        max_draft_tokens: int | None = None,
    ) -> list[GenerateOutput]:
        """Returns all outputs of one request."""
        request = GenerateRequest("test", tuple(prompt), params, max_draft_tokens=max_draft_tokens)
        return [one async for one in self.stream.generate(request, time.monotonic() + 60)]


def verifier_args(
    proposers: Sequence[str] = (),
    num_draft_tokens: int = 4,
    draft_model: str = "scripted",
    parallel_drafting: bool = False,
    **verifier: Any,
) -> EngineArgs:
    """Returns a configuration that waits for every block, unless told otherwise."""
    return parse_config({
        "model": "scripted",
        "speculative_config": {
            "model": draft_model,
            "num_speculative_tokens": num_draft_tokens,
            "parallel_drafting": parallel_drafting,
        },
        "specgw": {
            "verifier": {
                "proposers": tuple(proposers),
                "wait_for_slow_drafts": True,
                "draft_timeout_s": 10.0,
                **verifier,
            }
        },
    })  # fmt: skip


@asynccontextmanager
async def running_verifier(
    runner: ModelRunner, args: EngineArgs, links: Sequence[ProposerLink] | None = None
) -> AsyncIterator[RunningVerifier]:
    """Serves a verifier; by default its links are those of the configuration."""
    server = ServiceServer(SERVICE_NAME, [LOOPBACK])
    if links is None:
        links = [GrpcProposerLink(address) for address in args.specgw.verifier.proposers]
    service = VerifierService(runner, links, args)
    service.register(server.grpc_server)
    service.start()
    await server.start()
    try:
        async with open_channel(server.addresses[0]) as channel:
            stub = verifier_pb2_grpc.VerifierServiceStub(channel)
            address = server.addresses[0]
            stream = VerifierStream(stub, address)
            try:
                yield RunningVerifier(service, stub, stream, address)
            finally:
                await stream.close()
    finally:
        await server.stop(0)
        await service.stop()


def token_ids(outputs: Sequence[GenerateOutput]) -> list[int]:
    """Joins the tokens of a request's outputs."""
    return [token_id for output in outputs for token_id in output.token_ids]


def speculation(outputs: Sequence[GenerateOutput]) -> SpeculationStats:
    """Adds up what became of a request's drafts."""
    stats = SpeculationStats()
    for output in outputs:
        stats.count(output.round)
    return stats
