"""The noise behind random tokens: the same everywhere, and of the right distribution."""

import numpy as np
import pytest
import torch
from torch import Tensor

from specgw.engine.rng import (
    NOISE_BLOCK,
    Keys,
    Stream,
    block_minima,
    philox,
    token_noise,
    uniforms,
)

WORD = 2**32


def keys(
    count: int, *, stream: Stream = Stream.NOISE, seed: int = 7, position: int = 0, round_: int = 0
) -> Keys:
    """Keys of one request at many positions."""
    seeds, rounds = (torch.full((count,), value) for value in (seed, round_))
    return Keys(stream, seeds, torch.arange(count) + position, rounds)


def noise(row: Keys, vocab_size: int) -> Tensor:
    """Returns the noise of every token at the first of the positions."""
    ids = torch.arange(vocab_size)
    minima, places = block_minima(row, -(-vocab_size // NOISE_BLOCK))
    blocks = ids // NOISE_BLOCK
    same = row[torch.zeros(vocab_size, dtype=torch.int64)]
    return token_noise(same, ids, minima[0, blocks], places[0, blocks])


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python's integers, one call at a time."""
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (second // WORD) ^ counter[1] ^ key[0],
            second % WORD,
            (first // WORD) ^ counter[3] ^ key[1],
            first % WORD,
        ]
        key = [(key[0] + 0x9E3779B9) % WORD, (key[1] + 0xBB67AE85) % WORD]
    return counter


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        (4 * [0], 2 * [0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (4 * [WORD - 1], 2 * [WORD - 1], [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_its_authors_known_answers(
    counter: list[int], key: list[int], words: list[int]
) -> None:
    found = philox(*(tuple(torch.tensor([[word]]) for word in one) for one in (counter, key)))  # type: ignore[arg-type]

    assert [int(word) for word in found] == plain_philox(counter, key) == words


def test_the_numbers_are_these_on_every_machine() -> None:
    """By the documented counter: (index, position, 4 * stream + kind, round), key (seed)."""
    seed, position = -3, 56
    row = Keys(Stream.ACCEPT, *(torch.tensor([value]) for value in (seed, position, 9)))
    key = [seed % WORD, seed % 2**64 // WORD]
    high, low, *_ = plain_philox([0, position, 4 * Stream.ACCEPT, 9], key)
    block_words = plain_philox([1, position, 4 * Stream.ACCEPT + 1, 9], key)
    token_words = plain_philox([300 // 4, position, 4 * Stream.ACCEPT + 2, 9], key)

    [uniform] = uniforms(row).tolist()
    minima, places = block_minima(row, 2)
    found = token_noise(row, torch.tensor([300]), minima[:, 1], torch.tensor([0]))

    assert uniform == ((high << 20 | low >> 12) + 0.5) / 2**52
    least = -np.log(((block_words[0] << 20 | block_words[1] >> 12) + 0.5) / 2**52) / NOISE_BLOCK
    assert float(minima[0, 1]) == pytest.approx(least, rel=1e-15)
    assert int(places[0, 1]) == block_words[2] % NOISE_BLOCK
    more = -np.log((token_words[300 % 4] + 0.5) / WORD)
    assert float(found) == pytest.approx(least + more, rel=1e-15)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_numbers() -> None:
    ours = keys(1000)
    theirs = Keys(ours.stream, *(x.cuda() for x in (ours.seeds, ours.positions, ours.rounds)))

    assert torch.equal(uniforms(theirs).cpu(), uniforms(ours))
    torch.testing.assert_close(block_minima(theirs, 9)[0].cpu(), block_minima(ours, 9)[0])
    assert torch.equal(block_minima(theirs, 9)[1].cpu(), block_minima(ours, 9)[1])


def test_the_numbers_of_a_token_do_not_depend_on_the_size_of_the_vocabulary() -> None:
    small, large = noise(keys(1), 1001), noise(keys(1), 50_000)

    assert torch.equal(small, large[:1001])


@pytest.mark.parametrize(
    "other",
    [
        keys(1, seed=8),
        keys(1, seed=-7),
        keys(1, seed=7 - 2**63),
        keys(1, position=1),
        keys(1, round_=1),
        *(keys(1, stream=stream) for stream in Stream if stream is not Stream.NOISE),
    ],
    ids=str,
)
def test_another_seed_position_round_or_stream_gives_other_numbers(other: Keys) -> None:
    found, others = noise(keys(1), 1000), noise(other, 1000)

    assert not np.isin(found.numpy(), others.numpy()).any()
    assert float(uniforms(keys(1))) != float(uniforms(other))


def test_uniforms_fill_their_range_evenly() -> None:
    """Pearson's chi-square over 100 cells, 99 degrees of freedom, false-alarm rate 1e-9."""
    draws = uniforms(keys(1_000_000)).numpy()

    counts = np.histogram(draws, bins=100, range=(0, 1))[0]

    expected = len(draws) / 100
    assert ((counts - expected) ** 2 / expected).sum() < 208.6
    assert draws.min() > 0
    assert draws.max() < 1


def test_noise_is_exponential_and_independent_within_a_block() -> None:
    """Chi-square of (cell of one token, cell of the next), 399 degrees of freedom: rate 1e-9.

    Cells are the 20 quantiles of Exp(1). Pairs within a block and across a border are counted.
    """
    draws = torch.stack([noise(keys(1, position=i), 2 * NOISE_BLOCK) for i in range(1500)])
    cells = (20 * -torch.expm1(-draws)).long().clamp_(max=19)  # [num_positions, num_tokens]
    expected = cells[:, 1:].numel() / 400

    for step in (1, NOISE_BLOCK // 2, NOISE_BLOCK):
        pairs = cells[:, :-step] * 20 + cells[:, step:]
        counts = torch.bincount(pairs.flatten(), minlength=400)
        expected = pairs.numel() / 400
        assert float(((counts - expected) ** 2 / expected).sum()) < 590


def test_noise_is_positive_and_finite_with_mean_and_variance_one() -> None:
    """Both within 7 standard errors: a false-alarm rate under 1e-11."""
    draws = torch.cat([noise(keys(1, position=i), 20_000) for i in range(50)]).numpy()

    assert draws.min() > 0
    assert np.isfinite(draws).all()
    assert abs(draws.mean() - 1) < 7 / np.sqrt(len(draws))
    assert abs(draws.var() - 1) < 7 * np.sqrt(8 / len(draws))
