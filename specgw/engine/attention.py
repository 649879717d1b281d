"""Attention over the block cache for a ragged batch of sequences, on a CPU.

`paged_attention.py` takes its place on a GPU. `scaled_dot_product_attention` runs once for each
sequence. The query heads that share a key head are folded into query rows,
[num_kv_heads, 1, num_rows * group, head_dim], which takes a tenth of the time of `enable_gqa`
(0.033 ms against 0.33 ms for one row of a 1.5 B model).

Where there is a compiled operator, it computes all rows of all sequences in one call, each row by
itself: what a token attends to does not depend on the rows beside it, be they drafts, other
sequences or pieces of a prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specgw.engine import cpu_kernels
from specgw.engine.cpu_kernels import PagedRows
from specgw.engine.kv_cache import KVCache, SequenceCache

_MAX_FOLDED_ROWS = 256


class CausalMasks:
    """Additive masks as views of one table for each (group, window), which grows on demand.

    The table is the mask of its last rows over its last columns: whatever the lengths, the mask of
    the last n rows of a sequence of m is the table's lower right corner.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._tables: dict[tuple[int, int | None], Tensor] = {}

    def get(self, num_rows: int, length: int, group: int, window: int | None) -> Tensor:
        """Returns the mask of the last rows of a sequence: [num_rows * group, length]."""
        table = self._tables.get((group, window))
        if table is None or table.shape[1] < length:
            table = self._build(2 * length, group, window)
            self._tables[group, window] = table
        return table[-num_rows * group :, -length:]

    def _build(self, length: int, group: int, window: int | None) -> Tensor:
        num_rows = max_rows(group)
        length = max(length, num_rows)
        own = torch.arange(length - num_rows, length, device=self._device).repeat_interleave(group)
        distance = own[:, None] - torch.arange(length, device=self._device)
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        table = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return table.masked_fill_(hidden, float("-inf"))


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The new rows of one sequence in a batch."""

    cache: SequenceCache
    num_rows: int


@dataclass(frozen=True, slots=True)
class _Segment:
    """Query rows of one sequence that share a mask, and the cache rows that they see."""

    cache: SequenceCache
    start: int  # query rows, in the batch
    end: int
    first: int  # cache rows, in the sequence
    last: int
    mask: Tensor | None


class BatchAttention:
    """The attention of one forward pass: which rows of the batch belong to which sequence."""

    def __init__(
        self,
        kv_cache: KVCache,
        masks: CausalMasks,
        positions: Tensor,  # [num_tokens]
        slots: Tensor,  # [num_tokens]
        parts: Sequence[SequenceRows],
    ) -> None:
        self.kv_cache = kv_cache
        self._masks = masks
        self._positions = positions
        self._slots = slots
        self._parts = parts
        self._rows: PagedRows | None = None
        self._segments: dict[tuple[int, int | None], list[_Segment]] = {}

    def __call__(
        self,
        layer: int,
        query: Tensor,  # [num_tokens, num_heads, head_dim]
        keys_values: Tensor,  # [num_tokens, 2 * num_kv_heads, head_dim]
        scale: float,
        window: int | None = None,
    ) -> Tensor:  # [num_tokens, num_heads * head_dim]
        pool = self.kv_cache.layers[layer]
        pool.index_copy_(0, self._slots, keys_values)
        group = query.shape[1] * 2 // keys_values.shape[1]
        if cpu_kernels.is_usable(pool) and cpu_kernels.can_attend(pool.shape[-1]):
            return cpu_kernels.attend(query, pool, self.rows, window, scale)
        segments = self._segments.get((group, window)) or self._cut_segments(group, window)
        if len(segments) == 1:
            return _attend(query, pool, segments[0], group, scale)
        output = query.new_empty(len(query), query.shape[1] * query.shape[2])
        for s in segments:
            output[s.start : s.end] = _attend(query[s.start : s.end], pool, s, group, scale)
        return output

    @property
    def rows(self) -> PagedRows:
        """All rows, each to be computed by itself."""
        if self._rows is None:
            blocks: list[int] = []
            tables: list[int] = []
            for part in self._parts:
                tables += [len(blocks)] * part.num_rows
                blocks += part.cache.blocks
            self._rows = PagedRows(
                torch.tensor(blocks), torch.tensor(tables), self._positions, self._slots
            )
        return self._rows

    def _cut_segments(self, group: int, window: int | None) -> list[_Segment]:
        """Cuts the rows into segments of bounded size."""
        segments, row = [], 0
        for part in self._parts:
            cache = part.cache
            length, end = cache.length, row + part.num_rows
            while row < end:
                num = min(max_rows(group), end - row)
                length += num
                first = 0 if window is None else max(0, length - num + 1 - window)
                mask = self._masks.get(num, length - first, group, window) if num > 1 else None
                segments.append(_Segment(cache, row, row + num, first, length, mask))
                row += num
        self._segments[group, window] = segments
        return segments


class Attention(Protocol):
    """What a model's layers call: `BatchAttention`, or `PagedAttention` on a GPU."""

    def __call__(
        self,
        layer: int,
        query: Tensor,  # [num_tokens, num_heads, head_dim]
        keys_values: Tensor,  # [num_tokens, 2 * num_kv_heads, head_dim]
        scale: float,
        window: int | None = None,
    ) -> Tensor:  # [num_tokens, num_heads * head_dim]
        """Stores the new rows of a layer, then attends to all rows of each sequence.

        A window of n lets a row see itself and the n - 1 rows before it.
        """


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one forward pass."""

    token_ids: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    logit_rows: Tensor | None  # [num_logits]; None for all rows
    attention: Attention
    hidden: list[Tensor] | None = None  # takes what the LM head reads of every row, if wanted


def max_rows(group: int) -> int:
    """Returns how many rows are attended to in one call; bounds the size of masks."""
    return max(1, _MAX_FOLDED_ROWS // group)


def _attend(
    query: Tensor,  # [num_rows, num_heads, head_dim]
    pool: Tensor,  # [num_slots, 2 * num_kv_heads, head_dim]
    segment: _Segment,
    group: int,
    scale: float,
) -> Tensor:  # [num_rows, num_heads * head_dim]
    keys, values = _read(pool, segment)
    num_rows, _, head_dim = query.shape
    if num_rows == 1:
        query = query.view(-1, 1, group, head_dim)
        return scaled_dot_product_attention(query, keys, values, scale=scale).view(1, -1)
    query = query.view(num_rows, -1, group * head_dim).transpose(0, 1)
    query = query.reshape(-1, 1, num_rows * group, head_dim)
    output = scaled_dot_product_attention(query, keys, values, segment.mask, scale=scale)
    return output.view(-1, num_rows, group * head_dim).transpose(0, 1).reshape(num_rows, -1)


def _read(pool: Tensor, segment: _Segment) -> tuple[Tensor, Tensor]:
    """Returns keys and values, each [num_kv_heads, 1, num_rows, head_dim]."""
    first, last = segment.first, segment.last
    start = first
    if segment.cache.is_contiguous:
        start += segment.cache.first_slot
    else:
        pool, start = pool.index_select(0, segment.cache.gather_ids()[first:last]), 0
    _, num_heads, head_dim = pool.shape
    row = num_heads * head_dim
    size = (num_heads // 2, 1, last - first, head_dim)
    stride = (head_dim, 0, row, 1)
    keys = pool.as_strided(size, stride, start * row)
    return keys, pool.as_strided(size, stride, start * row + row // 2)
