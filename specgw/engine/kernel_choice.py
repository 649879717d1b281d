"""Chooses the attention kernel of a GPU: what is installed, fits the model, and computes the same.

Interfaces of such packages change, so nothing is taken on trust: before a kernel is used, it is
compared with torch's own attention on the device. What fails is passed over, and the log says why.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import Any

import torch

from specgw.engine.attention_kernels import (
    FlashAttention2,
    FlashAttention3,
    GatheredSdpa,
    PagedKernel,
    RowGroup,
    TorchFlash,
)
from specgw.engine.kv_cache import BLOCK_SIZE
from specgw.errors import ConfigError
from specgw.vllm_names import RUNNABLE_ATTENTION

logger = logging.getLogger(__name__)

FLASH, SDPA = RUNNABLE_ATTENTION

_MAX_HEAD_DIM, _HEAD_DIM_MULTIPLE = 256, 8
_TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.005}  # relative, of the whole trial
_TRIAL_LENGTHS = (1, 37, 300)  # cache rows of each sequence
_TRIAL_ROWS = (1, 5)
_TRIAL_WINDOWS = (None, 20)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What an attention kernel needs to know of a model, and where it runs."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class Unusable(Exception):
    """A kernel cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel of the flash-attention family.

    Attributes:
        module, function: Where it is called.
        build: Makes the kernel from the function.
        parameter: Of the function, that older versions lack.
        capabilities: Major compute capabilities that it has kernels for.
    """

    module: str
    function: str
    build: Callable[[Callable[..., Any]], PagedKernel]
    parameter: str
    capabilities: tuple[int, ...]


CANDIDATES = (
    Candidate(
        "flash_attn_interface", "flash_attn_with_kvcache", FlashAttention3, "page_table", (9,)
    ),
    Candidate(
        "flash_attn", "flash_attn_with_kvcache", FlashAttention2, "block_table", (8, 9, 10, 12)
    ),
    Candidate(
        "torch.nn.attention.varlen", "varlen_attn", TorchFlash, "block_table", (8, 9, 10, 12)
    ),
)


def choose_kernel(wanted: str | None, shape: HeadShape) -> PagedKernel:
    """Returns the first usable kernel of those wanted: `FLASH_ATTN`, `TORCH_SDPA`, None for any.

    Raises:
        ConfigError: if `FLASH_ATTN` is wanted and none is usable; it says why not, one by one.
    """
    reasons: list[str] = []
    found = None if wanted == SDPA else next(usable_kernels(shape, reasons), None)
    if found is None and wanted == FLASH:
        raise ConfigError([f"attention_backend: {FLASH} cannot be used: {'; '.join(reasons)}"])
    kernel = found or GatheredSdpa()
    if found is None and wanted is None:
        logger.warning(
            "no paged attention kernel can be used: contexts are copied in every pass",
            extra={"reasons": reasons},
        )
    logger.info("attention", extra={"kernel": kernel.name, "passed_over": reasons})
    return kernel


def usable_kernels(shape: HeadShape, reasons: list[str]) -> Iterator[PagedKernel]:
    """Yields the kernels of the flash-attention family that work; tells why others do not."""
    if (problem := _unfit(shape)) is not None:
        reasons.append(problem)
        return
    capability = torch.cuda.get_device_capability(shape.device)[0]
    for candidate in CANDIDATES:
        try:
            kernel = candidate.build(find_function(candidate, capability))
            try_kernel(kernel, shape)
        except Unusable as unusable:
            reasons.append(f"{candidate.module}: {unusable}")
        else:
            yield kernel


def _unfit(shape: HeadShape) -> str | None:
    if shape.device.type != "cuda":
        return f"the model runs on {shape.device}"
    if shape.dtype not in _TOLERANCE:
        return f"the model runs in {str(shape.dtype).removeprefix('torch.')}, not in 16 bits"
    if shape.head_dim > _MAX_HEAD_DIM or shape.head_dim % _HEAD_DIM_MULTIPLE:
        return f"heads of {shape.head_dim} are too large or no multiple of {_HEAD_DIM_MULTIPLE}"
    return None


def find_function(candidate: Candidate, capability: int) -> Callable[..., Any]:
    """Returns a candidate's function.

    Raises:
        Unusable: if it is not installed, too old, or has no kernels for the GPU.
    """
    if capability not in candidate.capabilities:
        raise Unusable(f"has no kernels for compute capability {capability}")
    try:
        function: Callable[..., Any] = getattr(import_module(candidate.module), candidate.function)
    except ImportError as error:
        raise Unusable(str(error)) from None
    except AttributeError:
        raise Unusable(f"has no {candidate.function}") from None
    if candidate.parameter not in signature(function).parameters:
        raise Unusable(f"{candidate.function} does not take {candidate.parameter}")
    return function


@torch.inference_mode()
def try_kernel(kernel: PagedKernel, shape: HeadShape) -> None:
    """Compares a kernel with torch's own attention, over blocks in disorder.

    Raises:
        Unusable: if it fails, or computes something else.
    """
    for num_rows in _TRIAL_ROWS:
        for window in _TRIAL_WINDOWS:
            query, pool, group = _trial(shape, num_rows, max(kernel.block_size, BLOCK_SIZE))
            scale = shape.head_dim**-0.5
            expected = GatheredSdpa()(query, pool, group, scale, window)
            try:
                found = kernel(query, pool, group, scale, window)
            except (RuntimeError, TypeError, ValueError, AssertionError) as error:
                raise Unusable(f"failed: {error}") from error
            if found.shape != expected.shape:
                raise Unusable(f"returned {list(found.shape)}, not {list(expected.shape)}")
            is_real = _seen(group) > 0  # [num_sequences, num_rows]
            difference = (found - expected)[is_real].float().norm()
            error_size = float(difference / expected[is_real].float().norm())
            if not error_size < _TOLERANCE.get(shape.dtype, 1e-4):
                raise Unusable(f"differs from torch's own attention by {error_size:.2g}")


def _trial(
    shape: HeadShape, num_rows: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, RowGroup]:
    """Returns random rows: query, pool and group."""
    generator = torch.Generator().manual_seed(0)
    num_sequences = len(_TRIAL_LENGTHS)
    width = -(-max(_TRIAL_LENGTHS) // block_size) + 1
    num_blocks = num_sequences * width + 1
    heads, kv_heads, size = shape.num_heads, shape.num_kv_heads, shape.head_dim
    query = torch.randn(num_sequences, num_rows, heads, size, generator=generator)
    pool = torch.randn(num_blocks, block_size, 2 * kv_heads, size, generator=generator)
    tables = torch.randperm(num_blocks, generator=generator)[: num_sequences * width]
    group = RowGroup(
        tables.view(num_sequences, width).to(shape.device),
        torch.tensor(_TRIAL_LENGTHS).to(shape.device),
        num_rows,
    )
    return query.to(shape.device, shape.dtype), pool.to(shape.device, shape.dtype), group


def _seen(group: RowGroup) -> torch.Tensor:
    offsets = torch.arange(1 - group.num_rows, 1, device=group.lengths.device)
    return group.lengths.unsqueeze(1) + offsets
