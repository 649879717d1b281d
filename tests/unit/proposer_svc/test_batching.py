"""Which rows a pass feeds, and how much room drafting takes beside them."""

import pytest
import torch

from proposer_svc.batching import build_batch
from proposer_svc.draft_rows import DraftRows
from proposer_svc.draft_vocabulary import SharedContext, SharedVocabulary
from proposer_svc.session_table import Session
from specgw.engine.kv_cache import KVCache
from specgw.types import ModelDescription

NUM_SESSIONS = 4
MODEL = ModelDescription("model", "arch", 10, "", 64, "float32", "cpu")


@pytest.fixture
def sessions() -> list[DraftRows]:
    """Sessions that have two rows to feed each and want a block."""
    kv_cache = KVCache(1, 1, 1, 1024, torch.float32, torch.device("cpu"))
    return [
        DraftRows(
            Session("v", number, [1, 2], num_ids=10, num_wanted=4),
            SharedVocabulary(MODEL),
            SharedContext([1, 2]),
            kv_cache.new_sequence(),
            num_choices=10,
            prefill_length=0,
            max_length=64,
        )
        for number in range(NUM_SESSIONS)
    ]


@pytest.mark.parametrize(
    ("rows", "mask_rows", "batched"), [(8, 0, 4), (8, 3, 1), (10, 3, 2), (20, 3, 4), (4, 3, 0)]
)
def test_rows_that_drafting_adds_count_as_well(
    sessions: list[DraftRows], rows: int, mask_rows: int, batched: int
) -> None:
    """As in vLLM, a session whose extra rows do not fit is skipped."""
    batch, starved = build_batch(sessions, 0, rows, mask_rows)

    complete = [session for session, count in batch if count == session.num_missing]
    assert len(complete) == batched
    assert sum(count for _, count in batch) + mask_rows * len(complete) <= rows
    assert starved == []
