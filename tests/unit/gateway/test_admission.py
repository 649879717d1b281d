"""Who runs, who waits and who is refused, with a ledger that holds a given number of sequences."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from gateway.admission import Admission, Slot
from gateway.ledger import Demand, Ledger
from specgw.errors import DeadlineExceeded, InvalidRequest, NotReady, Overloaded
from specgw.types import ModelDescription, VerifierInfo

DEMAND = Demand(prompt_token_count=10, max_tokens=10)
LARGE = Demand(prompt_token_count=10, max_tokens=90)


def ledger_of(
    num_sequences: int, kv_tokens: int = 10_000, addresses: Sequence[str] = "a"
) -> Ledger:
    ledger = Ledger()
    model = ModelDescription("m", "", 10, "", 1000, "", "")
    for address in addresses:
        ledger.open(address, VerifierInfo(address, model, num_sequences, 1000, kv_tokens, 0, 0))
    return ledger


def admission_of(
    num_sequences: int, max_waiting: int, queue_timeout_s: float = 5.0, **options: Any
) -> Admission:
    return Admission(ledger_of(num_sequences), 64, max_waiting, queue_timeout_s, **options)


async def hold(
    admission: Admission,
    entered: asyncio.Event,
    leave: asyncio.Event,
    demand: Demand = DEMAND,
    caller: int | None = None,
) -> None:
    async with admission.slot(demand, caller):
        entered.set()
        await leave.wait()


def is_empty(admission: Admission) -> bool:
    return (
        (admission.running_count, admission.waiting_count) == (0, 0)
        and not admission.ledger.claims
        and all(one.used.sequences == 0 for _, _, one in admission.ledger.accounts())
    )


async def test_requests_get_slots_in_the_order_they_came() -> None:
    admission = admission_of(1, 3)
    order: list[int] = []

    async def one(number: int) -> None:
        async with admission.slot(DEMAND):
            order.append(number)
            await asyncio.sleep(0)

    async with asyncio.timeout(5):
        await asyncio.gather(*(one(number) for number in range(4)))

    assert order == [0, 1, 2, 3]
    assert is_empty(admission)


async def test_a_small_request_does_not_overtake_a_large_one() -> None:
    admission = Admission(ledger_of(8, kv_tokens=110), 64, 8, 5)
    order: list[str] = []

    async def one(name: str, demand: Demand) -> None:
        async with admission.slot(demand):
            order.append(name)
            await asyncio.sleep(0)

    async with asyncio.timeout(5):
        await asyncio.gather(one("small", DEMAND), one("large", LARGE), one("small again", DEMAND))

    assert order == ["small", "large", "small again"]


async def test_a_full_queue_refuses_with_numbers() -> None:
    admission = admission_of(2, 0)

    async with AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(admission.slot(DEMAND))
        with pytest.raises(Overloaded, match=r"2 requests are running.*2 of 2 sequences"):
            await stack.enter_async_context(admission.slot(DEMAND))

    assert is_empty(admission)


async def test_the_configured_number_is_an_upper_bound() -> None:
    admission = Admission(ledger_of(8), 1, 0, 5)

    async with admission.slot(DEMAND):
        with pytest.raises(Overloaded, match=r"at most 1\)"):
            async with admission.slot(DEMAND):
                pass

    assert is_empty(admission)


async def test_what_can_never_fit_is_refused_at_once_with_the_numbers() -> None:
    admission = Admission(ledger_of(8, kv_tokens=50), 64, 8, 5)

    with pytest.raises(InvalidRequest, match="100 of at most 50 KV tokens"):
        async with admission.slot(LARGE):
            pass

    assert is_empty(admission)


async def test_a_wait_that_takes_too_long_ends() -> None:
    admission = admission_of(1, 1, 0.01)

    async with admission.slot(DEMAND):
        with pytest.raises(Overloaded, match="no slot became free in"):
            async with admission.slot(DEMAND):
                pass
        assert admission.waiting_count == 0


async def test_a_wait_ends_when_the_requests_own_time_is_up() -> None:
    admission = admission_of(1, 1)

    async with admission.slot(DEMAND):
        with pytest.raises(DeadlineExceeded):
            async with admission.slot(DEMAND, deadline=time.monotonic() + 0.01):
                pass

    assert is_empty(admission)


async def test_a_wait_without_any_verifier_ends_as_unavailable() -> None:
    admission = admission_of(1, 1, 0.01)
    admission.ledger.close("a")

    with pytest.raises(NotReady, match="no verifier was serving"):
        async with admission.slot(DEMAND):
            pass


async def test_a_cancelled_wait_takes_no_slot() -> None:
    admission = admission_of(1, 1)
    entered, leave = asyncio.Event(), asyncio.Event()

    async with admission.slot(DEMAND):
        waiting = asyncio.create_task(hold(admission, entered, leave))
        await asyncio.sleep(0)
        assert admission.waiting_count == 1
        waiting.cancel()
    await asyncio.wait([waiting])

    assert not entered.is_set()
    assert is_empty(admission)


async def test_one_that_has_just_left_the_queue_takes_no_place_in_it() -> None:
    admission = admission_of(1, 1)
    async with admission.slot(DEMAND):
        leaving = asyncio.create_task(hold(admission, asyncio.Event(), asyncio.Event()))
        await asyncio.sleep(0)
        leaving.cancel()  # it has not run since

        with pytest.raises(TimeoutError):  # it waits, and is not refused
            async with asyncio.timeout(0.01), admission.slot(DEMAND):
                pass
        await asyncio.wait([leaving])

    assert is_empty(admission)


async def test_a_slot_given_in_the_moment_of_cancellation_comes_back() -> None:
    admission = admission_of(1, 1)

    async with admission.slot(DEMAND):
        waiting = asyncio.create_task(hold(admission, asyncio.Event(), asyncio.Event()))
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])

    assert is_empty(admission)


async def test_a_cancelled_large_request_lets_those_behind_it_in() -> None:
    admission = Admission(ledger_of(8, kv_tokens=110), 64, 8, 5)
    entered, leave = asyncio.Event(), asyncio.Event()
    async with asyncio.timeout(5), admission.slot(DEMAND):
        large = asyncio.create_task(hold(admission, asyncio.Event(), leave, LARGE))
        small = asyncio.create_task(hold(admission, entered, leave))
        await asyncio.sleep(0)
        assert admission.waiting_count == 2

        large.cancel()
        await entered.wait()

        leave.set()
        await asyncio.wait([large, small])

    assert is_empty(admission)


async def test_an_error_inside_gives_the_slot_back() -> None:
    admission = admission_of(1, 0)

    with pytest.raises(ZeroDivisionError):
        async with admission.slot(DEMAND):
            raise ZeroDivisionError

    assert is_empty(admission)


async def test_room_that_a_verifier_reports_later_ends_a_wait() -> None:
    admission = admission_of(1, 8)
    async with asyncio.timeout(5), admission.slot(DEMAND):
        entered, leave = asyncio.Event(), asyncio.Event()
        waiting = asyncio.create_task(hold(admission, entered, leave))
        await asyncio.sleep(0)
        model = ModelDescription("m", "", 10, "", 1000, "", "")

        admission.ledger.open("b", VerifierInfo("b", model, 1, 1000, 1000, 0, 0))
        admission.grant()
        await entered.wait()

        leave.set()
        await waiting
    assert is_empty(admission)


class TestCallers:
    """The limit per API key."""

    async def test_a_key_at_its_limit_waits_and_is_passed_by_others(self) -> None:
        admission = admission_of(8, 8, max_per_caller=1)
        leave, events = asyncio.Event(), [asyncio.Event() for _ in range(3)]
        tasks = []
        async with asyncio.timeout(5):
            for event, caller in zip(events, (0, 0, 1), strict=True):
                tasks.append(asyncio.create_task(hold(admission, event, leave, caller=caller)))
                await asyncio.sleep(0)

            assert [event.is_set() for event in events] == [True, False, True]
            leave.set()
            await asyncio.gather(*tasks)

        assert events[1].is_set()
        assert is_empty(admission)

    async def test_a_key_with_as_many_waiting_is_refused_with_the_numbers(self) -> None:
        admission = admission_of(8, 8, max_per_caller=2)
        leave = asyncio.Event()
        tasks = [
            asyncio.create_task(hold(admission, asyncio.Event(), leave, caller=7)) for _ in range(4)
        ]
        await asyncio.sleep(0)

        message = r"2 requests running and 2 waiting \(at most 2 each\)"
        with pytest.raises(Overloaded, match=message):
            async with admission.slot(DEMAND, 7):
                pass
        async with admission.slot(DEMAND):  # without a key, no limit
            pass

        leave.set()
        await asyncio.gather(*tasks)
        assert is_empty(admission)


class TestMoves:
    """A request whose verifier is lost."""

    async def test_a_claim_moves_to_another_verifier_before_those_who_queue(self) -> None:
        admission = Admission(ledger_of(1, addresses="ab"), 64, 8, 5)
        leave = asyncio.Event()
        async with asyncio.timeout(5), AsyncExitStack() as stack:
            slots: list[Slot] = [
                await stack.enter_async_context(admission.slot(DEMAND)) for _ in range(2)
            ]
            entered = asyncio.Event()
            queued = asyncio.create_task(hold(admission, entered, leave))
            await asyncio.sleep(0)
            lost = slots[0].claim.verifier
            admission.ledger.close(lost)
            slots[0].leave()
            moving = asyncio.create_task(slots[0].move(lost))
            await asyncio.sleep(0)
            assert not moving.done()

            other = slots[1].claim.verifier
            slots[1].leave()
            await moving

            assert slots[0].claim.verifier == other
            assert not entered.is_set()
            slots[0].leave()
            await entered.wait()
            leave.set()
            await queued
        assert is_empty(admission)

    async def test_a_move_that_is_given_up_leaves_nothing_behind(self) -> None:
        admission = admission_of(1, 8)
        async with admission.slot(DEMAND) as slot:
            admission.ledger.close("a")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await slot.move("a")

        assert is_empty(admission)

    async def test_a_move_prefers_another_verifier_and_takes_the_same_if_it_must(self) -> None:
        admission = Admission(ledger_of(2, addresses="ab"), 64, 8, 5)
        async with admission.slot(DEMAND) as slot:
            first = slot.claim.verifier
            await slot.move(first)
            second = slot.claim.verifier
            admission.ledger.close(first)
            await slot.move(second)
            third = slot.claim.verifier

        assert first != second == third
        assert is_empty(admission)


class TestCalls:
    """The requests of one call."""

    async def test_all_are_taken_or_none(self) -> None:
        admission = admission_of(3, 1)

        async with admission.slot(DEMAND), admission.slot(DEMAND):
            with (
                pytest.raises(Overloaded, match="the queue is full: 3 requests are running"),
                admission.places([DEMAND] * 3),
            ):
                pass
            assert (admission.running_count, admission.waiting_count) == (2, 0)
            with admission.places([DEMAND] * 2):
                counts = admission.running_count, admission.waiting_count

        assert counts == (3, 1)
        assert is_empty(admission)

    async def test_one_that_can_never_fit_refuses_all(self) -> None:
        admission = Admission(ledger_of(8, kv_tokens=50), 64, 8, 5)

        with pytest.raises(InvalidRequest), admission.places([DEMAND, LARGE]):
            pass

        assert is_empty(admission)

    async def test_none_waits_too_long_once_another_has_had_its_turn(self) -> None:
        admission = admission_of(1, 2, 0.01)
        async with asyncio.timeout(5):
            with admission.places([DEMAND] * 2) as [first, second]:
                entered = asyncio.Event()

                async def wait() -> None:
                    async with second.slot():
                        entered.set()

                async with first.slot():
                    waiting = asyncio.create_task(wait())
                    await asyncio.sleep(0)
                    with pytest.raises(Overloaded, match="no slot became free"):
                        async with admission.slot(DEMAND):  # has waited as long by then
                            pass
                await entered.wait()
                await waiting

        assert is_empty(admission)

    async def test_those_beyond_what_could_run_do_not_queue_before_their_place_is_used(
        self,
    ) -> None:
        admission = admission_of(2, 0)

        with admission.places([DEMAND] * 4) as places:
            counts = admission.running_count, admission.waiting_count
            for place in places:
                async with place.slot():
                    pass

        assert counts == (2, 0)
        assert is_empty(admission)
