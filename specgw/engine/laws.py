"""The distributions that tokens are drawn from, and the drawing.

A token is argmax over ids i of log p_i - log E_i, where E_i ~ Exp(1) is noise for what the token is
for and i: this draws i with probability p_i (the Gumbel-max trick).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specgw.engine import cpu_sampling
from specgw.engine.rng import NOISE_BLOCK, Keys, block_minima, token_noise

_NUM_LIKELY = 16  # tokens of each row whose noise is computed first
_SLACK = 1e-9  # for a logarithm that is not quite monotone


@dataclass(frozen=True, slots=True)
class Laws:
    """Distributions of some rows: softmax(logits / temperature) over the ids whose logit is kept.

    A row whose largest logit is not a finite number, which only a broken model computes, is certain
    of its first such id.
    """

    logits: Tensor  # [num_rows, vocab_size]
    maxima: Tensor  # [num_rows, num_blocks], as of `block_maxima`
    floors: Tensor  # [num_rows], float32: the smallest logit kept
    temperatures: Tensor  # [num_rows], float64

    def __getitem__(self, rows: Tensor) -> "Laws":
        return Laws(
            self.logits[rows], self.maxima[rows], self.floors[rows], self.temperatures[rows]
        )

    def draw(self, keys: Keys) -> Tensor:
        """Draws one token for each row, int64 [num_rows].

        Noise is computed for a few likely tokens first, and then only for those that could win with
        the least noise of their block: the token is the same as if it were computed for all.
        """
        token_ids = first_maximum(self.logits, self.maxima)
        if cpu_sampling.is_usable(self.logits):
            cpu_sampling.draw_(
                token_ids, self.logits, self.maxima, self.floors, self.temperatures, keys
            )
            return token_ids
        minima, places = block_minima(keys, self.maxima.shape[1])  # [num_rows, num_blocks]

        def scores(rows: Tensor, ids: Tensor) -> Tensor:  # all [num_tokens]
            blocks = ids // NOISE_BLOCK
            noise = token_noise(keys[rows], ids, minima[rows, blocks], places[rows, blocks])
            return self.logits[rows, ids].double() / self.temperatures[rows] - noise.log()

        rows, ids = self._likely()
        reached = _largest(scores(rows, ids), rows, len(minima))
        rows, ids = self._contenders(minima.log(), reached - _SLACK)
        finals = scores(rows, ids)
        wins = finals == _largest(finals, rows, len(minima))[rows]
        token_ids[rows[wins]] = ids[wins]
        return token_ids

    def probs(self) -> Tensor:
        """Returns the probability of every id, float32 [num_rows, vocab_size]."""
        return self._kept().softmax(dim=1)

    def largest(self, count: int) -> tuple[Tensor, Tensor]:
        """Returns each row's most probable ids, and their probabilities among themselves.

        Ids int64, probabilities float32, both [num_rows, at most count]; 0 for ids not kept.
        """
        num_blocks = min(count, self.maxima.shape[1])
        blocks = self.maxima.topk(num_blocks, dim=1).indices.flatten()
        rows = torch.arange(len(self.logits), device=blocks.device).repeat_interleave(num_blocks)
        logits, ids = (
            one.view(len(self.logits), -1) for one in _block_logits(self.logits, rows, blocks)
        )
        logits, at = logits.float().topk(min(count, self.logits.shape[1]), dim=1)
        return ids.gather(1, at), self._scaled(logits).softmax(dim=1).float()

    def probs_of(
        self,
        rows: Tensor,  # [num]
        token_ids: Tensor,  # [num, num_ids]
    ) -> Tensor:
        """Returns the probabilities of some ids in each of some rows, float64 [num, num_ids]."""
        log_normalizers = self._kept().logsumexp(dim=1).double()  # [num_rows]
        logits = self.logits[rows.unsqueeze(1), token_ids]
        scores = _scaled(logits, self.floors[rows], self.temperatures[rows])
        return (scores - log_normalizers[rows].unsqueeze(1)).exp()

    def _likely(self) -> tuple[Tensor, Tensor]:
        """Returns rows and ids of the largest logits of some blocks; all of them are kept."""
        num_blocks = min(_NUM_LIKELY, self.maxima.shape[1])
        blocks = self.maxima.topk(num_blocks, dim=1).indices.flatten()
        rows = torch.arange(len(self.logits), device=blocks.device).repeat_interleave(num_blocks)
        logits, ids = _block_logits(self.logits, rows, blocks)  # [num_rows * num_blocks, n]
        logits, at = logits.float().max(dim=1)
        is_kept = logits.isfinite() & (logits >= self.floors[rows])
        return rows[is_kept], ids.gather(1, at.unsqueeze(1)).squeeze(1)[is_kept]

    def _contenders(
        self,
        log_minima: Tensor,  # [num_rows, num_blocks]
        reached: Tensor,  # [num_rows]
    ) -> tuple[Tensor, Tensor]:
        """Returns rows and ids of the tokens that could reach a score. Broken rows have none."""
        reached = reached.masked_fill(~self.maxima.amax(dim=1).isfinite(), torch.inf)
        bounds = self._scaled(self.maxima) - log_minima
        rows, blocks = (bounds >= reached.unsqueeze(1)).nonzero(as_tuple=True)
        logits, ids = _block_logits(self.logits, rows, blocks)
        least = torch.maximum(
            (reached[rows] + log_minima[rows, blocks]) * self.temperatures[rows],
            self.floors[rows].double(),
        )
        pairs, columns = (logits.double() >= least.unsqueeze(1)).nonzero(as_tuple=True)
        return rows[pairs], ids[pairs, columns]

    def _kept(self) -> Tensor:
        logits = self.logits.float()
        scores = logits / self.temperatures.float().unsqueeze(1)
        return scores.masked_fill_(logits < self.floors.unsqueeze(1), -torch.inf)

    def _scaled(self, logits: Tensor) -> Tensor:
        """Returns logits / temperature, -inf for what is not kept; float64 [num_rows, n]."""
        return _scaled(logits, self.floors, self.temperatures)


def laws_of(weights: Tensor) -> Laws:
    """Returns the laws with probabilities in proportion to weights, [num_rows, vocab_size]."""
    logits = weights.log()
    ones = torch.ones(len(weights), dtype=torch.float64, device=weights.device)
    return Laws(logits, block_maxima(logits), torch.full_like(logits[:, 0], -torch.inf), ones)


def block_maxima(logits: Tensor) -> Tensor:
    """Returns the largest logit of each `NOISE_BLOCK` ids, float32 [num_rows, num_blocks]."""
    if cpu_sampling.is_usable(logits):
        return cpu_sampling.block_maxima(logits)
    whole = logits.shape[1] // NOISE_BLOCK * NOISE_BLOCK
    blocks = logits[:, :whole].reshape(len(logits), whole // NOISE_BLOCK, NOISE_BLOCK)
    maxima = blocks.amax(dim=2)
    if whole < logits.shape[1]:
        maxima = torch.cat((maxima, logits[:, whole:].amax(dim=1, keepdim=True)), dim=1)
    return maxima.float()


def first_maximum(
    logits: Tensor,  # [num_rows, vocab_size]
    maxima: Tensor,  # [num_rows, num_blocks]
) -> Tensor:
    """Returns the lowest id with the largest logit, int64 [num_rows]; the first NaN is larger."""
    if cpu_sampling.is_usable(logits):
        return cpu_sampling.first_maximum(logits, maxima)
    rows = torch.arange(len(logits), device=logits.device)
    values, ids = _block_logits(logits, rows, maxima.argmax(dim=1))
    return ids.gather(1, values.argmax(dim=1, keepdim=True)).squeeze(1)


def next_maxima(
    logits: Tensor,  # [num_rows, vocab_size]; may be written to, and is as before in the end
    maxima: Tensor,  # [num_rows, num_blocks], as of `block_maxima`; may be overwritten
    first: Tensor,  # [num_rows]
    count: int,
) -> tuple[Tensor, Tensor]:
    """Returns the ids with the largest logits but for a first one, and those, largest first.

    Both are [num_rows, count]. Looks at one block for each, whatever the size of the vocabulary.
    """
    if cpu_sampling.is_usable(logits):
        return cpu_sampling.next_maxima(logits, maxima, first, count)
    rows = torch.arange(len(logits), device=logits.device)
    ids, values = [first], [logits[rows, first]]
    for _ in range(count):
        logits[rows, ids[-1]] = -torch.inf
        blocks = ids[-1] // NOISE_BLOCK
        left, _ = _block_logits(logits, rows, blocks)
        maxima[rows, blocks] = left.amax(dim=1).float()
        ids.append(first_maximum(logits, maxima))
        values.append(logits[rows, ids[-1]])
    for taken, value in zip(ids[:-1], values[:-1], strict=True):
        logits[rows, taken] = value
    return torch.stack(ids[1:], dim=1), torch.stack(values[1:], dim=1)


def _block_logits(logits: Tensor, rows: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logits and the ids of some rows' blocks; -inf beyond the vocabulary."""
    # rows, blocks: [num_blocks]; both results: [num_blocks, NOISE_BLOCK]
    vocab_size = logits.shape[1]
    ids = torch.arange(min(NOISE_BLOCK, vocab_size), device=logits.device)
    ids = blocks.unsqueeze(1) * NOISE_BLOCK + ids
    if vocab_size % NOISE_BLOCK == 0 and logits.is_contiguous():  # 20 times as fast on a CPU
        blocks = rows * (vocab_size // NOISE_BLOCK) + blocks
        return logits.view(-1, NOISE_BLOCK).index_select(0, blocks), ids
    if vocab_size % NOISE_BLOCK == 0 or vocab_size < NOISE_BLOCK:
        return logits[rows.unsqueeze(1), ids], ids
    values = logits[rows.unsqueeze(1), ids.clamp(max=vocab_size - 1)]
    return values.masked_fill_(ids >= vocab_size, -torch.inf), ids


def _scaled(logits: Tensor, floors: Tensor, temperatures: Tensor) -> Tensor:
    """Returns logits / temperature, -inf for what is not kept; float64 [num_rows, n]."""
    scores = logits.double() / temperatures.unsqueeze(1)
    return scores.masked_fill_(logits.float() < floors.unsqueeze(1), -torch.inf)


def _largest(scores: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Returns the largest score of each row, -inf where there is none, [num_rows]."""
    none = scores.new_full((num_rows,), -torch.inf)
    return none.scatter_reduce(0, rows, scores, "amax")
