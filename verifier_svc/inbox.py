"""What other threads tell the engine thread, in the order they told it."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from specgw.grammar import GrammarMatcher
from specgw.link import ProposerLink
from specgw.lookup.prediction import Prediction
from specgw.types import AnyBlock, GenerateRequest, HelloAck


@dataclass(frozen=True, slots=True)
class Submit:
    """A request to answer; it has passed `check_request`."""

    session_id: int
    request: GenerateRequest
    seed: int
    grammar: GrammarMatcher | None = None
    prediction: Prediction | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for the session any more."""

    session_id: int


@dataclass(frozen=True, slots=True)
class LinkUp:
    """A proposer can be asked."""

    address: str
    ack: HelloAck


@dataclass(frozen=True, slots=True)
class LinkDown:
    """A proposer is lost, with every session on it."""

    address: str
    detail: str


@dataclass(frozen=True, slots=True)
class Blocks:
    """A proposer has drafted. `arrived_at` is the inbox's clock at that moment."""

    address: str
    blocks: Sequence[AnyBlock]
    arrived_at: float


@dataclass(frozen=True, slots=True)
class Stop:
    """The loop shall end."""


Event = Submit | Cancel | LinkUp | LinkDown | Blocks | Stop


class Inbox:
    """The scheduler's only door. All but `waiting` and `wait` may be called from any thread.

    It is the `LinkListener` of every proposer link.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._num_requests = 0  # in `_events`
        self._counting = threading.Lock()

    @property
    def num_requests(self) -> int:
        """Requests that the loop has not taken yet."""
        return self._num_requests

    def submit(
        self,
        session_id: int,
        request: GenerateRequest,
        seed: int,
        grammar: GrammarMatcher | None = None,
        prediction: Prediction | None = None,
    ) -> None:
        """Brings a request; `grammar` stands at the start of its output, `prediction` at the end.

        They are built by the caller, since that may take longer than a step.
        """
        with self._counting:
            self._num_requests += 1
        self._events.put(Submit(session_id, request, seed, grammar, prediction))

    def cancel(self, session_id: int) -> None:
        """Frees a session before the next step. Harmless if it has ended."""
        self._events.put(Cancel(session_id))

    def stop(self) -> None:
        """Ends the loop after the step in progress."""
        self._events.put(Stop())

    def link_up(self, link: ProposerLink, ack: HelloAck) -> None:
        self._events.put(LinkUp(link.address, ack))

    def link_down(self, link: ProposerLink, detail: str) -> None:
        self._events.put(LinkDown(link.address, detail))

    def blocks_arrived(self, link: ProposerLink, blocks: Sequence[AnyBlock]) -> None:
        self._events.put(Blocks(link.address, blocks, self._clock()))

    def waiting(self) -> Iterator[Event]:
        """Yields what has come so far, and not what comes meanwhile."""
        for _ in range(self._events.qsize()):
            yield self._taken(self._events.get_nowait())

    def wait(self, timeout_s: float | None) -> Event | None:
        """Returns the next event, or none after `timeout_s`; waits for ever if that is none."""
        try:
            return self._taken(self._events.get(timeout=timeout_s))
        except queue.Empty:
            return None

    def _taken(self, event: Event) -> Event:
        if isinstance(event, Submit):
            with self._counting:
                self._num_requests -= 1
        return event
