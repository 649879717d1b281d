"""Server-sent events, and the end of work whose client went away. Knows ASGI, nothing of models.

The caller is `openai_api.py`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specgw.errors import Cancelled

T = TypeVar("T")


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work`, and cancels it as soon as the client is gone.

    Raises:
        Cancelled: if the client went away first.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled("the client went away")
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class EventSender:
    """Sends events on one response; begins it with the first, so that errors before are plain."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers
        self.has_begun = False

    async def send(self, *data: bytes) -> None:
        """Sends an event for each piece of data, all at once; nothing if there is none."""
        if data:
            await self._write(b"data: " + b"\n\ndata: ".join(data) + b"\n\n")

    async def end(self) -> None:
        """Sends the mark that OpenAI clients wait for, and ends the response."""
        await self._write(b"data: [DONE]\n\n", more_body=False)

    async def fail(self, data: bytes, timeout_s: float = 1.0) -> None:
        """Sends an error and the end, unless the client has stopped to read."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.send(data)
                await self.end()

    async def _write(self, event: bytes, *, more_body: bool = True) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": self._headers}
            )
        await self._send({"type": "http.response.body", "body": event, "more_body": more_body})


class EventStream(Response):
    """A response whose events `produce` sends, until it is done or the client is gone."""

    media_type = "text/event-stream"

    def __init__(
        self, produce: Callable[[EventSender], Coroutine[Any, Any, None]], headers: dict[str, str]
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", **headers})
        del self.headers["content-length"]
        self._produce = produce

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = EventSender(send, self.raw_headers)
        try:
            await run_until_disconnect(receive, self._produce(sender))
        except Cancelled:
            if sender.has_begun:
                return
            raise


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
