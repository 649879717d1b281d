"""The proposer's core: sessions of several verifiers, drafted together. One thread, no network.

Every answer it gives may be wrong without harm to the output: a verifier tests every token. Called
by the engine thread of `service.py`, or by an in-process link.
"""

import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from proposer_svc.drafter import Draft, Drafter
from proposer_svc.lookup import LookupDrafter
from proposer_svc.run_ahead import RunAheadCounts
from proposer_svc.session_table import Session, SessionTable
from specgw.config import EngineArgs
from specgw.errors import ConfigError, IncompatibleModels
from specgw.handshake import greeting_mismatches
from specgw.hidden import HiddenStates
from specgw.lookup.method import DEFAULT_MAX_MODEL_LEN, LOOKUP_METHODS, build_lookup
from specgw.slots import extra_slots, kv_lookahead
from specgw.types import (
    BlocksAhead,
    Commit,
    DraftBlock,
    Hello,
    HelloAck,
    OpenSession,
    ProposeStep,
    UndraftedReason,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProposerLoad:
    """How much of a proposer is in use."""

    session_count: int = 0
    waiting_count: int = 0
    kv_used_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RoundCounts:
    """Batches that made at least one block, and the draft model's forward passes in them."""

    round_count: int = 0
    pass_count: int = 0


def build_proposer(args: EngineArgs) -> "ProposerCore":
    """Loads what the configured method needs.

    Raises:
        ConfigError: without a speculative configuration, or if the model cannot be loaded.
    """
    if args.speculative_config is None:
        raise ConfigError(["speculative_config: a proposer needs one: it names the draft model"])
    is_lookup = args.speculative_config.method in LOOKUP_METHODS
    drafter = _lookup_drafter(args) if is_lookup else _load_model_drafter(args)
    return ProposerCore(drafter, args.max_draft_tokens, args.specgw.proposer.max_sessions)


def _load_model_drafter(args: EngineArgs) -> Drafter:
    from proposer_svc.model_drafter import load_model_drafter  # takes torch along

    return load_model_drafter(args)


def _lookup_drafter(args: EngineArgs) -> Drafter:
    config, settings = args.speculative_config, args.specgw.proposer
    assert config is not None
    return LookupDrafter(
        build_lookup(config),
        settings.max_sessions,
        settings.max_num_batched_tokens,
        config.max_model_len or args.max_model_len or DEFAULT_MAX_MODEL_LEN,
    )


@dataclass(frozen=True, slots=True)
class _Verifier:
    """A connected verifier and what holds between it and this proposer."""

    verifier_id: str
    max_draft_tokens: int
    num_ids: int  # ids that a context may have
    takes_blocks_ahead: bool = False

    def has_ids(self, token_ids: Sequence[int]) -> bool:
        return not token_ids or (min(token_ids) >= 0 and max(token_ids) < self.num_ids)


class ProposerCore:
    """Implements `specgw.link.Proposer` with a drafter. The caller's one thread owns it."""

    def __init__(self, drafter: Drafter, max_draft_tokens: int, max_sessions: int) -> None:
        self._drafter = drafter
        self._verifiers: dict[str, _Verifier] = {}
        self._table = SessionTable(max_sessions, drafter.close)
        self.rounds = RoundCounts()  # so far; replaced, never changed
        self.taken_token_count = 0  # draft tokens of blocks that were sent ahead and taken
        slots = drafter.method, max_draft_tokens, drafter.parallel_drafting
        self.offer = HelloAck(
            proposer_id=uuid.uuid4().hex,
            method=drafter.method,
            draft_model=drafter.description,
            max_draft_tokens=max_draft_tokens,
            extra_slots_per_session=extra_slots(*slots),
            max_sessions=max_sessions,
            kv_lookahead_per_session=kv_lookahead(*slots),
            max_num_batched_tokens=drafter.max_num_batched_tokens,
            kv_capacity_tokens=drafter.kv_capacity_tokens,
            draft_sample_method=drafter.draft_sample_method,
            hidden=drafter.hidden,
            vocab_mapping=drafter.vocab_mapping,
        )

    def connect(self, hello: Hello) -> HelloAck:
        mismatches = greeting_mismatches(hello, self.offer)
        mismatches += self._drafter.mismatches(hello.target_model)
        if mismatches:
            raise IncompatibleModels(mismatches)
        self.disconnect(hello.verifier_id)
        max_draft_tokens = min(self.offer.max_draft_tokens, hello.max_draft_tokens)
        num_ids = self._drafter.num_context_ids(hello.target_model)
        self._verifiers[hello.verifier_id] = _Verifier(
            hello.verifier_id, max_draft_tokens, num_ids, hello.takes_blocks_ahead
        )
        return replace(self.offer, max_draft_tokens=max_draft_tokens)

    def disconnect(self, verifier_id: str) -> None:
        self._verifiers.pop(verifier_id, None)
        self._table.remove_verifier(verifier_id)

    def apply(self, verifier_id: str, step: ProposeStep) -> list[DraftBlock]:
        verifier = self._verifiers[verifier_id]
        for opened in step.open:
            self._open(verifier, opened)
        refusals = []
        for commit in step.commit:
            reason = self._commit(verifier, commit)
            if reason is not None and commit.max_draft_tokens > 0:
                length = commit.base_length + len(commit.token_ids)
                refusals.append(DraftBlock(commit.session_id, length, reason=reason))
        for session_id in step.close:
            self._table.end(verifier_id, session_id)
        return refusals

    def enter_thread(self) -> None:
        """Called once by the thread that will own the core, if another one built it."""
        self._drafter.enter_thread()

    def has_work(self) -> bool:
        return self._drafter.has_work()

    @property
    def ahead(self) -> RunAheadCounts:
        """What was drafted beyond blocks so far."""
        return self._drafter.ahead.counts

    def can_run_ahead(self) -> bool:
        """Whether there is something to draft that nobody has asked for yet."""
        return self._drafter.can_run_ahead()

    def run_ahead(self) -> None:
        """Drafts it, one forward pass at a time: what has arrived meanwhile comes first."""
        self._drafter.run_ahead()

    def blocks_ahead(self) -> list[tuple[str, BlocksAhead]]:
        """Returns what has been drafted ahead since the last call, for those who take it."""
        return [
            (session.verifier_id, blocks)
            for session, blocks in self._drafter.blocks_ahead()
            if self._verifiers[session.verifier_id].takes_blocks_ahead
        ]

    def step(self) -> list[tuple[str, DraftBlock]]:
        began, num_passes = time.perf_counter(), self._drafter.num_passes
        drafts = self._drafter.step(self._table)
        draft_s = time.perf_counter() - began
        if any(draft.token_ids for draft in drafts):
            num_passes = self._drafter.num_passes - num_passes
            rounds = self.rounds
            self.rounds = RoundCounts(rounds.round_count + 1, rounds.pass_count + num_passes)
        blocks = [_block(draft, draft_s) for draft in drafts if draft.session.num_wanted]
        for draft in drafts:
            draft.session.num_wanted = 0
            if draft.reason is UndraftedReason.ERROR:
                self._table.remove(draft.session.verifier_id, draft.session.session_id)
        return blocks

    def load(self) -> ProposerLoad:
        """Returns a snapshot."""
        return ProposerLoad(
            session_count=len(self._table),
            waiting_count=sum(session.num_wanted > 0 for session in self._table),
            kv_used_tokens=self._drafter.kv_used_tokens,
        )

    def _open(self, verifier: _Verifier, opened: OpenSession) -> None:
        verifier_id, session_id = verifier.verifier_id, opened.session_id
        self._table.remove(verifier_id, session_id)
        if not opened.token_ids or not verifier.has_ids(opened.token_ids):
            self._table.refuse(verifier_id, session_id, UndraftedReason.ERROR)
            return
        if self._table.is_full:
            self._table.refuse(verifier_id, session_id, UndraftedReason.NO_SLOT)
            return
        session = Session(
            *(verifier_id, session_id, list(opened.token_ids), verifier.num_ids),
            cache_salt=opened.cache_salt,
            sampling=opened.sampling,
            structured_outputs=opened.structured_outputs,
            prompt_length=opened.prompt_length,
        )
        try:
            self._drafter.open(session)
        except Exception:  # one session's trouble is nobody else's
            logger.exception("session cannot be drafted for", extra={"session_id": session_id})
            self._drafter.close(session)
            self._table.refuse(verifier_id, session_id, UndraftedReason.ERROR)
        else:
            self._table.add(session)

    def _commit(self, verifier: _Verifier, commit: Commit) -> UndraftedReason | None:
        """Appends to a session's context and asks for a block; returns why there will be none."""
        verifier_id, session_id = verifier.verifier_id, commit.session_id
        session = self._table.get(verifier_id, session_id)
        if session is None:
            return self._table.refusal(verifier_id, session_id)
        if len(session.token_ids) != commit.base_length:
            self._table.remove(verifier_id, session_id)
            return UndraftedReason.RESYNC
        if not verifier.has_ids(commit.token_ids) or not self._can_take(commit.hidden):
            self._table.refuse(verifier_id, session_id, UndraftedReason.ERROR)
            return UndraftedReason.ERROR
        session.token_ids.extend(commit.token_ids)
        session.hidden = commit.hidden
        try:
            self._drafter.commit(session, commit.token_ids)
            room = self._drafter.room(session)
        except Exception:
            logger.exception("commit failed", extra={"session_id": session_id})
            self._table.refuse(verifier_id, session_id, UndraftedReason.ERROR)
            return UndraftedReason.ERROR
        if room <= 0:
            session.num_wanted = 0
            self._drafter.stop(session)
            return UndraftedReason.CONTEXT_LIMIT
        if commit.num_taken:
            self.taken_token_count += self._drafter.take_ahead(session, commit.num_taken)
            self._table.use(session)
        self._table.ask(session, min(commit.max_draft_tokens, verifier.max_draft_tokens, room))
        return None

    def _can_take(self, hidden: HiddenStates | None) -> bool:
        """Whether hidden states are those agreed on. There may be none: the drafter decides."""
        needed = self._drafter.hidden
        return hidden is None or (needed is not None and hidden.has_format(needed))


def _block(draft: Draft, draft_s: float) -> tuple[str, DraftBlock]:
    session = draft.session
    length = len(session.token_ids)
    block = DraftBlock(
        *(session.session_id, length, draft.token_ids, draft.reason),
        draft_s=0.0 if draft.was_ready else draft_s,
        rule=draft.rule,
        draft_probs=draft.draft_probs,
    )
    return session.verifier_id, block
