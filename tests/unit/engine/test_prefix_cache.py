"""Blocks that sequences share: who finds them, who may write into them, which are forgotten."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specgw.engine.block_hashes import BlockHashes
from specgw.engine.kv_cache import BLOCK_SIZE, KVCache, OutOfBlocks, SequenceCache

NUM_BLOCKS = 12


def build_pool(*, has_prefix_cache: bool = True) -> KVCache:
    return KVCache(
        *(1, 1, 2, NUM_BLOCKS * BLOCK_SIZE, torch.float32, torch.device("cpu")),
        has_prefix_cache=has_prefix_cache,
    )


def hashes_of(token_ids: Sequence[int], salt: str = "") -> Sequence[bytes]:
    return BlockHashes(salt).within(token_ids, len(token_ids))


def store(pool: KVCache, token_ids: Sequence[int], salt: str = "") -> SequenceCache:
    """Returns a sequence with a row for each token, published."""
    cache = pool.new_sequence()
    cache.reserve(len(token_ids))
    for layer in pool.layers:
        layer[cache.slot_ids(0, len(token_ids))] = torch.tensor(token_ids).float()[:, None, None]
    cache.length = len(token_ids)
    cache.publish(hashes_of(token_ids, salt))
    return cache


def resume(pool: KVCache, token_ids: Sequence[int], salt: str = "") -> SequenceCache:
    """Returns a sequence that begins with what the pool has of a context."""
    cache = pool.new_sequence()
    cache.adopt(hashes_of(token_ids, salt))
    return cache


def rows(pool: KVCache, cache: SequenceCache) -> list[int]:
    """Returns the token ids that `store` wrote into a sequence's rows."""
    return [int(row) for row in pool.layers[0][cache.slot_ids(0, cache.length), 0, 0]]


def tokens(num_blocks: int, first: int = 0) -> list[int]:
    return list(range(first, first + num_blocks * BLOCK_SIZE))


def test_a_context_begins_with_the_rows_of_an_equal_one() -> None:
    pool = build_pool()
    store(pool, [*tokens(3), 7, 7])

    second = resume(pool, [*tokens(3), 8, 8])

    assert rows(pool, second) == tokens(3)
    assert pool.used_tokens == 4 * BLOCK_SIZE


def test_only_the_blocks_before_the_first_difference_are_shared() -> None:
    pool = build_pool()
    store(pool, tokens(3))

    assert rows(pool, resume(pool, [*tokens(2), *tokens(1, 900)])) == tokens(2)
    assert resume(pool, [900, *tokens(3)]).length == 0
    assert resume(pool, tokens(3)[BLOCK_SIZE:]).length == 0


def test_contexts_of_different_salts_share_nothing() -> None:
    pool = build_pool()
    store(pool, tokens(2), salt="one")

    assert resume(pool, tokens(2), salt="other").length == 0
    assert resume(pool, tokens(2), salt="one").length == 2 * BLOCK_SIZE


def test_hashes_are_computed_once_and_do_not_depend_on_how_the_context_grew() -> None:
    at_once, growing = BlockHashes("salt"), BlockHashes("salt")

    for length in range(0, 5 * BLOCK_SIZE, 7):
        assert growing.within(tokens(5), length) == at_once.within(tokens(5), length)

    assert len(set(at_once.within(tokens(5), 5 * BLOCK_SIZE))) == 5


def test_rows_of_a_sequence_that_ended_are_found_until_the_room_is_needed() -> None:
    pool = build_pool()
    store(pool, tokens(4)).release()
    assert pool.used_tokens == 0
    others = pool.new_sequence()
    others.reserve((NUM_BLOCKS - 4) * BLOCK_SIZE)

    resumed = resume(pool, tokens(4))
    found = resumed.length
    resumed.release()
    others.reserve((NUM_BLOCKS - 1) * BLOCK_SIZE)
    left = resume(pool, tokens(4))

    assert found == 4 * BLOCK_SIZE
    assert left.length < 2 * BLOCK_SIZE
    assert rows(pool, left) == tokens(4)[: left.length]


def test_the_prefix_used_least_recently_is_forgotten_first() -> None:
    pool = build_pool()
    contexts = [tokens(3, first) for first in (0, 1000, 2000, 3000)]
    for context in contexts:
        store(pool, context).release()
    resume(pool, contexts[0]).release()  # used again: now the second is the oldest

    pool.new_sequence().reserve(3 * BLOCK_SIZE)

    found = [resume(pool, context) for context in contexts]
    assert [one.length // BLOCK_SIZE for one in found] == [3, 0, 3, 3]


def test_the_end_of_a_prefix_is_forgotten_before_its_beginning() -> None:
    pool = build_pool()
    store(pool, tokens(NUM_BLOCKS)).release()

    pool.new_sequence().reserve(2 * BLOCK_SIZE)

    assert resume(pool, tokens(NUM_BLOCKS)).length == (NUM_BLOCKS - 2) * BLOCK_SIZE


def test_a_new_sequence_leaves_prefixes_alone_while_there_is_other_room() -> None:
    pool = build_pool()
    store(pool, tokens(4)).release()

    pool.new_sequence().reserve((NUM_BLOCKS - 4) * BLOCK_SIZE)

    assert resume(pool, tokens(4)).length == 4 * BLOCK_SIZE


def test_a_resumed_sequence_grows_in_place_when_its_donor_has_ended() -> None:
    pool = build_pool()
    store(pool, tokens(6)).release()

    second = resume(pool, tokens(3))
    second.reserve(6 * BLOCK_SIZE)

    assert second.is_contiguous


def test_who_writes_into_a_shared_block_gets_a_copy_of_it() -> None:
    pool = build_pool()
    first = store(pool, tokens(2))
    second = resume(pool, tokens(2))

    second.truncate(BLOCK_SIZE + 3)
    second.reserve(BLOCK_SIZE + 4)
    pool.layers[0][second.slot_ids(BLOCK_SIZE + 3, BLOCK_SIZE + 4)] = -1
    second.length += 1

    assert rows(pool, first) == tokens(2)
    assert rows(pool, second) == [*tokens(2)[: BLOCK_SIZE + 3], -1]
    assert pool.used_tokens == 3 * BLOCK_SIZE


def test_who_writes_into_a_published_block_alone_takes_its_name_back() -> None:
    pool = build_pool()
    cache = store(pool, tokens(2))
    block = cache.blocks[1]

    cache.truncate(BLOCK_SIZE + 3)
    cache.reserve(BLOCK_SIZE + 4)

    assert cache.blocks[1] == block
    assert resume(pool, tokens(2)).length == BLOCK_SIZE
    cache.length = 2 * BLOCK_SIZE
    cache.publish(hashes_of(tokens(2)))
    assert resume(pool, tokens(2)).length == 2 * BLOCK_SIZE


def test_without_room_for_the_copy_nothing_changes() -> None:
    pool = build_pool()
    first = store(pool, tokens(2))
    second = resume(pool, tokens(2))
    pool.new_sequence().reserve((NUM_BLOCKS - 2) * BLOCK_SIZE)
    second.truncate(BLOCK_SIZE + 3)

    with pytest.raises(OutOfBlocks, match="1 KV cache blocks needed, 0 free"):
        second.reserve(BLOCK_SIZE + 4)

    assert second.blocks == first.blocks
    assert resume(pool, tokens(2)).length == 2 * BLOCK_SIZE


def test_rows_that_are_not_stored_cannot_be_published() -> None:
    cache = build_pool().new_sequence()
    cache.reserve(BLOCK_SIZE)

    with pytest.raises(AssertionError, match="not stored"):
        cache.publish(hashes_of(tokens(1)))


def test_a_pool_without_prefix_cache_finds_nothing() -> None:
    pool = build_pool(has_prefix_cache=False)
    store(pool, tokens(3))

    assert resume(pool, tokens(3)).length == 0


@given(
    stored=st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=3),
    num_blocks=st.integers(1, 4),
    num_more=st.integers(0, NUM_BLOCKS),
)
def test_a_sequence_begins_if_it_has_room_with_what_it_shares(
    stored: list[tuple[int, bool]], num_blocks: int, num_more: int
) -> None:
    pools = build_pool(), build_pool()
    for pool in pools:
        for count, is_held in stored:
            cache = store(pool, [*tokens(count), *[count] * BLOCK_SIZE])
            if not is_held:
                cache.release()
    expected = resume(pools[0], tokens(num_blocks))
    length = (num_blocks + num_more) * BLOCK_SIZE
    used = pools[1].used_tokens
    try:
        expected.reserve(length)
    except OutOfBlocks:
        with pytest.raises(OutOfBlocks):
            pools[1].begin(hashes_of(tokens(num_blocks)), length)
        assert pools[1].used_tokens == used
    else:
        begun = pools[1].begin(hashes_of(tokens(num_blocks)), length)
        assert (begun.blocks, begun.length) == (expected.blocks, expected.length)


def test_a_prefix_that_could_not_be_used_becomes_no_younger() -> None:
    pool = build_pool()
    pool.new_sequence().reserve((NUM_BLOCKS - 4) * BLOCK_SIZE)
    old, young = store(pool, tokens(2)), store(pool, tokens(2, first=1_000))
    old.release()
    young.release()

    with pytest.raises(OutOfBlocks, match="5 KV cache blocks needed, 4 free"):
        pool.begin(hashes_of(tokens(2)), 5 * BLOCK_SIZE)
    pool.new_sequence().reserve(2 * BLOCK_SIZE)

    assert resume(pool, tokens(2)).length == 0
    assert resume(pool, tokens(2, first=1_000)).length == 2 * BLOCK_SIZE
