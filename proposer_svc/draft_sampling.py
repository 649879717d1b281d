"""Chooses draft tokens from a draft model's logits: greedily, coupled to the target, or by a law.

- `greedy`: the most probable token. The verifier tests it by the one-hot rule.
- `coupled`: the token that the request's own noise chooses from the draft's law (Daliri et al.,
  2024, arXiv:2408.07978). The target chooses by the same noise, so both agree more often.
- `probabilistic`: a token drawn from the draft's law with random numbers of its own. The law is cut
  to a few tokens first, then drawn from, then sent: the verifier's test is exact for those numbers.

A greedy request is drafted greedily whatever the method.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from proposer_svc.session_table import Session
from specgw.engine.laws import Laws, block_maxima, first_maximum, laws_of
from specgw.engine.rng import Keys, Stream
from specgw.engine.sampling import RowSampling, build_keys, build_laws, sample
from specgw.types import AcceptanceRule, TokenProbs


@dataclass(frozen=True, slots=True)
class DraftToken:
    """A draft token, and the law it was drawn from if that is known."""

    token_id: int
    probs: TokenProbs | None = None


class DraftSampler:
    """How a drafter chooses tokens. One for all sessions; keeps nothing of them."""

    def __init__(self, method: str = "greedy", max_support: int = 64) -> None:
        """Takes `draft_sample_method` and the most tokens of a law that is sent."""
        self.method = method
        self._max_support = max_support

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
        maxima = block_maxima(logits)
        is_usable = maxima.amax(dim=1).isfinite().tolist()
        if self.method == "coupled":
            chosen = [DraftToken(token_id) for token_id in sample(logits, rows)]
        else:
            chosen = [DraftToken(one) for one in first_maximum(logits, maxima).tolist()]
        if self.method == "probabilistic":
            random = [i for i, row in enumerate(rows) if is_usable[i] and not row.is_greedy]
            drawn = self._draw(logits[random], [rows[i] for i in random]) if random else []
            for i, token in zip(random, drawn, strict=True):
                chosen[i] = token
        return [one if usable else None for one, usable in zip(chosen, is_usable, strict=True)]

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


def row_sampling(session: Session, num_drafted: int) -> RowSampling:
    """Returns how the token that follows a session's context and some draft tokens is chosen."""
    sampling = session.sampling
    length = len(session.token_ids)
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
