"""The link to a proposer over gRPC: one bidirectional stream that reopens itself when it breaks.

Lives on the event loop; `send` may be called from the engine thread. A step that cannot be
delivered is lost with its stream, after which the listener hears `link_down`.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence

import grpc

from specgw import wire
from specgw.channel import open_channel, status_to_error
from specgw.config import TlsSettings
from specgw.errors import IncompatibleModels, SpecgwError
from specgw.handshake import greeting_mismatches
from specgw.link import LinkListener
from specgw.types import AnyBlock, Hello, HelloAck, ProposeStep
from specgw.v1 import proposer_pb2, proposer_pb2_grpc

logger = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 10.0
_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
_MAX_UNREAD_STEPS = 256
_MAX_BLOCKS = 4096  # in one message; far more than sessions


class GrpcProposerLink:
    """One verifier's stream to one proposer."""

    def __init__(self, address: str, tls: TlsSettings | None = None) -> None:
        self.address = address
        self._tls = tls
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._stream: _Stream | None = None

    def start(self, hello: Hello, listener: LinkListener) -> None:
        """Begins to connect. Must be called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run(hello, listener))

    def send(self, step: ProposeStep, ack: HelloAck) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._put, step, ack)

    def stop(self) -> None:
        """Ends the link. Must be called on the event loop; `wait_stopped` says when it is over."""
        if self._task is not None:
            self._task.cancel()

    async def wait_stopped(self) -> None:
        """Returns when a stopped link has let go of its channel."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def _put(self, step: ProposeStep, ack: HelloAck) -> None:
        if self._stream is not None and self._stream.ack is ack:
            self._stream.put(step)

    async def _run(self, hello: Hello, listener: LinkListener) -> None:
        backoff_s = _MIN_BACKOFF_S
        loop = asyncio.get_running_loop()
        async with open_channel(self.address, self._tls) as channel:
            stub = proposer_pb2_grpc.ProposerServiceStub(channel)
            while True:
                began = loop.time()
                try:
                    detail = await self._connect(stub, hello, listener)
                except Exception as error:
                    logger.exception("link failed", extra={"address": self.address})
                    detail = f"the link failed: {error}"
                finally:
                    self._stream = None
                listener.link_down(self, detail)
                if loop.time() - began > _MAX_BACKOFF_S:
                    backoff_s = _MIN_BACKOFF_S
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _connect(
        self,
        stub: "proposer_pb2_grpc.ProposerServiceAsyncStub",
        hello: Hello,
        listener: LinkListener,
    ) -> str:
        """Keeps one stream going for as long as it lives; returns why it ended."""
        stream = _Stream(stub, hello)
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                ack = await stream.greet()
            if mismatches := greeting_mismatches(hello, ack):
                raise IncompatibleModels(mismatches)
            self._stream = stream
            listener.link_up(self, ack)
            async for blocks in stream.blocks():
                listener.blocks_arrived(self, blocks)
        except grpc.aio.AioRpcError as error:
            return str(status_to_error(error))
        except SpecgwError as error:
            return str(error)
        except TimeoutError:
            return f"the proposer did not answer the greeting within {_HELLO_TIMEOUT_S:g} s"
        except asyncio.CancelledError:
            if stream.is_stuck:
                return f"the proposer left {_MAX_UNREAD_STEPS} steps unread"
            raise
        finally:
            stream.end()
        return "the proposer ended the stream"


class _Stream:
    """One `Propose` call: what goes out waits in a bounded queue, what comes in is checked."""

    def __init__(self, stub: "proposer_pb2_grpc.ProposerServiceAsyncStub", hello: Hello) -> None:
        self.ack: HelloAck | None = None
        self.is_stuck = False
        self._outbox: asyncio.Queue[ProposeStep | None] = asyncio.Queue()
        self._call = stub.Propose(_requests(hello, self._outbox))
        self._responses = aiter(self._call)

    async def greet(self) -> HelloAck:
        """Returns the proposer's answer to the greeting.

        Raises:
            SpecgwError: if it is none that can be worked with.
        """
        response = await anext(self._responses, None)
        answer = _parse(response)
        if not isinstance(answer, HelloAck):
            raise SpecgwError("the proposer sent blocks before it answered the greeting")
        self.ack = answer
        return answer

    async def blocks(self) -> AsyncIterator[Sequence[AnyBlock]]:
        """Yields what is drafted until the stream ends."""
        async for response in self._responses:
            blocks = _parse(response)
            if isinstance(blocks, HelloAck):
                raise SpecgwError("the proposer answered the greeting twice")
            yield blocks

    def put(self, step: ProposeStep) -> None:
        """Sends a step. A proposer that reads none of them any more loses the stream."""
        if self._outbox.qsize() < _MAX_UNREAD_STEPS:
            self._outbox.put_nowait(step)
        elif not self.is_stuck:
            self.is_stuck = True
            self._call.cancel()

    def end(self) -> None:
        """Ends the call, if it has not ended, and what feeds it."""
        self._outbox.put_nowait(None)
        self._call.cancel()


def _parse(response: proposer_pb2.ProposeResponse | None) -> HelloAck | Sequence[AnyBlock]:
    """Unpacks a response. gRPC gives none for bytes that are no message."""
    if response is None:
        raise SpecgwError("the proposer sent a message that cannot be read")
    num_blocks = len(response.blocks.blocks) + len(response.blocks.ahead)
    if num_blocks > _MAX_BLOCKS:
        raise SpecgwError(f"the proposer sent {num_blocks} blocks at once")
    answer = wire.propose_response_from_pb(response)
    return answer if isinstance(answer, HelloAck) else answer[0]


async def _requests(
    hello: Hello, outbox: asyncio.Queue[ProposeStep | None]
) -> AsyncIterator[proposer_pb2.ProposeRequest]:
    yield wire.propose_request_to_pb(hello)
    while (step := await outbox.get()) is not None:
        yield wire.propose_request_to_pb(step)
