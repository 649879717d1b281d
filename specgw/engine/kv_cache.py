"""Keys and values of all sessions in one pool of blocks. Knows nothing of tokens or of models.

A sequence whose blocks follow one another is read as a strided view of the pool, without a copy;
so the allocator extends a sequence in place if it can, and begins a new one where there is most
room. A fragmented sequence is gathered. `attention.py` reads and writes the rows.

Full blocks that were published under a hash (`prefix_cache.py`) may be held by several sequences,
none of which writes into them. They keep their rows when the last holder leaves, until the room is
needed: of the free blocks, those that never held a prefix are taken first, then those that were
used least recently. Only a sequence that extends in place takes the blocks behind it first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specgw.engine.prefix_cache import PrefixCache

BLOCK_SIZE = 16

_NEVER = np.iinfo(np.int64).max  # later than any use


class OutOfBlocks(Exception):
    """There are not enough free blocks."""

    def __init__(self, num_missing: int, num_free: int) -> None:
        super().__init__(f"{num_missing} KV cache blocks needed, {num_free} free")


class KVCache:
    """The pool. Each layer's tensor is [num_slots, 2 * num_kv_heads, head_dim]: keys, then values.

    A slot is one token's place; a block is `block_size` slots that follow one another. Rows that no
    sequence holds are undefined, but for those of published blocks.

    `block_size` is a multiple of `BLOCK_SIZE`: some attention kernels want larger blocks. With
    `has_scratch` the tensors have one more block, `scratch_block`, that no sequence ever holds:
    rows that only pad a batch are written there. Such a pool begins with zeros.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        capacity_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        block_size: int = BLOCK_SIZE,
        has_prefix_cache: bool = True,
        has_scratch: bool = False,
    ) -> None:
        assert block_size % BLOCK_SIZE == 0, "prefixes are named by BLOCK_SIZE tokens"
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.has_prefix_cache = has_prefix_cache
        num_blocks = capacity_tokens // block_size
        self.scratch_block = num_blocks if has_scratch else None
        self._num_holders = np.zeros(num_blocks, dtype=np.int32)
        self._is_free = np.ones(num_blocks, dtype=bool)
        self._num_free = num_blocks
        self._prefixes = PrefixCache()
        self._last_used = np.zeros(num_blocks, dtype=np.int64)  # of free blocks with a prefix
        self._num_uses = 0
        shape = ((num_blocks + has_scratch) * block_size, 2 * num_kv_heads, head_dim)
        build = torch.zeros if has_scratch else torch.empty
        self.layers = [build(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    @property
    def capacity_tokens(self) -> int:
        """Slots in all."""
        return len(self._is_free) * self.block_size

    @property
    def used_tokens(self) -> int:
        """Slots in blocks that sequences hold; a shared block counts once."""
        return self.capacity_tokens - self._num_free * self.block_size

    def new_sequence(self) -> "SequenceCache":
        """Returns an empty sequence; it holds no block yet."""
        return SequenceCache(self)

    def begin(self, hashes: Sequence[bytes], length: int) -> "SequenceCache":
        """Returns a sequence that begins with the longest prefix in the pool, and has room.

        Args:
            hashes: As for `SequenceCache.adopt`; no more blocks than `length` rows fill.
            length: Rows in all.

        Raises:
            OutOfBlocks: and then nothing has changed, nor has any prefix become older or younger.
        """
        shared = self._prefixes.find(self.names(hashes))
        num_held = len(shared) - int(self._is_free[shared].sum())
        num_needed = -(-length // self.block_size) - num_held
        if num_needed > self._num_free:
            raise OutOfBlocks(num_needed, self._num_free)
        cache = self.new_sequence()
        cache.adopt(hashes)
        cache.reserve(length)
        return cache

    def reserve(self, lengths: Sequence[tuple["SequenceCache", int]]) -> None:
        """Makes room in several sequences at once, or in none.

        A published block that a sequence will write into becomes its own: if others hold it too,
        by a copy.

        Raises:
            OutOfBlocks: and then nothing has changed.
        """
        needed = [cache.num_missing_blocks(length) for cache, length in lengths]
        written = [cache for cache, length in lengths if length > cache.length]
        published = [cache for cache in written if cache.has_published_tail]
        num_copied = sum(self._is_shared(cache.blocks[-1]) for cache in published)
        if sum(needed) + num_copied > self._num_free:
            raise OutOfBlocks(sum(needed) + num_copied, self._num_free)
        for cache in published:
            cache.own_tail(self._private(cache.blocks[-1]))
        for (cache, _), count in zip(lengths, needed, strict=True):
            if count:
                cache.extend(self._take(count, cache.blocks[-1] if cache.blocks else None))

    # Called by sequences only.

    def names(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Returns the names of this pool's full blocks: a block's is that of its last tokens."""
        stride = self.block_size // BLOCK_SIZE
        return hashes if stride == 1 else hashes[stride - 1 :: stride]

    def give_back(self, blocks: Sequence[int]) -> None:
        """Ends a hold on each block. The rows of published ones stay, the last one's the least."""
        assert self._num_holders[blocks].all(), "a block was freed twice"
        self._num_holders[blocks] -= 1
        for block in reversed(blocks):
            if self._num_holders[block] == 0:
                self._is_free[block] = True
                self._num_free += 1
                self._num_uses += 1
                self._last_used[block] = self._num_uses if block in self._prefixes else 0

    def hold_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Takes a hold on the blocks of the longest prefix that was published."""
        blocks = self._prefixes.find(hashes)
        self._num_free -= int(self._is_free[blocks].sum())
        self._is_free[blocks] = False
        self._num_holders[blocks] += 1
        return blocks

    def publish(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Lets others find full blocks; from now on nobody writes into them."""
        if self.has_prefix_cache:
            for block, block_hash in zip(blocks, hashes, strict=True):
                self._prefixes.add(block, block_hash)

    # Whole blocks.

    def _is_shared(self, block: int) -> bool:
        return bool(self._num_holders[block] > 1)

    def _private(self, block: int) -> int:
        """Turns a hold on a published block into one on a block that nobody else can hold."""
        if not self._is_shared(block):
            self._prefixes.forget([block])
            return block
        [copy] = self._take(1, None)
        for layer in self.layers:
            rows = layer.view(-1, self.block_size, *layer.shape[1:])
            rows[copy] = rows[block]
        self.give_back([block])
        return copy

    def _take(self, count: int, last: int | None) -> list[int]:
        """Takes `count` free blocks, if possible those that follow `last`."""
        taken: list[int] = []
        start, size = self._run_after(last) if last is not None else (0, 0)
        while True:
            size = min(size, count - len(taken))
            self._claim(start, start + size)
            taken.extend(range(start, start + size))
            if len(taken) == count:
                self._num_free -= count
                return taken
            start, size = self._least_used_run(count - len(taken))
            if start and size > count - len(taken):
                # The owner of the blocks before the run keeps room to grow, and so does this one.
                skipped = (size - (count - len(taken))) // 2
                start, size = start + skipped, size - skipped

    def _claim(self, start: int, end: int) -> None:
        self._prefixes.forget((start + np.flatnonzero(self._last_used[start:end])).tolist())
        self._last_used[start:end] = 0
        self._is_free[start:end] = False
        self._num_holders[start:end] = 1

    def _run_after(self, last: int) -> tuple[int, int]:
        following = self._is_free[last + 1 :]
        taken = following.argmin() if len(following) else 0
        all_free = len(following) > 0 and bool(following[taken])
        return last + 1, len(following) if all_free else int(taken)

    def _least_used_run(self, count: int) -> tuple[int, int]:
        """Returns the largest run among the free blocks used longest ago that gives `count`.

        Those are as few as will do; if no run of free blocks is long enough, they are all.
        """
        latest = np.where(self._is_free, self._last_used, _NEVER)  # use in the `width` blocks here
        width = 1
        while width < min(count, len(self._is_free)):
            step = min(width, count - width, len(latest) - 1)
            latest = np.maximum(latest[:-step], latest[step:])
            width += step
        return self._largest_run(int(latest.min()) if width == count else _NEVER)

    def _largest_run(self, last_use: int) -> tuple[int, int]:
        """Returns the largest run of free blocks that were not used later."""
        candidates = self._is_free & (self._last_used <= last_use)
        edges = np.diff(candidates.astype(np.int8), prepend=0, append=0)
        starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        largest = int((ends - starts).argmax())
        return int(starts[largest]), int(ends[largest] - starts[largest])


@dataclass(slots=True)
class _Slots:
    """A sequence's block table as arrays, until it changes."""

    blocks: NDArray[np.int64]
    ids: torch.Tensor | None = None  # of all slots


class SequenceCache:
    """One session's share of the pool: a block table and how many rows are stored."""

    def __init__(self, pool: KVCache) -> None:
        self.length = 0
        self.blocks: list[int] = []
        self._pool = pool
        self._num_leading = 0  # blocks at the front that follow one another
        self._num_published = 0  # blocks at the front that others may hold
        self._slots: _Slots | None = None  # made of the blocks when wanted

    @property
    def is_contiguous(self) -> bool:
        """Whether the blocks follow one another in the pool."""
        return self._num_leading == len(self.blocks)

    def reserve(self, length: int) -> None:
        """Makes room for `length` rows in all.

        Raises:
            OutOfBlocks: and then nothing has changed.
        """
        self._pool.reserve([(self, length)])

    def truncate(self, length: int) -> None:
        """Drops the rows past `length` and gives whole free blocks back."""
        self.length = min(self.length, length)
        num_kept = -(-self.length // self._pool.block_size)
        if num_kept < len(self.blocks):
            self._pool.give_back(self.blocks[num_kept:])
            del self.blocks[num_kept:]
            self._num_leading = min(self._num_leading, num_kept)
            self._num_published = min(self._num_published, num_kept)
            self._slots = None

    def release(self) -> None:
        """Gives every block back. May be called again."""
        self.truncate(0)

    # Prefixes that sequences share.

    def adopt(self, hashes: Sequence[bytes]) -> None:
        """Begins an empty sequence with the rows of the longest prefix that is in the pool.

        Args:
            hashes: Each `BLOCK_SIZE` tokens that the sequence will begin with (`BlockHashes`).
        """
        assert not self.blocks, "only an empty sequence can begin with other rows"
        self.extend(self._pool.hold_prefix(self._pool.names(hashes)))
        self._num_published = len(self.blocks)
        self.length = len(self.blocks) * self._pool.block_size

    def publish(self, hashes: Sequence[bytes]) -> None:
        """Lets other sequences use this one's first blocks. Their rows must be final.

        Args:
            hashes: Those of the context (`BlockHashes`), as far as it is stored at most.
        """
        assert len(hashes) * BLOCK_SIZE <= self.length, "a block is not stored yet"
        names, first = self._pool.names(hashes), self._num_published
        if first < len(names):
            self._pool.publish(self.blocks[first : len(names)], names[first:])
            self._num_published = len(names)

    @property
    def has_published_tail(self) -> bool:
        """Whether the next row goes into a block that others may hold."""
        return self._num_published > self.length // self._pool.block_size

    @property
    def first_slot(self) -> int:
        """The slot of row 0."""
        return self.blocks[0] * self._pool.block_size

    def slot_ids(self, start: int, end: int) -> list[int]:
        """Returns the slots of rows `start` to `end`."""
        size, blocks = self._pool.block_size, self.blocks
        return [blocks[row // size] * size + row % size for row in range(start, end)]

    def gather_ids(self) -> torch.Tensor:
        """Returns the slots of all rows that there is room for, as an index into a layer."""
        slots = self._arrays()
        if slots.ids is None:
            ids = self.slot_ids(0, len(self.blocks) * self._pool.block_size)
            slots.ids = torch.tensor(ids, device=self._pool.layers[0].device)
        return slots.ids

    def block_table(self) -> NDArray[np.int64]:
        """Returns the blocks as an array that must not be changed."""
        return self._arrays().blocks

    def _arrays(self) -> "_Slots":
        if self._slots is None:
            self._slots = _Slots(np.array(self.blocks, dtype=np.int64))
        return self._slots

    def num_missing_blocks(self, length: int) -> int:
        """Returns how many more blocks `length` rows need."""
        return max(0, -(-length // self._pool.block_size) - len(self.blocks))

    # Called by the pool only.

    def extend(self, blocks: list[int]) -> None:
        """Appends blocks to the table."""
        for block in blocks:
            if self.is_contiguous and (not self.blocks or block == self.blocks[-1] + 1):
                self._num_leading += 1
            self.blocks.append(block)
        self._slots = None

    def own_tail(self, block: int) -> None:
        """Puts a block that only this sequence holds in the place of its last one."""
        self.blocks.pop()
        self._num_leading = min(self._num_leading, len(self.blocks))
        self._num_published = len(self.blocks)
        self.extend([block])
