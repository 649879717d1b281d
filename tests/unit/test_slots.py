"""vLLM's table of extra input rows and its KV lookahead."""

from typing import get_args

import pytest

from specgw.slots import METHODS, SLOTS_TABLE, extra_slots, kv_lookahead
from specgw.vllm_names import DEPRECATED_METHODS, Method

K = 12


def test_the_eight_rows_of_vllms_table() -> None:
    rows = [extra_slots(row.method, K, row.parallel_drafting) for row in SLOTS_TABLE]

    assert rows == [0, K - 1, K, K - 1, 0, 0, 1, K]


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_what_always_drafts_in_parallel_takes_the_same_rows_either_way(method: str) -> None:
    assert extra_slots(method, K) == extra_slots(method, K, parallel_drafting=True)


@pytest.mark.parametrize(
    ("method", "slots"),
    [
        ("draft_model", K),
        ("eagle", K),
        ("eagle3", K),
        ("mtp", K),
        ("qwen3_next_mtp", K),
        ("dspark", K),
        ("dflash", K + 1),
        ("ngram", 0),
        ("ngram_gpu", 0),
        ("suffix", 0),
        ("medusa", 0),
        ("mlp_speculator", 0),
        ("custom_class", 0),
        ("extract_hidden_states", 0),
    ],
)
def test_kv_lookahead(method: str, slots: int) -> None:
    assert kv_lookahead(method, K) == slots
    assert kv_lookahead(method, K, parallel_drafting=True) == slots


def test_dspark_that_fills_in_needs_one_more_slot() -> None:
    assert kv_lookahead("dspark", K, sample_from_anchor=False) == K + 1


def test_every_method_is_in_both_tables() -> None:
    assert set(METHODS) == set(get_args(Method))
    for method in (*METHODS, *DEPRECATED_METHODS):
        assert 0 <= extra_slots(method, K) <= K
        assert 0 <= kv_lookahead(method, K) <= K + 1


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="'eagle4' is not a method: draft_model, eagle"):
        extra_slots("eagle4", K)
