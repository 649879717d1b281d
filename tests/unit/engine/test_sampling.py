"""Sampling against a reference that is slow and plain."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from specgw.engine.rng import NOISE_BLOCK, Stream, block_minima, token_noise
from specgw.engine.sampling import RowSampling, argmax, build_keys, build_laws, sample

CPU = torch.device("cpu")
PLAIN = RowSampling(temperature=1.0, top_p=1.0, top_k=0, seed=0, position=0)
GREEDY = replace(PLAIN, temperature=0.0)


def random_logits(num_rows: int, vocab_size: int, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return spread * torch.randn(num_rows, vocab_size, generator=generator)


def kept_by_definition(logits: list[float], row: RowSampling) -> dict[int, float]:
    """Returns the probability of every token that may be sampled, one token at a time."""
    highest = max(logits)
    weights = {i: float(np.exp((x - highest) / row.temperature)) for i, x in enumerate(logits)}
    weights = {i: weight for i, weight in weights.items() if weight >= row.min_p}
    if row.top_k > 0:
        least = sorted(weights.values(), reverse=True)[: row.top_k][-1]
        weights = {i: weight for i, weight in weights.items() if weight >= least}
    total, mass, least = sum(weights.values()), 0.0, 0.0
    for weight in sorted(weights.values(), reverse=True):
        if mass < row.top_p * total:
            least = weight
        mass += weight
    weights = {i: weight for i, weight in weights.items() if weight >= least}
    return {i: weight / sum(weights.values()) for i, weight in weights.items()}


def draws(logits: torch.Tensor, row: RowSampling, count: int) -> Counter[int]:
    """Samples one row at many positions."""
    keys = build_keys(Stream.NOISE, [replace(row, position=i) for i in range(count)], CPU)
    laws = build_laws(logits, [row])[torch.zeros(count, dtype=torch.int64)]
    return Counter(laws.draw(keys).tolist())


def test_greedy_rows_take_the_most_probable_token() -> None:
    logits = random_logits(5, 50)

    assert sample(logits, 5 * [GREEDY]) == [int(row.argmax()) for row in logits]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_between_equally_probable_tokens_greedy_takes_the_lowest_id(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0, 5.0]], dtype=dtype)

    assert sample(logits, [GREEDY]) == [1]


@pytest.mark.parametrize(
    "row",
    [
        PLAIN,
        replace(PLAIN, temperature=0.6),
        replace(PLAIN, top_k=5),
        replace(PLAIN, top_p=0.8),
        replace(PLAIN, temperature=1.7, top_k=20, top_p=0.7),
        replace(PLAIN, top_k=1),
        replace(PLAIN, top_p=1e-6),
        replace(PLAIN, top_k=1000),
        replace(PLAIN, min_p=0.02),
        replace(PLAIN, temperature=1.5, min_p=0.01, top_k=12, top_p=0.9),
        replace(PLAIN, temperature=1.5, min_p=0.01, top_p=0.8),
    ],
    ids=str,
)
def test_exactly_the_tokens_of_the_definition_are_sampled(row: RowSampling) -> None:
    """A kept token is missed with a probability under 1e-9: only those over 0.5 % are asked for."""
    logits = random_logits(1, 40)
    expected = kept_by_definition(logits[0].tolist(), row)

    found = draws(logits, row, 5000)

    assert found.keys() <= expected.keys()
    assert found.keys() >= {i for i, probability in expected.items() if probability > 0.005}


def test_a_set_of_many_improbable_tokens_is_exact_too() -> None:
    """The wrong half would be missed with probability e**-60 if it were kept."""
    improbable = -12 - torch.arange(2000) * 1e-3
    logits = torch.cat((torch.zeros(1), improbable)).unsqueeze(0)
    mass = float(logits.double().exp().sum())
    row = replace(PLAIN, top_p=float(logits[0, :1001].double().exp().sum()) / mass)

    found = draws(logits, row, 20_000)

    assert 500 < max(found) <= 1001


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "count"),
    [
        (PLAIN, 200_000),
        (replace(PLAIN, temperature=0.7, top_k=6, top_p=0.9, seed=-3), 50_000),
    ],
    ids=str,
)
def test_frequencies_are_those_of_the_definition(row: RowSampling, count: int) -> None:
    """Pearson's chi-square, at most 7 degrees of freedom: false-alarm rate under 1e-9."""
    logits = random_logits(1, 8, spread=1.0)
    expected = kept_by_definition(logits[0].tolist(), row)

    found = draws(logits, row, count)

    means = {i: count * probability for i, probability in expected.items()}
    assert sum((found[i] - mean) ** 2 / mean for i, mean in means.items()) < 60


@pytest.mark.parametrize("spread", [0.0, 0.5, 5.0])
@pytest.mark.parametrize("vocab_size", [3, 256, 1000, 20_000])
@pytest.mark.parametrize("row", [PLAIN, replace(PLAIN, temperature=0.6, top_p=0.9)], ids=str)
def test_tokens_left_out_could_not_have_won(
    row: RowSampling, vocab_size: int, spread: float
) -> None:
    """The definition, with the noise of every token computed."""
    logits = random_logits(1, vocab_size, spread)
    ids = torch.arange(vocab_size)
    for position in range(20):
        laws = build_laws(logits, [row])
        keys = build_keys(Stream.NOISE, [replace(row, position=position)], CPU)
        minima, places = block_minima(keys, len(laws.maxima[0]))
        blocks = ids // NOISE_BLOCK
        same = keys[torch.zeros_like(ids)]
        noise = token_noise(same, ids, minima[0, blocks], places[0, blocks])
        race = noise / laws.probs()[0].double()

        assert int(laws.draw(keys)) == int(race.argmin())


def test_a_token_does_not_depend_on_the_rest_of_the_batch() -> None:
    logits = random_logits(6, 5000)
    rows = [
        replace(PLAIN, seed=seed, position=9, top_p=0.95 if seed % 2 else 1.0, top_k=seed * 10)
        for seed in range(5)
    ] + [GREEDY]

    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(6)]
    reverse = sample(logits.flip(0), rows[::-1])[::-1]

    assert together == alone == reverse


def test_the_same_seed_gives_another_token_at_another_position() -> None:
    logits = random_logits(1, 5000, spread=0.1).expand(2, -1)

    first, second = sample(logits, [PLAIN, replace(PLAIN, position=1)])

    assert first != second


@pytest.mark.parametrize("row", [GREEDY, PLAIN, replace(PLAIN, top_p=0.5, top_k=3)], ids=str)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_broken_logits_give_some_token_of_the_vocabulary(row: RowSampling, broken: float) -> None:
    logits = torch.full((1, 10), broken)

    assert 0 <= sample(logits, [row])[0] < 10


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, 10), []) == []


@pytest.mark.parametrize("vocab_size", [1, 255, 256, 511, 512, 513, 2048, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_is_that_of_torch_ties_and_broken_rows_included(
    vocab_size: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randint(-9, 9, (40, vocab_size), generator=generator).to(dtype)  # many ties
    logits[1, vocab_size // 2 :] = torch.nan
    logits[2, :] = -torch.inf
    logits[3, -1] = torch.inf
    logits[4, :] = torch.arange(vocab_size)

    assert argmax(logits).tolist() == logits.argmax(-1).tolist()
    assert argmax(logits[:, : vocab_size - vocab_size // 3]).tolist() == (
        logits[:, : vocab_size - vocab_size // 3].argmax(-1).tolist()
    )
