import asyncio
from contextlib import AsyncExitStack

import pytest

from gateway.admission import Admission
from specgw.errors import Overloaded


async def hold(admission: Admission, entered: asyncio.Event, leave: asyncio.Event) -> None:
    async with admission.slot():
        entered.set()
        await leave.wait()


async def test_requests_get_slots_in_the_order_they_came() -> None:
    admission = Admission(1, 3, 5)
    order: list[int] = []

    async def one(number: int) -> None:
        async with admission.slot():
            order.append(number)
            await asyncio.sleep(0)

    async with asyncio.timeout(5):
        await asyncio.gather(*(one(number) for number in range(4)))

    assert order == [0, 1, 2, 3]
    assert (admission.running_count, admission.waiting_count) == (0, 0)


async def test_a_full_queue_refuses_with_numbers() -> None:
    admission = Admission(2, 0, 5)

    async with AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(admission.slot())
        with pytest.raises(Overloaded, match="2 requests are running"):
            await stack.enter_async_context(admission.slot())

    assert admission.running_count == 0


async def test_a_wait_that_takes_too_long_ends() -> None:
    admission = Admission(1, 1, 0.01)

    async with admission.slot():
        with pytest.raises(Overloaded, match="no slot became free in"):
            async with admission.slot():
                pass
        assert admission.waiting_count == 0


async def test_a_cancelled_wait_takes_no_slot() -> None:
    admission = Admission(1, 1, 5)
    entered, leave = asyncio.Event(), asyncio.Event()

    async with admission.slot():
        waiting = asyncio.create_task(hold(admission, entered, leave))
        await asyncio.sleep(0)
        assert admission.waiting_count == 1
        waiting.cancel()
    await asyncio.wait([waiting])

    assert not entered.is_set()
    assert (admission.running_count, admission.waiting_count) == (0, 0)


async def test_a_slot_given_in_the_moment_of_cancellation_comes_back() -> None:
    admission = Admission(1, 1, 5)

    async with admission.slot():
        waiting = asyncio.create_task(hold(admission, asyncio.Event(), asyncio.Event()))
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])

    assert admission.running_count == 0


async def test_an_error_inside_gives_the_slot_back() -> None:
    admission = Admission(1, 0, 5)

    with pytest.raises(ZeroDivisionError):
        async with admission.slot():
            raise ZeroDivisionError

    assert admission.running_count == 0
