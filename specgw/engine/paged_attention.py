"""Attention for a batch whose sequences are described by tensors: block tables and lengths.

Nothing here depends on the sequences' state but through these tensors, so that one recording of a
pass serves all batches of a shape (`graphs.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specgw.engine.attention_kernels import PagedKernel, RowGroup
from specgw.engine.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class Padding:
    """How the rows of a group's sequences become equally many, and back.

    Attributes:
        sources: [num_sequences * num_rows], for each padded row one of the group's.
        targets: [rows of the group], where each is among the padded ones.
    """

    sources: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True)
class BatchGroup:
    """A group of sequences in a batch: its rows from `first` to `last`."""

    first: int
    last: int
    rows: RowGroup
    padding: Padding | None = None


class PagedAttention:
    """The `Attention` of one forward pass, by a kernel that reads blocks."""

    def __init__(
        self,
        kv_cache: KVCache,
        kernel: PagedKernel,
        slots: Tensor,  # [num_tokens], where each row is stored
        groups: Sequence[BatchGroup],  # in the order of their rows
    ) -> None:
        self._kv_cache = kv_cache
        self._kernel = kernel
        self._slots = slots
        self._groups = groups

    def __call__(
        self,
        layer: int,
        query: Tensor,  # [num_tokens, num_heads, head_dim]
        keys_values: Tensor,  # [num_tokens, 2 * num_kv_heads, head_dim]
        scale: float,
        window: int | None = None,
    ) -> Tensor:  # [num_tokens, num_heads * head_dim]
        slots = self._kv_cache.layers[layer]
        slots.index_copy_(0, self._slots, keys_values)
        pool = slots.view(-1, self._kv_cache.block_size, *slots.shape[1:])
        outputs = [self._attend(query, pool, group, scale, window) for group in self._groups]
        return (torch.cat(outputs) if len(outputs) > 1 else outputs[0]).flatten(1)

    def _attend(
        self, query: Tensor, pool: Tensor, group: BatchGroup, scale: float, window: int | None
    ) -> Tensor:  # [last - first, num_heads, head_dim]
        rows = query[group.first : group.last]
        if group.padding is not None:
            rows = rows.index_select(0, group.padding.sources)
        rows = rows.view(-1, group.rows.num_rows, *rows.shape[1:])
        output = self._kernel(rows, pool, group.rows, scale, window).flatten(0, 1)
        if group.padding is not None:
            output = output.index_select(0, group.padding.targets)
        return output
