"""Calls the operators of `cpu_sampling.c`, where they were built and the CPU has AVX-512.

Each has a twin in torch that its callers fall back to; `is_usable` decides. Tensors are on the CPU
and dense; logits are [num_rows, vocab_size], bfloat16 or float32.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specgw.engine.extension import INT, POINTER, load_operators
from specgw.engine.rng import NOISE_BLOCK, Keys

_operators = load_operators(
    "_cpu_sampling",
    {
        "specgw_block_maxima": (POINTER, INT, POINTER, INT, INT),
        "specgw_first_maximum": (POINTER, INT, *[POINTER] * 2, INT, INT),
        "specgw_next_maxima": (POINTER, INT, *[POINTER] * 3, INT, INT, INT),
        "specgw_smallest_kept": (POINTER, INT, *[POINTER] * 5, INT, INT),
        "specgw_keep_allowed": (*[POINTER] * 2, INT),
        "specgw_draw": (POINTER, INT, *[POINTER] * 6, INT, POINTER, INT, INT),
    },
)


def is_usable(logits: Tensor) -> bool:
    """Whether there are operators for these logits."""
    has_type = logits.dtype in (torch.bfloat16, torch.float32) and logits.device.type == "cpu"
    return bool(_operators) and has_type and logits.is_contiguous()


def block_maxima(logits: Tensor) -> Tensor:
    """Returns the largest logit of each `NOISE_BLOCK` ids, float32 [num_rows, num_blocks]."""
    num_rows, vocab_size = logits.shape
    maxima = torch.empty(num_rows, -(-vocab_size // NOISE_BLOCK))
    _operators["specgw_block_maxima"](*_start(logits), maxima.data_ptr(), num_rows, vocab_size)
    return maxima


def first_maximum(logits: Tensor, maxima: Tensor) -> Tensor:
    """Returns the lowest id with the largest logit, int64 [num_rows]."""
    token_ids = torch.empty(len(logits), dtype=torch.int64)
    pointers = maxima.data_ptr(), token_ids.data_ptr()
    _operators["specgw_first_maximum"](*_start(logits), *pointers, *logits.shape)
    return token_ids


def next_maxima(
    logits: Tensor,
    maxima: Tensor,  # as of `block_maxima`
    first: Tensor,  # [num_rows] int64
    count: int,  # less than vocab_size
) -> tuple[Tensor, Tensor]:
    """Returns ids with the largest logits but for a first one, and those: [num_rows, count]."""
    ids = torch.empty(len(logits), 1 + count, dtype=torch.int64)
    ids[:, 0] = first
    values = torch.empty(len(logits), count)
    pointers = maxima.data_ptr(), ids.data_ptr(), values.data_ptr()
    _operators["specgw_next_maxima"](*_start(logits), *pointers, count, *logits.shape)
    return ids[:, 1:], values


def smallest_kept(
    logits: Tensor,
    maxima: Tensor,  # as of `block_maxima`
    temperatures: Tensor,  # [num_rows] float64
    shares: Tensor,  # [2, num_rows] float64: min-p, top-p
    counts: Tensor,  # [num_rows] int64: top-k
) -> Tensor:
    """Returns the smallest logit that each row keeps, float32 [num_rows]."""
    floors = torch.empty(len(logits))
    _operators["specgw_smallest_kept"](
        *_start(logits),
        maxima.data_ptr(),
        temperatures.data_ptr(),
        shares.data_ptr(),
        counts.data_ptr(),
        floors.data_ptr(),
        *logits.shape,
    )
    return floors


def keep_allowed_(
    logits: Tensor,  # [vocab_size] float32
    mask: NDArray[np.int32],  # [at least ceil(vocab_size / 32)]
) -> None:
    """Leaves the logits of the tokens that a mask allows, or 0 if they are all -inf."""
    _operators["specgw_keep_allowed"](logits.data_ptr(), mask.ctypes.data, len(logits))


def draw_(
    token_ids: Tensor,  # [num_rows] int64
    logits: Tensor,
    maxima: Tensor,  # as of `block_maxima`
    floors: Tensor,  # [num_rows] float32
    temperatures: Tensor,  # [num_rows] float64
    keys: Keys,
) -> None:
    """Draws a token for each row but for those whose largest logit is not a finite number."""
    seeds, positions, rounds = (
        one.contiguous() for one in (keys.seeds, keys.positions, keys.rounds)
    )
    _operators["specgw_draw"](
        *_start(logits),
        maxima.data_ptr(),
        floors.data_ptr(),
        temperatures.data_ptr(),
        seeds.data_ptr(),
        positions.data_ptr(),
        rounds.data_ptr(),
        int(keys.stream),
        token_ids.data_ptr(),
        *logits.shape,
    )


def _start(logits: Tensor) -> tuple[int, bool]:
    return logits.data_ptr(), logits.dtype == torch.bfloat16
