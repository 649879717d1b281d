"""Finds a verifier for each request and carries the request from one to the next when one is lost.

The only module that talks to verifiers. A request is cut off only when no verifier comes back in
time: until then it is opened again with the tokens delivered so far and the same seed, which gives
the same output as if nothing had happened. The caller is `generation.py`.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import zip_longest

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

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
    PROTOCOL_VERSION,
    GenerateOutput,
    GenerateRequest,
    ModelDescription,
    SpeculationStats,
)
from specgw.v1 import verifier_pb2, verifier_pb2_grpc
from specgw.wire import (
    generate_output_from_pb,
    generate_request_to_pb,
    model_description_from_pb,
)

logger = logging.getLogger(__name__)

_INFO_TIMEOUT_S = 10.0
_MIN_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0


class Verifier:
    """One verifier as seen from here: its channel, whether it serves, and our load on it."""

    def __init__(self, address: str, vocab_fingerprint: str, tls: TlsSettings | None) -> None:
        self.address = address
        self.running_count = 0
        self.is_serving = False
        self.detail = "not connected yet"
        self.target_model: ModelDescription | None = None
        self._vocab_fingerprint = vocab_fingerprint
        self._channel = open_channel(address, tls)
        self._stub = verifier_pb2_grpc.VerifierServiceStub(self._channel)
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
                async for update in updates:
                    await self._learn(update.status == health_pb2.HealthCheckResponse.SERVING)
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

    async def generate(
        self, request: GenerateRequest, deadline: float
    ) -> AsyncGenerator[GenerateOutput, None]:
        """Runs one attempt at a request. Leaving the iteration early cancels the call.

        Raises:
            SpecgwError: as the verifier raised it; `NotReady` if the connection was lost.
        """
        self.running_count += 1
        call = self._stub.Generate(
            generate_request_to_pb(request), timeout=max(0.0, deadline - time.monotonic())
        )
        try:
            async for response in call:
                if response is None:
                    raise NotReady(f"verifier {self.address} sent what is not a message")
                yield generate_output_from_pb(response)
        except grpc.aio.AioRpcError as error:
            raise status_to_error(error) from error
        finally:
            self.running_count -= 1
            call.cancel()

    async def close(self) -> None:
        """Ends the connection and every call on it."""
        await self._channel.close()

    async def _learn(self, is_serving: bool) -> None:
        if not is_serving:
            self._lost("not serving: it is loading or draining")
            return
        if not self.is_serving:
            await self._meet()
            self.is_serving = True
            self.detail = "serving"
            logger.info("verifier is serving", extra={"verifier": self.address})

    async def _meet(self) -> None:
        info = await self._stub.GetVerifierInfo(
            verifier_pb2.GetVerifierInfoRequest(), timeout=_INFO_TIMEOUT_S
        )
        model = model_description_from_pb(info.target_model)
        mismatches = []
        if info.protocol_version != PROTOCOL_VERSION:
            mismatches.append(
                f"verifier {self.address} speaks version {info.protocol_version} of the contract, "
                f"the gateway version {PROTOCOL_VERSION}"
            )
        if model.vocab_fingerprint and model.vocab_fingerprint != self._vocab_fingerprint:
            mismatches.append(
                f"verifier {self.address} runs {model.name} with vocabulary "
                f"{model.vocab_fingerprint[:12]}, the gateway's tokenizer has "
                f"{self._vocab_fingerprint[:12]}: both must be configured with the same model"
            )
        if mismatches:
            raise IncompatibleModels(mismatches)
        self.target_model = model

    def _lost(self, detail: str) -> None:
        if self.is_serving or detail != self.detail:
            logger.warning(
                "verifier is not available", extra={"verifier": self.address, "detail": detail}
            )
        self.is_serving = False
        self.detail = detail


class Router:
    """The verifiers, and the way of a request among them.

    Args:
        addresses: At least one, `host:port` or `unix:path`.
        vocab_fingerprint: Of the gateway's tokenizer; a verifier with another one is not used.
        reopen_timeout_s: How long a request that lost its verifier waits for the next one.
        on_reopen: Called whenever a request is opened again.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        vocab_fingerprint: str,
        *,
        tls: TlsSettings | None = None,
        reopen_timeout_s: float = 30.0,
        on_reopen: Callable[[], None] = lambda: None,
    ) -> None:
        self._verifiers = [Verifier(address, vocab_fingerprint, tls) for address in addresses]
        self._reopen_timeout_s = reopen_timeout_s
        self._on_reopen = on_reopen
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
        known = (verifier.target_model for verifier in self._verifiers)
        return next((model for model in known if model is not None), None)

    @property
    def states(self) -> str:
        """What is known of each verifier, for people."""
        return "; ".join(f"{verifier.address}: {verifier.detail}" for verifier in self._verifiers)

    async def ready(self) -> None:
        """Waits until some verifier is serving."""
        while not self.is_ready:
            await self.changed()

    async def changed(self) -> None:
        """Waits until the state of some verifier changes."""
        await self._changed.wait()

    async def generate(
        self, request: GenerateRequest, deadline: float
    ) -> AsyncGenerator[GenerateOutput, None]:
        """Streams the output of a request with a seed, on as many verifiers as it takes.

        Speculation statistics are totals over all attempts.

        Args:
            request: Its seed is set, or every attempt would draw its own.
            deadline: `time.monotonic()` at which the work is worthless.

        Raises:
            NotReady: if no verifier is serving, or none comes back in time.
            Overloaded: if the verifier refuses a request that has no output yet.
            DeadlineExceeded: if the time is up.
        """
        delivered = list(request.output_token_ids)
        earlier, stats = SpeculationStats(), SpeculationStats()
        verifier = self._choose(None)
        reopen_by, backoff = deadline, _Backoff()
        while True:
            attempt = replace(request, output_token_ids=tuple(delivered))
            try:
                async with aclosing(verifier.generate(attempt, deadline)) as outputs:
                    async for output in outputs:
                        delivered += output.token_ids
                        stats = _total(earlier, output.speculation or SpeculationStats())
                        backoff = _Backoff()
                        yield replace(output, speculation=stats)
                        if output.finish_reason is not None:
                            return
                raise NotReady(f"verifier {verifier.address} ended the stream without a finish")
            except (NotReady, Cancelled, Overloaded) as error:
                if isinstance(error, Overloaded) and not delivered:
                    raise
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
                earlier = stats
                wait_s = backoff.next_s()
                verifier = await self._next(verifier, min(reopen_by, deadline), wait_s)
                self._on_reopen()

    def _choose(self, lost: Verifier | None) -> Verifier:
        serving = [verifier for verifier in self._verifiers if verifier.is_serving]
        if not serving:
            raise NotReady(f"no verifier is serving ({self.states})")
        return min(serving, key=lambda one: (one is lost, one.running_count))

    async def _next(self, lost: Verifier, give_up_at: float, wait_s: float) -> Verifier:
        """Waits for a verifier, preferably another one than `lost`."""
        try:
            async with asyncio.timeout(max(0.0, give_up_at - time.monotonic())):
                await asyncio.sleep(wait_s)
                await self.ready()
                return self._choose(lost)
        except TimeoutError:
            raise NotReady(
                f"no verifier took the request up again within {self._reopen_timeout_s:g} s "
                f"({self.states})"
            ) from None

    def _on_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


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


def _total(earlier: SpeculationStats, stats: SpeculationStats) -> SpeculationStats:
    undrafted = dict(earlier.undrafted)
    for reason, count in stats.undrafted.items():
        undrafted[reason] = undrafted.get(reason, 0) + count
    positions = zip_longest(earlier.accepted_per_position, stats.accepted_per_position, fillvalue=0)
    return SpeculationStats(
        draft_count=earlier.draft_count + stats.draft_count,
        draft_token_count=earlier.draft_token_count + stats.draft_token_count,
        accepted_token_count=earlier.accepted_token_count + stats.accepted_token_count,
        accepted_per_position=[one + other for one, other in positions],
        undrafted=undrafted,
    )
