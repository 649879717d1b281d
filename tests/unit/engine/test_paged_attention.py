"""Attention from block tables against softmax(q k) v, by every kernel, with doubles of packages."""

import pytest
import torch

from specgw.engine.attention import max_rows
from specgw.engine.attention_kernels import (
    FlashAttention2,
    FlashAttention3,
    GatheredSdpa,
    PagedKernel,
    RowGroup,
    TorchFlash,
)
from specgw.engine.kv_cache import KVCache, SequenceCache
from specgw.engine.paged_attention import BatchGroup, PagedAttention
from tests.flash_doubles import flash_attn_2, flash_attn_3, varlen_attn
from tests.unit.engine.test_attention import (
    GROUP,
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    SCALE,
    attend_by_definition,
    random_rows,
)

KERNELS: dict[str, PagedKernel] = {
    "sdpa": GatheredSdpa(),
    "flash-attn-2": FlashAttention2(flash_attn_2),
    "flash-attn-3": FlashAttention3(flash_attn_3),
    "varlen": TorchFlash(varlen_attn),
}
each_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())


def build_pool(kernel: PagedKernel, num_blocks: int = 20) -> KVCache:
    """Returns a pool whose unused rows are no numbers."""
    size = max(16, kernel.block_size)
    pool = KVCache(
        *(1, NUM_KV_HEADS, HEAD_DIM, num_blocks * size, torch.float32, torch.device("cpu")),
        block_size=size,
        has_scratch=True,
    )
    pool.layers[0].fill_(torch.nan)
    return pool


def scattered(pool: KVCache, num_blocks: int) -> SequenceCache:
    """Returns a sequence whose blocks do not follow one another."""
    singles = [pool.new_sequence() for _ in range(2 * num_blocks)]
    for single in singles:
        single.reserve(pool.block_size)
    for single in singles[::2]:
        single.release()
    sequence = pool.new_sequence()
    sequence.reserve(num_blocks * pool.block_size)
    for single in singles[1::2]:
        single.release()
    return sequence


def attend(
    pool: KVCache,
    kernel: PagedKernel,
    sequences: list[tuple[SequenceCache, torch.Tensor]],
    window: int | None,
    spare_blocks: int = 0,
) -> torch.Tensor:
    """Appends equally many rows to each sequence."""
    num_rows = len(sequences[0][1])
    slots = [slot for c, rows in sequences for slot in c.slot_ids(c.length, c.length + len(rows))]
    for cache, rows in sequences:
        cache.length += len(rows)
    width = max(len(cache.blocks) for cache, _ in sequences) + spare_blocks
    scratch = pool.scratch_block
    assert scratch is not None
    tables = [c.blocks + [scratch] * (width - len(c.blocks)) for c, _ in sequences]
    described = RowGroup(
        torch.tensor(tables), torch.tensor([cache.length for cache, _ in sequences]), num_rows
    )
    qkv = torch.cat([rows for _, rows in sequences])
    groups = [BatchGroup(0, len(qkv), described)]
    attention = PagedAttention(pool, kernel, torch.tensor(slots), groups)
    return attention(0, qkv[:, :NUM_HEADS], qkv[:, NUM_HEADS:], SCALE, window)


@each_kernel
@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("sizes", [[70], [33, 1, 20, 16], [60, *5 * [2]]], ids=str)
def test_attention_is_what_its_definition_says(
    kernel: PagedKernel, window: int | None, sizes: list[int]
) -> None:
    pool, qkv = build_pool(kernel), random_rows(70)
    cache = scattered(pool, -(-70 // pool.block_size))

    parts = torch.split(qkv, sizes)
    output = torch.cat([attend(pool, kernel, [(cache, rows)], window, 2) for rows in parts])

    torch.testing.assert_close(output, attend_by_definition(qkv, window))


@each_kernel
@pytest.mark.parametrize("window", [None, 7])
def test_sequences_of_unlike_lengths_see_only_themselves(
    kernel: PagedKernel, window: int | None
) -> None:
    pool, first, second = build_pool(kernel), random_rows(20, seed=1), random_rows(50, seed=2)
    one, other = scattered(pool, -(-20 // pool.block_size)), pool.new_sequence()
    other.reserve(50)
    attend(pool, kernel, [(one, first[:15])], window)
    attend(pool, kernel, [(other, second[:45])], window)

    output = attend(pool, kernel, [(other, second[45:]), (one, first[15:])], window)

    expected = (attend_by_definition(second, window)[45:], attend_by_definition(first, window)[15:])
    torch.testing.assert_close(output, torch.cat(expected))


def test_a_chunk_longer_than_the_mask_is_cut() -> None:
    count = 2 * max_rows(GROUP) + 7
    kernel = KERNELS["sdpa"]
    pool, qkv = build_pool(kernel, 30), random_rows(count)
    cache = pool.new_sequence()
    cache.reserve(count)

    output = attend(pool, kernel, [(cache, qkv)], 100)

    torch.testing.assert_close(output, attend_by_definition(qkv, 100))
