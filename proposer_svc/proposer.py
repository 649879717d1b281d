"""The proposer's core: sessions of several verifiers, drafted together. One thread, no network.

Every answer it gives may be wrong without harm to the output: a verifier tests every token. Called
by the engine thread of `service.py`, or by an in-process link.
"""

import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from proposer_svc.batching import build_batch
from proposer_svc.draft_model import draft
from proposer_svc.session_table import Session, SessionTable
from specgw.budget import mask_rows
from specgw.config import EngineArgs
from specgw.engine.loading import draft_options, load_model
from specgw.engine.model_runner import ModelRunner
from specgw.errors import ConfigError, IncompatibleModels
from specgw.handshake import greeting_mismatches
from specgw.model_files import resolve_model
from specgw.slots import extra_slots, kv_lookahead
from specgw.types import (
    Commit,
    DraftBlock,
    Hello,
    HelloAck,
    ModelDescription,
    OpenSession,
    ProposeStep,
    UndraftedReason,
)
from specgw.vocab import tokenizer_size

logger = logging.getLogger(__name__)

METHOD = "draft_model"


@dataclass(frozen=True, slots=True)
class ProposerLimits:
    """What bounds a proposer's work. `tokenizer_size` is the number of ids that mean something."""

    max_draft_tokens: int
    max_sessions: int
    max_num_batched_tokens: int
    tokenizer_size: int | None = None


@dataclass(frozen=True, slots=True)
class ProposerLoad:
    """How much of a proposer is in use."""

    session_count: int = 0
    waiting_count: int = 0
    kv_used_tokens: int = 0


def build_proposer(args: EngineArgs) -> "DraftModelProposer":
    """Loads the draft model.

    Raises:
        ConfigError: without a speculative configuration, or if the model cannot be loaded.
    """
    if args.speculative_config is None:
        raise ConfigError(["speculative_config: a proposer needs one: it names the draft model"])
    settings = args.specgw.proposer
    limits = ProposerLimits(
        args.max_draft_tokens,
        settings.max_sessions,
        settings.max_num_batched_tokens,
        tokenizer_size(resolve_model(args.speculative_config.model)),
    )
    return DraftModelProposer(load_model(draft_options(args)), limits)


@dataclass(frozen=True, slots=True)
class _Verifier:
    """A connected verifier and what holds between it and this proposer."""

    verifier_id: str
    max_draft_tokens: int
    num_ids: int  # token ids that both models have
    num_draftable_ids: int

    def has_ids(self, token_ids: Sequence[int]) -> bool:
        return not token_ids or (min(token_ids) >= 0 and max(token_ids) < self.num_ids)


class DraftModelProposer:
    """Implements `specgw.link.Proposer` with a draft model. The caller's one thread owns it."""

    def __init__(self, runner: ModelRunner, limits: ProposerLimits) -> None:
        self.proposer_id = uuid.uuid4().hex
        self.runner = runner
        self.limits = limits
        self._verifiers: dict[str, _Verifier] = {}
        self._table = SessionTable(limits.max_sessions)
        self.offer = HelloAck(
            proposer_id=self.proposer_id,
            method=METHOD,
            draft_model=runner.description,
            max_draft_tokens=limits.max_draft_tokens,
            extra_slots_per_session=extra_slots(METHOD, limits.max_draft_tokens),
            max_sessions=limits.max_sessions,
            kv_lookahead_per_session=kv_lookahead(METHOD, limits.max_draft_tokens),
            max_num_batched_tokens=limits.max_num_batched_tokens,
            kv_capacity_tokens=runner.kv_cache.capacity_tokens,
        )
        self._mask_rows = mask_rows(self.offer.extra_slots_per_session)

    def connect(self, hello: Hello) -> HelloAck:
        mismatches = greeting_mismatches(hello, self.offer)
        mismatches += _vocabulary_mismatches(hello.target_model, self.runner.description)
        if mismatches:
            raise IncompatibleModels(mismatches)
        self.disconnect(hello.verifier_id)
        num_ids = min(hello.target_model.vocab_size, self.runner.vocab_size)
        self._verifiers[hello.verifier_id] = verifier = _Verifier(
            hello.verifier_id,
            max_draft_tokens=min(self.limits.max_draft_tokens, hello.max_draft_tokens),
            num_ids=num_ids,
            num_draftable_ids=min(num_ids, self.limits.tokenizer_size or num_ids),
        )
        return replace(self.offer, max_draft_tokens=verifier.max_draft_tokens)

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
            self._table.remove(verifier_id, session_id)
        return refusals

    def has_work(self) -> bool:
        return any(session.has_work for session in self._table)

    def step(self) -> list[tuple[str, DraftBlock]]:
        began = time.perf_counter()
        batch, starved = build_batch(
            self._table, self.limits.max_num_batched_tokens, self._mask_rows
        )
        blocks = [_refusal(session) for session in starved if session.num_wanted]
        for session in starved:
            session.forget_rows()
        answered = self._draft(batch)
        draft_s = time.perf_counter() - began
        return blocks + [self._answer(session, draft_s) for session in answered]

    def load(self) -> ProposerLoad:
        """Returns a snapshot."""
        return ProposerLoad(
            session_count=len(self._table),
            waiting_count=sum(session.num_wanted > 0 for session in self._table),
            kv_used_tokens=self.runner.kv_cache.used_tokens,
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
        length = len(opened.token_ids)
        self._table.add(
            Session(
                verifier_id,
                session_id,
                token_ids=list(opened.token_ids),
                cache=self.runner.kv_cache.new_sequence(),
                num_draftable_ids=verifier.num_draftable_ids,
                prefill_length=length if length <= self.runner.max_model_len else 0,
            )
        )

    def _commit(self, verifier: _Verifier, commit: Commit) -> UndraftedReason | None:
        """Appends to a session's context and asks for a block; returns why there will be none."""
        verifier_id, session_id = verifier.verifier_id, commit.session_id
        session = self._table.get(verifier_id, session_id)
        if session is None:
            return self._table.refusal(verifier_id, session_id)
        if len(session.token_ids) != commit.base_length:
            self._table.remove(verifier_id, session_id)
            return UndraftedReason.RESYNC
        if not verifier.has_ids(commit.token_ids):
            self._table.refuse(verifier_id, session_id, UndraftedReason.ERROR)
            return UndraftedReason.ERROR
        session.commit(commit.token_ids)
        # Every token of the context is fed, and every draft token but the last.
        room = self.runner.max_model_len - len(session.token_ids) + 1
        if room <= 0:
            session.forget_rows()
            return UndraftedReason.CONTEXT_LIMIT
        self._table.ask(session, min(commit.max_draft_tokens, verifier.max_draft_tokens, room))
        return None

    def _draft(self, batch: Sequence[tuple[Session, int]]) -> list[Session]:
        """Returns the sessions to answer. If drafting fails, they are all of the batch, dropped."""
        if not batch:
            return []
        try:
            return draft(self.runner, batch)
        except Exception:
            logger.exception("drafting failed", extra={"session_count": len(batch)})
        for session, _ in batch:
            session.draft_token_ids = []
            self._table.remove(session.verifier_id, session.session_id)
        return [session for session, _ in batch if session.num_wanted]

    def _answer(self, session: Session, draft_s: float) -> tuple[str, DraftBlock]:
        """Returns a session's block. Without a token in it, the session is dropped."""
        session.num_wanted = 0
        token_ids = tuple(session.draft_token_ids)
        reason = None if token_ids else UndraftedReason.ERROR
        if reason is not None:
            self._table.remove(session.verifier_id, session.session_id)
        length = len(session.token_ids)
        block = DraftBlock(session.session_id, length, token_ids, reason, draft_s)
        return session.verifier_id, block


def _refusal(session: Session) -> tuple[str, DraftBlock]:
    length, reason = len(session.token_ids), UndraftedReason.NO_MEMORY
    return session.verifier_id, DraftBlock(session.session_id, length, reason=reason)


def _vocabulary_mismatches(target: ModelDescription, draft_model: ModelDescription) -> list[str]:
    """Returns one readable line for each reason why the two models' ids cannot be shared."""
    mismatches = []
    if target.vocab_size < 1:
        mismatches.append(f"target_model.vocab_size: must be at least 1, got {target.vocab_size}")
    fingerprints = {target.vocab_fingerprint, draft_model.vocab_fingerprint} - {""}
    if len(fingerprints) > 1:
        mismatches.append(
            f"vocabulary: {_vocabulary(target)} is the target's, {_vocabulary(draft_model)} the "
            "draft's; the draft_model method needs the same tokens under the same ids"
        )
    return mismatches


def _vocabulary(model: ModelDescription) -> str:
    return f"that of {model.name} ({model.vocab_size} ids, sha256 {model.vocab_fingerprint[:12]})"
