"""Drafts that the verifier finds by itself, in microseconds: by lookup, or in a prediction.

`drafting.py` asks for one before it asks a proposer, and again where a proposer does not answer.
Tokens found so are as good as any: whether they are used is decided before the target sees them.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from specgw.config import EngineArgs
from specgw.lookup import prediction
from specgw.lookup.match import ContextLookup, Lookup
from specgw.lookup.method import build_lookup, describe_lookup
from specgw.types import HelloAck
from verifier_svc.session import Session

ADDRESS = "local"
"""Stands for the verifier's own lookup where proposers are told by address."""


@dataclass(frozen=True, slots=True)
class LocalDraft:
    """Draft tokens and where they were found; empty if nowhere."""

    token_ids: Sequence[int] = ()
    source: str = ""


NO_DRAFT = LocalDraft()


class LocalDrafts:
    """Every session's lookup. One thread owns it.

    Attributes:
        offer: What the lookup is to gateways if it takes the proposer's place.
    """

    def __init__(
        self,
        lookup: Lookup | None = None,
        *,
        min_match_length: int = 1,
        offer: HelloAck | None = None,
    ) -> None:
        """Takes a lookup method, if there is one.

        Args:
            lookup: The method.
            min_match_length: Shortest match that is used in place of a proposer's block.
            offer: Given if there is no proposer besides.
        """
        self.offer = offer
        self._lookup = lookup
        self._min_match_length = min_match_length
        self._contexts: dict[int, ContextLookup] = {}

    @property
    def has_lookup(self) -> bool:
        """Whether sessions are drafted for without a proposer."""
        return self._lookup is not None

    @property
    def session_count(self) -> int:
        """Sessions that were drafted for and have not ended."""
        return len(self._contexts)

    def draft(self, session: Session, max_tokens: int, *, is_alone: bool) -> LocalDraft:
        """Returns up to `max_tokens` tokens that may follow the session's context.

        Args:
            session: Any session whose context is not drafted beyond `max_tokens`.
            max_tokens: Most tokens, at least 1.
            is_alone: Whether no proposer will draft; then any match will do.
        """
        if session.prediction is not None and (predicted := session.prediction.draft(max_tokens)):
            return LocalDraft(predicted, prediction.METHOD)
        if self._lookup is None:
            return NO_DRAFT
        match = self._context(session, self._lookup).find(max_tokens)
        if not match.token_ids or (not is_alone and match.length < self._min_match_length):
            return NO_DRAFT
        return LocalDraft(match.token_ids, self._lookup.method)

    def close(self, session: Session) -> None:
        """Forgets a session, but for what the method remembers of answers."""
        if context := self._contexts.pop(session.session_id, None):
            context.close()

    def _context(self, session: Session, lookup: Lookup) -> ContextLookup:
        context = self._contexts.get(session.session_id)
        if context is None:
            context = self._contexts[session.session_id] = lookup.open(
                session.context,
                len(session.request.prompt_token_ids),
                is_private=bool(session.request.cache_salt),
            )
        return context


def build_local_drafts(args: EngineArgs, max_model_len: int) -> LocalDrafts:
    """Returns what the configuration asks for: a fallback, or the method if no proposer runs it."""
    if (fallback := args.specgw.fallback_proposer) is not None:
        return LocalDrafts(build_lookup(fallback), min_match_length=fallback.min_match_length)
    config = args.speculative_config
    if config is None or not args.drafts_locally:
        return LocalDrafts()
    offer = HelloAck(
        proposer_id=uuid.uuid4().hex,
        method=config.method,
        draft_model=describe_lookup(config.method, max_model_len),
        max_draft_tokens=config.num_speculative_tokens,
        extra_slots_per_session=0,
        max_sessions=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        kv_capacity_tokens=args.max_num_seqs * max_model_len,
    )
    return LocalDrafts(build_lookup(config), offer=offer)
