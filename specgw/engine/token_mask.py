"""Turns masks over the vocabulary from the form that grammars make to the one logits take."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specgw.engine import cpu_sampling


def allowed_tokens(
    mask: NDArray[np.int32],  # [ceil(num_ids / 32)], little-endian: bit 0 is the first id
    vocab_size: int,
    device: torch.device,
) -> Tensor:  # [vocab_size] bool
    """Unpacks a mask on the device. It may have more ids than the logits."""
    packed = torch.from_numpy(mask.view(np.uint8)).to(device)
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    return (packed.unsqueeze(1) >> shifts & 1).flatten()[:vocab_size].bool()


def keep_allowed_(
    logits: Tensor,  # [vocab_size] float32
    mask: NDArray[np.int32],  # as for `allowed_tokens`, of the whole vocabulary
) -> None:
    """Takes all probability from tokens that are not allowed.

    Where that leaves none, those that are allowed become as likely as one another.
    """
    if cpu_sampling.is_usable(logits):
        cpu_sampling.keep_allowed_(logits, mask)
        return
    allowed = allowed_tokens(mask, len(logits), logits.device)
    logits.masked_fill_(~allowed, -torch.inf)
    is_ruled_out = logits.max() == -torch.inf
    logits.masked_fill_(allowed & is_ruled_out, 0.0)
