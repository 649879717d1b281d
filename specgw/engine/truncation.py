"""Which tokens min-p, top-k and top-p keep: those whose logit reaches a floor.

To sort a large vocabulary takes 5 ms. The few tokens that matter are found through the largest
logit of each block of ids, without a look at the others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specgw.engine import cpu_sampling
from specgw.engine.rng import NOISE_BLOCK

_WEIGHTS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 0.0)  # relative to the most probable token's


@dataclass(frozen=True, slots=True)
class Truncation:
    """What a row's tokens are kept by.

    A `top_k` of 0 or -1, a `top_p` of 1 and a `min_p` of 0 keep all. Min-p keeps tokens at least
    that probable relative to the most probable one; then top-k, then top-p choose among the tokens
    that are left. Equals of the last token kept are kept.
    """

    min_p: float
    top_k: int
    top_p: float


def smallest_kept(
    logits: Tensor,  # [num_rows, vocab_size]
    maxima: Tensor,  # [num_rows, num_blocks], the largest logit of each `NOISE_BLOCK` ids
    temperatures: Tensor,  # [num_rows] float64
    truncations: Sequence[Truncation],
) -> Tensor:  # [num_rows] float32
    """Returns the smallest logit that each row keeps; -inf for all."""
    if cpu_sampling.is_usable(logits):
        shares = [[one.min_p for one in truncations], [one.top_p for one in truncations]]
        return cpu_sampling.smallest_kept(
            logits,
            maxima,
            temperatures,
            torch.tensor(shares, dtype=torch.float64),
            torch.tensor([one.top_k for one in truncations]),
        )
    rows = zip(logits, maxima, temperatures.tolist(), truncations, strict=True)
    return torch.tensor([_smallest_kept(*row) for row in rows]).to(logits.device)


def _smallest_kept(
    logits: Tensor,  # [vocab_size]
    maxima: Tensor,  # [num_blocks]
    temperature: float,
    kept_by: Truncation,
) -> float:
    min_p, top_k, top_p = kept_by.min_p, kept_by.top_k, kept_by.top_p
    has_top_k = 0 < top_k < len(logits)
    if not (has_top_k or top_p < 1 or min_p > 0):
        return -math.inf
    best = float(maxima.max())
    if not math.isfinite(best):
        return -math.inf
    floor = _logit_of(min_p, best, temperature)
    if top_p >= 1 and not has_top_k:
        return floor
    if top_p < 1 and not has_top_k and min_p == 0:
        return _top_p_of_all(logits, maxima, best, temperature, top_p)
    if has_top_k:
        floor = max(floor, _kth_at_least(logits, maxima, top_k))
    kept = _sorted_from(floor, logits, maxima)
    if has_top_k:
        kept = kept[kept >= kept[min(top_k, len(kept)) - 1]]
    if top_p >= 1:
        return float(kept[-1])
    weights = _weights(kept, best, temperature)
    return _top_p(kept, weights, top_p * float(weights.sum()))


def _top_p_of_all(
    logits: Tensor, maxima: Tensor, best: float, temperature: float, top_p: float
) -> float:
    wanted = top_p * float(_weights(logits, best, temperature).sum())
    for weight in _WEIGHTS:
        kept = _sorted_from(_logit_of(weight, best, temperature), logits, maxima)
        weights = _weights(kept, best, temperature)
        if float(weights.sum()) >= wanted:
            break
    return _top_p(kept, weights, wanted)


def _top_p(kept: Tensor, weights: Tensor, wanted: float) -> float:
    """Returns the last of the fewest largest logits whose weights add up to what is wanted."""
    before = weights.cumsum(dim=0) - weights
    return float(kept[max(int((before < wanted).sum()), 1) - 1])


def _logit_of(weight: float, best: float, temperature: float) -> float:
    """Returns the logit of a token `weight` times as probable as the most probable one."""
    if weight == 0:
        return -math.inf
    return float(torch.tensor(best + temperature * math.log(weight), dtype=torch.float32))


def _kth_at_least(logits: Tensor, maxima: Tensor, k: int) -> float:
    """Returns a logit that the k-th largest one reaches: k blocks hold one as large as that."""
    values = maxima if k <= len(maxima) else logits
    return float(values.topk(k).values[-1])


def _sorted_from(floor: float, logits: Tensor, maxima: Tensor) -> Tensor:
    """Returns the logits that reach a floor, the largest first, float32."""
    [blocks] = (maxima.float() >= floor).nonzero(as_tuple=True)
    ids = blocks.unsqueeze(1) * NOISE_BLOCK + torch.arange(NOISE_BLOCK, device=logits.device)
    num_beyond = max(int(ids[-1, -1]) + 1 - len(logits), 0)
    values = logits[ids.flatten()[: ids.numel() - num_beyond]].float()
    return values[values >= floor].sort(descending=True).values


def _weights(logits: Tensor, best: float, temperature: float) -> Tensor:
    return ((logits.double() - best) / temperature).exp()
