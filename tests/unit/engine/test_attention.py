"""Attention over the block cache against softmax(q k) v, one row and one head at a time."""

import pytest
import torch

from specgw.engine.attention import BatchAttention, CausalMasks, SequenceRows, max_rows
from specgw.engine.kv_cache import BLOCK_SIZE, KVCache, SequenceCache

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8
GROUP = NUM_HEADS // NUM_KV_HEADS
NUM_BLOCKS = 64
SCALE = 0.3


def build_cache() -> KVCache:
    capacity = NUM_BLOCKS * BLOCK_SIZE
    return KVCache(1, NUM_KV_HEADS, HEAD_DIM, capacity, torch.float32, torch.device("cpu"))


def fragmented_sequence(pool: KVCache, length: int) -> SequenceCache:
    """Returns a sequence with room, no two blocks of which follow one another."""
    singles = [pool.new_sequence() for _ in range(NUM_BLOCKS)]
    for single in singles:
        single.reserve(BLOCK_SIZE)
    for single in singles:
        if single.blocks[0] % 2:
            single.release()
    sequence = pool.new_sequence()
    sequence.reserve(length)
    return sequence


def attend(
    pool: KVCache, parts: list[tuple[SequenceCache, torch.Tensor]], window: int | None
) -> torch.Tensor:
    """Appends rows [num_rows, num_heads + 2 * num_kv_heads, head_dim] to each sequence."""
    positions: list[int] = []
    slots, masks = [], CausalMasks(torch.float32, torch.device("cpu"))
    for cache, rows in parts:
        cache.reserve(cache.length + len(rows))
        positions += range(cache.length, cache.length + len(rows))
        slots += cache.slot_ids(cache.length, cache.length + len(rows))
    counts = [(cache, len(rows)) for cache, rows in parts]
    qkv = torch.cat([rows for _, rows in parts])
    sizes = [SequenceRows(cache, count) for cache, count in counts]
    attention = BatchAttention(pool, masks, torch.tensor(positions), torch.tensor(slots), sizes)
    output = attention(0, qkv[:, :NUM_HEADS], qkv[:, NUM_HEADS:], SCALE, window)
    for cache, count in counts:
        cache.length += count
    return output


def attend_by_definition(qkv: torch.Tensor, window: int | None) -> torch.Tensor:
    """Computes the rows of one whole sequence."""
    query, key, value = torch.split(qkv, [NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], 1)
    rows = []
    for i in range(len(qkv)):
        seen = slice(0 if window is None else max(0, i + 1 - window), i + 1)
        heads = [
            (SCALE * key[seen, head // GROUP] @ query[i, head]).softmax(0)
            @ value[seen, head // GROUP]
            for head in range(NUM_HEADS)
        ]
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def random_rows(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, generator=generator)


@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("sizes", [[70], [33, 1, 20, 16]], ids=str)
@pytest.mark.parametrize("is_fragmented", [False, True])
def test_attention_is_what_its_definition_says(
    window: int | None, sizes: list[int], is_fragmented: bool
) -> None:
    pool, qkv = build_cache(), random_rows(70)
    cache = fragmented_sequence(pool, 70) if is_fragmented else pool.new_sequence()

    output = torch.cat([attend(pool, [(cache, rows)], window) for rows in torch.split(qkv, sizes)])

    assert cache.is_contiguous == (not is_fragmented)
    torch.testing.assert_close(output, attend_by_definition(qkv, window))


@pytest.mark.parametrize("window", [None, 100])
def test_a_chunk_longer_than_the_mask_is_cut(window: int | None) -> None:
    count = 2 * max_rows(GROUP) + 7
    pool, qkv = build_cache(), random_rows(count)

    output = attend(pool, [(pool.new_sequence(), qkv)], window)

    torch.testing.assert_close(output, attend_by_definition(qkv, window))


def test_sequences_of_a_batch_see_only_themselves() -> None:
    pool, first, second = build_cache(), random_rows(20, seed=1), random_rows(30, seed=2)
    one, other = fragmented_sequence(pool, 20), pool.new_sequence()
    attend(pool, [(one, first[:15])], None)

    output = attend(pool, [(other, second), (one, first[15:])], None)

    expected = (attend_by_definition(second, None), attend_by_definition(first, None)[15:])
    torch.testing.assert_close(output, torch.cat(expected))


def test_masks_take_no_memory_for_each_length() -> None:
    masks = CausalMasks(torch.float32, torch.device("cpu"))
    masks.get(3, 500, GROUP, None)

    storages = {
        masks.get(rows, length, GROUP, None).untyped_storage().data_ptr()
        for rows, length in ((2, 2), (5, 300), (max_rows(GROUP), 900))
    }

    assert len(storages) == 1
