"""The verifier's loop: drain, batch, forward, verify, commit.

One thread runs it and owns every session. Other threads only put events into `inbox`; outputs go
out through `deliver`, one call a step. Knows no network.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from specgw.budget import decode_rows
from specgw.engine.kv_cache import OutOfBlocks
from specgw.errors import Overloaded, SpecgwError
from specgw.types import (
    BlocksAhead,
    DraftBlock,
    GenerateOutput,
    ProposerStatus,
    Round,
    SpeculationStats,
)
from verifier_svc.draft_length import profile_steps
from verifier_svc.drafting import Drafting, moving_average
from verifier_svc.inbox import Blocks, Cancel, Event, Inbox, LinkDown, LinkUp, Stop, Submit
from verifier_svc.prefill_budget import PrefillBudget
from verifier_svc.session import Session, open_session
from verifier_svc.verifier import Verified, Verifier, VerifyRows

logger = logging.getLogger(__name__)

_MAX_FAILED_IN_A_ROW = 3

Deliver = Callable[[Sequence[tuple[int, GenerateOutput | SpecgwError]]], None]


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the scheduler keeps to."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting_requests: int
    max_draft_tokens: int
    max_prefill_tokens_beside_decodes: int | None = None  # None for a measured one


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The scheduler's state after a step, safe to read from any thread."""

    running_count: int
    waiting_count: int
    kv_used_tokens: int
    step_count: int
    output_token_count: int
    preemption_count: int
    prefix_query_count: int  # tokens of started requests
    prefix_hit_count: int  # those of them whose rows were cached
    proposers: tuple[ProposerStatus, ...]
    speculation: SpeculationStats
    drafts_by_source: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step's figures, for metrics."""

    num_rows: int
    forward_s: float  # the target's forward pass
    sample_s: float  # what was made of its logits
    wait_s: float  # since the step before, for blocks


class Scheduler:
    """Continuous batching: sessions whose drafts have arrived beside sessions without any."""

    def __init__(
        self,
        verifier: Verifier,
        drafting: Drafting,
        limits: SchedulerLimits,
        deliver: Deliver,
        on_step: Callable[[StepReport], None] = lambda report: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._verifier = verifier
        self._drafting = drafting
        self._limits = limits
        self._deliver = deliver
        self._on_step = on_step
        self._clock = clock
        self.inbox = Inbox(clock)
        self._sessions: dict[int, Session] = {}
        self._running: list[Session] = []  # oldest first
        drafting.running = self._running
        self._waiting: deque[Session] = deque()
        self._postponed: list[Event] = []  # that came during the step
        self._outputs: list[tuple[int, GenerateOutput | SpecgwError]] = []
        self._prefill_budget = PrefillBudget(limits.max_prefill_tokens_beside_decodes)
        self._speculation = SpeculationStats()
        self._drafts_by_source: Counter[str] = Counter()
        self._step_count = self._output_token_count = self._preemption_count = 0
        self._prefix_query_count = self._prefix_hit_count = 0
        self._num_failed_in_a_row = 0
        self._wait_s = 0.0
        self._is_stopping = False
        self.snapshot = self._take_snapshot()

    def run(self) -> None:
        """Steps until stopped; sleeps while there is nothing to do."""
        self.calibrate()
        while not self._is_stopping:
            self.step()
        for session in list(self._sessions.values()):
            self._end(session)  # the model may outlive the loop

    def calibrate(self) -> None:
        """Measures the target's steps, if the number of draft tokens is to follow from them."""
        if self._drafting.length.is_adaptive and self._drafting.addresses:
            self._drafting.length.step_cost = profile_steps(self._verifier.runner, self._clock)

    def step(self) -> None:
        """One round for every session that is ready."""
        self._drain()
        self._drafting.flush()  # lets the proposer work while the target does
        batch = self._build_batch()
        if batch:
            verified = self._verify(batch)
            self._take_meanwhile()
            self._commit(batch, verified)
        self._flush()

    # 1. Drain the inbox and wait until a step can start.

    def _drain(self) -> None:
        while True:
            self._take_waiting()
            if self._is_stopping:
                return
            now = self._clock()
            self._drafting.expire(self._running, now)
            self._start_waiting(now)
            start_at = self._start_at(now)
            if start_at is not None and start_at <= now:
                return
            self._flush()
            last = self.inbox.wait(None if start_at is None else start_at - now)
            if start_at is not None:
                self._wait_s += self._clock() - now
            if last is not None:
                self._take(last)

    def _start_at(self, now: float) -> float | None:
        """When the next step may start: none while there is nothing to do."""
        awaiting = [s for s in self._running if s.draft.deadline is not None]
        if len(awaiting) < len(self._running):
            share = len(awaiting) / len(self._running)
            return max((self._worth_waiting(s, share, now) for s in awaiting), default=now)
        return min((s.draft.deadline or now for s in awaiting), default=None)

    def _worth_waiting(self, session: Session, share: float, now: float) -> float:
        """Until when a step that could start waits for one more session's block.

        Joining this step saves the session a step of its own, and those that go in step with it
        one each round, so that is what it may cost. Where blocks are usually ready when asked for,
        sessions meet again by themselves in the next step: then it is only this one that counts,
        and what all who wait would lose is weighed against what those lose who are waited for,
        which are that share of all. A block that is drafted on the target's cores comes only while
        no step is running.
        """
        if self._drafting.needs_the_cores(session):
            return session.draft.deadline or now
        ready_rate = self._drafting.ready_rate(session)
        most_s = (self._drafting.step_s or 0.0) * (1 - ready_rate * (1 - share))
        due_at = self._drafting.due_at(session)
        return due_at + most_s / 2 if due_at <= now + most_s else now

    def _take_waiting(self) -> None:
        postponed, self._postponed = self._postponed, []
        for event in (*postponed, *self.inbox.waiting()):
            self._take(event)

    def _take_meanwhile(self) -> None:
        """Takes in what came during the step, before its commits: these may find their blocks.

        What became of the drafts that the step was about waits until they are counted.
        """
        for event in self.inbox.waiting():
            match event:
                case Blocks():
                    ahead = [block for block in event.blocks if isinstance(block, BlocksAhead)]
                    asked = [block for block in event.blocks if isinstance(block, DraftBlock)]
                    self._take(replace(event, blocks=ahead))
                    if asked:
                        self._postponed.append(replace(event, blocks=asked))
                case LinkUp() | LinkDown():
                    self._postponed.append(event)
                case _:
                    self._take(event)

    def _take(self, event: Event) -> None:
        match event:
            case Submit():
                self._admit(event)
            case Cancel(session_id):
                if session_id in self._sessions:
                    self._end(self._sessions[session_id])
            case LinkUp(address, ack):
                self._drafting.link_up(address, ack)
            case LinkDown(address, detail):
                self._drafting.link_down(address, detail, self._sessions)
            case Blocks(address, blocks, arrived_at):
                for block in blocks:
                    if session := self._sessions.get(block.session_id):
                        self._drafting.receive(address, block, session, arrived_at)
            case Stop():
                self._is_stopping = True

    def _admit(self, event: Submit) -> None:
        runner = self._verifier.runner
        if len(self._waiting) >= self._limits.max_waiting_requests + self._free_seqs:
            message = (
                f"{len(self._sessions)} requests run or wait already, of at most "
                f"{self._limits.max_num_seqs} and {self._limits.max_waiting_requests}"
            )
            self._outputs.append((event.session_id, Overloaded(message)))
            return
        session = open_session(
            event.session_id,
            event.request,
            event.seed,
            max_draft_tokens=self._limits.max_draft_tokens,
            max_model_len=runner.max_model_len,
            eos_token_ids=runner.eos_token_ids,
            processors=self._verifier.processors_for(event.request, event.grammar),
            prediction=event.prediction,
        )
        self._sessions[session.session_id] = session
        self._waiting.append(session)

    def _start_waiting(self, now: float) -> None:
        """Lets waiting sessions run, first come first served, as slots and KV blocks allow.

        A session starts with room for its context and a first round, or it would soon be preempted.
        """
        self._count_running()
        while self._waiting and self._free_seqs > 0:
            session = self._waiting[0]
            num_rows = len(session.context) + max(session.draft_room(), 0)
            pool = self._verifier.runner.kv_cache
            try:
                session.cache = pool.begin(session.reusable_blocks(), num_rows)
            except OutOfBlocks:
                return
            self._count_reused(session)
            self._running.append(self._waiting.popleft())
            self._drafting.open(session, now)

    def _count_running(self) -> None:
        """Tells how many sessions share the steps, those that are about to start among them."""
        num_sessions = len(self._sessions) + self.inbox.num_requests
        num_running = min(num_sessions, self._limits.max_num_seqs)
        self._drafting.length.num_running = num_running

    def _count_reused(self, session: Session) -> None:
        """Counts what a session begins with, as vLLM does: not again when it was preempted."""
        if session.num_reused is None and self._verifier.runner.kv_cache.has_prefix_cache:
            session.num_reused = session.num_cached
            self._prefix_query_count += len(session.context)
            self._prefix_hit_count += session.num_cached

    # 2. Build one ragged batch.

    @property
    def _free_seqs(self) -> int:
        return self._limits.max_num_seqs - len(self._running)

    def _build_batch(self) -> list[tuple[Session, VerifyRows]]:
        """Takes decoding sessions first, then prefill chunks, oldest first, as rows allow.

        Every decoding session gets a row before any gets more for its drafts, and drafts leave room
        for one prefill chunk. Beside decoding sessions, prefill takes no more rows than they bear.
        """
        ready = [(s, s.is_decoding) for s in self._running if s.draft.deadline is None]
        ready.sort(key=lambda one: not one[1])
        budget = self._limits.max_num_batched_tokens
        num_decoding = sum(is_decoding for _, is_decoding in ready)
        max_drafts = self._max_drafts_each(num_decoding, len(ready), budget)
        prefill_budget = self._max_prefill_rows(ready, budget) if num_decoding < len(ready) else 0
        batch: dict[int, tuple[Session, VerifyRows]] = {}
        for session, is_decoding in ready:
            room = budget if is_decoding else min(budget, prefill_budget)
            if room and session.cache is not None:  # None: preempted meanwhile
                rows = self._reserve(session, room, max_drafts, batch)
                if rows is not None:
                    batch[session.session_id] = session, rows
                    budget -= rows.num_rows
                    prefill_budget -= 0 if is_decoding else rows.num_rows
        return list(batch.values())

    def _max_prefill_rows(self, ready: Sequence[tuple[Session, bool]], budget: int) -> int:
        if any(session.is_decoding for session in self._running):
            decoding = [session for session, is_decoding in ready if is_decoding]
            num_rows = sum(1 + len(session.draft.token_ids) for session in decoding)
            return self._prefill_budget.rows(budget, num_rows)
        return budget

    def _max_drafts_each(self, num_decoding: int, num_ready: int, budget: int) -> int:
        """Returns the draft tokens that leave every session its row, and prefills a chunk."""
        if num_decoding < num_ready:
            budget = decode_rows(budget, 1 + self._limits.max_draft_tokens)
        return max(budget - num_decoding, 0) // max(num_decoding, 1)

    def _reserve(
        self,
        session: Session,
        budget: int,
        max_drafts: int,
        batch: dict[int, tuple[Session, VerifyRows]],
    ) -> VerifyRows | None:
        """Makes room in the KV cache for a session's rows, at the cost of younger sessions.

        Drafts are given up first: they are worth less than another session's cache.
        """
        rows = self._rows(session, budget, max_drafts)
        while True:
            try:
                rows.cache.reserve(rows.cache.length + rows.num_rows)
            except OutOfBlocks:
                if rows.draft_token_ids:
                    rows = rows._replace(draft_token_ids=(), draft_probs=())
                    continue
                youngest = self._running[-1]
                self._preempt(youngest)
                batch.pop(youngest.session_id, None)
                if youngest is session:
                    return None
            else:
                return rows

    def _rows(self, session: Session, budget: int, max_drafts: int) -> VerifyRows:
        assert session.cache is not None  # running sessions have one
        first = session.cache.length
        missing = session.context[first : first + budget]
        is_complete = first + len(missing) == len(session.context)
        draft, draft_probs = session.draft.take() if is_complete else ((), ())
        num_drafts = min(max_drafts, budget - len(missing))
        return VerifyRows(
            cache=session.cache,
            context_length=len(session.context),
            missing_token_ids=missing,
            draft_token_ids=draft[:num_drafts],
            draft_probs=draft_probs[:num_drafts],
            is_complete=is_complete,
            sampling_params=session.request.sampling_params,
            seed=session.seed,
            processors=session.processors,
            scored_token_ids=session.tokens_to_score(first + len(missing)),
            wants_hidden=self._drafting.needs_hidden(session),
        )

    def _preempt(self, session: Session) -> None:
        """Takes a session's cache away; it waits in front and is recomputed from its context."""
        self._running.remove(session)
        self._waiting.appendleft(session)
        session.draft.take()
        self._release(session)
        self._preemption_count += 1
        logger.info("session preempted", extra={"request_id": session.request.request_id})

    # 3. Run the target model and verify.

    def _verify(self, batch: Sequence[tuple[Session, VerifyRows]]) -> list[Verified] | None:
        began = self._clock()
        try:
            verified = self._verifier.verify([rows for _, rows in batch])
        except Exception:
            logger.exception("step failed", extra={"session_count": len(batch)})
            for session, _ in batch:
                self._outputs.append((session.session_id, SpecgwError("the target model failed")))
                self._end(session)
            self._num_failed_in_a_row += 1
            if self._num_failed_in_a_row == _MAX_FAILED_IN_A_ROW:  # it will not recover by itself
                self._flush()
                raise
            return None
        self._num_failed_in_a_row = 0
        self._report(batch, self._clock() - began)
        return verified

    def _report(self, batch: Sequence[tuple[Session, VerifyRows]], step_s: float) -> None:
        self._step_count += 1
        num_rows, forward_s = sum(rows.num_rows for _, rows in batch), self._verifier.forward_s
        wait_s, self._wait_s = self._wait_s, 0.0
        self._on_step(StepReport(num_rows, forward_s, step_s - forward_s, wait_s))
        missing = [len(rows.missing_token_ids) for _, rows in batch]
        num_prompt_rows = sum(count for count in missing if count > 1)
        self._prefill_budget.observe(num_prompt_rows, num_rows - num_prompt_rows, step_s, wait_s)
        if all(count == 1 for count in missing):
            self._drafting.step_s = moving_average(self._drafting.step_s, step_s)
            self._drafting.length.observe_step(num_rows, step_s)

    # 4. Commit the output tokens.

    def _commit(
        self, batch: Sequence[tuple[Session, VerifyRows]], verified: Sequence[Verified] | None
    ) -> None:
        self._count_running()
        now = self._clock()
        for (session, rows), result in zip(batch, verified or (), strict=False):
            if session.session_id not in self._sessions:  # cancelled meanwhile
                continue
            if result.prompt_logprobs:
                session.prompt_logprobs.extend(result.prompt_logprobs)
            if result.error is not None:
                self._outputs.append((session.session_id, result.error))
                self._end(session)
                continue
            if result.hidden is not None:
                session.draft.hidden.append(rows.cache.length - len(result.hidden), result.hidden)
            if rows.is_complete:
                self._commit_session(session, rows, result, now)
            else:
                session.publish_rows()

    def _commit_session(
        self, session: Session, rows: VerifyRows, result: Verified, now: float
    ) -> None:
        kept, finish_reason, stop_token_id = session.append(result.output_token_ids)
        session.publish_rows()
        round = self._count(session, rows, min(result.num_accepted, len(kept)))
        self._output_token_count += len(kept)
        output = GenerateOutput(
            token_ids=kept,
            finish_reason=finish_reason,
            stop_token_id=stop_token_id,
            seed=None if session.has_started else session.seed,
            round=round,
            logprobs=tuple(result.logprobs[: len(kept)]),
            prompt_logprobs=() if session.has_started else tuple(session.prompt_logprobs),
            cached_token_count=None if session.has_started else session.num_reused,
        )
        session.has_started = True
        self._outputs.append((session.session_id, output))
        if finish_reason is None:
            self._drafting.ask(session, now)
            return
        if session.is_synthetic:
            logger.warning("output is synthetic", extra={"request_id": session.request.request_id})
        self._end(session)

    def _count(self, session: Session, rows: VerifyRows, num_accepted: int) -> Round:
        num_drafted = len(rows.draft_token_ids)
        if num_drafted:
            self._drafting.count_round(session, num_drafted, num_accepted)
            self._drafts_by_source[session.draft.source] += 1
            round = Round(num_drafted, num_accepted, is_synthetic=self._verifier.is_synthetic)
            session.is_synthetic |= round.is_synthetic
        else:
            round = Round(undrafted=session.draft.reason if session.has_started else None)
        self._speculation.count(round)
        return round

    def _end(self, session: Session) -> None:
        """Frees everything a session holds, here and on its proposer."""
        del self._sessions[session.session_id]
        if session in self._running:
            self._running.remove(session)
        else:
            self._waiting.remove(session)
        self._release(session)
        self._drafting.close(session)

    def _release(self, session: Session) -> None:
        if session.cache is not None:
            session.cache.release()
            session.cache = None

    # 5. Tell callers and proposers.

    def _flush(self) -> None:
        """Sends commits first, so that drafts are under way while callers get their outputs."""
        self._drafting.flush()
        self.snapshot = self._take_snapshot()
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._deliver(outputs)

    def _take_snapshot(self) -> Snapshot:
        return Snapshot(
            running_count=len(self._running),
            waiting_count=len(self._waiting),
            kv_used_tokens=self._verifier.runner.kv_cache.used_tokens,
            step_count=self._step_count,
            output_token_count=self._output_token_count,
            preemption_count=self._preemption_count,
            prefix_query_count=self._prefix_query_count,
            prefix_hit_count=self._prefix_hit_count,
            proposers=self._drafting.status(),
            speculation=self._speculation.copy(),
            drafts_by_source=dict(self._drafts_by_source),
        )
