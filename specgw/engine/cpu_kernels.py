"""Calls the operators of `cpu_kernels.c`, where they were built and the CPU has AVX-512 BF16.

Every one has a twin in torch that its callers fall back to; `is_usable` decides. All tensors are
bfloat16 on the CPU and dense.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specgw.engine.extension import FLOAT, INT, POINTER, load_operators
from specgw.engine.huge_pages import HugePages

_BLOCK = 48  # output columns that lie together in packed weights
_MAX_HEAD_DIM = 256
_MULTIPLE = 32  # of which a head's size must be a multiple

_operators = load_operators(
    "_cpu_kernels",
    {
        "specgw_linear": (*[POINTER] * 5, *[INT] * 3),
        "specgw_quantize": (*[POINTER] * 3, *[INT] * 2),
        "specgw_int8_linear": (*[POINTER] * 8, *[INT] * 3),
        "specgw_rms_norm": (*[POINTER] * 3, *[INT] * 2, FLOAT),
        "specgw_attend": (*[POINTER] * 6, *[INT] * 6, FLOAT),
        "specgw_run_layers": (*[POINTER] * 2, INT, *[POINTER] * 4),
    },
)


def is_usable(tensor: Tensor) -> bool:
    """Whether operators for this data type and device are there."""
    return bool(_operators) and tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu"


def can_attend(head_dim: int) -> bool:
    """Whether `attend` and `run_layers` know heads of this size."""
    return head_dim <= _MAX_HEAD_DIM and head_dim % _MULTIPLE == 0


def pack(weight: Tensor, pages: HugePages) -> Tensor:
    """Lays out weights [num_columns, size] for `linear`: [ceil(num_columns / 64), size / 2, 64, 2].

    The size must be even.
    """
    num_columns, size = weight.shape
    num_blocks = -(-num_columns // _BLOCK)
    padded = torch.nn.functional.pad(weight, (0, 0, 0, num_blocks * _BLOCK - num_columns))
    pairs = padded.contiguous().view(torch.int32).view(num_blocks, _BLOCK, size // 2)
    packed = pages.copy(pairs.transpose(1, 2))
    return packed.view(torch.bfloat16).view(num_blocks, size // 2, _BLOCK, 2)


def unpack_rows(packed: Tensor, rows: Tensor) -> Tensor:
    """Returns rows [num_rows, size] of the weights that were packed."""
    return packed[rows // _BLOCK, :, rows % _BLOCK].flatten(1)


def linear(
    x: Tensor,  # [num_rows, size]
    packed: Tensor,
    bias: Tensor | None,  # [num_columns]
    residual: Tensor | None,  # [num_rows, num_columns]
    num_columns: int,
) -> Tensor:  # [num_rows, num_columns]
    """Returns `x @ weight.T + bias + residual`; a row does not depend on the rows beside it."""
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    output = x.new_empty(len(x), num_columns)
    _operators["specgw_linear"](
        x.data_ptr(),
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if residual is None else residual.data_ptr(),
        output.data_ptr(),
        len(x),
        num_columns,
        x.shape[1],
    )
    return output


@dataclass(frozen=True, slots=True)
class Int8Weights:
    """Weights rounded to int8, each output column with a scale of its own.

    Attributes:
        packed: [ceil(num_columns / 64), size / 4, 64, 4], int8.
        scales: [ceil(num_columns / 64) * 64], float32; a column counts for packed * scale.
        totals: The sums of each column's int8 weights, int32.
        num_columns: Output columns.
    """

    packed: Tensor
    scales: Tensor
    totals: Tensor
    num_columns: int


def pack_int8(weight: Tensor, pages: HugePages) -> Int8Weights:
    """Rounds weights [num_columns, size] to the nearest of 255 steps and lays them out.

    The size must be a multiple of 4.
    """
    num_columns, size = weight.shape
    num_blocks = -(-num_columns // _BLOCK)
    padded = torch.nn.functional.pad(weight, (0, 0, 0, num_blocks * _BLOCK - num_columns)).float()
    scales = padded.abs().amax(1) / 127
    steps = scales.where(scales > 0, 1.0).unsqueeze(1)
    rounded = padded.div_(steps).round_().to(torch.int8)
    totals = rounded.sum(1, dtype=torch.int32)
    quads = rounded.view(torch.int32).view(num_blocks, _BLOCK, size // 4)
    packed = pages.copy(quads.transpose(1, 2)).view(torch.int8)
    return Int8Weights(packed.view(num_blocks, size // 4, _BLOCK, 4), scales, totals, num_columns)


def unpack_int8_rows(weights: Int8Weights, rows: Tensor) -> Tensor:
    """Returns rows [num_rows, size] of the weights, rounded, in bfloat16."""
    chosen = weights.packed[rows // _BLOCK, :, rows % _BLOCK].flatten(1)
    return (chosen * weights.scales[rows].unsqueeze(1)).to(torch.bfloat16)


def int8_linear(
    x: Tensor,  # [num_rows, size]
    weights: Int8Weights,
    bias: Tensor | None,  # [num_columns]
    residual: Tensor | None,  # [num_rows, num_columns]
) -> Tensor:  # [num_rows, num_columns]
    """Returns `x @ weight.T + bias + residual`, each row of x rounded to 255 steps of its own."""
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    num_rows, size = x.shape
    quantized = torch.empty(num_rows, size, dtype=torch.uint8)
    scales = torch.empty(num_rows)
    output = x.new_empty(num_rows, weights.num_columns)
    pointers = x.data_ptr(), quantized.data_ptr(), scales.data_ptr()
    _operators["specgw_quantize"](*pointers, num_rows, size)
    _operators["specgw_int8_linear"](
        quantized.data_ptr(),
        scales.data_ptr(),
        weights.packed.data_ptr(),
        weights.scales.data_ptr(),
        weights.totals.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if residual is None else residual.data_ptr(),
        output.data_ptr(),
        num_rows,
        weights.num_columns,
        size,
    )
    return output


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Rows of several sequences and where their keys and values are; int64.

    Attributes:
        blocks: The block tables of all sequences, one after the other.
        tables: [num_rows], where the block table of a row's sequence begins.
        positions: [num_rows], a row's place in its sequence.
        slots: [num_rows], where a row's own keys and values are stored.
    """

    blocks: Tensor
    tables: Tensor
    positions: Tensor
    slots: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the rows of x [..., size] at unit root mean square, times the weight [size]."""
    x = x.contiguous()
    size = x.shape[-1]
    output = torch.empty_like(x)
    pointers = x.data_ptr(), weight.data_ptr(), output.data_ptr()
    _operators["specgw_rms_norm"](*pointers, x.numel() // size, size, eps)
    return output


def attend(
    query: Tensor,  # [num_rows, num_heads, head_dim], rows may be apart
    pool: Tensor,  # [num_slots, 2 * num_kv_heads, head_dim]
    rows: PagedRows,
    window: int | None,
    scale: float,
) -> Tensor:  # [num_rows, num_heads * head_dim]
    """Returns the attention of the rows, each independent of the others.

    A row sees those of its sequence up to itself, at most `window` of them.
    """
    num_rows, num_heads, head_dim = query.shape
    kv_heads = pool.shape[1] // 2
    output = query.new_empty(num_rows, num_heads * head_dim)
    _operators["specgw_attend"](
        query.data_ptr(),
        pool.data_ptr(),
        rows.blocks.data_ptr(),
        rows.tables.data_ptr(),
        rows.positions.data_ptr(),
        output.data_ptr(),
        num_rows,
        kv_heads,
        num_heads // kv_heads,
        head_dim,
        query.stride(0),
        window or 0,
        scale,
    )
    return output


def run_layers(
    layers: "ctypes.Array[Any]",
    pools: "ctypes.Array[ctypes.c_void_p]",
    shape: ctypes.Structure,
    rows: ctypes.Structure,
    hidden: Tensor,  # [num_rows, hidden], changed in place
    scratch: ctypes.Structure,
) -> None:
    """Runs decoder layers; `compiled_layers.py` has the structures."""
    _operators["specgw_run_layers"](
        ctypes.addressof(layers),
        ctypes.addressof(pools),
        len(layers),
        ctypes.addressof(shape),
        ctypes.addressof(rows),
        hidden.data_ptr(),
        ctypes.addressof(scratch),
    )
