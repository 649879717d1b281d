"""Finds a verifier for each request and carries the request from one to the next when one is lost.

The only module that talks to verifiers, through `verifier_stream.py`. It opens in the ledger those
that serve and that fit the gateway's configuration; which of them gets a request is the slot's
claim. A request is cut off only when no verifier comes back in time: until then it is opened again
with the tokens delivered so far and the same seed, which gives the same output as if nothing had
happened. The caller is `generation.py`.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.admission import Slot
from gateway.ledger import Ledger
from gateway.verifier_stream import VerifierStream
from specgw.channel import open_channel, status_to_error
from specgw.config import TlsSettings
from specgw.errors import (
    Cancelled,
    IncompatibleModels,
    NotReady,
    Overloaded,
    SpecgwError,
)
from specgw.types import (
    GenerateOutput,
    GenerateRequest,
    ModelDescription,
    SpeculationStats,
    VerifierInfo,
)
from specgw.v1 import verifier_pb2, verifier_pb2_grpc
from specgw.wire import (
    generate_output_from_pb,
    generate_request_to_pb,
    speculation_stats_from_pb,
    verifier_info_from_pb,
)

logger = logging.getLogger(__name__)

_INFO_TIMEOUT_S = 10.0
_INFO_INTERVAL_S = 1.0  # between looks at what a serving verifier and its proposers have loaded
_CONNECTING_INTERVAL_S = 0.2  # the same while one of its proposers is not connected
_MIN_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0

# Returns one line for each reason why a verifier must not be used.
Compare = Callable[[VerifierInfo], Sequence[str]]


class Verifier:
    """One verifier as seen from here: its channel, whether it serves, and what it has loaded."""

    def __init__(
        self, address: str, ledger: Ledger, compare: Compare, tls: TlsSettings | None
    ) -> None:
        self.address = address
        self.is_serving = False
        self.detail = "not connected yet"
        self.info: VerifierInfo | None = None
        self._ledger = ledger
        self._compare = compare
        self._channel = open_channel(address, tls)
        self._stub = verifier_pb2_grpc.VerifierServiceStub(self._channel)
        self._stream = VerifierStream(self._stub, address)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def watch(self, on_change: Callable[[], None]) -> None:
        """Follows the verifier's health until cancelled; checks whom it meets there."""
        backoff = _Backoff()
        while True:
            # No deadline: the watch lives as long as the connection, which keepalive tests.
            updates = self._health.Watch(  # type: ignore[attr-defined]
                health_pb2.HealthCheckRequest(service=""), wait_for_ready=True
            )
            try:
                async with aclosing(self._statuses(updates)) as statuses:
                    async for is_serving in statuses:
                        await self._learn(is_serving)
                        on_change()
                        if self.is_serving:
                            backoff = _Backoff()
                self._lost("it ended the health watch")
            except grpc.aio.AioRpcError as error:
                self._lost(f"{error.code().name}: {error.details()}")
            except SpecgwError as error:
                self._lost(str(error))
            except Exception as error:  # such as a message that does not parse, which is None
                logger.exception("health watch failed", extra={"verifier": self.address})
                self._lost(f"its answer made no sense: {error!r}")
            finally:
                updates.cancel()
            on_change()
            await asyncio.sleep(backoff.next_s())

    def generate(
        self, request: GenerateRequest, deadline: float
    ) -> AsyncGenerator[GenerateOutput, None]:
        """Runs one attempt at a request. Leaving the iteration early cancels the call.

        Raises:
            SpecgwError: as the verifier raised it; `NotReady` if the connection was lost.
        """
        is_new = self.info is not None and self.info.generates_many
        run = self._stream.generate if is_new else self._generate_alone
        return run(request, deadline)

    async def _generate_alone(
        self, request: GenerateRequest, deadline: float
    ) -> AsyncGenerator[GenerateOutput, None]:
        """Does it over a call of its own, with a verifier that knows no other way."""
        call = self._stub.Generate(
            generate_request_to_pb(request), timeout=max(0.0, deadline - time.monotonic())
        )
        stats = SpeculationStats()
        try:
            async for response in call:
                if response is None:
                    raise NotReady(f"verifier {self.address} sent what is not a message")
                before, stats = stats, speculation_stats_from_pb(response.speculation)
                yield generate_output_from_pb(response)._replace(round=stats.since(before))
        except grpc.aio.AioRpcError as error:
            raise status_to_error(error) from error
        finally:
            call.cancel()

    async def close(self) -> None:
        """Ends the connection and every call on it."""
        await self._stream.close()
        await self._channel.close()

    async def _statuses(self, updates: Any) -> AsyncGenerator[bool, None]:
        """Yields whether it serves, at every change and, while it does, once in a while."""
        reading = asyncio.ensure_future(updates.read())
        try:
            while True:
                await asyncio.wait({reading}, timeout=self._interval_s())
                if not reading.done():
                    yield True
                    continue
                update = reading.result()
                if update is grpc.aio.EOF:
                    return
                yield update.status == health_pb2.HealthCheckResponse.SERVING
                reading = asyncio.ensure_future(updates.read())
        finally:
            reading.cancel()

    def _interval_s(self) -> float | None:
        if not self.is_serving or self.info is None:
            return None
        proposers = self.info.proposers if self.info.max_draft_tokens else ()
        is_whole = all(proposer.is_connected for proposer in proposers)
        return _INFO_INTERVAL_S if is_whole else _CONNECTING_INTERVAL_S

    async def _learn(self, is_serving: bool) -> None:
        if not is_serving:
            self._lost("not serving: it is loading or draining")
            return
        await self._meet()
        if not self.is_serving:
            self.is_serving = True
            self.detail = "serving"
            logger.info("verifier is serving", extra={"verifier": self.address})

    async def _meet(self) -> None:
        """Asks what is loaded, and opens the verifier's accounts if it is what it should be."""
        response = await self._stub.GetVerifierInfo(
            verifier_pb2.GetVerifierInfoRequest(), timeout=_INFO_TIMEOUT_S
        )
        info = verifier_info_from_pb(response)
        if mismatches := self._compare(info):
            raise IncompatibleModels(mismatches)
        self._tell_proposers(info)
        self.info = info
        self._ledger.open(self.address, info)

    def _tell_proposers(self, info: VerifierInfo) -> None:
        before = {one.address: one.detail for one in self.info.proposers} if self.info else {}
        for one in info.proposers if info.max_draft_tokens else ():
            if one.detail and one.detail != before.get(one.address):
                logger.warning(
                    "proposer is not available",
                    extra={
                        "verifier": self.address,
                        "proposer": one.address,
                        "detail": one.detail,
                    },
                )

    def _lost(self, detail: str) -> None:
        if self.is_serving or detail != self.detail:
            logger.warning(
                "verifier is not available", extra={"verifier": self.address, "detail": detail}
            )
        self.is_serving = False
        self.detail = detail
        self._ledger.close(self.address)


class Router:
    """The verifiers, and the way of a request among them.

    Args:
        addresses: At least one, `host:port` or `unix:path`.
        ledger: Where verifiers that serve are opened.
        compare: Says why a verifier must not be used.
        reopen_timeout_s: How long a request that lost its verifier waits for the next one.
        on_reopen: Called whenever a request is opened again.
        on_change: Called whenever the ledger's accounts may have changed.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        ledger: Ledger,
        compare: Compare,
        *,
        tls: TlsSettings | None = None,
        reopen_timeout_s: float = 30.0,
        on_reopen: Callable[[], None] = lambda: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._verifiers = [Verifier(address, ledger, compare, tls) for address in addresses]
        self._reopen_timeout_s = reopen_timeout_s
        self._on_reopen = on_reopen
        self._tell_change = on_change
        self._changed = asyncio.Event()  # replaced at every change
        self._watches: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begins to look for verifiers."""
        self._watches = [
            asyncio.create_task(verifier.watch(self._on_change)) for verifier in self._verifiers
        ]

    async def stop(self) -> None:
        """Ends every connection. Requests should have finished before."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        for verifier in self._verifiers:
            await verifier.close()

    @property
    def addresses(self) -> tuple[str, ...]:
        """The verifiers' addresses, as configured."""
        return tuple(verifier.address for verifier in self._verifiers)

    @property
    def is_ready(self) -> bool:
        """Whether some verifier is serving."""
        return any(verifier.is_serving for verifier in self._verifiers)

    @property
    def target_model(self) -> ModelDescription | None:
        """The target model as a verifier describes it, once one was reached."""
        known = (verifier.info for verifier in self._verifiers)
        return next((info.target_model for info in known if info is not None), None)

    @property
    def states(self) -> str:
        """What is known of each verifier, for people."""
        return "; ".join(f"{verifier.address}: {verifier.detail}" for verifier in self._verifiers)

    def check_ready(self) -> None:
        """Refuses if no verifier is serving.

        Raises:
            NotReady: with what is known of each.
        """
        if not self.is_ready:
            raise NotReady(f"no verifier is serving ({self.states})")

    async def ready(self) -> None:
        """Waits until some verifier is serving."""
        while not self.is_ready:
            await self.changed()

    async def changed(self) -> None:
        """Waits until the state of some verifier changes."""
        await self._changed.wait()

    async def generate(
        self, request: GenerateRequest, slot: Slot, deadline: float
    ) -> AsyncGenerator[GenerateOutput, None]:
        """Streams the output of a request with a seed, on as many verifiers as it takes.

        Args:
            request: Its seed is set, or every attempt would draw its own.
            slot: Says which verifier and which proposer; moves along with the request.
            deadline: `time.monotonic()` at which the work is worthless.

        Raises:
            NotReady: if no verifier is serving, or none comes back in time.
            Overloaded: if the verifier refuses a request of a call that has no output yet.
            DeadlineExceeded: if the time is up.
        """
        delivered = list(request.output_token_ids)
        reopen_by, backoff = deadline, _Backoff()
        while True:
            verifier = next(one for one in self._verifiers if one.address == slot.claim.verifier)
            attempt = _attempt(request, slot, delivered)
            try:
                async with aclosing(verifier.generate(attempt, deadline)) as outputs:
                    async for output in outputs:
                        if not delivered:
                            slot.begin()
                        delivered += output.token_ids
                        backoff = _Backoff()
                        yield output
                        if output.finish_reason is not None:
                            return
                raise NotReady(f"verifier {verifier.address} ended the stream without a finish")
            except (NotReady, Cancelled, Overloaded) as error:
                if isinstance(error, Overloaded) and slot.may_be_refused:
                    raise
                slot.leave()
                logger.warning(
                    "request lost its verifier",
                    extra={
                        "request_id": request.request_id,
                        "verifier": verifier.address,
                        "output_token_count": len(delivered),
                        "detail": str(error),
                    },
                )
                if backoff.is_fresh:
                    reopen_by = time.monotonic() + self._reopen_timeout_s
                await self._move(slot, verifier, min(reopen_by, deadline), backoff.next_s())
                self._on_reopen()

    async def _move(self, slot: Slot, lost: Verifier, give_up_at: float, wait_s: float) -> None:
        """Waits for room on a verifier, preferably on another one than `lost`."""
        try:
            async with asyncio.timeout(max(0.0, give_up_at - time.monotonic())):
                await asyncio.sleep(wait_s)
                await slot.move(lost.address)
        except TimeoutError:
            raise NotReady(
                f"no verifier took the request up again within {self._reopen_timeout_s:g} s "
                f"({self.states})"
            ) from None

    def _on_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._tell_change()


class _Backoff:
    """Waits that double, with jitter, until something works again."""

    def __init__(self) -> None:
        self._wait_s = _MIN_BACKOFF_S

    @property
    def is_fresh(self) -> bool:
        """Whether there was no wait yet."""
        return self._wait_s == _MIN_BACKOFF_S

    def next_s(self) -> float:
        """Returns the next wait."""
        wait_s = self._wait_s * random.uniform(0.5, 1.0)
        self._wait_s = min(2 * self._wait_s, _MAX_BACKOFF_S)
        return wait_s


def _attempt(request: GenerateRequest, slot: Slot, delivered: Sequence[int]) -> GenerateRequest:
    """Returns the request as the slot's verifier gets it."""
    claim = slot.claim
    return replace(
        request,
        output_token_ids=tuple(delivered),
        proposer_address=claim.proposer,
        max_draft_tokens=request.max_draft_tokens if claim.may_draft else 0,
    )
