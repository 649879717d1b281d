"""The link to a proposer over gRPC: one bidirectional stream that reopens itself when it breaks.

Lives on the event loop; `send` may be called from the engine thread. A step that cannot be
delivered is lost with its stream, after which the listener hears `link_down`.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import grpc

from specgw import wire
from specgw.channel import open_channel, status_to_error
from specgw.config import TlsSettings
from specgw.errors import SpecgwError
from specgw.handshake import greeting_mismatches
from specgw.link import LinkListener
from specgw.types import Hello, HelloAck, ProposeStep
from specgw.v1 import proposer_pb2, proposer_pb2_grpc

_HELLO_TIMEOUT_S = 10.0
_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0


class GrpcProposerLink:
    """One verifier's stream to one proposer."""

    def __init__(self, address: str, tls: TlsSettings | None = None) -> None:
        self.address = address
        self._tls = tls
        self._outbox: asyncio.Queue[ProposeStep] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, hello: Hello, listener: LinkListener) -> None:
        """Begins to connect. Must be called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run(hello, listener))

    def send(self, step: ProposeStep) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._put, step)

    def stop(self) -> None:
        """Ends the link. Must be called on the event loop; `wait_stopped` says when it is over."""
        if self._task is not None:
            self._task.cancel()

    async def wait_stopped(self) -> None:
        """Returns when a stopped link has let go of its channel."""
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def _put(self, step: ProposeStep) -> None:
        if self._outbox is not None:
            self._outbox.put_nowait(step)

    async def _run(self, hello: Hello, listener: LinkListener) -> None:
        backoff_s = _MIN_BACKOFF_S
        async with open_channel(self.address, self._tls) as channel:
            stub = proposer_pb2_grpc.ProposerServiceStub(channel)
            while True:
                began = asyncio.get_running_loop().time()
                detail = await self._serve_stream(stub, hello, listener)
                listener.link_down(self, detail)
                if asyncio.get_running_loop().time() - began > _MAX_BACKOFF_S:
                    backoff_s = _MIN_BACKOFF_S
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _serve_stream(
        self,
        stub: "proposer_pb2_grpc.ProposerServiceAsyncStub",
        hello: Hello,
        listener: LinkListener,
    ) -> str:
        """Keeps one stream going for as long as it lives; returns why it ended."""
        outbox: asyncio.Queue[ProposeStep] = asyncio.Queue()
        call = stub.Propose(_requests(hello, outbox))
        responses = aiter(call)
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                ack = wire.propose_response_from_pb(await anext(responses))
            if not isinstance(ack, HelloAck):
                return "the proposer did not answer the greeting"
            if mismatches := greeting_mismatches(hello, ack):
                return "\n".join(mismatches)
            self._outbox = outbox
            listener.link_up(self, ack)
            async for response in responses:
                blocks = wire.propose_response_from_pb(response)
                if not isinstance(blocks, HelloAck):
                    listener.blocks_arrived(self, blocks[0])
        except grpc.aio.AioRpcError as error:
            return str(status_to_error(error))
        except SpecgwError as error:
            return f"the proposer sent a malformed message: {error}"
        except TimeoutError:
            return f"the proposer did not answer the greeting within {_HELLO_TIMEOUT_S:g} s"
        except StopAsyncIteration:
            return "the proposer ended the stream before the greeting"
        finally:
            self._outbox = None
            call.cancel()
        return "the proposer ended the stream"


async def _requests(
    hello: Hello, outbox: asyncio.Queue[ProposeStep]
) -> AsyncIterator[proposer_pb2.ProposeRequest]:
    yield wire.propose_request_to_pb(hello)
    while True:
        yield wire.propose_request_to_pb(await outbox.get())
