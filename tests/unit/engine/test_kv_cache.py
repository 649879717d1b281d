"""The block allocator: who holds which block."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specgw.engine.kv_cache import BLOCK_SIZE, Fork, KVCache, OutOfBlocks, SequenceCache

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


# Forks.


def stored(cache: SequenceCache) -> list[float]:
    """Returns what the rows of a sequence hold."""
    rows: list[float] = cache.pool.layers[0][cache.slot_ids(0, cache.length), 0, 0].tolist()
    return rows


def store(cache: SequenceCache, values: Sequence[float]) -> None:
    """Appends rows."""
    start = cache.length
    grow(cache, start + len(values))
    cache.pool.layers[0][cache.slot_ids(start, cache.length), 0, 0] = torch.tensor(values)


def test_a_fork_shares_full_blocks_and_copies_the_rest() -> None:
    pool = build_cache()
    parent = pool.new_sequence()
    rows = [float(row) for row in range(2 * BLOCK_SIZE + 3)]
    store(parent, rows)

    [fork] = pool.fork([Fork(parent, 2 * BLOCK_SIZE + 2, 2 * BLOCK_SIZE + 8)])
    store(fork, [100.0])

    assert stored(fork) == [*rows[:-1], 100.0]
    assert stored(parent) == rows
    assert pool.used_tokens == 4 * BLOCK_SIZE


@pytest.mark.parametrize("num_shared", [0, 1, BLOCK_SIZE, BLOCK_SIZE + 5, 2 * BLOCK_SIZE])
def test_a_sequence_becomes_one_of_its_forks(num_shared: int) -> None:
    pool = build_cache()
    parent = pool.new_sequence()
    rows = [float(row) for row in range(2 * BLOCK_SIZE + 3)]
    store(parent, rows)
    forks = pool.fork([Fork(parent, num_shared, num_shared + 4) for _ in range(3)])
    for number, fork in enumerate(forks):
        store(fork, [100.0 + number])

    pool.release_forks([forks[0], forks[2]])
    parent.become(forks[1])

    assert stored(parent) == [*rows[:num_shared], 101.0]
    assert pool.used_tokens == -(-(num_shared + 4) // BLOCK_SIZE) * BLOCK_SIZE
    parent.release()
    assert pool.used_tokens == 0


def test_forks_without_room_for_all_change_nothing() -> None:
    pool = build_cache()
    parent = pool.new_sequence()
    store(parent, [1.0] * 5)

    with pytest.raises(OutOfBlocks):
        pool.fork([Fork(parent, 5, 6)] * NUM_BLOCKS)

    assert pool.used_tokens == BLOCK_SIZE
    pool.release_forks(pool.fork([Fork(parent, 5, 6)] * (NUM_BLOCKS - 1)))
    assert pool.used_tokens == BLOCK_SIZE


def test_a_fork_may_be_released_by_itself() -> None:
    pool = build_cache()
    parent = pool.new_sequence()
    store(parent, [1.0] * (BLOCK_SIZE + 1))
    [fork] = pool.fork([Fork(parent, BLOCK_SIZE + 1, BLOCK_SIZE + 2)])

    fork.release()
    fork.release()

    assert pool.used_tokens == 2 * BLOCK_SIZE


def test_what_a_sequence_became_does_not_write_into_published_blocks() -> None:
    pool = build_cache()
    parent = pool.new_sequence()
    rows = [float(row) for row in range(BLOCK_SIZE + 3)]
    store(parent, rows)
    parent.publish([b"first"])
    [fork] = pool.fork([Fork(parent, BLOCK_SIZE + 1, BLOCK_SIZE + 5)])
    parent.become(fork)
    other = pool.new_sequence()
    other.adopt([b"first"])

    parent.truncate(BLOCK_SIZE - 1)
    store(parent, [100.0])

    assert stored(other) == rows[:BLOCK_SIZE]
