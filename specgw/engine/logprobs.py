"""Log probabilities of tokens, and of the most probable ones beside them, from raw logits.

Knows nothing of requests or drafts. The caller is the verifier, for those who ask.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specgw.types import TokenLogprobs

_ROWS_AT_ONCE = 64  # in float32, that many rows of a large vocabulary take 40 MB


def token_logprobs(
    logits: Tensor,  # [num_tokens, vocab_size]
    token_ids: Sequence[int],  # [num_tokens]
    num_top: int,
) -> list[TokenLogprobs]:
    """Returns how probable each token was in its row. `num_top` of -1 is the whole vocabulary."""
    num_top = logits.shape[-1] if num_top == -1 else min(num_top, logits.shape[-1])
    scored: list[TokenLogprobs] = []
    for first in range(0, len(token_ids), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        scored += _score(logits[rows], token_ids[rows], num_top)
    return scored


def _score(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    logprobs = logits.float().log_softmax(-1)
    own_ids = torch.tensor(token_ids, device=logits.device).unsqueeze(1)  # [num_rows, 1]
    own = logprobs.gather(1, own_ids)
    ranks = (logprobs >= own).sum(1)
    top, top_ids = logprobs.topk(num_top)  # [num_rows, num_top]
    all_ids = torch.cat((own_ids, top_ids), 1).tolist()
    values = torch.cat((own, top), 1).tolist()
    return [
        TokenLogprobs(tuple(ids), tuple(row), rank)
        for ids, row, rank in zip(all_ids, values, ranks.tolist(), strict=True)
    ]
