"""A client that reads a thousand event streams at little cost: it counts events, parses none.

Plain sockets under one epoll; an HTTP library would be slower than the gateway that it measures.
The kernel says when bytes came, so that what this client takes to read them is not counted as the
gateway's.
"""

import json
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

_EVENT = b"data: {"
_LAST = b"data: [DONE]"
_SO_TIMESTAMPNS = 35  # asks Linux for the time at which it received what is read
_TIMESPEC = struct.Struct("qq")
_CONTROL_BYTES = socket.CMSG_SPACE(_TIMESPEC.size)
_READ_BYTES = 1 << 16


class EventStream:
    """One answer, as it comes.

    Attributes:
        num_events: Events so far.
        head: The beginning of the status line.
    """

    def __init__(self) -> None:
        self.num_events = 0
        self.head = b""
        self._tail = b""
        self._is_done = False

    def feed(self, data: bytes) -> int:
        """Takes what was read; returns how many more events that makes."""
        self.head = (self.head + data)[:12]
        text = self._tail + data  # a mark may lie across two reads
        count = text.count(_EVENT)
        self._is_done = self._is_done or _LAST in text
        end = text.rfind(_EVENT)
        self._tail = text[max(end + len(_EVENT) if end >= 0 else 0, len(text) - len(_LAST) + 1) :]
        self.num_events += count
        return count

    @property
    def is_complete(self) -> bool:
        """Whether the answer was good, to its end."""
        return self._is_done and self.head.endswith(b" 200")


class StreamClient:
    """Many streams of one server. Leaving the block closes those that are still open.

    Args:
        port: Where the server listens, on this machine.
        on_events: Is told of each read: how many events more, and the `time.time()` at which the
            kernel had them.

    Attributes:
        num_started: Answers that have had an event.
        ended: Answers that the server has ended, complete or not.
    """

    def __init__(
        self, port: int, on_events: Callable[[int, float], None] = lambda count, at: None
    ) -> None:
        self._port = port
        self.on_events = on_events
        self._epoll = select.epoll()
        self._open: dict[int, tuple[socket.socket, EventStream]] = {}
        self.num_started = 0
        self.ended: list[EventStream] = []

    def __enter__(self) -> "StreamClient":
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for connection, _ in self._open.values():
            connection.close()
        self._open.clear()
        self._epoll.close()

    @property
    def num_open(self) -> int:
        """Streams that have not ended."""
        return len(self._open)

    def open(self, body: Mapping[str, Any]) -> None:
        """Sends a completion request that streams."""
        connection = socket.create_connection(("127.0.0.1", self._port), timeout=30)
        connection.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        content = json.dumps({**body, "stream": True}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: specgw\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
        )
        connection.sendall(head.encode() + content)
        connection.setblocking(False)
        self._open[connection.fileno()] = connection, EventStream()
        self._epoll.register(connection, select.EPOLLIN)

    def abandon(self) -> None:
        """Goes away from the stream that has been open longest."""
        number = next(iter(self._open))
        self._close(number)

    def read(self, timeout_s: float) -> None:
        """Reads what there is, or what comes first within the time."""
        for number, _ in self._epoll.poll(timeout_s):
            connection, stream = self._open[number]
            try:
                data, control, _, _ = connection.recvmsg(_READ_BYTES, _CONTROL_BYTES)
            except ConnectionError:
                data, control = b"", []
            if not data:
                self._close(number)
                self.ended.append(stream)
            elif count := stream.feed(data):
                self.num_started += stream.num_events == count
                self.on_events(count, _received_at(control))

    def _close(self, number: int) -> None:
        connection, _ = self._open.pop(number)
        self._epoll.unregister(number)
        connection.close()


def _received_at(control: list[tuple[int, int, bytes]]) -> float:
    for _, kind, data in control:
        if kind == _SO_TIMESTAMPNS:
            seconds, nanoseconds = _TIMESPEC.unpack(data)
            return float(seconds + nanoseconds / 1e9)
    return time.time()
