"""Decides which requests run now, which wait and which are refused, first come first served.

The ledger says what fits; here is the waiting for it. The caller is `generation.py`; `routing.py`
moves a slot when its verifier is lost.
"""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from gateway.ledger import Claim, Demand, Ledger
from specgw.errors import DeadlineExceeded, NotReady, Overloaded, SpecgwError


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that waits for its turn, which brings a claim."""

    demand: Demand
    caller: int | None
    turn: asyncio.Future[Claim]
    avoid: str = ""


class Slot:
    """An admitted request's place, and its claim on a verifier while it has one."""

    def __init__(self, admission: "Admission", demand: Demand, claim: Claim) -> None:
        self._admission = admission
        self._demand = demand
        self._claim: Claim | None = claim

    @property
    def claim(self) -> Claim:
        """What is claimed where. There is none between `leave` and `move`."""
        assert self._claim is not None
        return self._claim

    def leave(self) -> None:
        """Gives the claim back, if there is one: the verifier is lost, or the request is over."""
        if self._claim is not None:
            claim, self._claim = self._claim, None
            self._admission.give_back(claim)

    async def move(self, avoid: str) -> None:
        """Waits for a claim elsewhere than on `avoid`, or there again; before all who queue."""
        self.leave()
        self._claim = await self._admission.claim_again(self._demand, avoid)


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

    @asynccontextmanager
    async def slot(
        self, demand: Demand, caller: int | None = None, deadline: float = math.inf
    ) -> AsyncIterator[Slot]:
        """Holds a slot.

        Args:
            demand: What the request asks for.
            caller: The API key's number, if there are keys.
            deadline: `time.monotonic()` at which the work is worthless.

        Raises:
            InvalidRequest: if the request could never fit.
            Overloaded: if the queue is full, the caller has too many, or the wait was too long.
            NotReady: if no verifier took claims during the wait.
            DeadlineExceeded: if the time is up.
        """
        self.ledger.check(demand)
        slot = Slot(self, demand, await self._admitted(demand, caller, deadline))
        try:
            yield slot
        finally:
            slot.leave()
            self._leave(caller)

    async def claim_again(self, demand: Demand, avoid: str) -> Claim:
        """Waits for a claim of a request that is admitted already."""
        waiting = _Waiting(demand, None, asyncio.get_running_loop().create_future(), avoid)
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
        return True

    async def _admitted(self, demand: Demand, caller: int | None, deadline: float) -> Claim:
        waiting = _Waiting(demand, caller, asyncio.get_running_loop().create_future())
        queued_by_caller = Counter(
            one.caller for one in self._queue if one.caller is not None and not one.turn.done()
        )
        self._queue.append(waiting)
        self.grant()
        if not waiting.turn.done():
            refusal = self._refusal(caller, queued_by_caller)
            if refusal:
                self._queue.remove(waiting)
                raise Overloaded(refusal)
        try:
            async with asyncio.timeout(min(self._queue_timeout_s, deadline - time.monotonic())):
                return await waiting.turn
        except BaseException as error:
            if not self._withdraw(waiting, self._queue):
                self._leave(caller)
            if isinstance(error, TimeoutError):
                raise self._too_late(time.monotonic() >= deadline) from None
            raise

    def _withdraw(self, waiting: _Waiting, queue: deque[_Waiting]) -> bool:
        """Ends a wait; returns false if the turn came in the very moment it ended."""
        if waiting.turn.done() and not waiting.turn.cancelled():
            self.give_back(waiting.turn.result())
            return False
        with suppress(ValueError):
            queue.remove(waiting)
        self.grant()  # it may have kept others waiting
        return True

    def _enter(self, caller: int | None) -> None:
        self._running_count += 1
        if caller is not None:
            self._running_by_caller[caller] += 1

    def _leave(self, caller: int | None) -> None:
        self._running_count -= 1
        if caller is not None:
            self._running_by_caller[caller] -= 1
        self.grant()

    def _is_at_limit(self, caller: int | None, counts: Counter[int]) -> bool:
        limit = self._max_per_caller
        return caller is not None and limit is not None and counts[caller] >= limit

    def _refusal(self, caller: int | None, queued_by_caller: Counter[int]) -> str:
        """Says why a request may not wait; empty if it may."""
        if self._is_at_limit(caller, queued_by_caller):
            assert caller is not None
            return (
                f"this API key has {self._running_by_caller[caller]} requests running and "
                f"{queued_by_caller[caller]} waiting (at most {self._max_per_caller} each)"
            )
        num_before = self.waiting_count - 1
        if num_before >= self._max_waiting:
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
