"""Matrix products with fixed weights: one noun over three ways to compute them.

On a CPU that computes in bfloat16, weights are laid out once for the compiled operators, which read
them at the speed of the memory; without those for oneDNN's, which take up to twice as long for a
few rows. oneDNN's operators are private to torch; without them, in another data type or on another
device, plain `linear` does the same.
"""

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from specgw.engine import cpu_kernels


class PackedLinear:
    """Computes `x @ weight.T + bias (+ residual)`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._num_columns = len(weight)
        self._is_compiled = cpu_kernels.is_usable(weight) and weight.shape[1] % 2 == 0
        self._is_onednn = not self._is_compiled and _can_use_onednn(weight)
        self._weight = self._pack(weight.detach())
        self._bias = None if bias is None else bias.detach()

    @property
    def is_packed(self) -> bool:
        """Whether the weights were copied into another layout."""
        return self._is_compiled or self._is_onednn

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self._is_compiled:
            rows = x.flatten(0, -2) if x.dim() > 2 else x
            output = cpu_kernels.linear(rows, self._weight, self._bias, residual, self._num_columns)
            return output.view(*x.shape[:-1], self._num_columns) if x.dim() > 2 else output
        if self._is_onednn:
            op = torch.ops.mkldnn._linear_pointwise
            if residual is None:
                return cast(Tensor, op.default(x, self._weight, self._bias, "none", [], ""))
            return cast(Tensor, op.binary(x, residual, self._weight, self._bias, "add"))
        output = F.linear(x, self._weight, self._bias)
        return output if residual is None else output.add_(residual)

    @property
    def can_look_up(self) -> bool:
        """Whether `rows` gives the weights back."""
        return not self._is_onednn

    def rows(self, ids: Tensor) -> Tensor:
        """Returns rows of the weights, as an embedding does: [num_ids, size]."""
        if self._is_compiled:
            return cpu_kernels.unpack_rows(self._weight, ids)
        return self._weight.index_select(0, ids)

    def _pack(self, weight: Tensor) -> Tensor:
        if self._is_compiled:
            return cpu_kernels.pack(weight)
        if self._is_onednn:
            return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight, 1))
        return weight


def _can_use_onednn(weight: Tensor) -> bool:
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
