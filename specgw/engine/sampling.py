"""Chooses tokens from logits. Knows nothing of requests, drafts or sessions.

The token at a position depends on the seed, the position and the distribution only: it is the same
alone or in a batch, with or without speculation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specgw.engine.laws import Laws, block_maxima, first_maximum
from specgw.engine.rng import Keys, Stream
from specgw.engine.truncation import Truncation, smallest_kept

_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How the token of one row is chosen. `position` is that of the token to be sampled.

    `round` is the context length at which a round of speculation began, for numbers that differ
    from round to round.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int
    position: int
    min_p: float = 0.0
    round: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is chosen."""
        return self.temperature < _GREEDY_BELOW


def argmax(logits: Tensor) -> Tensor:
    """Returns the first index of each row's largest value: `logits.argmax(-1)`, only faster.

    On a CPU torch finds indices one value at a time, but maxima with vector instructions: for a row
    of 152 k bfloat16 values this takes 0.08 ms in place of 0.55. A NaN counts as the largest.
    """
    # logits: [num_rows, vocab_size] -> [num_rows]
    return first_maximum(logits, block_maxima(logits))


def sample(
    logits: Tensor,  # [num_rows, vocab_size]
    rows: Sequence[RowSampling],
) -> list[int]:
    """Chooses one token for each row.

    A temperature under 1e-5 means the most probable token. Otherwise temperature, then min-p, then
    top-k, then top-p, as vLLM does; a token as probable as the last one kept is kept too, so that
    the choice does not depend on an order among equals. Between equals the lowest id wins. The
    first NaN of a row, which only a broken model computes, counts as its largest logit.
    """
    maxima = block_maxima(logits)
    random = [i for i, row in enumerate(rows) if not row.is_greedy]
    if len(random) == len(rows):
        return _draw(logits, rows, maxima)
    chosen: list[int] = first_maximum(logits, maxima).tolist()
    if random:
        drawn = _draw(logits[random], [rows[i] for i in random], maxima[random])
        for i, token_id in zip(random, drawn, strict=True):
            chosen[i] = token_id
    return chosen


def _draw(logits: Tensor, rows: Sequence[RowSampling], maxima: Tensor) -> list[int]:
    keys = build_keys(Stream.NOISE, rows, logits.device)
    token_ids: list[int] = build_laws(logits, rows, maxima).draw(keys).tolist()
    return token_ids


def build_keys(stream: Stream, rows: Sequence[RowSampling], device: torch.device) -> Keys:
    """Returns what the rows' numbers are for; only streams that differ by round use `round`."""
    has_rounds = stream in (Stream.DRAFT, Stream.ACCEPT, Stream.RECOVER)
    words = [
        [row.seed for row in rows],
        [row.position for row in rows],
        [row.round if has_rounds else 0 for row in rows],
    ]
    return Keys(stream, *torch.tensor(words, dtype=torch.int64).to(device))


def build_laws(
    logits: Tensor,  # [num_rows, vocab_size]
    rows: Sequence[RowSampling],  # none of them greedy
    maxima: Tensor | None = None,  # as of `block_maxima`, if they are known
) -> Laws:
    """Returns what tokens are drawn from, after temperature, min-p, top-k and top-p."""
    maxima = block_maxima(logits) if maxima is None else maxima
    temperatures = torch.tensor([row.temperature for row in rows], dtype=torch.float64)
    temperatures = temperatures.to(logits.device)
    truncations = [Truncation(row.min_p, row.top_k, row.top_p) for row in rows]
    floors = smallest_kept(logits, maxima, temperatures, truncations)
    return Laws(logits, maxima, floors, temperatures)
