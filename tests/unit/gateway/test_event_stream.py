import asyncio
from typing import Any

from gateway.event_stream import EventSender


async def test_an_error_is_not_forced_on_a_client_that_does_not_read() -> None:
    async def send(message: Any) -> None:
        await asyncio.Event().wait()

    async with asyncio.timeout(5):
        await EventSender(send, []).fail(b'{"error":"late"}', timeout_s=0.01)


async def test_an_error_is_the_last_event() -> None:
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    await EventSender(send, []).fail(b'{"error":"late"}')

    assert [message.get("body") for message in messages] == [
        None,
        b'data: {"error":"late"}\n\n',
        b"data: [DONE]\n\n",
    ]
    assert not messages[-1]["more_body"]
