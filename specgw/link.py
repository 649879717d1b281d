"""The link between a verifier and a proposer: the interface, and the one inside a process.

The other implementation, over gRPC, is `verifier_svc/proposer_link.py`. Both pass
`tests/conformance/test_link.py`. Tests inject faults by implementing these interfaces
(`tests/scripted_proposers.py`).
"""

import logging
from collections.abc import Sequence
from typing import Protocol

from specgw.addresses import IN_PROCESS
from specgw.errors import IncompatibleModels, SpecgwError
from specgw.handshake import greeting_mismatches
from specgw.types import AnyBlock, DraftBlock, Hello, HelloAck, ProposeStep

logger = logging.getLogger(__name__)


class LinkListener(Protocol):
    """Where a link reports to. May be called from any thread; never blocks."""

    def link_up(self, link: "ProposerLink", ack: HelloAck) -> None:
        """Sessions can be opened; none is open on the other side."""

    def link_down(self, link: "ProposerLink", detail: str) -> None:
        """Every session on the other side is lost. `detail` is for people."""

    def blocks_arrived(self, link: "ProposerLink", blocks: Sequence[AnyBlock]) -> None:
        """Blocks were drafted. They may be late, foreign or malformed."""


class ProposerLink(Protocol):
    """One verifier's way to one proposer. Reconnects by itself until stopped."""

    address: str

    def start(self, hello: Hello, listener: LinkListener) -> None:
        """Begins to connect. Reports to `listener` from then on."""

    def send(self, step: ProposeStep, ack: HelloAck) -> None:
        """Hands a step over for the connection that `ack` began; dropped if that one has ended.

        Neither blocks nor raises.
        """

    def stop(self) -> None:
        """Ends the link for good. Nothing is reported afterwards."""

    async def wait_stopped(self) -> None:
        """Returns when a stopped link holds no resource any more."""


class Proposer(Protocol):
    """The core of a proposer: sessions of several verifiers, one thread, no clock, no network."""

    def connect(self, hello: Hello) -> HelloAck:
        """Greets a verifier.

        Raises:
            IncompatibleModels: with one line for each mismatch.
        """

    def disconnect(self, verifier_id: str) -> None:
        """Drops every session of a verifier."""

    def apply(self, verifier_id: str, step: ProposeStep) -> Sequence[DraftBlock]:
        """Applies a step and returns the blocks that can be answered at once: the refusals."""

    def step(self) -> Sequence[tuple[str, DraftBlock]]:
        """Runs one batch over all sessions; returns finished blocks with their verifier's id."""

    def has_work(self) -> bool:
        """Whether `step` has something to do."""


class InProcessLink:
    """Runs a proposer in the caller's thread: draft and target take turns on the same cores."""

    def __init__(self, proposer: Proposer, address: str = IN_PROCESS) -> None:
        self.address = address
        self._proposer = proposer
        self._hello: Hello | None = None
        self._ack: HelloAck | None = None
        self._listener: LinkListener | None = None

    def start(self, hello: Hello, listener: LinkListener) -> None:
        self._hello, self._listener = hello, listener
        self._connect(hello, listener)

    def send(self, step: ProposeStep, ack: HelloAck) -> None:
        if self._hello is None or self._listener is None or self._ack is not ack:
            return
        try:
            blocks = self._propose(self._hello.verifier_id, step)
        except Exception as error:
            logger.exception("proposer failed")
            self._proposer.disconnect(self._hello.verifier_id)
            self._listener.link_down(self, str(error))
            self._connect(self._hello, self._listener)
        else:
            if blocks:
                self._listener.blocks_arrived(self, blocks)

    def stop(self) -> None:
        if self._hello is not None:
            self._proposer.disconnect(self._hello.verifier_id)
            self._hello = self._listener = self._ack = None

    async def wait_stopped(self) -> None:
        pass

    def _connect(self, hello: Hello, listener: LinkListener) -> None:
        try:
            self._ack = self._proposer.connect(hello)
            if mismatches := greeting_mismatches(hello, self._ack):
                raise IncompatibleModels(mismatches)
        except SpecgwError as error:
            self._ack = None
            listener.link_down(self, str(error))
        else:
            listener.link_up(self, self._ack)

    def _propose(self, verifier_id: str, step: ProposeStep) -> Sequence[AnyBlock]:
        blocks = list(self._proposer.apply(verifier_id, step))
        while self._proposer.has_work():
            blocks += [block for _, block in self._proposer.step()]
        return blocks
