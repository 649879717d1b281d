"""What a forward pass reads beside weights and cache: one array of integers, copied at once.

Pure NumPy up to the copy. Padding rows stand before a sequence's own ones, have token 0 at position
0, and are stored in the pool's scratch block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specgw.engine.kv_cache import KVCache
from specgw.engine.model_runner import SequenceChunk

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """How many sequences, rows of each, and blocks of the longest one."""

    num_sequences: int
    num_rows: int
    num_blocks: int

    @property
    def num_tokens(self) -> int:
        """Rows in all."""
        return self.num_sequences * self.num_rows


@dataclass(frozen=True, slots=True)
class PaddedInputs:
    """The inputs of some sequences, padded to a shape.

    Attributes:
        token_ids, positions, slots: [num_sequences, num_rows].
        is_real: [num_sequences, num_rows], whether a row is no padding.
        lengths: [num_sequences], cache rows with these.
        tables: [num_sequences, num_blocks].
    """

    token_ids: Integers
    positions: Integers
    slots: Integers
    is_real: NDArray[np.bool_]
    lengths: Integers
    tables: Integers


def num_blocks(chunk: SequenceChunk, pool: KVCache) -> int:
    """Returns how many blocks a chunk's rows and those before them fill."""
    return -(-(chunk.cache.length + len(chunk.token_ids)) // pool.block_size)


def pad_inputs(chunks: Sequence[SequenceChunk], shape: Shape, pool: KVCache) -> PaddedInputs:
    """Returns the inputs of chunks that fit a shape; what is left of it is padding."""
    assert pool.scratch_block is not None, "padding needs a place"
    size, num_rows = pool.block_size, shape.num_rows
    tables = np.full((shape.num_sequences, shape.num_blocks), pool.scratch_block)
    token_ids = np.zeros((shape.num_sequences, num_rows), dtype=np.int64)
    starts = np.full(shape.num_sequences, num_rows)
    lengths = np.full(shape.num_sequences, num_rows)
    for i, chunk in enumerate(chunks):
        count = len(chunk.token_ids)
        blocks = chunk.cache.block_table()[: shape.num_blocks]
        tables[i, : len(blocks)] = blocks
        token_ids[i, num_rows - count :] = chunk.token_ids
        starts[i], lengths[i] = chunk.cache.length, chunk.cache.length + count
    positions = lengths[:, None] + np.arange(-num_rows, 0)
    is_real = positions >= starts[:, None]
    positions = np.where(is_real, positions, 0)
    blocks = np.where(is_real, np.take_along_axis(tables, positions // size, 1), pool.scratch_block)
    slots = blocks * size + positions % size
    return PaddedInputs(token_ids, positions, slots, is_real, lengths, tables)


def padded_logit_rows(chunks: Sequence[SequenceChunk], num_rows: int) -> Integers:
    """Returns the padded rows whose logits are wanted, in the order of the chunks."""
    ends = num_rows * np.arange(1, len(chunks) + 1)
    parts = [np.arange(end - c.num_logits, end) for end, c in zip(ends, chunks, strict=True)]
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


class Upload:
    """Copies arrays to a device through one buffer in host memory, pinned for a GPU.

    The copy is asynchronous; the buffer is written anew only when it has been read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._buffer = self._allocate(1 << 12)
        self._was_read: torch.cuda.Event | None = None
        if self._is_cuda:
            self._was_read = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def __call__(self, arrays: Sequence[Integers]) -> list[Tensor]:
        """Returns new tensors on the device, in one piece of memory, int64."""
        total = sum(array.size for array in arrays)
        target = torch.empty(total, dtype=torch.int64, device=self._device)
        self.into(target, arrays)
        parts = torch.split(target, [array.size for array in arrays])
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]

    def into(self, target: Tensor, arrays: Sequence[Integers]) -> None:
        """Fills the beginning of a tensor on the device, [at least all elements], int64."""
        total = sum(array.size for array in arrays)
        if self._was_read is not None:
            self._was_read.synchronize()
        if total > len(self._buffer):
            self._buffer = self._allocate(2 * total)
        np.concatenate([array.ravel() for array in arrays], out=self._buffer.numpy()[:total])
        target[:total].copy_(self._buffer[:total], non_blocking=self._is_cuda)
        if self._was_read is not None:
            self._was_read.record(torch.cuda.current_stream(self._device))

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64, pin_memory=self._is_cuda)
