"""The proposer's gRPC edge: moves messages between streams and the engine thread, computes nothing.

Steps and blocks are bounded: a verifier that sends without reading is no longer read from.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from proposer_svc.engine_thread import EngineThread
from proposer_svc.metrics import ProposerMetrics
from proposer_svc.proposer import ProposerCore
from specgw import wire
from specgw.errors import InvalidRequest, NotReady
from specgw.telemetry import tell_simulation
from specgw.types import PROTOCOL_VERSION, AnyBlock, Hello
from specgw.v1 import proposer_pb2, proposer_pb2_grpc

SERVICE_NAME = proposer_pb2.DESCRIPTOR.services_by_name["ProposerService"].full_name

_DRAINING = "the proposer is draining"
_MAX_UNREAD = 64  # steps that the engine has not read, and responses that the verifier has not


class ProposerService(proposer_pb2_grpc.ProposerServiceServicer):
    """Answers `Propose` streams with one core in one engine thread. Built on the event loop."""

    def __init__(self, proposer: ProposerCore, metrics: ProposerMetrics | None = None) -> None:
        self._proposer = proposer
        self._metrics = metrics or ProposerMetrics(proposer.offer.kv_capacity_tokens)
        if proposer.offer.draft_model.is_simulated:
            tell_simulation(self._metrics.registry, "proposer")
        self.engine = EngineThread(proposer, self._metrics)
        self._streams: set[_Stream] = set()
        self._is_draining = False

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server that has not started."""
        proposer_pb2_grpc.add_ProposerServiceServicer_to_server(self, server)

    def start(self) -> None:
        """Starts the engine thread."""
        self.engine.start()

    def drain(self) -> None:
        """Ends every stream: verifiers decode plainly until they find another proposer."""
        self._is_draining = True
        for stream in self._streams:
            stream.end(NotReady(_DRAINING))

    async def stop(self) -> None:
        """Ends the engine thread."""
        await self.engine.stop()

    async def Propose(
        self,
        request_iterator: AsyncIterator[proposer_pb2.ProposeRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[proposer_pb2.ProposeResponse]:
        self._refuse_if_draining()
        hello = await _read_hello(request_iterator)
        self._refuse_if_draining()
        stream = _Stream(hello.verifier_id)
        self._streams.add(stream)
        reading: asyncio.Task[None] | None = None
        try:
            ack = await self.engine.connect(hello, stream)
            yield proposer_pb2.ProposeResponse(hello_ack=wire.hello_ack_to_pb(ack))
            reading = asyncio.create_task(self._read_steps(request_iterator, stream))
            while (response := await stream.next_response()) is not None:
                yield response
        finally:
            self._streams.discard(stream)
            self.engine.disconnect(stream)
            if reading is not None:
                reading.cancel()
                await asyncio.wait([reading])

    async def GetProposerInfo(
        self,
        request: proposer_pb2.GetProposerInfoRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> proposer_pb2.GetProposerInfoResponse:
        offer, load = self._proposer.offer, self.engine.load
        return proposer_pb2.GetProposerInfoResponse(
            protocol_version=PROTOCOL_VERSION,
            proposer_id=offer.proposer_id,
            method=offer.method,
            draft_model=wire.model_description_to_pb(offer.draft_model),
            max_draft_tokens=offer.max_draft_tokens,
            extra_slots_per_session=offer.extra_slots_per_session,
            max_sessions=offer.max_sessions,
            session_count=load.session_count,
            kv_capacity_tokens=offer.kv_capacity_tokens,
            kv_used_tokens=load.kv_used_tokens,
            max_num_batched_tokens=offer.max_num_batched_tokens,
            draft_token_count=self._metrics.draft_token_count,
            resync_count=self._metrics.resync_count,
        )

    def _refuse_if_draining(self) -> None:
        if self._is_draining:
            raise NotReady(_DRAINING)

    async def _read_steps(
        self, requests: AsyncIterator[proposer_pb2.ProposeRequest], stream: "_Stream"
    ) -> None:
        try:
            async for request in requests:
                step = wire.propose_request_from_pb(request)
                if isinstance(step, Hello):
                    raise InvalidRequest("message", "hello", "must be a step after the first")
                await stream.take_room()
                self.engine.submit(stream, step)
        except Exception as error:  # raised where the stream is written, so that it gets a status
            stream.end(error)
        else:
            stream.end(None)


class _Stream:
    """One verifier's steps and responses under way. Implements `BlockStream`."""

    def __init__(self, verifier_id: str) -> None:
        self.verifier_id = verifier_id
        self._responses: asyncio.Queue[proposer_pb2.ProposeResponse | Exception | None]
        self._responses = asyncio.Queue()
        self._num_steps = 0  # on their way through the engine's inbox
        self._room = asyncio.Event()
        self._room.set()

    async def take_room(self) -> None:
        """Waits until one more step may enter the engine's inbox, and counts it."""
        await self._room.wait()
        self._num_steps += 1
        self._update_room()

    def step_applied(self) -> None:
        self._num_steps -= 1
        self._update_room()

    def deliver(self, blocks: Sequence[AnyBlock], queue_depth: int) -> None:
        blocks_pb = wire.draft_blocks_to_pb(blocks, queue_depth)
        self._responses.put_nowait(proposer_pb2.ProposeResponse(blocks=blocks_pb))
        self._update_room()

    def end(self, error: Exception | None) -> None:
        self._responses.put_nowait(error)

    async def next_response(self) -> proposer_pb2.ProposeResponse | None:
        """Returns the next response, or None at the end.

        Raises:
            Exception: the reason why the stream ends.
        """
        response = await self._responses.get()
        self._update_room()
        if isinstance(response, Exception):
            raise response
        return response

    def _update_room(self) -> None:
        if max(self._num_steps, self._responses.qsize()) < _MAX_UNREAD:
            self._room.set()
        else:
            self._room.clear()


async def _read_hello(requests: AsyncIterator[proposer_pb2.ProposeRequest]) -> Hello:
    async for request in requests:
        hello = wire.propose_request_from_pb(request)
        if isinstance(hello, Hello):
            return hello
        break
    raise InvalidRequest("message", "step", "must be hello in the first request")
