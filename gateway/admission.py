"""Decides which requests run now, which wait and which are refused, first come first served.

The ledger says what fits; here is the waiting for it. The requests of one call, such as the samples
of a prompt, are taken into the queue all together or refused all together. The caller is
`generation.py`; `routing.py` moves a slot when its verifier is lost.
"""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

from gateway.ledger import Claim, Demand, Ledger
from specgw.errors import DeadlineExceeded, NotReady, Overloaded, SpecgwError


@dataclass(slots=True, eq=False)
class _Call:
    """What the requests of one client's call have in common."""

    has_started: bool = False  # some of them had their turn: the others are not refused any more
    has_output: bool = False  # of some of them


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that waits for its turn, which brings a claim."""

    demand: Demand
    caller: int | None
    call: _Call
    avoid: str = ""
    turn: asyncio.Future[Claim] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Slot:
    """An admitted request's room, and its claim on a verifier while it has one."""

    def __init__(self, admission: "Admission", demand: Demand, claim: Claim, call: _Call) -> None:
        self._admission = admission
        self._demand = demand
        self._claim: Claim | None = claim
        self._call = call

    @property
    def claim(self) -> Claim:
        """What is claimed where. There is none between `leave` and `move`."""
        assert self._claim is not None
        return self._claim

    @property
    def may_be_refused(self) -> bool:
        """Whether the client has seen nothing yet, of this request or others of its call."""
        return not self._call.has_output

    def begin(self) -> None:
        """Notes that there is output."""
        self._call.has_output = True

    def leave(self) -> None:
        """Gives the claim back, if there is one: the verifier is lost, or the request is over."""
        if self._claim is not None:
            claim, self._claim = self._claim, None
            self._admission.give_back(claim)

    async def move(self, avoid: str) -> None:
        """Waits for a claim elsewhere than on `avoid`, or there again; before all who queue."""
        self.leave()
        self._claim = await self._admission.claim_again(self._demand, avoid)


class Place:
    """A request's place in the queue, which becomes a slot. Made by `Admission.places`."""

    def __init__(
        self, admission: "Admission", demand: Demand, caller: int | None, call: _Call
    ) -> None:
        self._admission = admission
        self._demand = demand
        self._caller = caller
        self._call = call
        self._waiting: _Waiting | None = None

    @property
    def has_turn(self) -> bool:
        """Whether there would be a slot at once."""
        return self._waiting is not None and self._waiting.turn.done()

    def queue(self) -> None:
        """Waits from now on."""
        self._waiting = _Waiting(self._demand, self._caller, self._call)
        self._admission.queue(self._waiting)

    @asynccontextmanager
    async def slot(self, deadline: float = math.inf) -> AsyncIterator[Slot]:
        """Holds a slot, once.

        Args:
            deadline: `time.monotonic()` at which the work is worthless.

        Raises:
            Overloaded: if the wait was too long.
            NotReady: if no verifier took claims during the wait.
            DeadlineExceeded: if the time is up.
        """
        if self._waiting is None:
            self.queue()
        assert self._waiting is not None
        try:
            claim = await self._admission.turn(self._waiting, deadline)
        except BaseException:
            self.leave()
            raise
        self._waiting = None
        slot = Slot(self._admission, self._demand, claim, self._call)
        try:
            yield slot
        finally:
            slot.leave()
            self._admission.leave(self._caller)

    def leave(self) -> None:
        """Gives the place up, unless it has become a slot."""
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._admission.withdraw(waiting)


class Admission:
    """A bounded queue in front of the ledger.

    Args:
        ledger: What the services have room for.
        max_running: Most requests admitted at once, whatever has room.
        max_waiting: Most requests that wait.
        queue_timeout_s: Longest wait.
        max_per_caller: Most requests of one caller admitted at once, and as many may wait. Callers
            without a key are not counted.
    """

    def __init__(
        self,
        ledger: Ledger,
        max_running: int,
        max_waiting: int,
        queue_timeout_s: float,
        max_per_caller: int | None = None,
    ) -> None:
        self.ledger = ledger
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._queue_timeout_s = queue_timeout_s
        self._max_per_caller = max_per_caller
        self._running_count = 0
        self._running_by_caller: Counter[int] = Counter()
        self._queue: deque[_Waiting] = deque()
        self._moving: deque[_Waiting] = deque()  # admitted, without a verifier at the moment

    @property
    def running_count(self) -> int:
        """Requests admitted."""
        return self._running_count

    @property
    def waiting_count(self) -> int:
        """Requests that wait to be admitted; those that have just left are not among them."""
        return sum(not waiting.turn.done() for waiting in self._queue)

    @property
    def max_at_once(self) -> int:
        """Requests of one caller that could run at once if there were no others."""
        limits = (self._max_running, self._max_per_caller, self.ledger.max_sequences or None)
        return min(limit for limit in limits if limit is not None)

    @contextmanager
    def places(self, demands: Sequence[Demand], caller: int | None = None) -> Iterator[list[Place]]:
        """Takes the requests of one call into the queue, all of them or none.

        As many as could run at once queue now, the others when their place is used. None of them is
        refused any more once one has had its turn. Slots must be left before the block is.

        Args:
            demands: What the requests ask for.
            caller: The API key's number, if there are keys.

        Raises:
            InvalidRequest: if one of them could never fit.
            Overloaded: if the queue has no room for them, or the caller has too many.
        """
        for demand in demands:
            self.ledger.check(demand)
        call = _Call()
        places = [Place(self, demand, caller, call) for demand in demands]
        queued_by_caller = Counter(
            one.caller for one in self._queue if one.caller is not None and not one.turn.done()
        )
        num_before = self.waiting_count
        try:
            for place in places[: self.max_at_once]:
                place.queue()
            num_waiting = self.waiting_count - num_before
            if num_waiting > 0 and (
                refusal := self._refusal(caller, queued_by_caller, num_before, num_waiting)
            ):
                raise Overloaded(refusal)
            yield places
        finally:
            for place in sorted(places, key=lambda place: place.has_turn):
                place.leave()  # first those without a turn, or they would get those of the others

    @asynccontextmanager
    async def slot(
        self, demand: Demand, caller: int | None = None, deadline: float = math.inf
    ) -> AsyncIterator[Slot]:
        """Holds a slot for a request that is a call of its own. Raises as the two parts do."""
        with self.places([demand], caller) as [place]:
            async with place.slot(deadline) as slot:
                yield slot

    async def claim_again(self, demand: Demand, avoid: str) -> Claim:
        """Waits for a claim of a request that is admitted already."""
        waiting = _Waiting(demand, None, _Call(), avoid)
        self._moving.append(waiting)
        self.grant()
        try:
            return await waiting.turn
        except BaseException:
            self._withdraw(waiting, self._moving)
            raise

    def give_back(self, claim: Claim) -> None:
        """Returns a claim to the ledger; those who wait may have it."""
        self.ledger.release(claim)
        self.grant()

    def grant(self) -> None:
        """Gives everyone their turn, in order, until one does not fit. Called at every change."""
        while self._moving:
            if not self._moving[0].turn.done() and not self._give_turn(self._moving[0]):
                return
            self._moving.popleft()
        for waiting in [one for one in self._queue if not one.turn.done()]:
            if self._running_count >= self._max_running:
                return
            if self._is_at_limit(waiting.caller, self._running_by_caller):
                continue  # the others need not wait for this caller's own requests
            if not self._give_turn(waiting):
                return
            self._queue.remove(waiting)
            self._enter(waiting.caller)

    def _give_turn(self, waiting: _Waiting) -> bool:
        claim = self.ledger.claim(waiting.demand, waiting.avoid)
        if claim is None:
            return False
        waiting.turn.set_result(claim)
        waiting.call.has_started = True
        return True

    # For places.

    def queue(self, waiting: _Waiting) -> None:
        """Puts a request at the end of the queue."""
        self._queue.append(waiting)
        self.grant()

    async def turn(self, waiting: _Waiting, deadline: float) -> Claim:
        """Waits for a request's turn; see `Place.slot`."""
        if waiting.turn.done():
            return waiting.turn.result()
        loop = asyncio.get_running_loop()
        left_s = max(0.0, deadline - time.monotonic())
        timers = [loop.call_later(self._queue_timeout_s, self._end_wait, waiting, False)]
        if left_s < math.inf:
            timers.append(loop.call_later(left_s, self._end_wait, waiting, True))
        try:
            return await waiting.turn
        finally:
            for timer in timers:
                timer.cancel()

    def withdraw(self, waiting: _Waiting) -> None:
        """Takes a request out of the queue, or gives back what its turn has brought."""
        if not self._withdraw(waiting, self._queue):
            self.leave(waiting.caller)

    def leave(self, caller: int | None) -> None:
        """A request is over that had its turn."""
        self._running_count -= 1
        if caller is not None:
            self._running_by_caller[caller] -= 1
        self.grant()

    def _end_wait(self, waiting: _Waiting, is_over: bool) -> None:
        if not waiting.turn.done() and (is_over or not waiting.call.has_started):
            waiting.turn.set_exception(self._too_late(is_over))

    def _withdraw(self, waiting: _Waiting, queue: deque[_Waiting]) -> bool:
        """Ends a wait; returns false if the turn came in the very moment it ended."""
        turn = waiting.turn
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            self.give_back(turn.result())
            return False
        turn.cancel()  # if the place was never used
        with suppress(ValueError):
            queue.remove(waiting)
        self.grant()  # it may have kept others waiting
        return True

    def _enter(self, caller: int | None) -> None:
        self._running_count += 1
        if caller is not None:
            self._running_by_caller[caller] += 1

    def _is_at_limit(self, caller: int | None, counts: Counter[int], num_more: int = 1) -> bool:
        limit = self._max_per_caller
        return caller is not None and limit is not None and counts[caller] + num_more > limit

    def _refusal(
        self,
        caller: int | None,
        queued_by_caller: Counter[int],
        num_before: int,
        num_waiting: int,
    ) -> str:
        """Says why a call may not have `num_waiting` requests wait; empty if it may."""
        if self._is_at_limit(caller, queued_by_caller, num_waiting):
            assert caller is not None
            return (
                f"this API key has {self._running_by_caller[caller]} requests running and "
                f"{queued_by_caller[caller]} waiting (at most {self._max_per_caller} each)"
            )
        if num_before + num_waiting > self._max_waiting:
            return (
                f"the queue is full: {self._load} and {num_before} waiting "
                f"(at most {self._max_waiting}); {self.ledger}"
            )
        return ""

    def _too_late(self, is_over: bool) -> SpecgwError:
        if is_over:
            return DeadlineExceeded(f"the time was up before there was a slot: {self._load}")
        if not self.ledger.is_open:
            return NotReady(f"no verifier was serving within {self._queue_timeout_s:g} s")
        return Overloaded(
            f"no slot became free in {self._queue_timeout_s:g} s: {self._load}; {self.ledger}"
        )

    @property
    def _load(self) -> str:
        return f"{self._running_count} requests are running (at most {self._max_running})"
