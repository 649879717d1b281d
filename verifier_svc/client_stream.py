"""One client's `GenerateMany` stream: its open calls, and what it has still to be told.

Lives on the event loop. Nobody waits for a client that reads slowly; what it leaves unread is
bounded: beyond that it loses its stream, and its sessions end.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from specgw.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NotReady,
    Overloaded,
    SpecgwError,
)
from specgw.types import GenerateOutput
from specgw.v1 import verifier_pb2
from specgw.wire_many import Answer, answers_to_pb, timeout_from_pb

logger = logging.getLogger(__name__)

_MAX_UNREAD_BYTES = 64 * 2**20

Sink = Callable[[Answer], None]
"""Where the outputs of a session go, on the event loop."""


class Sessions(Protocol):
    """The service, as its streams see it."""

    async def open_session(self, request: verifier_pb2.GenerateRequest, sink: Sink) -> int:
        """Submits a request; returns the session's id.

        Raises:
            SpecgwError: if it can never be served, naming the field.
        """

    def close_session(self, session_id: int) -> None:
        """Frees a session before the next step, if it has not ended."""


@dataclass(slots=True, eq=False)
class _Call:
    call_id: int
    opening: asyncio.Task[None] | None = None
    session_id: int | None = None
    timer: asyncio.TimerHandle | None = None


class ClientStream:
    """Answers the calls of one client.

    Args:
        sessions: Where requests are submitted.
        max_calls: Most calls open at once; more are refused.
        is_draining: Whether new calls are refused from the start.
    """

    def __init__(self, sessions: Sessions, max_calls: int, *, is_draining: bool) -> None:
        self._sessions = sessions
        self._max_calls = max_calls
        self._is_draining = is_draining
        self._calls: dict[int, _Call] = {}
        self._last_call_id = 0
        self._answers: list[tuple[int, Answer]] = []  # since the last message
        # Ends with what ends the stream: an error, or nothing in particular.
        self._outbox: asyncio.Queue[verifier_pb2.GenerateManyResponse | Exception | None]
        self._outbox = asyncio.Queue()
        self._num_unread_bytes = 0

    async def serve(
        self,
        requests: AsyncIterator[verifier_pb2.GenerateManyRequest],
        write: Callable[[verifier_pb2.GenerateManyResponse], Awaitable[None]],
    ) -> None:
        """Reads and writes until either side ends the stream. Every call ends with it.

        Raises:
            Exception: the reason why it ends before its time.
        """
        reading = asyncio.create_task(self._read(requests))
        try:
            while (response := await self._outbox.get()) is not None:
                if isinstance(response, Exception):
                    raise response
                self._num_unread_bytes -= response.ByteSize()
                await write(response)
        finally:
            self.close()
            reading.cancel()
            await asyncio.wait([reading])

    def flush(self) -> None:
        """Sends what the calls were given since the last time."""
        if not self._answers:
            return
        answers, self._answers = self._answers, []
        for response in answers_to_pb(answers):
            self._num_unread_bytes += response.ByteSize()
            self._outbox.put_nowait(response)
        if self._num_unread_bytes > _MAX_UNREAD_BYTES:
            self._give_up()

    def drain(self) -> None:
        """Refuses new calls, and ends the stream when those open have ended."""
        self._is_draining = True
        self._end_if_drained()

    def close(self) -> None:
        """Ends every call."""
        for call_id in list(self._calls):
            self._close(call_id)

    def _give_up(self) -> None:
        """Ends every call. The client learns it when it reads on: gRPC takes no status before."""
        error = Overloaded(f"the client left {self._num_unread_bytes} bytes unread")
        logger.warning("client reads too slowly", extra={"detail": str(error)})
        self._outbox, self._num_unread_bytes = asyncio.Queue(), 0
        self._outbox.put_nowait(error)
        self.close()

    async def _read(self, requests: AsyncIterator[verifier_pb2.GenerateManyRequest]) -> None:
        try:
            async for request in requests:
                if request.HasField("start"):
                    self._start(request.start)
                elif request.HasField("cancel"):
                    self._close(request.cancel.call_id)
                else:
                    raise InvalidRequest("message", None, "must be start or cancel")
        except Exception as error:  # raised where the stream is written, so that it gets a status
            self._outbox.put_nowait(error)
        else:
            self._outbox.put_nowait(None)

    def _start(self, pb: verifier_pb2.StartCall) -> None:
        if pb.call_id <= self._last_call_id:
            raise InvalidRequest("call_id", pb.call_id, f"must be above {self._last_call_id}")
        self._last_call_id = pb.call_id
        call = self._calls[pb.call_id] = _Call(pb.call_id)
        if self._is_draining:
            self._fail(call, NotReady("the verifier is draining"))
        elif len(self._calls) > self._max_calls:
            self._fail(call, Overloaded(f"{self._max_calls} calls are open already"))
        else:
            if (timeout_s := timeout_from_pb(pb)) is not None:
                late = DeadlineExceeded("Deadline Exceeded")
                loop = asyncio.get_running_loop()
                call.timer = loop.call_later(timeout_s, self._fail, call, late)
            call.opening = asyncio.create_task(self._open(call, pb.request))

    async def _open(self, call: _Call, request: verifier_pb2.GenerateRequest) -> None:
        def take(answer: Answer) -> None:
            self._take(call, answer)

        try:
            call.session_id = await self._sessions.open_session(request, take)
        except SpecgwError as error:
            self._fail(call, error)
        except Exception:
            logger.exception("call failed", extra={"request_id": request.request_id})
            self._fail(call, SpecgwError("internal error; see the server's log"))

    def _take(self, call: _Call, answer: Answer) -> None:
        self._answers.append((call.call_id, answer))
        if not isinstance(answer, GenerateOutput) or answer.finish_reason is not None:
            self._close(call.call_id)

    def _fail(self, call: _Call, error: SpecgwError) -> None:
        self._take(call, error)
        self.flush()

    def _close(self, call_id: int) -> None:
        if (call := self._calls.pop(call_id, None)) is None:
            return
        if call.timer is not None:
            call.timer.cancel()
        if call.session_id is not None:
            self._sessions.close_session(call.session_id)
        elif call.opening is not None:
            call.opening.cancel()
        self._end_if_drained()

    def _end_if_drained(self) -> None:
        if self._is_draining and not self._calls:
            self.flush()
            self._outbox.put_nowait(None)
