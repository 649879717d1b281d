"""What one request takes of a service, and what a service has: sequences, step rows, KV tokens.

The arithmetic of K and of the slot tables (`slots.py`) in one place: the gateway's ledger, the
verifier's scheduler and the proposer's batches all count with it. Pure numbers.
"""

from dataclasses import dataclass

from specgw.config import SpeculativeConfig
from specgw.types import HelloAck, VerifierInfo

# Prefill rows that decoding leaves room for in a step, and the most prefill rows beside a block
# that is nearly ready.
PREFILL_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Budget:
    """An amount of each kind of room: a service's capacity, or one request's part of it."""

    sequences: int = 0
    step_tokens: int = 0
    kv_tokens: int = 0

    def __add__(self, other: "Budget") -> "Budget":
        return Budget(
            self.sequences + other.sequences,
            self.step_tokens + other.step_tokens,
            self.kv_tokens + other.kv_tokens,
        )

    def __sub__(self, other: "Budget") -> "Budget":
        return Budget(
            self.sequences - other.sequences,
            self.step_tokens - other.step_tokens,
            self.kv_tokens - other.kv_tokens,
        )

    def fits(self, capacity: "Budget") -> bool:
        """Whether no kind exceeds the capacity."""
        return (
            self.sequences <= capacity.sequences
            and self.step_tokens <= capacity.step_tokens
            and self.kv_tokens <= capacity.kv_tokens
        )


NOTHING = Budget()


@dataclass(frozen=True, slots=True)
class DraftSlots:
    """What drafting takes of one request's services beyond the request's own tokens."""

    extra_rows: int = 0  # input rows on the proposer, per step
    kv_lookahead: int = 0  # KV cache slots, on each side


def draft_slots(config: SpeculativeConfig | None) -> DraftSlots:
    """Returns the configured method's row of the slot tables."""
    if config is None:
        return DraftSlots()
    return DraftSlots(config.extra_slots, config.kv_lookahead)


def mask_rows(extra_slots_per_session: int) -> int:
    """Returns the rows that drafting adds to those a session has not fed yet.

    The first extra slot is that of the newest token, which is among them already.
    """
    return max(0, extra_slots_per_session - 1)


def decode_rows(max_num_batched_tokens: int, rows_per_session: int) -> int:
    """Returns the rows of a step that decoding may take, so that one prefill chunk has room.

    One session may always decode, and where rows are few, prefill is left half of them.
    """
    chunk = min(PREFILL_CHUNK, max_num_batched_tokens // 2)
    return max(rows_per_session, max_num_batched_tokens - chunk)


def verifier_capacity(verifier: VerifierInfo) -> Budget:
    """Returns what a verifier has for decoding requests."""
    return Budget(
        verifier.max_num_seqs,
        decode_rows(verifier.max_num_batched_tokens, 1 + verifier.max_draft_tokens),
        verifier.kv_capacity_tokens,
    )


def proposer_capacity(proposer: HelloAck) -> Budget:
    """Returns what a proposer has for decoding requests."""
    return Budget(
        proposer.max_sessions,
        decode_rows(proposer.max_num_batched_tokens, 1 + proposer.extra_slots_per_session),
        proposer.kv_capacity_tokens,
    )


def verifier_part(verifier: VerifierInfo, context_limit: int, num_draft_tokens: int) -> Budget:
    """Returns what one request takes of a verifier.

    Args:
        verifier: Whose part it is.
        context_limit: Prompt and output together, at most.
        num_draft_tokens: Most draft tokens per round; 0 if there is no drafting.
    """
    lookahead = verifier.kv_lookahead_per_session if num_draft_tokens else 0
    # Drafts never reach beyond the model's context: rounds are cut before.
    kv_tokens = min(context_limit + lookahead, verifier.target_model.max_model_len)
    return Budget(1, 1 + num_draft_tokens, kv_tokens)


def proposer_part(proposer: HelloAck, context_limit: int) -> Budget:
    """Returns what one request takes of a proposer."""
    kv_tokens = context_limit + proposer.kv_lookahead_per_session
    return Budget(
        1,
        1 + proposer.extra_slots_per_session,
        min(kv_tokens, proposer.draft_model.max_model_len),
    )
