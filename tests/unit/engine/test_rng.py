"""The noise behind random tokens: the same everywhere, and of the right distribution."""

import math

import numpy as np
import pytest

from specgw.engine.rng import exponential_noise, uniform_noise


def test_the_numbers_are_these_on_every_machine() -> None:
    bits = [2665260011, 2562089316, 906032427, 649836834, 4186281648]  # Philox4x64-10
    known = [-math.log1p(-(n + 0.5) / 2**32) for n in bits]

    found = exponential_noise(seed=1234, position=56, vocab_size=5)

    np.testing.assert_allclose(found, known, rtol=1e-6)


def test_the_numbers_of_a_token_do_not_depend_on_the_size_of_the_vocabulary() -> None:
    small, large = exponential_noise(7, 3, 1001), exponential_noise(7, 3, 50_000)

    np.testing.assert_array_equal(small, large[:1001])


@pytest.mark.parametrize("other", [(8, 3), (7, 4), (-7, 3), (7 + 2**63, 3), (3, 7)], ids=str)
def test_another_seed_or_position_gives_other_numbers(other: tuple[int, int]) -> None:
    found, others = exponential_noise(7, 3, 1000), exponential_noise(*other, 1000)

    assert not np.isin(found, others).any()


def test_uniform_noise_fills_its_range_evenly() -> None:
    """Pearson's chi-square over 100 cells, 99 degrees of freedom, false-alarm rate 1e-9."""
    draws = np.concatenate([uniform_noise(0, position, 20_000) for position in range(50)])

    counts = np.histogram(draws, bins=100, range=(0, 1))[0]

    expected = len(draws) / 100
    assert ((counts - expected) ** 2 / expected).sum() < 208.6
    assert draws.min() > 0
    assert draws.max() < 1


def test_exponential_noise_is_positive_and_finite_with_mean_and_variance_one() -> None:
    """Both within 7 standard errors: a false-alarm rate under 1e-11."""
    draws = np.concatenate([exponential_noise(5, position, 20_000) for position in range(50)])

    assert draws.min() > 0
    assert np.isfinite(draws).all()
    assert abs(draws.mean(dtype=np.float64) - 1) < 7 / np.sqrt(len(draws))
    assert abs(draws.var(dtype=np.float64) - 1) < 7 * np.sqrt(8 / len(draws))
