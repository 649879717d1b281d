"""Which draft tokens begin the next block when a context is another vocabulary's."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from proposer_svc.draft_rows import DraftRows
from proposer_svc.draft_vocabulary import SharedContext, SharedVocabulary
from proposer_svc.session_table import Session
from specgw.engine.kv_cache import KVCache
from specgw.types import ModelDescription, TokenProbs

MODEL = ModelDescription("model", "arch", 10, "", 64, "float32", "cpu")
LAW = TokenProbs(np.array([3], np.int32), np.array([1.0], np.float32))


class SpelledContext(SharedContext):
    """Reads any commit as the next ids given, however many tokens of the target those are."""

    def __init__(self, token_ids: list[int], following: list[int]) -> None:
        super().__init__(token_ids)
        self._following = following

    def extend(self, committed: Sequence[int]) -> tuple[int, list[int]]:
        start = len(self.token_ids)
        self.token_ids += self._following
        return start, []


def ahead_of_a_block(following: list[int], *, has_laws: bool) -> DraftRows:
    """Returns a session whose block was 3, and which has gone on with 4, 5 and 6."""
    kv_cache = KVCache(1, 1, 1, 64, torch.float32, torch.device("cpu"))
    rows = DraftRows(
        Session("v", 1, [1, 2], num_ids=10),
        SharedVocabulary(MODEL),
        SpelledContext([1, 2], following),
        kv_cache.new_sequence(),
        num_choices=10,
        prefill_length=0,
        max_length=64,
        draft_token_ids=[3, 4, 5, 6],
        draft_probs=[LAW] * 4 if has_laws else [],
        num_sent=1,
    )
    rows.cache.reserve(5)
    rows.cache.length = 5
    return rows


@pytest.mark.parametrize("has_laws", [False, True])
def test_what_was_drafted_ahead_begins_the_next_block(has_laws: bool) -> None:
    rows = ahead_of_a_block([3, 4], has_laws=has_laws)

    rows.extend([30, 40])

    assert rows.draft_token_ids == [5, 6]
    assert len(rows.draft_probs) == 2 * has_laws


@pytest.mark.parametrize(("has_laws", "left"), [(False, [6]), (True, [])])
def test_a_token_drawn_for_another_place_is_not_offered(has_laws: bool, left: list[int]) -> None:
    """The target's two tokens are three here: what follows was drawn with another's numbers."""
    rows = ahead_of_a_block([3, 4, 5], has_laws=has_laws)

    rows.extend([30, 40])

    assert rows.draft_token_ids == left
    assert rows.cache.length == (5 if left else 4)
