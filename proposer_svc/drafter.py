"""How blocks come about: the interface that each drafting method implements.

`proposer.py` keeps the sessions and speaks with verifiers; a drafter turns contexts into blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from proposer_svc.run_ahead import RunAhead
from proposer_svc.session_table import Session, SessionTable
from specgw.hidden import HiddenFormat
from specgw.types import (
    AcceptanceRule,
    BlocksAhead,
    ModelDescription,
    TokenProbs,
    UndraftedReason,
    VocabMappingSummary,
)


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter made for one session: draft tokens, or the reason for none.

    `rule` says how the tokens were chosen; under PROBS there is a law for each.
    After `ERROR` the session is dropped; it is opened anew if its verifier asks again.
    """

    session: Session
    token_ids: Sequence[int] = ()
    reason: UndraftedReason | None = None
    rule: AcceptanceRule = AcceptanceRule.ONE_HOT
    draft_probs: Sequence[TokenProbs] = ()
    was_ready: bool = False  # before it was asked for


class Drafter(Protocol):
    """One drafting method. Owns what it keeps for each session; called from one thread.

    Attributes:
        method: vLLM's name of the method.
        parallel_drafting: Whether all tokens of a block come from one forward pass.
        draft_sample_method: How draft tokens are chosen, as far as the method has a choice and the
            vocabulary leaves one; else empty or `greedy`. Each block says it of its own tokens.
        description: The draft model.
        max_num_batched_tokens: Most input rows of one forward pass.
        kv_capacity_tokens: Slots of the KV cache.
        num_passes: Forward passes of the draft model since it was loaded.
    """

    method: str
    parallel_drafting: bool
    description: ModelDescription
    max_num_batched_tokens: int
    kv_capacity_tokens: int
    num_passes: int

    @property
    def draft_sample_method(self) -> str: ...

    @property
    def hidden(self) -> HiddenFormat | None:
        """The target's hidden states that it needs in `Session.hidden`; None for none."""

    @property
    def vocab_mapping(self) -> VocabMappingSummary | None:
        """How the draft model's vocabulary is mapped; None if it is the target's."""

    @property
    def kv_used_tokens(self) -> int:
        """Slots of the KV cache in use, whole blocks counted."""

    def mismatches(self, target: ModelDescription) -> list[str]:
        """Returns one readable line for each reason why it cannot draft for a target model."""

    def num_context_ids(self, target: ModelDescription) -> int:
        """Returns how many of the target's leading token ids a context may have."""

    def open(self, session: Session) -> None:
        """Begins a session with the context that it has."""

    def commit(self, session: Session, token_ids: Sequence[int]) -> None:
        """Takes note of tokens that the session's context has just been extended by."""

    def take_ahead(self, session: Session, num_tokens: int) -> int:
        """Takes note that the verifier tests so many tokens of a block that was sent ahead.

        Returns how many of them are known.
        """

    def room(self, session: Session) -> int:
        """Returns the most draft tokens that may follow the context now."""

    def stop(self, session: Session) -> None:
        """Ends work on a session that has no room; it stays open."""

    def close(self, session: Session) -> None:
        """Frees all that it keeps for a session."""

    def enter_thread(self) -> None:
        """Called once by the thread that will call all else, if another one built it."""

    def has_work(self) -> bool:
        """Whether `step` has something to do."""

    @property
    def ahead(self) -> RunAhead:
        """What was drafted ahead."""

    def can_run_ahead(self) -> bool:
        """Whether `run_ahead` has something to do; never while `step` has."""

    def run_ahead(self) -> None:
        """Runs one forward pass on what sessions will need if all that was sent is accepted."""

    def blocks_ahead(self) -> Sequence[tuple[Session, BlocksAhead]]:
        """Returns what has been drafted ahead since the last call, as far as it is complete."""

    def step(self, table: SessionTable) -> Sequence[Draft]:
        """Runs one batch over all sessions; returns what is ready or failed."""
