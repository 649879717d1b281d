"""Matrix products with fixed weights, in the fastest form that the device and the data type have.

On a CPU that computes in bfloat16, weights are laid out once for the compiled operators, which read
them at the speed of the memory; without those for oneDNN's, which take up to twice as long for a
few rows. oneDNN's operators are private to torch; without them, in another data type or on another
device, plain `linear` does the same.
"""

from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from specgw.engine import cpu_kernels
from specgw.engine.huge_pages import HugePages


class Linear(Protocol):
    """Computes `x @ weight.T + bias (+ residual)`.

    Attributes:
        is_packed: Whether the weights were copied into another layout.
        can_look_up: Whether `rows` gives the weights back.
    """

    is_packed: bool
    can_look_up: bool

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Takes [..., size] and a residual of the result's shape; returns [..., num_columns]."""

    def rows(self, ids: Tensor) -> Tensor:
        """Returns rows of the weights, as an embedding does: [num_ids, size]."""


class LinearBuilder:
    """Builds the products of one model. Its weights lie together, in memory of its own."""

    def __init__(self, *, is_int8: bool = False) -> None:
        """With `is_int8`, weights and inputs are rounded to int8; see `can_be_int8`."""
        self._is_int8 = is_int8
        self._pages = HugePages()

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Returns the fastest form of weights [num_columns, size] and a bias [num_columns]."""
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        if self._is_int8 and can_be_int8(weight):
            return Int8Linear(weight, bias, self._pages)
        if cpu_kernels.is_usable(weight) and weight.shape[1] % 2 == 0:
            return CompiledLinear(weight, bias, self._pages)
        if _can_use_onednn(weight):
            return _OneDnnLinear(weight, bias)
        return _PlainLinear(weight, bias)


def can_be_int8(weight: Tensor) -> bool:
    """Whether there is an operator for these weights rounded to int8."""
    return cpu_kernels.is_usable(weight) and weight.shape[1] % 4 == 0


class _PlainLinear:
    is_packed = False
    can_look_up = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        output = F.linear(x, self._weight, self._bias)
        return output if residual is None else output.add_(residual)

    def rows(self, ids: Tensor) -> Tensor:
        return self._weight.index_select(0, ids)


class _OneDnnLinear:
    is_packed = True
    can_look_up = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        self._bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        op = torch.ops.mkldnn._linear_pointwise
        if residual is None:
            return cast(Tensor, op.default(x, self._weight, self._bias, "none", [], ""))
        return cast(Tensor, op.binary(x, residual, self._weight, self._bias, "add"))

    def rows(self, ids: Tensor) -> Tensor:
        raise NotImplementedError("oneDNN's layout is its own")


class CompiledLinear:
    """Weights in bfloat16, laid out for `cpu_kernels.linear`."""

    is_packed = True
    can_look_up = True

    def __init__(self, weight: Tensor, bias: Tensor | None, pages: HugePages) -> None:
        self.num_columns = len(weight)
        self.weight = cpu_kernels.pack(weight, pages)
        self.bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        rows = x.flatten(0, -2) if x.dim() > 2 else x
        output = cpu_kernels.linear(rows, self.weight, self.bias, residual, self.num_columns)
        return output.view(*x.shape[:-1], self.num_columns) if x.dim() > 2 else output

    def rows(self, ids: Tensor) -> Tensor:
        return cpu_kernels.unpack_rows(self.weight, ids)


class Int8Linear:
    """Rounds each output column's weights, and each row of the input, to 255 steps of its own."""

    is_packed = True
    can_look_up = True

    def __init__(self, weight: Tensor, bias: Tensor | None, pages: HugePages) -> None:
        self.weights = cpu_kernels.pack_int8(weight, pages)
        self.bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        rows = x.flatten(0, -2) if x.dim() > 2 else x
        output = cpu_kernels.int8_linear(rows, self.weights, self.bias, residual)
        return output.view(*x.shape[:-1], self.weights.num_columns) if x.dim() > 2 else output

    def rows(self, ids: Tensor) -> Tensor:
        return cpu_kernels.unpack_int8_rows(self.weights, ids)


def _can_use_onednn(weight: Tensor) -> bool:
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
