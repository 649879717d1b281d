"""The block allocator: who holds which block."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specgw.engine.kv_cache import BLOCK_SIZE, KVCache, OutOfBlocks, SequenceCache

NUM_BLOCKS = 12


def build_cache() -> KVCache:
    return KVCache(1, 1, 2, NUM_BLOCKS * BLOCK_SIZE, torch.float32, torch.device("cpu"))


def grow(cache: SequenceCache, length: int) -> None:
    """Does what a forward pass does to the block table."""
    cache.reserve(length)
    cache.length = length


def test_used_tokens_are_counted_in_whole_blocks() -> None:
    pool = build_cache()

    grow(pool.new_sequence(), BLOCK_SIZE + 1)

    assert pool.used_tokens == 2 * BLOCK_SIZE
    assert pool.capacity_tokens == NUM_BLOCKS * BLOCK_SIZE


def test_sequences_that_grow_in_turns_stay_contiguous() -> None:
    pool = build_cache()
    sequences = [pool.new_sequence() for _ in range(3)]

    for length in range(1, 3 * BLOCK_SIZE + 1):
        for sequence in sequences:
            grow(sequence, length)

    assert all(sequence.is_contiguous for sequence in sequences)


def test_a_sequence_with_no_room_behind_it_is_fragmented_but_complete() -> None:
    pool = build_cache()
    first, second = pool.new_sequence(), pool.new_sequence()
    grow(first, 1)
    grow(second, 6 * BLOCK_SIZE)

    grow(first, 6 * BLOCK_SIZE)

    assert not first.is_contiguous
    assert sorted(first.blocks + second.blocks) == list(range(NUM_BLOCKS))


def test_truncation_to_the_contiguous_part_makes_a_sequence_contiguous_again() -> None:
    pool = build_cache()
    first, second = pool.new_sequence(), pool.new_sequence()
    grow(first, 1)
    grow(second, 6 * BLOCK_SIZE)
    grow(first, 6 * BLOCK_SIZE)

    first.truncate(1)

    assert first.is_contiguous
    assert first.slot_ids(0, 1) == [first.first_slot]


def test_truncation_keeps_the_block_that_is_partly_used() -> None:
    pool = build_cache()
    sequence = pool.new_sequence()
    grow(sequence, 3 * BLOCK_SIZE)

    sequence.truncate(BLOCK_SIZE + 1)

    assert (sequence.length, len(sequence.blocks)) == (BLOCK_SIZE + 1, 2)


def test_truncation_past_the_end_gives_reserved_blocks_back_and_drops_no_row() -> None:
    pool = build_cache()
    sequence = pool.new_sequence()
    grow(sequence, 3)
    sequence.reserve(5 * BLOCK_SIZE)

    sequence.truncate(100)

    assert (sequence.length, len(sequence.blocks)) == (3, 1)


def test_a_released_sequence_can_be_released_and_used_again() -> None:
    pool = build_cache()
    sequence = pool.new_sequence()
    grow(sequence, 40)

    sequence.release()
    sequence.release()

    assert pool.used_tokens == 0
    grow(sequence, NUM_BLOCKS * BLOCK_SIZE)
    assert sequence.is_contiguous


def test_out_of_blocks_changes_nothing() -> None:
    pool = build_cache()
    first, second = pool.new_sequence(), pool.new_sequence()
    grow(first, 10)

    with pytest.raises(OutOfBlocks, match="13 KV cache blocks needed, 11 free"):
        pool.reserve([(first, 10 * BLOCK_SIZE), (second, 4 * BLOCK_SIZE)])

    assert (len(first.blocks), len(second.blocks)) == (1, 0)
    assert pool.used_tokens == BLOCK_SIZE


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from(["grow", "truncate", "release"]),
            st.integers(0, NUM_BLOCKS * BLOCK_SIZE),
        ),
        max_size=40,
    )
)
def test_no_block_is_lost_or_given_twice(steps: list[tuple[int, str, int]]) -> None:
    pool = build_cache()
    sequences = [pool.new_sequence() for _ in range(4)]

    for who, what, length in steps:
        sequence, free = sequences[who], pool.capacity_tokens - pool.used_tokens
        if what == "release":
            sequence.release()
        elif what == "truncate":
            sequence.truncate(length)
        elif sequence.num_missing_blocks(length) * BLOCK_SIZE <= free:
            grow(sequence, max(length, sequence.length))
        else:
            with pytest.raises(OutOfBlocks):
                sequence.reserve(length)

        held = [block for sequence in sequences for block in sequence.blocks]
        assert len(held) == len(set(held))
        assert pool.used_tokens == len(held) * BLOCK_SIZE
        for one in sequences:
            follow = [block == one.blocks[0] + i for i, block in enumerate(one.blocks)]
            assert len(one.blocks) == -(-one.length // BLOCK_SIZE)
            assert one.is_contiguous == all(follow)

    for sequence in sequences:
        sequence.release()
    assert pool.used_tokens == 0


class CountingPool(KVCache):
    """Counts the scans for the largest run."""

    num_scans = 0

    def _largest_run(self, last_use: int) -> tuple[int, int]:
        self.num_scans += 1
        return super()._largest_run(last_use)


@given(
    st.lists(st.none() | st.integers(0, 5), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS).filter(any),
    st.integers(1, NUM_BLOCKS + 3),
)
def test_room_is_made_where_the_latest_use_is_longest_ago(
    uses: list[int | None], count: int
) -> None:
    """The definition, use by use; `None` is for a block that is held."""
    pool = CountingPool(1, 1, 2, NUM_BLOCKS * BLOCK_SIZE, torch.float32, torch.device("cpu"))
    pool._is_free = np.array([use is not None for use in uses])
    pool._last_used = np.array([use or 0 for use in uses])
    runs = [pool._largest_run(use) for use in sorted({use for use in uses if use is not None})]
    expected = next((run for run in runs if run[1] >= count), runs[-1])

    pool.num_scans = 0

    assert pool._least_used_run(count) == expected
    assert pool.num_scans == 1
