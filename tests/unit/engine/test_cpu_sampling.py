"""The compiled operators do what their twins in torch do, to the last token."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specgw.engine import cpu_sampling
from specgw.engine.laws import block_maxima, first_maximum, next_maxima
from specgw.engine.rng import NOISE_BLOCK
from specgw.engine.sampling import RowSampling, build_laws, sample
from specgw.engine.token_mask import keep_allowed_

pytestmark = pytest.mark.skipif(
    not cpu_sampling.is_usable(torch.empty(0)),
    reason="the compiled operators were not built, or the CPU is without AVX-512",
)
T = TypeVar("T")
SIZES = [1, 5, NOISE_BLOCK, NOISE_BLOCK + 1, 3000, 40_003]
TYPES = [torch.bfloat16, torch.float32]
BROKEN: dict[str, Callable[[Tensor], object]] = {
    "a NaN": lambda row: row.index_fill_(0, torch.tensor(3), torch.nan),
    "NaNs": lambda row: row.fill_(torch.nan),
    "an infinite one": lambda row: row.index_fill_(0, torch.tensor(4), torch.inf),
    "nothing": lambda row: row.fill_(-torch.inf),
    "one token": lambda row: row.fill_(-torch.inf).index_fill_(0, torch.tensor(2), 1.0),
    "a block": lambda row: row[NOISE_BLOCK // 2 :].fill_(-torch.inf),
    "equals": lambda row: row.fill_(2.0),
}

sampling = st.builds(
    RowSampling,
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 5.0]),
    top_p=st.sampled_from([1.0, 0.999, 0.95, 0.5, 1e-6]),
    top_k=st.sampled_from([-1, 0, 1, 2, 40, 900, 100_000]),
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**20),
    min_p=st.sampled_from([0.0, 1e-4, 0.05, 1.0]),
)


def random_logits(num_rows: int, size: int, seed: int, spread: float = 3.0) -> Tensor:
    return spread * torch.randn(num_rows, size, generator=torch.Generator().manual_seed(seed))


def by_torch(call: Callable[[], T]) -> T:
    """Calls it without the compiled operators."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_sampling, "is_usable", lambda logits: False)
        return call()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", SIZES)
@settings(max_examples=25)
@given(
    rows=st.lists(sampling, min_size=1, max_size=8),
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.0, 0.3, 3.0, 20.0]),
)
def test_tokens_are_those_of_torch(
    size: int, dtype: torch.dtype, rows: list[RowSampling], seed: int, spread: float
) -> None:
    logits = random_logits(len(rows), size, seed, spread).to(dtype)

    assert sample(logits, rows) == by_torch(lambda: sample(logits, rows))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", SIZES)
@settings(max_examples=25)
@given(
    rows=st.lists(sampling.filter(lambda row: not row.is_greedy), min_size=1, max_size=8),
    seed=st.integers(0, 2**31),
)
def test_what_is_kept_is_what_torch_keeps(
    size: int, dtype: torch.dtype, rows: list[RowSampling], seed: int
) -> None:
    """Every floor, not only those that a token drawn happens to show."""
    logits = random_logits(len(rows), size, seed).to(dtype)

    def kept() -> Tensor:
        return logits.float() >= build_laws(logits, rows).floors.unsqueeze(1)

    assert torch.equal(kept(), by_torch(kept))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("breaks", BROKEN.values(), ids=BROKEN)
@settings(max_examples=25)
@given(row=sampling, size=st.sampled_from([5, NOISE_BLOCK, 3000]))
def test_odd_rows_harm_nothing_and_give_the_same_token(
    breaks: Callable[[Tensor], object], dtype: torch.dtype, row: RowSampling, size: int
) -> None:
    logits = random_logits(3, size, 5).to(dtype)
    breaks(logits[1])

    tokens = sample(logits, [row] * 3)

    assert tokens == by_torch(lambda: sample(logits, [row] * 3))
    assert tokens[::2] == sample(logits[::2], [row] * 2)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", SIZES)
def test_maxima(size: int, dtype: torch.dtype) -> None:
    logits = random_logits(4, size, 2).to(dtype)
    logits[2, size // 2] = torch.nan
    maxima = block_maxima(logits)

    assert torch.equal(maxima.nan_to_num(), by_torch(lambda: block_maxima(logits)).nan_to_num())
    assert first_maximum(logits, maxima).tolist() == logits.argmax(dim=1).tolist()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", SIZES[1:])
def test_next_maxima(size: int, dtype: torch.dtype) -> None:
    """Those after any first token, equals by their ids, in rows that are broken too."""
    logits = random_logits(3 + len(BROKEN), size, seed=size).to(dtype)
    for row, spoil in zip(logits[3:], BROKEN.values(), strict=True):
        spoil(row)
    maxima = block_maxima(logits)
    first = first_maximum(logits, maxima)
    first[1] = size // 2  # as noise may have chosen
    count = min(8, size - 1)

    ids, values = next_maxima(logits, maxima, first, count)

    expected_ids, expected = by_torch(lambda: next_maxima(logits, maxima.clone(), first, count))
    assert ids.shape == values.shape == (len(logits), count)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(values.nan_to_num(7.0), expected.float().nan_to_num(7.0))


@given(
    size=st.sampled_from(SIZES), seed=st.integers(0, 2**31), allowed=st.sampled_from([0, 0.1, 1])
)
def test_masks(size: int, seed: int, allowed: float) -> None:
    rng = np.random.default_rng(seed)
    bits = rng.random(-(-size // 32) * 32 + 64) < allowed  # more ids than there are logits
    mask = np.packbits(bits, bitorder="little").view(np.int32)
    logits = random_logits(1, size, seed)[0]
    logits[torch.from_numpy(rng.random(size) < 0.5)] = -torch.inf
    expected = logits.clone()
    by_torch(lambda: keep_allowed_(expected, mask))

    keep_allowed_(logits, mask)

    assert torch.equal(logits, expected)


def test_threads_change_nothing() -> None:
    rows = [RowSampling(0.8, 0.9, 50, seed, 7, 0.01) for seed in range(20)]
    logits = random_logits(20, 5000, 3)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = sample(logits, rows)
        torch.set_num_threads(4)
        together = sample(logits, rows)
    finally:
        torch.set_num_threads(before)

    assert together == alone
