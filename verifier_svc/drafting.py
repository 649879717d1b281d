"""Keeps sessions open on proposers, asks for blocks, and says how long a step may wait for them.

A round may be drafted here instead, by `local_drafts.py`: if it has a long match, or if no proposer
answers. Then the proposer gets the commits all the same, and nobody waits for it.

Nothing here can change an answer: a block is only an offer. The rules for waiting:

- A session waits for its block until a deadline taken from the proposer's recent answers.
- A proposer that misses deadlines in a row, or needs longer than a fully accepted block could save,
  is slow: it is asked no more, but for one session in a while that sees whether it recovered.
- A step that could start without some sessions waits for those whose block is due within one step;
  the less, the more blocks are ready when asked for (run-ahead) and the fewer sessions lack theirs.

How many tokens are asked for is `draft_length.py`'s business.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from specgw.addresses import is_local
from specgw.hidden import MAX_COMMIT_BYTES
from specgw.link import ProposerLink
from specgw.types import (
    AcceptanceRule,
    AnyBlock,
    BlocksAhead,
    Commit,
    DraftBlock,
    HelloAck,
    OpenSession,
    ProposerStatus,
    ProposeStep,
    TokenProbs,
    UndraftedReason,
)
from verifier_svc.draft_laws import are_laws
from verifier_svc.draft_length import DraftLength, FirstBlock, Opening, ProposerHistory
from verifier_svc.local_drafts import ADDRESS, LocalDrafts
from verifier_svc.session import Session

logger = logging.getLogger(__name__)

_AVERAGE_WEIGHT = 0.2  # of the newest value in a moving average
_DEADLINE_FACTOR = 4.0  # deadline of a block, in average answer times
_MIN_DEADLINE_S = 0.01
_MISSES_TO_SLOW = 3  # deadlines missed in a row
_RETRY_S = 1.0  # before a session that was refused asks again
_RETRY_AFTER_S = {UndraftedReason.RESYNC: 0.0, UndraftedReason.CONTEXT_LIMIT: math.inf}
_MIN_PROBE_S = 0.25  # before a slow proposer is asked again; doubles up to the maximum
_MAX_PROBE_S = 8.0
_EXPECTED_TOKENS = 64  # of an answer's output, while nothing is known of others

PROPOSER = "proposer"
"""The source of blocks that a proposer drafted; other sources are the verifier's own."""


def moving_average(average: float | None, value: float) -> float:
    """Returns the exponential moving average after one more value."""
    return value if average is None else average + _AVERAGE_WEIGHT * (value - average)


@dataclass(slots=True)
class _Peer:
    """One proposer as this verifier knows it, and what the next message to it will carry."""

    link: ProposerLink
    ack: HelloAck | None = None  # while it is connected
    offer: HelloAck | None = None  # the last one
    detail: str = "not connected yet"
    session_ids: set[int] = field(default_factory=set)
    open: list[OpenSession] = field(default_factory=list)
    commit: list[Commit] = field(default_factory=list)
    close: list[int] = field(default_factory=list)
    answer_s: float | None = None  # moving average of the time from asking to a block
    drafted_s: float | None = None  # the same of those blocks that were not ready when asked for
    ready_rate: float = 0.0  # moving average of how many were
    misses: int = 0
    is_slow: bool = False
    probe_at: float = 0.0
    probe_s: float = _MIN_PROBE_S
    history: ProposerHistory = field(default_factory=ProposerHistory)
    opened_at: float = -math.inf  # when sessions were opened last
    opened_rows: int = 0  # of their contexts
    num_opening: int = 0  # of them, that wait for their first block

    def take_step(self) -> ProposeStep:
        step = ProposeStep(tuple(self.open), tuple(self.commit), tuple(self.close))
        self.open.clear()
        self.commit.clear()
        self.close.clear()
        return step

    def miss(self, now: float) -> None:
        self.misses += 1
        if self.is_slow or self.misses >= _MISSES_TO_SLOW:
            self.mark_slow(now)

    def mark_slow(self, now: float) -> None:
        if not self.is_slow:
            logger.warning("proposer is slow", extra={"address": self.link.address})
        self.probe_s = min(self.probe_s * 2, _MAX_PROBE_S) if self.is_slow else _MIN_PROBE_S
        self.is_slow = True
        self.probe_at = now + self.probe_s

    def mark_fast(self) -> None:
        if self.is_slow:
            logger.info("proposer recovered", extra={"address": self.link.address})
        self.is_slow = False
        self.misses = 0

    def measure(self, answer_s: float, was_ready: bool) -> float:
        """Returns the average with one more answer; a slow proposer is judged by the newest."""
        average = None if self.is_slow else self.answer_s
        self.answer_s = moving_average(average, answer_s)
        self.ready_rate = moving_average(self.ready_rate, was_ready)
        if not was_ready:
            self.drafted_s = moving_average(self.drafted_s, answer_s)
        return self.answer_s

    @property
    def shares_cores(self) -> bool:
        """Whether it computes on the processor that the target computes on."""
        return self.history.shares_cores

    @property
    def longest_s(self) -> float | None:
        """The time from asking to a block that is not ready, or to any while there was none."""
        return self.answer_s if self.drafted_s is None else self.drafted_s


@dataclass(frozen=True, slots=True)
class _Group:
    """The running sessions at one time, as one proposer sees them."""

    at: float
    address: str = ""
    unopened_rows: int = 0  # contexts of those that are open nowhere
    tokens_to_come: float = 1.0  # of each, on average
    share_open: float = 1.0  # of those that decode


class Drafting:
    """Every session's dealings with proposers. One thread; the caller passes the time."""

    def __init__(
        self,
        links: Sequence[ProposerLink],
        vocab_size: int,
        draft_timeout_s: float,
        wait_for_slow_drafts: bool = False,
        on_answer: Callable[[float, float], None] = lambda answer_s, draft_s: None,
        length: DraftLength | None = None,
        local: LocalDrafts | None = None,
        uses_draft_probs: bool = False,
        target_device: str = "",
    ) -> None:
        self._local = local or LocalDrafts()
        self._peers = {link.address: _Peer(link) for link in links}
        self._vocab_size = vocab_size
        self._draft_timeout_s = draft_timeout_s
        self._wait_for_slow_drafts = wait_for_slow_drafts
        self.length = length or DraftLength(is_adaptive=False)
        self._local_history = ProposerHistory.of_lookup()
        self.step_s: float | None = None
        self._on_answer = on_answer
        self._uses_draft_probs = uses_draft_probs
        self._target_device = target_device
        self._output_length = float(_EXPECTED_TOKENS)  # moving average over answers
        self.running: Sequence[Session] = ()  # those that share the steps; the owner's own list
        self._group = _Group(-math.inf)
        self._measured: tuple[object, ...] = ()  # the newest answer

    @property
    def addresses(self) -> tuple[str, ...]:
        """The proposers configured, or what stands for the lookup that takes their place."""
        return tuple(self._peers) or (ADDRESS,) * (self._local.offer is not None)

    def status(self) -> tuple[ProposerStatus, ...]:
        """Returns a snapshot of every proposer."""
        if (offer := self._local.offer) is not None:
            return (ProposerStatus(ADDRESS, True, self._local.session_count, "", offer),)
        return tuple(
            ProposerStatus(
                address=address,
                is_connected=peer.ack is not None,
                session_count=len(peer.session_ids),
                detail="" if peer.ack else peer.detail,
                offer=peer.offer,
            )
            for address, peer in self._peers.items()
        )

    # Links come and go.

    def link_up(self, address: str, ack: HelloAck) -> None:
        """A proposer can be asked from now on."""
        peer = self._peers[address]
        peer.ack, peer.offer, peer.is_slow = ack, ack, False
        is_on_cpu = ack.draft_model.device == self._target_device == "cpu"
        peer.answer_s, peer.drafted_s, peer.ready_rate = None, None, 0.0
        peer.history = ProposerHistory.of(ack, shares_cores=is_on_cpu and is_local(address))
        logger.info("proposer connected", extra={"address": address, "method": ack.method})

    def link_down(self, address: str, detail: str, sessions: Mapping[int, Session]) -> None:
        """Every session open on the proposer is lost there, and waits no more."""
        peer = self._peers[address]
        if peer.ack is not None or peer.detail != detail:
            logger.warning("proposer unavailable", extra={"address": address, "detail": detail})
        peer.ack, peer.detail = None, detail
        peer.take_step()
        for session_id in peer.session_ids:
            session = sessions[session_id]
            session.draft.reset()
            session.draft.reason = UndraftedReason.UNAVAILABLE
            self._draft_locally(session, is_alone=True)
        peer.session_ids.clear()

    # A session's life.

    def open(self, session: Session, now: float) -> None:
        """Opens a session that is to be drafted on a proposer, so that both prefills overlap.

        Where they would only take turns on the same cores, the target's comes first.
        """
        peer = self._peer_for(session, now)
        if peer is None or peer.is_slow:
            return
        needs_prompt = peer.ack is not None and peer.ack.hidden is not None  # in hidden states
        if peer.shares_cores and not needs_prompt:
            return
        if self.length.best(self._room(session), session.history, peer.history) > 0:
            self._open_on(peer, session, now)

    def ask(self, session: Session, now: float) -> None:
        """Asks for the block that continues the session's context as it is now."""
        draft = session.draft
        draft.take()
        if self._room(session) <= 0:
            draft.reason = UndraftedReason.DISABLED
            return
        peer = self._peer_to_ask(session, now)
        if peer is None:
            self._draft_locally(session, is_alone=True)
            return
        num_tokens = self._num_wanted(peer, session, now)
        if num_tokens > 0 and not draft.is_open and not peer.shares_cores:
            # Even if a block is found here: its prefill costs nothing.
            self._open_on(peer, session, now)
        if not peer.is_slow and self._draft_locally(session, is_alone=False):
            if draft.is_open:
                self._commit(peer, session, 0)
        elif num_tokens > 0:
            self._ask(peer, session, num_tokens, now)
        else:
            draft.reason = UndraftedReason.NO_GAIN

    def count_round(self, session: Session, num_drafted: int, num_accepted: int) -> None:
        """Learns from what became of a session's block."""
        session_history, proposer_history = session.local_history, self._local_history
        peer = self._peers.get(session.draft.address)
        if peer is not None and session.draft.source == PROPOSER:
            session_history, proposer_history = session.history, peer.history
        for acceptance in (session_history.acceptance, proposer_history.acceptance):
            acceptance.observe(num_drafted, num_accepted)

    def close(self, session: Session) -> None:
        """Ends the session on its proposer."""
        if session.has_started:
            num_output = len(session.context) - len(session.request.prompt_token_ids)
            self._output_length = moving_average(self._output_length, num_output)
        peer = self._peers.get(session.draft.address)
        if peer is not None and session.draft.is_open:
            peer.close.append(session.session_id)
            peer.session_ids.discard(session.session_id)
        session.draft.reset()
        self._local.close(session)

    def needs_hidden(self, session: Session) -> bool:
        """Whether the session's proposer drafts from hidden states of the target."""
        peer = self._peers.get(session.draft.address) if session.draft.is_open else None
        return peer is not None and peer.ack is not None and peer.ack.hidden is not None

    def flush(self) -> None:
        """Sends each proposer everything gathered for it: one message, unless it is too large."""
        for peer in self._peers.values():
            if peer.ack is not None and (step := peer.take_step()):
                for part in _sendable(step):
                    peer.link.send(part, peer.ack)

    # Blocks arrive.

    def receive(self, address: str, block: AnyBlock, session: Session, now: float) -> None:
        """Takes a block if it continues the session's context, or may soon; drops it otherwise."""
        peer, draft = self._peers[address], session.draft
        if draft.address != address:
            return
        if isinstance(block, BlocksAhead):
            if block.block_size <= session.max_draft_tokens:  # else nobody asked for so many
                draft.keep_ahead(block)
            return
        if draft.asked_length != block.base_length:
            return
        asked = draft.asked_at, draft.asked_tokens, draft.is_first
        if self._is_new_answer(address, now, asked, block.reason):
            self._measure(peer, session, block, now)
        if peer.shares_cores and draft.is_first and draft.asked_at == peer.opened_at:
            self._count_opening(peer, session, block, now)
        draft.block = block.token_ids
        draft.asked_length = draft.deadline = None
        draft.is_first = False
        if block.reason not in (None, UndraftedReason.EMPTY):
            self._refused(peer, session, block.reason, now)
        elif block.base_length == len(session.context):
            draft.token_ids = self._usable(block.token_ids[: draft.asked_tokens])
            draft.probs = self._usable_probs(block, session)
            draft.source, draft.reason = PROPOSER, UndraftedReason.EMPTY
            if not draft.token_ids:
                self._draft_locally(session, is_alone=True)
        else:  # Late: the session went on without it.
            self.ask(session, now)

    # How long to wait.

    def expire(self, sessions: Iterable[Session], now: float) -> None:
        """Ends the waiting of sessions whose deadline has passed."""
        late = set()
        for session in sessions:
            draft = session.draft
            if draft.deadline is not None and draft.deadline <= now:
                draft.deadline = None
                late.add(draft.address)
                self._draft_locally(session, is_alone=True)
        for address in late:
            self._peers[address].miss(now)

    def due_at(self, session: Session) -> float:
        """When the block of a waiting session is expected."""
        return session.draft.asked_at + (self._peers[session.draft.address].longest_s or 0.0)

    def needs_the_cores(self, session: Session) -> bool:
        """Whether the block of a waiting session is drafted only while the target does not compute.

        Not if its proposer is slow: nobody waits for a probe of it but the session itself.
        """
        peer = self._peers[session.draft.address]
        return peer.shares_cores and not peer.is_slow

    def ready_rate(self, session: Session) -> float:
        """How many of the proposer's blocks are ready when they are asked for."""
        return self._peers[session.draft.address].ready_rate

    def _is_resting(self, peer: _Peer, now: float) -> bool:
        """Whether the proposer is too slow to be asked; lets one session through to probe it."""
        if not peer.is_slow or self._wait_for_slow_drafts:
            return False
        if now < peer.probe_at:
            return True
        peer.probe_at = now + self._draft_timeout_s
        return False

    def _wait_s(self, peer: _Peer, session: Session) -> float:
        longest_s = peer.longest_s
        if session.draft.is_first and peer.shares_cores:
            prefill_s = self.length.opening_s(len(session.context), peer.history)
            return self._draft_timeout_s + self.length.num_running * prefill_s
        if session.draft.is_first or longest_s is None or self._wait_for_slow_drafts:
            return self._draft_timeout_s
        wait_s = max(_MIN_DEADLINE_S, _DEADLINE_FACTOR * longest_s)
        return min(wait_s, self._draft_timeout_s)

    def _is_new_answer(self, *answer: object) -> bool:
        """Whether this is not the newest answer: blocks that come together are one."""
        is_new = answer != self._measured
        self._measured = answer
        return is_new

    def _measure(self, peer: _Peer, session: Session, block: DraftBlock, now: float) -> None:
        """Judges the proposer by one more answer; the first of a session holds its prefill."""
        draft, num_tokens = session.draft, session.draft.asked_tokens
        answer_s = now - draft.asked_at
        self._on_answer(answer_s, block.draft_s)
        if draft.is_first:
            return
        # On the target's cores all blocks wait for the prefills that were asked for with them.
        holds_prefill = peer.shares_cores and draft.asked_at <= peer.opened_at
        if block.token_ids and not holds_prefill:  # a refusal takes no drafting
            peer.history.observe(num_tokens, answer_s, self.length.num_running)
        saves_s = math.inf
        if self.step_s is not None and not self.length.is_adaptive:
            saves_s = num_tokens * self.step_s
        was_ready = bool(block.token_ids) and block.draft_s == 0
        if peer.measure(answer_s, was_ready) <= saves_s:
            peer.mark_fast()
        else:
            peer.mark_slow(now)

    def _count_opening(self, peer: _Peer, session: Session, block: DraftBlock, now: float) -> None:
        """Learns what the prefills of sessions that were opened together took, by the last of them.

        On the target's cores that is all that was done meanwhile, unless a block was late.
        """
        draft = session.draft
        peer.num_opening -= 1
        if draft.deadline is None:
            peer.opened_rows = 0  # they tell nothing
        if not block.token_ids:
            peer.opened_rows -= draft.known_length
        if peer.num_opening == 0 and peer.opened_rows > 0:
            first = FirstBlock(peer.opened_rows, draft.asked_tokens, now - draft.asked_at)
            peer.history.openings.append(first)

    # Without a proposer.

    def _draft_locally(self, session: Session, *, is_alone: bool) -> bool:
        """Drafts without a proposer, if something is found; returns whether it was."""
        if session.prediction is None and not self._local.has_lookup:
            return False
        draft, room = session.draft, self._room(session)
        if room <= 0:
            return False
        found = self._local.draft(session, room, is_alone=is_alone)
        token_ids = self._usable(found.token_ids)
        if not token_ids:
            return False
        num_tokens = self.length.choose(len(token_ids), session.local_history, self._local_history)
        draft.token_ids, draft.probs, draft.source = token_ids[:num_tokens], (), found.source
        draft.reason = UndraftedReason.EMPTY if num_tokens else UndraftedReason.NO_GAIN
        return num_tokens > 0

    def _room(self, session: Session) -> int:
        """Returns the most draft tokens that the session may have now."""
        return self.length.allowed(session.draft_room())

    # Which proposer.

    def _peer_to_ask(self, session: Session, now: float) -> _Peer | None:
        """Returns the proposer for the next block, or none and keeps the reason."""
        draft = session.draft
        if self._local.has_lookup and not self._peers:
            draft.reason = UndraftedReason.EMPTY
            return None
        peer = self._peer_for(session, now)
        if peer is None or peer.ack is None:
            return None
        if draft.asked_length is not None:
            draft.reason = UndraftedReason.LATE
            return None
        if self._is_resting(peer, now):
            draft.reason = UndraftedReason.UNAVAILABLE
            return None
        return peer

    def _peer_for(self, session: Session, now: float) -> _Peer | None:
        """Returns the session's proposer, or the one to open it on.

        That is the one that the request names while it is well, else the least loaded.
        """
        draft = session.draft
        current = self._peers.get(draft.address)
        if draft.is_open and current is not None:
            return current
        if now < draft.retry_at:
            return None
        wanted = session.request.proposer_address
        candidates = [peer for peer in self._peers.values() if peer.ack is not None]
        if not candidates:
            draft.reason = UndraftedReason.UNAVAILABLE
            return None
        return min(
            candidates,
            key=lambda peer: (peer.is_slow, peer.link.address != wanted, len(peer.session_ids)),
        )

    def _num_wanted(self, peer: _Peer, session: Session, now: float) -> int:
        """Returns how many tokens the proposer is to draft for the next round."""
        assert peer.ack is not None  # or it is not one to ask
        allowed = min(self._room(session), peer.ack.max_draft_tokens)
        opening, share = Opening(), 1.0
        if peer.shares_cores:  # all wait for it, those too that are not drafted for
            group, num_rows = self._group_at(now, peer, session), len(session.context)
            if session.draft.is_open:
                share = group.share_open
            else:
                all_rows = max(num_rows, group.unopened_rows)
                opening = Opening(num_rows, all_rows, group.tokens_to_come)
        return self.length.choose(allowed, session.history, peer.history, opening, share)

    def _group_at(self, now: float, peer: _Peer, session: Session) -> _Group:
        """Returns what the running sessions have in common, the same for all of a step."""
        address = peer.link.address
        if (self._group.at, self._group.address) != (now, address):
            running = [one for one in self.running if self._room(one) > 0] or [session]
            waiting = [s for s in running if not s.draft.is_open and s.draft.retry_at <= now]
            to_come = sum(map(self._tokens_to_come, running)) / len(running)
            decoding = [one.draft for one in running if one.has_started]
            num_here = sum(one.is_open and one.address == address for one in decoding)
            self._group = _Group(
                *(now, address),
                unopened_rows=sum(len(one.context) for one in waiting),
                tokens_to_come=max(1.0, to_come),
                share_open=num_here / len(decoding) if decoding else 1.0,
            )
        return self._group

    def _tokens_to_come(self, session: Session) -> int:
        """Returns what other answers had after so many tokens, or as many tokens again."""
        num_output = len(session.context) - len(session.request.prompt_token_ids)
        expected = max(int(self._output_length) - num_output, num_output)
        return min(expected, session.remaining_tokens)

    def _ask(self, peer: _Peer, session: Session, num_tokens: int, now: float) -> None:
        draft = session.draft
        if not draft.is_open:
            self._open_on(peer, session, now)
        found = draft.find_ahead(session.context)
        # A shorter one is begun there, and goes on when it is asked for.
        usable = self._usable(found[:num_tokens]) if len(found) >= num_tokens else ()
        if usable:
            self._take_ahead(peer, session, usable, now)
            return
        self._commit(peer, session, num_tokens)
        draft.asked_length = len(session.context)
        draft.asked_at, draft.asked_tokens = now, num_tokens
        draft.reason = UndraftedReason.LATE
        draft.deadline = now + self._wait_s(peer, session)

    def _take_ahead(
        self, peer: _Peer, session: Session, token_ids: Sequence[int], now: float
    ) -> None:
        """Takes a block that came before it was asked for."""
        draft, num_tokens = session.draft, len(token_ids)
        self._commit(peer, session, 0, num_taken=num_tokens)
        draft.block = draft.token_ids = token_ids
        draft.source, draft.reason = PROPOSER, UndraftedReason.EMPTY
        if self._is_new_answer(peer.link.address, now, num_tokens):
            peer.ready_rate = moving_average(peer.ready_rate, True)
            peer.history.observe(num_tokens, 0.0, self.length.num_running)

    def _commit(
        self, peer: _Peer, session: Session, num_tokens: int, *, num_taken: int = 0
    ) -> None:
        """Brings the proposer's context up to date and asks for a block of `num_tokens`, if any."""
        draft = session.draft
        draft.ahead.clear()
        missing = tuple(session.context[draft.known_length :])
        needed = peer.ack.hidden if peer.ack is not None else None
        hidden = draft.hidden.take(needed) if needed is not None else None
        base_length = draft.known_length
        peer.commit.append(
            Commit(session.session_id, base_length, missing, num_tokens, hidden, num_taken)
        )
        draft.known_length = len(session.context)

    def _open_on(self, peer: _Peer, session: Session, now: float) -> None:
        if peer.opened_at != now:
            peer.opened_at, peer.opened_rows, peer.num_opening = now, 0, 0
        peer.opened_rows += len(session.context)
        peer.num_opening += 1
        session.draft.reset(peer.link.address)
        session.draft.is_open = True
        session.draft.known_length = len(session.context)
        peer.session_ids.add(session.session_id)
        request = session.request
        peer.open.append(
            OpenSession(
                session.session_id,
                tuple(session.context),
                request.cache_salt,
                request.sampling_params.structured_outputs,
                len(request.prompt_token_ids),
                session.draft_sampling,
            )
        )

    def _refused(self, peer: _Peer, session: Session, reason: UndraftedReason, now: float) -> None:
        peer.session_ids.discard(session.session_id)
        if reason is not UndraftedReason.RESYNC:
            peer.close.append(session.session_id)
        session.draft.reset()
        session.draft.reason = reason
        session.draft.retry_at = now + _RETRY_AFTER_S.get(reason, _RETRY_S)
        self._draft_locally(session, is_alone=True)

    def _usable_probs(self, block: DraftBlock, session: Session) -> Sequence[TokenProbs]:
        """Returns the laws of a session's draft; none if it is tested as one-hot anyway."""
        token_ids = session.draft.token_ids
        if not self._uses_draft_probs or session.request.sampling_params.is_greedy:
            return ()
        if block.rule is not AcceptanceRule.PROBS or not token_ids:
            return ()
        laws = block.draft_probs[: len(token_ids)]
        return laws if are_laws(token_ids, laws, self._vocab_size) else ()

    def _usable(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Returns the leading tokens that are ids of the target's."""
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self._vocab_size):
            is_usable = [0 <= token_id < self._vocab_size for token_id in token_ids]
            return token_ids[: is_usable.index(False)]
        return token_ids


def _sendable(step: ProposeStep) -> Iterator[ProposeStep]:
    """Splits a step so that no part carries more than two commits' worth of hidden states."""
    part: list[Commit] = []
    opened, num_bytes = step.open, 0
    for commit in step.commit:
        size = len(commit.hidden.values) if commit.hidden is not None else 0
        if num_bytes + size > 2 * MAX_COMMIT_BYTES:
            yield ProposeStep(opened, tuple(part))
            opened, part, num_bytes = (), [], 0
        part.append(commit)
        num_bytes += size
    yield ProposeStep(opened, tuple(part), step.close)
