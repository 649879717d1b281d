"""Chooses draft tokens from a draft model's logits: greedily, coupled to the target, or by a law.

- `greedy`: the most probable token. The verifier tests it by the one-hot rule.
- `coupled`: the token that the request's own noise chooses from the draft's law (Daliri et al.,
  2024, arXiv:2408.07978). The target chooses by the same noise, so both agree more often.
- `probabilistic`: a token drawn from the draft's law with random numbers of its own. The law is cut
  to a few tokens first, then drawn from, then sent: the verifier's test is exact for those numbers.

A greedy request is drafted greedily whatever the method.

Small results are looked at through numpy: an operator of torch takes ten times as long as one of
numpy's on a few rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specgw.engine.laws import Laws, block_maxima, first_maximum, laws_of, next_maxima
from specgw.engine.rng import NOISE_BLOCK, Keys, Stream, block_minima, token_noise
from specgw.engine.sampling import RowSampling, build_keys, build_laws, sample
from specgw.types import AcceptanceRule, DraftSampling, TokenProbs

_SPARE = 4  # more candidates than runner-ups wanted: noise changes the order


class DraftToken(NamedTuple):
    """A draft token, and the law it was drawn from if that is known."""

    token_id: int
    probs: TokenProbs | None = None


class DraftSampler:
    """How a drafter chooses tokens. One for all sessions; keeps nothing of them."""

    def __init__(self, method: str = "greedy", max_support: int = 64) -> None:
        """Takes `draft_sample_method` and the most tokens of a law that is sent."""
        self.method = method
        self._max_support = max_support

    @property
    def uses_sampling(self) -> bool:
        """Whether how a request is sampled matters."""
        return self.method != "greedy"

    def rule(self, has_probs: bool) -> AcceptanceRule:
        """Returns how a block's tokens were chosen."""
        if has_probs:
            return AcceptanceRule.PROBS
        return AcceptanceRule.COUPLED if self.method == "coupled" else AcceptanceRule.ONE_HOT

    def choose(
        self,
        logits: Tensor,  # [num_rows, vocab_size], -inf for ids that must not be drafted
        rows: Sequence[RowSampling],
    ) -> list[DraftToken | None]:
        """Chooses a token for each row; None where the logits are not numbers."""
        return self._choose(logits, block_maxima(logits), rows)

    @torch.inference_mode()
    def choose_with_runner_ups(
        self,
        logits: Tensor,  # as for `choose`
        rows: Sequence[RowSampling],
        count: int,
    ) -> tuple[list[DraftToken | None], list[list[int]]]:
        """Chooses a token for each row, and says what else the target may say, likeliest first.

        Those are the next most probable tokens; with `coupled` the next in the order of the noise,
        which the target chooses by too.
        """
        maxima = block_maxima(logits)
        tokens = self._choose(logits, maxima, rows)
        first = torch.from_numpy(np.array([token.token_id if token else 0 for token in tokens]))
        random = []
        if self.method == "coupled":
            random = [i for i, row in enumerate(rows) if not row.is_greedy]
        num_candidates = min(count + (_SPARE if random else 0), logits.shape[1] - 1)
        ids, values = next_maxima(logits, maxima, first.to(logits.device), num_candidates)
        if random:
            order = _noise_order(ids[random], values[random], [rows[i] for i in random])
            ids[random] = ids[random].gather(1, order)
        kept: list[list[int]] = ids[:, :count].cpu().numpy().tolist()
        for i in np.flatnonzero(~np.isfinite(values.float().cpu().numpy()).all(axis=1)):
            kept[i] = []
        return tokens, kept

    def guesses_by(self, sampling: DraftSampling | None) -> DraftSampling | None:
        """Returns how to guess a token that the target will choose, and no draft is tested for."""
        return sampling if self.method == "coupled" else None

    def _choose(
        self,
        logits: Tensor,  # [num_rows, vocab_size]
        maxima: Tensor,  # [num_rows, num_blocks]
        rows: Sequence[RowSampling],
    ) -> list[DraftToken | None]:
        chosen: list[DraftToken | None]
        if self.method == "coupled":
            chosen = [DraftToken(token_id) for token_id in sample(logits, rows)]
        else:
            first = first_maximum(logits, maxima).cpu().numpy().tolist()
            chosen = [DraftToken(one) for one in first]
        for broken in np.flatnonzero(~np.isfinite(maxima.cpu().numpy().max(axis=1))):
            chosen[broken] = None
        if self.method == "probabilistic":
            random = [i for i, row in enumerate(rows) if chosen[i] and not row.is_greedy]
            drawn = self._draw(logits[random], [rows[i] for i in random]) if random else []
            for i, token in zip(random, drawn, strict=True):
                chosen[i] = token
        return chosen

    def _draw(self, logits: Tensor, rows: Sequence[RowSampling]) -> list[DraftToken]:
        """Draws from the laws as they are sent, so that both sides mean the same numbers."""
        keys = build_keys(Stream.DRAFT, rows, logits.device)
        ids, probs, drawn = draw_from_largest(build_laws(logits, rows), self._max_support, keys)
        token_ids = drawn.tolist()
        has_probs = (probs > 0).cpu().numpy()
        laws = zip(ids.int().cpu().numpy(), probs.cpu().numpy(), has_probs, strict=True)
        return [
            DraftToken(token_id, TokenProbs(support[kept], weights[kept]))
            for token_id, (support, weights, kept) in zip(token_ids, laws, strict=True)
        ]


def draw_from_largest(laws: Laws, count: int, keys: Keys) -> tuple[Tensor, Tensor, Tensor]:
    """Cuts each law to its most probable ids and draws from what is left.

    Returns:
        The ids, their probabilities in float32, both [num_rows, at most count], and the ids drawn
        with exactly these, [num_rows].
    """
    ids, probs = laws.largest(count)
    drawn = laws_of(probs).draw(keys)
    return ids, probs, ids.gather(1, drawn.unsqueeze(1)).squeeze(1)


def _noise_order(
    ids: Tensor,  # [num_rows, num_ids]
    logits: Tensor,  # [num_rows, num_ids], those of the ids
    rows: Sequence[RowSampling],
) -> Tensor:
    """Returns the order in which the target's noise prefers some ids, [num_rows, num_ids]."""
    keys = build_keys(Stream.NOISE, rows, ids.device)
    num_blocks = int(ids.max()) // NOISE_BLOCK + 1
    minima, places = block_minima(keys, num_blocks)  # [num_rows, num_blocks]
    blocks = ids // NOISE_BLOCK
    at = torch.arange(len(rows), device=ids.device).repeat_interleave(ids.shape[1])
    noise = token_noise(
        keys[at],
        ids.flatten(),
        minima.gather(1, blocks).flatten(),
        places.gather(1, blocks).flatten(),
    )
    temperatures = torch.tensor([row.temperature for row in rows], dtype=torch.float64)
    scores = logits.double() / temperatures.to(ids.device).unsqueeze(1) - noise.log().view_as(ids)
    return scores.argsort(dim=1, descending=True, stable=True)


def row_sampling(sampling: DraftSampling | None, length: int, num_drafted: int) -> RowSampling:
    """Returns how the token is chosen that follows a context of a length and some draft tokens."""
    if sampling is None:
        return RowSampling(0.0, 1.0, 0, seed=0, position=length + num_drafted)
    return RowSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        position=length + num_drafted,
        round=length,
    )
