"""What each method's requests take of a proposer and of a verifier, and what a step can hold."""

import pytest

from specgw.budget import (
    PREFILL_CHUNK,
    Budget,
    decode_rows,
    proposer_capacity,
    proposer_part,
    verifier_capacity,
    verifier_part,
)
from specgw.slots import SLOTS_TABLE, SlotsRow, extra_slots, kv_lookahead
from specgw.types import HelloAck, ModelDescription, VerifierInfo

K = 5
MODEL = ModelDescription("m", "", 10, "", 10_000, "", "")
EXPECTED = {  # algorithm: step rows on the proposer, KV tokens for a context of 100
    "EAGLE3": (1, 100 + K),
    "P-EAGLE": (K, 100 + K),
    "DFlash": (1 + K, 101 + K),
    "DSpark": (K, 100 + K),
    "MTP": (1, 100 + K),
    "N-gram": (1, 100),
    "Draft model": (2, 100 + K),
    "PARD": (1 + K, 100 + K),
}


@pytest.mark.parametrize("row", SLOTS_TABLE, ids=lambda row: row.algorithm)
def test_a_request_takes_what_the_table_says(row: SlotsRow) -> None:
    lookahead = kv_lookahead(row.method, K, row.parallel_drafting)
    rows = extra_slots(row.method, K, row.parallel_drafting)
    offer = HelloAck("p", row.method, MODEL, K, rows, 8, lookahead, 2048, 1000)
    verifier = VerifierInfo("v", MODEL, 8, 2048, 1000, K, lookahead)

    step_tokens, kv_tokens = EXPECTED[row.algorithm]
    assert proposer_part(offer, 100) == Budget(1, step_tokens, kv_tokens)
    assert verifier_part(verifier, 100, K) == Budget(1, 1 + K, kv_tokens)
    assert verifier_part(verifier, 100, 0) == Budget(1, 1, 100)
    left = 2048 - PREFILL_CHUNK
    assert proposer_capacity(offer) == verifier_capacity(verifier) == Budget(8, left, 1000)


@pytest.mark.parametrize(
    ("max_num_batched_tokens", "rows"),
    [(2048, 2048 - PREFILL_CHUNK), (100, 50), (8, 5), (5, 5)],
)
def test_decoding_leaves_room_for_prefill_but_one_session_can_always_decode(
    max_num_batched_tokens: int, rows: int
) -> None:
    assert decode_rows(max_num_batched_tokens, rows_per_session=5) == rows
