"""Drafts by lookup in contexts and earlier answers: no model, no torch, any vocabulary."""

from collections.abc import Sequence

from proposer_svc.drafter import Draft
from proposer_svc.run_ahead import RunAhead
from proposer_svc.session_table import Session, SessionTable
from specgw.lookup.match import ContextLookup, Lookup
from specgw.lookup.method import describe_lookup
from specgw.types import BlocksAhead, ModelDescription, UndraftedReason


class LookupDrafter:
    """Implements `Drafter` with a lookup method. Its cache is the contexts themselves."""

    parallel_drafting = False
    draft_sample_method = ""
    num_passes = 0
    hidden = None
    vocab_mapping = None

    def __init__(
        self, lookup: Lookup, max_sessions: int, max_num_batched_tokens: int, max_model_len: int
    ) -> None:
        self.method = lookup.method
        self.description = describe_lookup(lookup.method, max_model_len)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.kv_capacity_tokens = max_sessions * max_model_len
        self.ahead = RunAhead()
        self._lookup = lookup
        self._contexts: dict[Session, ContextLookup] = {}

    @property
    def kv_used_tokens(self) -> int:
        return sum(len(session.token_ids) for session in self._contexts)

    def mismatches(self, target: ModelDescription) -> list[str]:
        if target.vocab_size < 1:
            return [f"target_model.vocab_size: must be at least 1, got {target.vocab_size}"]
        return []

    def num_context_ids(self, target: ModelDescription) -> int:
        return target.vocab_size

    def open(self, session: Session) -> None:
        # An older verifier does not say where the output begins: then it begins here.
        prompt_length = session.prompt_length or len(session.token_ids)
        self._contexts[session] = self._lookup.open(
            session.token_ids, prompt_length, is_private=bool(session.cache_salt)
        )

    def commit(self, session: Session, token_ids: Sequence[int]) -> None:
        """The context is the session's own list, and is read when a block is asked for."""

    def take_ahead(self, session: Session, num_tokens: int) -> int:
        return 0  # nothing is sent ahead

    def room(self, session: Session) -> int:
        return self.description.max_model_len - len(session.token_ids)

    def stop(self, session: Session) -> None:
        """Nothing is under way between two steps."""

    def close(self, session: Session) -> None:
        if context := self._contexts.pop(session, None):
            # One that is dropped comes again with all that it had, here or on another proposer.
            context.close(remember=session.has_ended)

    def has_work(self) -> bool:
        return any(session.num_wanted > 0 for session in self._contexts)

    def can_run_ahead(self) -> bool:
        return False

    def run_ahead(self) -> None:
        """A lookup takes no time that could be saved."""

    def blocks_ahead(self) -> Sequence[tuple[Session, BlocksAhead]]:
        return ()

    def enter_thread(self) -> None:
        """Any thread will do."""

    def step(self, table: SessionTable) -> list[Draft]:
        return [self._draft(session) for session in self._contexts if session.num_wanted > 0]

    def _draft(self, session: Session) -> Draft:
        token_ids = self._contexts[session].find(session.num_wanted).token_ids
        # An answer remembered of another target may hold ids that this one does not have.
        count = next((n for n, i in enumerate(token_ids) if i >= session.num_ids), len(token_ids))
        return Draft(session, token_ids[:count], None if count else UndraftedReason.EMPTY)
