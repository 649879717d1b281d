"""Runs all layers of a decoder in one call of `cpu_kernels.c`.

A step of a few rows spends 10 us of Python on each operator: for a small draft model more than on
the arithmetic. The structures are those of the C code.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specgw.engine import cpu_kernels
from specgw.engine.kv_cache import KVCache
from specgw.engine.linear import CompiledLinear, Int8Linear, Linear

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class _Product(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("weight", "bias", "scales", "totals")),
        *((name, _INT) for name in ("num_columns", "size")),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("attention_norm", "head_norms", "mlp_norm")),
        *((name, _Product) for name in ("qkv", "output", "gate_up", "down")),
        ("window", _INT),
    ]


class _Shape(ctypes.Structure):
    _fields_ = [
        ("rotations", _POINTER),
        *((name, _INT) for name in ("heads", "kv_heads", "head_dim", "hidden", "inner")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    ]


class _Rows(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("blocks", "tables", "positions", "slots")),
        ("num_rows", _INT),
    ]


class _Scratch(ctypes.Structure):
    _fields_ = [
        (name, _POINTER)
        for name in ("normed", "qkv", "attended", "gate_up", "activated", "bytes", "scales")
    ]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """What a layer computes with; see `decoder.py` for shapes.

    Attributes:
        attention_norm: Weights of the norm before attention.
        head_norms: [num_heads + num_kv_heads, head_dim], or None.
        mlp_norm: Weights of the norm before the MLP.
        qkv, output, gate_up, down: The products.
        window: How many rows a row sees, itself included; None for all.
    """

    attention_norm: Tensor
    head_norms: Tensor | None
    mlp_norm: Tensor
    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear
    window: int | None


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What all layers have in common; `inner` is the size of the MLP."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    eps: float
    scale: float


def can_compile(layer: LayerWeights, shape: LayerShape) -> bool:
    """Whether there are operators for all that such a layer computes."""
    products = layer.qkv, layer.output, layer.gate_up, layer.down
    return (
        all(isinstance(product, CompiledLinear | Int8Linear) for product in products)
        and cpu_kernels.is_usable(layer.attention_norm)
        and cpu_kernels.can_attend(shape.head_dim)
    )


class CompiledLayers:
    """The layers of a decoder. Their weights must stay where they are."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        shape: LayerShape,
        rotations: Tensor,  # [num_positions, 2, 1, head_dim]
    ) -> None:
        self._weights = layers, rotations  # what the structures point to
        self._layers = (_Layer * len(layers))(*map(_layer, layers))
        self._shape = _Shape(
            rotations.data_ptr(),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.hidden,
            shape.inner,
            shape.eps,
            shape.scale,
        )
        attended = shape.heads * shape.head_dim
        qkv = attended + 2 * shape.kv_heads * shape.head_dim
        self._widths = shape.hidden, qkv, attended, 2 * shape.inner, shape.inner
        self._num_bytes = max(shape.hidden, attended, shape.inner)
        self._has_int8 = any(one.scales for layer in self._layers for one in _products(layer))
        self._pools: tuple[KVCache, ctypes.Array[ctypes.c_void_p]] | None = None

    def __call__(
        self,
        hidden: Tensor,  # [num_rows, hidden]
        kv_cache: KVCache,
        rows: cpu_kernels.PagedRows,
    ) -> Tensor:
        """Stores the rows' keys and values; returns the hidden states after the last layer."""
        num_rows = len(hidden)
        hidden = hidden.contiguous()
        widths = sum(self._widths)
        scratch = hidden.new_empty(num_rows * widths)
        quantized = torch.empty(
            num_rows * self._num_bytes if self._has_int8 else 0, dtype=torch.uint8
        )
        scales = torch.empty(num_rows)
        starts = [scratch.data_ptr()]
        for width in self._widths[:-1]:
            starts.append(starts[-1] + num_rows * width * scratch.element_size())
        cpu_kernels.run_layers(
            self._layers,
            self._pools_of(kv_cache),
            self._shape,
            _Rows(
                rows.blocks.data_ptr(),
                rows.tables.data_ptr(),
                rows.positions.data_ptr(),
                rows.slots.data_ptr(),
                num_rows,
            ),
            hidden,
            _Scratch(*starts, quantized.data_ptr(), scales.data_ptr()),
        )
        return hidden

    def _pools_of(self, kv_cache: KVCache) -> "ctypes.Array[ctypes.c_void_p]":
        if self._pools is None or self._pools[0] is not kv_cache:
            pointers = [layer.data_ptr() for layer in kv_cache.layers]
            self._pools = kv_cache, (_POINTER * len(pointers))(*pointers)
        return self._pools[1]


def _layer(layer: LayerWeights) -> _Layer:
    head_norms = layer.head_norms
    return _Layer(
        layer.attention_norm.data_ptr(),
        None if head_norms is None else head_norms.data_ptr(),
        layer.mlp_norm.data_ptr(),
        *map(_product, (layer.qkv, layer.output, layer.gate_up, layer.down)),
        layer.window or 0,
    )


def _product(linear: Linear) -> _Product:
    assert isinstance(linear, CompiledLinear | Int8Linear)
    bias = None if linear.bias is None else linear.bias.data_ptr()
    if isinstance(linear, CompiledLinear):
        size = linear.weight.shape[1] * 2
        return _Product(linear.weight.data_ptr(), bias, None, None, linear.num_columns, size)
    weights = linear.weights
    return _Product(
        weights.packed.data_ptr(),
        bias,
        weights.scales.data_ptr(),
        weights.totals.data_ptr(),
        weights.num_columns,
        weights.packed.shape[1] * 4,
    )


def _products(layer: _Layer) -> tuple[_Product, ...]:
    return layer.qkv, layer.output, layer.gate_up, layer.down
