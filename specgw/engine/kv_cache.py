"""Keys and values of all sessions in one pool of blocks. Knows nothing of tokens or of models.

A sequence whose blocks follow one another is read as a strided view of the pool, without a copy;
so the allocator extends a sequence in place if it can, and begins a new one where there is most
room. A fragmented sequence is gathered. `attention.py` reads and writes the rows.
"""

from collections.abc import Sequence

import numpy as np
import torch

BLOCK_SIZE = 16


class OutOfBlocks(Exception):
    """There are not enough free blocks."""

    def __init__(self, num_missing: int, num_free: int) -> None:
        super().__init__(f"{num_missing} KV cache blocks needed, {num_free} free")


class KVCache:
    """The pool. Each layer's tensor is [num_slots, 2 * num_kv_heads, head_dim]: keys, then values.

    A slot is one token's place; a block is `block_size` slots that follow one another. Rows that no
    sequence holds are undefined.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        capacity_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = BLOCK_SIZE
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self._is_free = np.ones(capacity_tokens // BLOCK_SIZE, dtype=bool)
        self._num_free = len(self._is_free)
        shape = (len(self._is_free) * BLOCK_SIZE, 2 * num_kv_heads, head_dim)
        self.layers = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    @property
    def capacity_tokens(self) -> int:
        """Slots in all."""
        return len(self._is_free) * self.block_size

    @property
    def used_tokens(self) -> int:
        """Slots in blocks that sequences hold."""
        return self.capacity_tokens - self._num_free * self.block_size

    def new_sequence(self) -> "SequenceCache":
        """Returns an empty sequence; it holds no block yet."""
        return SequenceCache(self)

    def reserve(self, lengths: Sequence[tuple["SequenceCache", int]]) -> None:
        """Makes room in several sequences at once, or in none.

        Raises:
            OutOfBlocks: and then nothing has changed.
        """
        needed = [cache.num_missing_blocks(length) for cache, length in lengths]
        if sum(needed) > self._num_free:
            raise OutOfBlocks(sum(needed), self._num_free)
        for (cache, _), count in zip(lengths, needed, strict=True):
            if count:
                cache.extend(self._take(count, cache.blocks[-1] if cache.blocks else None))

    def give_back(self, blocks: list[int]) -> None:
        """Frees blocks. Called by sequences only."""
        assert not self._is_free[blocks].any(), "a block was freed twice"
        self._is_free[blocks] = True
        self._num_free += len(blocks)

    def _take(self, count: int, last: int | None) -> list[int]:
        """Takes `count` free blocks, if possible those that follow `last`."""
        taken: list[int] = []
        start, size = self._run_after(last) if last is not None else (0, 0)
        while True:
            size = min(size, count - len(taken))
            self._is_free[start : start + size] = False
            taken.extend(range(start, start + size))
            if len(taken) == count:
                self._num_free -= count
                return taken
            start, size = self._largest_run()
            if start and size > count - len(taken):
                # The owner of the blocks before the run keeps room to grow, and so does this one.
                skipped = (size - (count - len(taken))) // 2
                start, size = start + skipped, size - skipped

    def _run_after(self, last: int) -> tuple[int, int]:
        following = self._is_free[last + 1 :]
        taken = following.argmin() if len(following) else 0
        all_free = len(following) > 0 and bool(following[taken])
        return last + 1, len(following) if all_free else int(taken)

    def _largest_run(self) -> tuple[int, int]:
        edges = np.diff(self._is_free.astype(np.int8), prepend=0, append=0)
        starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        largest = int((ends - starts).argmax())
        return int(starts[largest]), int(ends[largest] - starts[largest])


class SequenceCache:
    """One session's share of the pool: a block table and how many rows are stored."""

    def __init__(self, pool: KVCache) -> None:
        self.length = 0
        self.blocks: list[int] = []
        self._pool = pool
        self._num_leading = 0  # blocks at the front that follow one another
        self._slots: torch.Tensor | None = None

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
            self._slots = None

    def release(self) -> None:
        """Gives every block back. May be called again."""
        self.truncate(0)

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
        if self._slots is None:
            slots = self.slot_ids(0, len(self.blocks) * self._pool.block_size)
            self._slots = torch.tensor(slots, device=self._pool.layers[0].device)
        return self._slots

    def num_missing_blocks(self, length: int) -> int:
        """Returns how many more blocks `length` rows need."""
        return max(0, -(-length // self._pool.block_size) - len(self.blocks))

    def extend(self, blocks: list[int]) -> None:
        """Appends blocks to the table. Called by the pool only."""
        for block in blocks:
            if self.is_contiguous and (not self.blocks or block == self.blocks[-1] + 1):
                self._num_leading += 1
            self.blocks.append(block)
        self._slots = None
