"""Turns masks over the vocabulary from the form that grammars make to the one logits take."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def allowed_tokens(
    mask: NDArray[np.int32],  # [ceil(num_ids / 32)], little-endian: bit 0 is the first id
    vocab_size: int,
    device: torch.device,
) -> Tensor:  # [vocab_size] bool
    """Unpacks a mask on the device. It may have more ids than the logits."""
    packed = torch.from_numpy(mask.view(np.uint8)).to(device)
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    return (packed.unsqueeze(1) >> shifts & 1).flatten()[:vocab_size].bool()
