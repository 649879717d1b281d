"""Attention of equally many rows of each of some sequences over a pool of blocks.

Every kernel computes the same. Those of the flash-attention family read the blocks where they lie,
as far as a sequence is long; `GatheredSdpa` copies them and runs on every device and in every data
type. `kernel_choice.py` decides; `paged_attention.py` calls.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specgw.engine.attention import max_rows


@dataclass(frozen=True)
class RowGroup:
    """Some sequences, and how much each sees. Row i of r sees what r - 1 - i rows fewer do.

    Attributes:
        tables: [num_sequences, num_blocks], blocks of each sequence in the pool.
        lengths: [num_sequences], cache rows that the last row of each sees.
        num_rows: Query rows of each. The first ones may be padding that sees nothing.
    """

    tables: Tensor
    lengths: Tensor
    num_rows: int
    _masks: dict[tuple[int, int, int, int | None], Tensor] = field(default_factory=dict)

    @cached_property
    def block_table(self) -> Tensor:
        """The tables as kernels want them: int32."""
        return self.tables.to(torch.int32)

    @cached_property
    def seqused(self) -> Tensor:
        """The lengths as kernels want them: int32."""
        return self.lengths.to(torch.int32)

    @cached_property
    def cu_seqlens_q(self) -> Tensor:
        """Where each sequence's query rows begin, and the end: int32 [num_sequences + 1]."""
        ends = torch.arange(len(self.tables) + 1, dtype=torch.int32, device=self.tables.device)
        return ends * self.num_rows

    @cached_property
    def cu_seqlens_k(self) -> Tensor:
        """Where keys would begin if they were not in blocks: int32 [num_sequences + 1]."""
        ends = self.seqused.cumsum(0, dtype=torch.int32)
        return torch.nn.functional.pad(ends, (1, 0))

    def mask(self, first: int, last: int, fold: int, num_keys: int, window: int | None) -> Tensor:
        """Returns what some rows see: bool [num_sequences, 1, (last - first) * fold, num_keys].

        Each row is there `fold` times. Padding sees one key, so that no row sees nothing.
        """
        key = (first, last, fold, window)
        if (found := self._masks.get(key)) is None:
            device = self.tables.device
            rows = torch.arange(first, last, device=device).repeat_interleave(fold)
            visible = self.lengths.unsqueeze(1) + (rows + 1 - self.num_rows)
            visible = visible.clamp_(min=1).unsqueeze(2)
            keys = torch.arange(num_keys, device=device)
            found = keys < visible
            if window is not None:
                found &= keys >= visible - window
            self._masks[key] = found
        return found.unsqueeze(1)


class PagedKernel(Protocol):
    """One implementation.

    Attributes:
        name: What it is called in logs.
        block_size: Of which the pool's must be a multiple.
        is_bounded_by_lengths: Whether wider tables than sequences need cost nothing.
    """

    name: str
    block_size: int
    is_bounded_by_lengths: bool

    def __call__(
        self,
        query: Tensor,  # [num_sequences, num_rows, num_heads, head_dim], rows may be apart
        pool: Tensor,  # [num_blocks, block_size, 2 * num_kv_heads, head_dim]
        group: RowGroup,
        scale: float,
        window: int | None,
    ) -> Tensor:  # [num_sequences, num_rows, num_heads, head_dim]
        """Attends. A window of n lets a row see itself and the n - 1 rows before it.

        What comes out of padding rows means nothing.
        """


class GatheredSdpa:
    """Copies the blocks of every sequence side by side, for torch's own attention."""

    name = "scaled_dot_product_attention"
    block_size = 1
    is_bounded_by_lengths = False

    def __call__(
        self, query: Tensor, pool: Tensor, group: RowGroup, scale: float, window: int | None
    ) -> Tensor:
        keys, values = _gather(pool, group).transpose(1, 2).chunk(2, 1)
        num_sequences, num_rows, num_heads, head_dim = query.shape
        num_kv_heads, num_keys = keys.shape[1:3]
        fold = num_heads // num_kv_heads
        step = max_rows(fold)  # bounds the size of masks
        outputs = []
        for first in range(0, num_rows, step):
            last = min(first + step, num_rows)
            mask = group.mask(first, last, fold, num_keys, window)
            # Heads that share a key head become rows.
            rows = query[:, first:last].reshape(num_sequences, -1, num_kv_heads, fold, head_dim)
            rows = rows.transpose(1, 2)
            output = scaled_dot_product_attention(
                rows.reshape(num_sequences, num_kv_heads, -1, head_dim),
                keys,
                values,
                mask,
                scale=scale,
            )
            output = output.reshape(rows.shape).transpose(1, 2)
            outputs.append(output.flatten(2, 3))
        return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]


class _FlashAttention:
    """Calls `flash_attn_with_kvcache`, whose versions name the block tables differently."""

    name: str
    block_size: int
    is_bounded_by_lengths = True
    _table_argument: str

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(
        self, query: Tensor, pool: Tensor, group: RowGroup, scale: float, window: int | None
    ) -> Tensor:
        keys, values = pool.chunk(2, 2)
        output: Tensor = self._function(
            query,
            keys,
            values,
            cache_seqlens=group.seqused,
            softmax_scale=scale,
            causal=True,
            window_size=_window(window),
            **{self._table_argument: group.block_table},
        )
        return output


class FlashAttention2(_FlashAttention):
    """That of `flash_attn` (flash-attn 2.5 and later)."""

    name = "flash-attn 2"
    block_size = 256
    _table_argument = "block_table"


class FlashAttention3(_FlashAttention):
    """That of `flash_attn_interface` (flash-attn 3, for Hopper)."""

    name = "flash-attn 3"
    block_size = 1
    _table_argument = "page_table"


class TorchFlash:
    """Calls `torch.nn.attention.varlen.varlen_attn`, where it takes block tables (torch 2.12)."""

    name = "torch varlen_attn"
    block_size = 256
    is_bounded_by_lengths = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(
        self, query: Tensor, pool: Tensor, group: RowGroup, scale: float, window: int | None
    ) -> Tensor:
        keys, values = pool.chunk(2, 2)
        output: Tensor = self._function(
            query.flatten(0, 1),
            keys,
            values,
            group.cu_seqlens_q,
            group.cu_seqlens_k,
            group.num_rows,
            group.tables.shape[1] * pool.shape[1],
            scale=scale,
            window_size=_window(window) if window is not None else (-1, 0),
            enable_gqa=query.shape[2] != keys.shape[2],
            seqused_k=group.seqused,
            block_table=group.block_table,
        )
        return output.view(query.shape)


def _window(window: int | None) -> tuple[int, int]:
    """Returns how far a row sees to the left and the right of itself; -1 for no limit."""
    return (-1, -1) if window is None else (window - 1, 0)


def _gather(pool: Tensor, group: RowGroup) -> Tensor:
    """Copies the sequences' rows: [num_sequences, num_blocks * block_size, 2 * num_kv_heads, ..].

    Rows that nobody sees become zeros: what others left there may be no number, and 0 * NaN is NaN.
    """
    num_sequences, num_blocks = group.tables.shape
    rows = pool.index_select(0, group.tables.flatten())
    rows = rows.view(num_sequences, num_blocks * pool.shape[1], *pool.shape[2:])
    beyond = torch.arange(rows.shape[1], device=rows.device) >= group.lengths.unsqueeze(1)
    return rows.masked_fill_(beyond[:, :, None, None], 0)
