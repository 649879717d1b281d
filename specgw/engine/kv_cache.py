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
from torch import Tensor

from specgw.engine.huge_pages import HugePages
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
        self.layers = [_build_layer(shape, dtype, device) for _ in range(num_layers)]
        if has_scratch:  # which is read before it is written
            for layer in self.layers:
                layer.zero_()

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
        lengths = [one for one in lengths if one[0].lacks_room(one[1])]
        if not lengths:
            return
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

    # Forks.

    def fork(self, forks: Sequence["Fork"]) -> list["SequenceCache"]:
        """Returns a sequence for each fork that begins with rows of another and has room for more.

        Full blocks stay the parent's, which must neither drop them nor write into them while the
        fork lives; the rows of a block that is partly filled are copied, all in one operation.

        Raises:
            OutOfBlocks: and then nothing has changed.
        """
        size = self.block_size
        shared = [one.num_shared // size for one in forks]
        counts = self._num_own_blocks(forks)
        if sum(counts) > self._num_free:
            raise OutOfBlocks(sum(counts), self._num_free)
        taken = self._take(sum(counts), None) if forks else []
        caches, sources, copies = [], [], []
        for one, num_full, count in zip(forks, shared, counts, strict=True):
            own, taken = taken[:count], taken[count:]
            if one.num_shared % size:
                sources.append(one.parent.blocks[num_full])
                copies.append(own[0])
            caches.append(SequenceCache(self, one, own))
        self._copy(sources, copies)
        return caches

    def num_fitting(self, forks: Sequence["Fork"]) -> int:
        """Returns for how many of some forks, the first ones, there is room now."""
        ends = np.cumsum(self._num_own_blocks(forks))
        return int(np.searchsorted(ends, self._num_free, side="right"))

    def _num_own_blocks(self, forks: Sequence["Fork"]) -> list[int]:
        size = self.block_size
        return [-(-one.num_rows // size) - one.num_shared // size for one in forks]

    def release_forks(self, forks: Sequence["SequenceCache"]) -> None:
        """Gives the blocks of several forks back at once."""
        self.give_back([block for one in forks for block in one.take_own()])

    # Called by sequences only.

    def names(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Returns the names of this pool's full blocks: a block's is that of its last tokens."""
        stride = self.block_size // BLOCK_SIZE
        return hashes if stride == 1 else hashes[stride - 1 :: stride]

    def give_back(self, blocks: Sequence[int]) -> None:
        """Ends a hold on each block. The rows of published ones stay, the last one's the least."""
        if not blocks:
            return
        at = np.array(blocks)
        assert self._num_holders[at].all(), "a block was freed twice"
        self._num_holders[at] -= 1
        freed = at[self._num_holders[at] == 0]
        self._is_free[freed] = True
        self._num_free += len(freed)
        self._last_used[freed] = 0
        for block in reversed(freed.tolist()):
            if block in self._prefixes:
                self._num_uses += 1
                self._last_used[block] = self._num_uses

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
        self._copy([block], [copy])
        self.give_back([block])
        return copy

    def _copy(self, sources: Sequence[int], copies: Sequence[int]) -> None:
        """Copies the rows of whole blocks into others."""
        if not sources:
            return
        at = torch.tensor((sources, copies), device=self.layers[0].device)
        for layer in self.layers:
            rows = layer.view(-1, self.block_size, *layer.shape[1:])
            rows[at[1]] = rows[at[0]]

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


def _build_layer(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return HugePages(chunk_bytes=0).empty(shape, dtype)
    return torch.empty(tuple(shape), dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class Fork:
    """A sequence to begin with the first `num_shared` rows of another, with room for `num_rows`."""

    parent: "SequenceCache"
    num_shared: int
    num_rows: int


@dataclass(slots=True)
class _Slots:
    """A sequence's block table as arrays, until it changes."""

    blocks: NDArray[np.int64]
    ids: torch.Tensor | None = None  # of all slots


class SequenceCache:
    """One session's share of the pool: a block table and how many rows are stored."""

    def __init__(self, pool: KVCache, fork: Fork | None = None, own: Sequence[int] = ()) -> None:
        """Begins empty, or as a fork with blocks of its own behind those of its parent."""
        self.length = 0
        self.blocks: list[int] = []
        self.pool = pool
        self._num_leading = 0  # blocks at the front that follow one another
        self._num_published = 0  # blocks at the front that others may hold
        self._num_borrowed = 0  # blocks at the front that the parent of a fork holds
        self._slots: _Slots | None = None  # made of the blocks when wanted
        if fork is not None:
            self._num_borrowed = fork.num_shared // pool.block_size
            self.blocks = fork.parent.blocks[: self._num_borrowed]
            self._num_leading = min(fork.parent._num_leading, self._num_borrowed)
            self._num_published = min(fork.parent._num_published, self._num_borrowed)
            self.length = fork.num_shared
            self.extend(list(own))

    @property
    def is_contiguous(self) -> bool:
        """Whether the blocks follow one another in the pool."""
        return self._num_leading == len(self.blocks)

    def reserve(self, length: int) -> None:
        """Makes room for `length` rows in all.

        Raises:
            OutOfBlocks: and then nothing has changed.
        """
        if self.lacks_room(length):
            self.pool.reserve([(self, length)])

    def truncate(self, length: int) -> None:
        """Drops the rows past `length` and gives whole free blocks back."""
        self.length = min(self.length, length)
        num_kept = -(-self.length // self.pool.block_size)
        assert num_kept >= self._num_borrowed, "a fork does not drop what it shares"
        if num_kept < len(self.blocks):
            self.pool.give_back(self.blocks[num_kept:])
            del self.blocks[num_kept:]
            self._num_leading = min(self._num_leading, num_kept)
            self._num_published = min(self._num_published, num_kept)
            self._slots = None

    def release(self) -> None:
        """Gives every block back. May be called again."""
        if self._num_borrowed:
            self.pool.release_forks([self])
        self.truncate(0)

    # Forks.

    def take_own(self) -> list[int]:
        """Leaves a fork empty; returns the blocks that only it holds."""
        own = self.blocks[self._num_borrowed :]
        self.length = self._num_leading = self._num_published = self._num_borrowed = 0
        self.blocks, self._slots = [], None
        return own

    def become(self, fork: "SequenceCache") -> None:
        """Takes a fork's rows over in place of its own after those that both have."""
        num_shared = fork._num_borrowed
        length, own = fork.length, fork.take_own()
        self.pool.give_back(self.blocks[num_shared:])
        del self.blocks[num_shared:]
        self._num_leading = min(self._num_leading, num_shared)
        self._num_published = min(self._num_published, num_shared)
        self.length = length
        self.extend(own)

    # Prefixes that sequences share.

    def adopt(self, hashes: Sequence[bytes]) -> None:
        """Begins an empty sequence with the rows of the longest prefix that is in the pool.

        Args:
            hashes: Each `BLOCK_SIZE` tokens that the sequence will begin with (`BlockHashes`).
        """
        assert not self.blocks, "only an empty sequence can begin with other rows"
        self.extend(self.pool.hold_prefix(self.pool.names(hashes)))
        self._num_published = len(self.blocks)
        self.length = len(self.blocks) * self.pool.block_size

    def publish(self, hashes: Sequence[bytes]) -> None:
        """Lets other sequences use this one's first blocks. Their rows must be final.

        Args:
            hashes: Those of the context (`BlockHashes`), as far as it is stored at most.
        """
        assert len(hashes) * BLOCK_SIZE <= self.length, "a block is not stored yet"
        names, first = self.pool.names(hashes), self._num_published
        if first < len(names):
            self.pool.publish(self.blocks[first : len(names)], names[first:])
            self._num_published = len(names)

    def has_unpublished(self, length: int) -> bool:
        """Whether `publish` has something to do when `length` rows are final."""
        return length // self.pool.block_size > self._num_published

    @property
    def has_published_tail(self) -> bool:
        """Whether the next row goes into a block that others may hold."""
        return self._num_published > self.length // self.pool.block_size

    @property
    def first_slot(self) -> int:
        """The slot of row 0."""
        return self.blocks[0] * self.pool.block_size

    def slot_ids(self, start: int, end: int) -> list[int]:
        """Returns the slots of rows `start` to `end`."""
        size, blocks = self.pool.block_size, self.blocks
        if end == start + 1:  # as in most passes of a draft model
            return [blocks[start // size] * size + start % size]
        return [blocks[row // size] * size + row % size for row in range(start, end)]

    def gather_ids(self) -> torch.Tensor:
        """Returns the slots of all rows that there is room for, as an index into a layer."""
        slots = self._arrays()
        if slots.ids is None:
            ids = self.slot_ids(0, len(self.blocks) * self.pool.block_size)
            slots.ids = torch.tensor(ids, device=self.pool.layers[0].device)
        return slots.ids

    def block_table(self) -> NDArray[np.int64]:
        """Returns the blocks as an array that must not be changed."""
        return self._arrays().blocks

    def _arrays(self) -> "_Slots":
        if self._slots is None:
            self._slots = _Slots(np.array(self.blocks, dtype=np.int64))
        return self._slots

    def lacks_room(self, length: int) -> bool:
        """Whether anything must change before `length` rows can be stored."""
        size = self.pool.block_size
        if length > len(self.blocks) * size:
            return True
        return length > self.length and self._num_published > self.length // size

    def num_missing_blocks(self, length: int) -> int:
        """Returns how many more blocks `length` rows need."""
        return max(0, -(-length // self.pool.block_size) - len(self.blocks))

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
