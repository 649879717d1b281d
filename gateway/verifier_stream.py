"""All of this gateway's requests to one verifier over one `GenerateMany` stream.

A step's outputs come in one message. When the stream breaks, every call on it ends, as if each had
lost a connection of its own; the next request opens another. The caller is `routing.py`.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator

import grpc

from specgw.channel import status_to_error
from specgw.errors import DeadlineExceeded, NotReady, SpecgwError
from specgw.types import GenerateOutput, GenerateRequest
from specgw.v1 import verifier_pb2, verifier_pb2_grpc
from specgw.wire_many import Answer, answers_from_pb, cancel_call_to_pb, start_call_to_pb

_MAX_UNSENT = 4096  # messages that the verifier has not read; two for each request at most

_Requests = asyncio.Queue[verifier_pb2.GenerateManyRequest | None]


class VerifierStream:
    """The calls to one verifier. Opens its stream with the first request after each loss."""

    def __init__(self, stub: "verifier_pb2_grpc.VerifierServiceAsyncStub", address: str) -> None:
        self._stub = stub
        self._address = address
        self._connection: _Connection | None = None

    async def generate(
        self, request: GenerateRequest, deadline: float
    ) -> AsyncGenerator[GenerateOutput, None]:
        """Runs one attempt at a request. Leaving the iteration early cancels the call.

        Raises:
            SpecgwError: as the verifier raised it; `NotReady` if the stream was lost.
        """
        if self._connection is None or self._connection.has_ended:
            self._connection = _Connection(self._stub, self._address)
        connection = self._connection
        call_id, answers = connection.start(request, deadline)
        try:
            while True:
                answer = await answers.get()
                if isinstance(answer, SpecgwError):
                    raise answer
                yield answer
                if answer.finish_reason is not None:
                    return
        finally:
            connection.leave(call_id)

    async def close(self) -> None:
        """Ends the stream and every call on it."""
        if self._connection is not None:
            await self._connection.close()


class _Connection:
    """One stream, from its first request to its loss."""

    def __init__(self, stub: "verifier_pb2_grpc.VerifierServiceAsyncStub", address: str) -> None:
        self.has_ended = False
        self._address = address
        self._calls: dict[int, asyncio.Queue[Answer]] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._call_ids = itertools.count(1)
        self._unsent: _Requests = asyncio.Queue()
        self._stream = stub.GenerateMany(_sent(self._unsent))
        self._reading = asyncio.create_task(self._read())

    def start(
        self, request: GenerateRequest, deadline: float
    ) -> tuple[int, "asyncio.Queue[Answer]"]:
        """Begins a call; returns its number, and where its outputs come.

        Raises:
            InvalidRequest: if the request is too large to be sent.
        """
        call_id, answers = next(self._call_ids), asyncio.Queue[Answer]()
        left_s = max(0.0, deadline - time.monotonic())
        self._send(start_call_to_pb(call_id, request, left_s))
        self._calls[call_id] = answers
        # The verifier has the deadline too, but may be out of reach.
        self._timers[call_id] = asyncio.get_running_loop().call_later(
            left_s, answers.put_nowait, DeadlineExceeded("Deadline Exceeded")
        )
        return call_id, answers

    def leave(self, call_id: int) -> None:
        """Forgets a call, and cancels it unless it has ended."""
        self._timers.pop(call_id).cancel()
        if self._calls.pop(call_id, None) is not None:
            self._send(cancel_call_to_pb(call_id))

    async def close(self) -> None:
        """Ends the stream; every call on it ends with `NotReady`."""
        self._reading.cancel()
        await asyncio.wait([self._reading])

    def _send(self, message: verifier_pb2.GenerateManyRequest) -> None:
        if self._unsent.qsize() < _MAX_UNSENT:
            self._unsent.put_nowait(message)
        else:
            self._reading.cancel()  # the verifier reads nothing any more

    async def _read(self) -> None:
        detail = "ended the stream"
        try:
            async for response in self._stream:
                if response is None:
                    detail = "sent what is not a message"
                    return
                for call_id, answer in answers_from_pb(response):
                    self._take(call_id, answer)
        except grpc.aio.AioRpcError as error:
            detail = str(status_to_error(error))
        except SpecgwError as error:
            detail = f"sent what makes no sense: {error}"
        finally:
            self._lose(detail)

    def _take(self, call_id: int, answer: Answer) -> None:
        if (answers := self._calls.get(call_id)) is None:
            return  # the caller has left
        answers.put_nowait(answer)
        if isinstance(answer, SpecgwError) or answer.finish_reason is not None:
            del self._calls[call_id]

    def _lose(self, detail: str) -> None:
        self.has_ended = True
        self._unsent.put_nowait(None)
        self._stream.cancel()
        for answers in self._calls.values():
            answers.put_nowait(NotReady(f"verifier {self._address}: {detail}"))
        self._calls.clear()


async def _sent(unsent: _Requests) -> AsyncIterator[verifier_pb2.GenerateManyRequest]:
    while (message := await unsent.get()) is not None:
        yield message
