"""Random numbers that are a function of what they are for, not of when they are drawn.

Philox4x32-10 (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3") is a block cipher
of a counter: a number can be had in any order, in any process, on any device, and is always the
same. It is written in 64-bit integer operators, which wrap alike on CPUs and GPUs.

The noise of tokens comes in blocks of 256 ids, so that most of a large vocabulary need not be
looked at. The least of n numbers from Exp(1) is Exp(1) / n, at a uniform place, and the others are
that least number plus Exp(1) again (Rényi, 1953): a block's least number is drawn first, and says
what is the best any token of the block can do; the rest is drawn if that could be enough.
"""

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

NOISE_BLOCK = 256  # token ids; a power of two, so that a place in it is drawn without bias

_WORD = 0xFFFFFFFF
_WORDS = 4  # of one Philox call
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_SINGLE, _BLOCK, _TOKEN = range(3)  # what numbers of one stream are for


class Stream(enum.IntEnum):
    """Who draws. Numbers of one stream are independent of all others."""

    NOISE = 1
    """The target's own tokens; under `coupled` the drafts too."""
    DRAFT = 2
    """Drafts from a law of their own."""
    ACCEPT = 3
    """Whether a draft token is accepted."""
    RECOVER = 4
    """The token in place of a rejected one."""
    BONUS = 5
    """The token after a block that was accepted."""


@dataclass(frozen=True, slots=True)
class Keys:
    """What the numbers of each row are for.

    `rounds` tells apart numbers for one position that are drawn in several rounds of speculation,
    where a later round must not see those that an earlier one has looked at: the context length at
    which the round began, or 0 for numbers that do not depend on rounds.
    """

    stream: Stream
    seeds: Tensor  # [num_rows], int64
    positions: Tensor  # [num_rows], int64
    rounds: Tensor  # [num_rows], int64

    def __getitem__(self, rows: Tensor) -> "Keys":
        return Keys(self.stream, self.seeds[rows], self.positions[rows], self.rounds[rows])


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns four random words for each counter and key. Words are 32 bits in an int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((second >> 32) ^ c1 ^ k0) & _WORD
        c2 = ((first >> 32) ^ c3 ^ k1) & _WORD
        c1, c3 = second & _WORD, first & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def uniforms(keys: Keys) -> Tensor:
    """Returns a number in (0, 1) for each row, float64 [num_rows]."""
    first, second, *_ = _words(keys, torch.zeros_like(keys.seeds).unsqueeze(1), _SINGLE)
    return _unit(first, second).squeeze(1)


def block_minima(keys: Keys, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Returns the least noise of each block, float64, and its place in the block, int64.

    Both are [num_rows, num_blocks].
    """
    blocks = torch.arange(num_blocks, device=keys.seeds.device)
    first, second, third, _ = _words(keys, blocks, _BLOCK)
    return -_unit(first, second).log() / NOISE_BLOCK, third % NOISE_BLOCK


def token_noise(
    keys: Keys,  # [num_tokens]
    token_ids: Tensor,  # [num_tokens]
    minima: Tensor,  # [num_tokens], those of the tokens' blocks
    places: Tensor,  # [num_tokens]
) -> Tensor:
    """Returns one number from Exp(1) for each key and token, float64 [num_tokens]."""
    words = torch.cat(_words(keys, (token_ids // _WORDS).unsqueeze(1), _TOKEN), dim=1)
    word = words.gather(1, (token_ids % _WORDS).unsqueeze(1)).squeeze(1)
    more = -((word.double() + 0.5) * 2.0**-32).log()
    return torch.where(token_ids % NOISE_BLOCK == places, minima, minima + more)


def _words(keys: Keys, index: Tensor, kind: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns words for each row and index; `index` is [num_rows, n], or [n] for all rows alike."""
    seeds, positions, rounds = (
        one.unsqueeze(1) for one in (keys.seeds, keys.positions, keys.rounds)
    )
    role = torch.full_like(positions, 4 * keys.stream + kind)
    return philox((index, positions, role, rounds), (seeds & _WORD, (seeds >> 32) & _WORD))


def _unit(high: Tensor, low: Tensor) -> Tensor:
    """Returns (n + 0.5) / 2**52 for 52 bits n of two words: in (0, 1), exact in float64."""
    return (((high << 20) | (low >> 12)).double() + 0.5) * 2.0**-52
