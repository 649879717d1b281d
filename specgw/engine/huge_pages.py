"""Memory of the CPU in huge pages, for what every step reads: weights and the KV cache.

A core that streams through 4 KiB pages waits for address translation again and again, in a virtual
machine for two levels of it: from 2 MiB pages the same loop reads up to twice as fast. Linux gives
them to whoever asks (`madvise`), in its usual setting; elsewhere this is ordinary memory.
"""

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_PAGE_BYTES = 1 << 21
_CHUNK_BYTES = 1 << 26  # that tensors share, so that small ones have huge pages too
_ALIGNMENT = 64  # a cache line


class HugePages:
    """Gives out memory from chunks. A chunk is freed with the last tensor in it.

    Args:
        chunk_bytes: At least. With 0 every tensor has memory of its own, in huge pages so far as
            it fills them.
    """

    def __init__(self, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._rest = torch.empty(0, dtype=torch.uint8)  # of the newest chunk

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a dense tensor in CPU memory, aligned to a cache line, with any content."""
        num_bytes = math.prod(shape) * dtype.itemsize
        taken = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if taken > len(self._rest):
            self._rest = _allocate(max(taken, self._chunk_bytes))
        memory, self._rest = self._rest[:num_bytes], self._rest[taken:]
        return memory.view(dtype).view(*shape)

    def copy(self, tensor: Tensor) -> Tensor:
        """Returns a dense copy."""
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor)


def _allocate(num_bytes: int) -> Tensor:
    if num_bytes < _PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_bytes, dtype=torch.uint8)
    size = -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
