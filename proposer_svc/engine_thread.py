"""The one thread that owns the proposer's core: steps of all verifiers in, blocks out.

Knows no gRPC: a verifier is a `BlockStream`, which lives on the event loop. What arrives while a
batch runs waits in the inbox and joins the next one.
"""

import asyncio
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from proposer_svc.metrics import ProposerMetrics
from proposer_svc.proposer import ProposerCore, ProposerLoad
from specgw.errors import Cancelled, NotReady, SpecgwError
from specgw.telemetry import name_thread
from specgw.types import AnyBlock, Hello, HelloAck, ProposeStep

logger = logging.getLogger(__name__)


class BlockStream(Protocol):
    """A verifier's end of a connection. Called on the event loop; never blocks."""

    verifier_id: str

    def deliver(self, blocks: Sequence[AnyBlock], queue_depth: int) -> None:
        """Sends blocks."""

    def step_applied(self) -> None:
        """Makes room for one more step."""

    def end(self, error: SpecgwError | None) -> None:
        """Ends the connection after what was delivered."""


class EngineThread:
    """Runs a core. Its public methods are called on the event loop that it was built on."""

    def __init__(self, proposer: ProposerCore, metrics: ProposerMetrics) -> None:
        self.load = ProposerLoad()  # as of the last step; replaced, never changed
        self._proposer = proposer
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        # From here on, the engine thread's own.
        self._streams: dict[str, BlockStream] = {}
        self._applied: list[BlockStream] = []  # one entry for each step since the last batch
        self._outbox: list[Callable[[], None]] = []
        self._is_stopped = False

    @property
    def inbox_length(self) -> int:
        """What has arrived and waits for the current batch."""
        return self._inbox.qsize()

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread after its current batch."""
        self._inbox.put(self._stop)
        await asyncio.to_thread(self._thread.join)

    async def connect(self, hello: Hello, stream: BlockStream) -> HelloAck:
        """Greets a verifier. The connection that it had before, if any, ends.

        Raises:
            IncompatibleModels: with one line for each mismatch.
        """
        answer: asyncio.Future[HelloAck] = self._loop.create_future()
        self._inbox.put(functools.partial(self._connect, hello, stream, answer))
        return await answer

    def submit(self, stream: BlockStream, step: ProposeStep) -> None:
        """Hands a step over. It is dropped if the stream is no longer connected."""
        self._inbox.put(functools.partial(self._apply, stream, step))

    def disconnect(self, stream: BlockStream) -> None:
        """Frees a verifier's sessions, unless it has connected anew meanwhile."""
        self._inbox.put(functools.partial(self._disconnect, stream))

    def _run(self) -> None:
        name_thread("engine")
        self._proposer.enter_thread()
        while not self._is_stopped:
            try:
                self._run_batch()
            except Exception:
                logger.exception("engine failed; every verifier must connect again")
                self._end_all(SpecgwError("the proposer failed; see its log"))

    def _run_batch(self) -> None:
        self._drain_inbox()
        self._flush()  # refusals need not wait for the batch
        blocks = self._step()
        self.load = self._proposer.load()
        self._metrics.set_load(self.load)
        self._metrics.count_ahead(self._proposer.ahead)
        for stream in self._applied:
            self._post(stream.step_applied)
        self._applied.clear()
        for verifier_id, drafted in blocks.items():
            self._deliver(self._streams[verifier_id], drafted)
        self._flush()

    def _drain_inbox(self) -> None:
        """Takes in what arrived; waits for something to arrive if nothing else is to be done."""
        wait = not (self._proposer.has_work() or self._proposer.can_run_ahead())
        while True:
            try:
                self._inbox.get(block=wait)()
            except queue.Empty:
                return
            wait = False

    def _step(self) -> dict[str, list[AnyBlock]]:
        """Runs one batch over all verifiers; returns the blocks of each."""
        blocks: dict[str, list[AnyBlock]] = {}
        if self._proposer.has_work():
            began = time.perf_counter()
            for verifier_id, block in self._proposer.step():
                blocks.setdefault(verifier_id, []).append(block)
            self._metrics.observe_step(time.perf_counter() - began)
            self._metrics.count_rounds(self._proposer.rounds)
        elif self._proposer.can_run_ahead():
            self._proposer.run_ahead()
        for verifier_id, ahead in self._proposer.blocks_ahead():
            blocks.setdefault(verifier_id, []).append(ahead)
        return blocks

    def _connect(
        self, hello: Hello, stream: BlockStream, answer: "asyncio.Future[HelloAck]"
    ) -> None:
        try:
            ack = self._proposer.connect(hello)
        except SpecgwError as error:
            self._post(_settle, answer, error)
            return
        if (former := self._streams.get(hello.verifier_id)) is not None:
            self._post(former.end, Cancelled("the verifier has connected again"))
        self._streams[hello.verifier_id] = stream
        self._post(_settle, answer, ack)
        logger.info("verifier connected", extra={"verifier_id": hello.verifier_id})

    def _apply(self, stream: BlockStream, step: ProposeStep) -> None:
        self._applied.append(stream)
        if self._streams.get(stream.verifier_id) is stream:
            refusals = self._proposer.apply(stream.verifier_id, step)
            self._metrics.count_taken(self._proposer.taken_token_count)
            if refusals:
                self._deliver(stream, refusals)

    def _disconnect(self, stream: BlockStream) -> None:
        if self._streams.get(stream.verifier_id) is stream:
            del self._streams[stream.verifier_id]
            self._proposer.disconnect(stream.verifier_id)
            logger.info("verifier disconnected", extra={"verifier_id": stream.verifier_id})

    def _stop(self) -> None:
        self._is_stopped = True
        self._end_all(NotReady("the proposer has stopped"))

    def _end_all(self, error: SpecgwError) -> None:
        for stream in list(self._streams.values()):
            self._post(stream.end, error)
            self._disconnect(stream)
        self._flush()

    def _deliver(self, stream: BlockStream, blocks: Sequence[AnyBlock]) -> None:
        self._metrics.count_blocks(blocks)
        self._post(stream.deliver, blocks, self.load.waiting_count)

    def _post(self, callback: Callable[..., None], *args: Any) -> None:
        self._outbox.append(functools.partial(callback, *args))

    def _flush(self) -> None:
        """Hands everything posted to the event loop, which wakes up once."""
        if self._outbox:
            self._loop.call_soon_threadsafe(_call_all, self._outbox)
            self._outbox = []


def _call_all(callbacks: Sequence[Callable[[], None]]) -> None:
    for callback in callbacks:
        callback()


def _settle(answer: "asyncio.Future[HelloAck]", result: HelloAck | SpecgwError) -> None:
    if answer.done():  # the caller has gone
        return
    if isinstance(result, SpecgwError):
        answer.set_exception(result)
    else:
        answer.set_result(result)
