"""Makes a link longer: what a proposer says arrives later by a fixed time.

Simulates a network between services that share a machine, and slow proposers in tests.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence

from specgw.link import LinkListener, ProposerLink
from specgw.precise_timer import PreciseTimer
from specgw.types import AnyBlock, Hello, HelloAck, ProposeStep


class DelayedLink:
    """Implements `ProposerLink` and listens to the link that it delays. The order stays."""

    def __init__(self, inner: ProposerLink, delay_s: float) -> None:
        self.address = inner.address
        self._inner = inner
        self._delay_s = delay_s
        self._listener: LinkListener | None = None
        self._reports: queue.SimpleQueue[tuple[float, Callable[[], None]] | None]
        self._reports = queue.SimpleQueue()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._report, name="delayed link", daemon=True)

    def start(self, hello: Hello, listener: LinkListener) -> None:
        self._listener = listener
        self._thread.start()
        self._inner.start(hello, self)

    def send(self, step: ProposeStep, ack: HelloAck) -> None:
        self._inner.send(step, ack)

    def stop(self) -> None:
        self._is_stopped = True
        self._inner.stop()
        self._reports.put(None)

    async def wait_stopped(self) -> None:
        await self._inner.wait_stopped()

    def link_up(self, link: ProposerLink, ack: HelloAck) -> None:
        self._later(lambda listener: listener.link_up(self, ack))

    def link_down(self, link: ProposerLink, detail: str) -> None:
        self._later(lambda listener: listener.link_down(self, detail))

    def blocks_arrived(self, link: ProposerLink, blocks: Sequence[AnyBlock]) -> None:
        self._later(lambda listener: listener.blocks_arrived(self, blocks))

    def _later(self, report: Callable[[LinkListener], None]) -> None:
        listener = self._listener
        assert listener is not None, "the inner link reports to nobody before the start"
        self._reports.put((time.perf_counter() + self._delay_s, lambda: report(listener)))

    def _report(self) -> None:
        timer = PreciseTimer()
        while (due := self._reports.get()) is not None:
            at, report = due
            timer.wait_until(at)
            if not self._is_stopped:
                report()
