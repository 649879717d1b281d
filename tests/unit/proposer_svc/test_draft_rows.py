"""Which draft tokens begin the next block when a context is another vocabulary's."""

from collections.abc import Sequence

import pytest
import torch

from proposer_svc.draft_rows import DraftRows
from proposer_svc.draft_sampling import DraftToken
from proposer_svc.draft_vocabulary import SharedContext, SharedVocabulary
from proposer_svc.drafted import Drafted
from proposer_svc.session_table import Session
from specgw.engine.kv_cache import KVCache
from specgw.types import ModelDescription

MODEL = ModelDescription("model", "arch", 10, "", 64, "float32", "cpu")


class SpelledContext(SharedContext):
    """Reads any commit as the next ids given, however many tokens of the target those are."""

    def __init__(self, token_ids: list[int], following: list[int]) -> None:
        super().__init__(token_ids)
        self._following = following

    def extend(self, committed: Sequence[int]) -> tuple[int, list[int]]:
        start = len(self.token_ids)
        self.token_ids += self._following
        return start, []


def ahead_of_a_block(following: list[int]) -> DraftRows:
    """Returns a session whose block was 3, and which has guessed 4 and gone on with 5 and 6."""
    kv_cache = KVCache(1, 1, 1, 64, torch.float32, torch.device("cpu"))
    rows = DraftRows(
        Session("v", 1, [1, 2], num_ids=10),
        SharedVocabulary(MODEL),
        SpelledContext([1, 2], following),
        kv_cache.new_sequence(),
        num_choices=10,
        prefill_length=0,
        max_length=64,
        drafted=Drafted([3], [], [()]),
        is_sent=True,
    )
    rows.cache.reserve(5)
    rows.cache.length = 5
    branches = rows.begin_ahead()
    branches.add(1, 4, rows.cache)
    [_, branch] = branches.drafting()
    branch.num_wanted = 2
    for token_id in (5, 6):
        branch.extend_draft(DraftToken(token_id), ())
    return rows


def test_what_was_drafted_ahead_is_the_next_block() -> None:
    rows = ahead_of_a_block([3, 4])

    rows.extend([30, 40])

    assert rows.drafted.token_ids == [5, 6]
    assert rows.cache.length == 5
    assert not rows.is_sent


@pytest.mark.parametrize("following", [[3, 4, 5], [4], [3, 5], [3]])
def test_an_outcome_that_reads_otherwise_than_it_was_drafted_drops_what_follows(
    following: list[int],
) -> None:
    """Also if it only reads as more tokens: the next was drafted for another place."""
    rows = ahead_of_a_block(following)

    rows.extend([30, 40])

    assert rows.drafted.token_ids == []
    assert rows.branches is None
    assert rows.cache.length < 5
