"""The compiled operators against torch in float32, and a batch's rows against each row alone."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specgw.engine import cpu_kernels
from specgw.engine.attention import BatchAttention, CausalMasks, SequenceRows
from specgw.engine.huge_pages import HugePages
from specgw.engine.kv_cache import KVCache

BF16 = torch.bfloat16
ROWS = (0, 1, 2, 5, 6, 7, 13, 32)
pytestmark = pytest.mark.skipif(
    not cpu_kernels.is_usable(torch.empty(0, dtype=BF16)),
    reason="the compiled operators were not built here, or the CPU has no AVX-512 BF16",
)


def pack(weight: Tensor) -> Tensor:
    return cpu_kernels.pack(weight, HugePages())


def pack_int8(weight: Tensor) -> cpu_kernels.Int8Weights:
    return cpu_kernels.pack_int8(weight, HugePages())


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(BF16)


def is_close(actual: Tensor, expected: Tensor) -> bool:
    """Whether two results differ by the rounding to bfloat16 only."""
    return torch.allclose(actual.float(), expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("num_columns", "size"), [(64, 2), (65, 32), (200, 576), (1, 4098)])
@pytest.mark.parametrize("is_added", [False, True])
def test_linear(num_rows: int, num_columns: int, size: int, is_added: bool) -> None:
    x, weight = rand(num_rows, size), rand(num_columns, size) / math.sqrt(size)
    bias = rand(num_columns) if is_added else None
    residual = rand(num_rows, num_columns) if is_added else None
    packed = pack(weight)

    output = cpu_kernels.linear(x, packed, bias, residual, num_columns)

    expected = F.linear(x.float(), weight.float())
    if bias is not None and residual is not None:
        expected += bias.float() + residual.float()
    assert is_close(output, expected)
    for row in range(num_rows):
        of_row = None if residual is None else residual[row : row + 1]
        alone = cpu_kernels.linear(x[row : row + 1], packed, bias, of_row, num_columns)
        assert torch.equal(alone[0], output[row])


def test_linear_of_rows_that_are_apart() -> None:
    x, weight = rand(64, 4).T, rand(10, 64)

    output = cpu_kernels.linear(x, pack(weight), None, rand(10, 4).T, 10)

    assert is_close(output, x.float() @ weight.float().T + rand(10, 4).T.float())


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("num_columns", "size"), [(64, 4), (65, 32), (200, 576), (1, 4100)])
@pytest.mark.parametrize("is_added", [False, True])
def test_int8_linear(num_rows: int, num_columns: int, size: int, is_added: bool) -> None:
    """Against the same product of weights and inputs that were rounded alike."""
    x, weight = rand(num_rows, size), rand(num_columns, size) / math.sqrt(size)
    bias = rand(num_columns) if is_added else None
    residual = rand(num_rows, num_columns) if is_added else None
    packed = pack_int8(weight)

    output = cpu_kernels.int8_linear(x, packed, bias, residual)

    expected = rounded(x) @ rounded(weight).T
    if bias is not None and residual is not None:
        expected += bias.float() + residual.float()
    assert is_close(output, expected)
    for row in range(num_rows):
        of_row = None if residual is None else residual[row : row + 1]
        alone = cpu_kernels.int8_linear(x[row : row + 1], packed, bias, of_row)
        assert torch.equal(alone[0], output[row])


def rounded(rows: Tensor) -> Tensor:
    """Rounds each row to multiples of a 127th of its largest value."""
    step = rows.float().abs().amax(1, keepdim=True) / 127
    return (rows.float() / step).round() * step


def test_int8_rows_of_zeros_stay_zero() -> None:
    zeros = torch.zeros(10, 64, dtype=BF16)
    no_weights, weights = pack_int8(zeros), pack_int8(rand(10, 64))

    assert cpu_kernels.int8_linear(rand(3, 64), no_weights, None, None).eq(0).all()
    assert cpu_kernels.int8_linear(zeros, weights, None, None).eq(0).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_int8_rows_that_are_no_numbers_stay_so(value: float) -> None:
    x, weights = rand(2, 64), pack_int8(rand(10, 64))
    x[0, 3] = value

    output = cpu_kernels.int8_linear(x, weights, None, None)

    assert output[0].isnan().all()
    assert output[1].isfinite().all()


def test_int8_weights_give_their_rows_back() -> None:
    weight, rows = rand(130, 36), torch.tensor([0, 129, 64, 64])

    unpacked = cpu_kernels.unpack_int8_rows(pack_int8(weight), rows)

    assert is_close(unpacked, rounded(weight)[rows])


def test_packed_weights_give_their_rows_back() -> None:
    weight, rows = rand(130, 34), torch.tensor([0, 129, 64, 64])

    assert torch.equal(cpu_kernels.unpack_rows(pack(weight), rows), weight[rows])


@pytest.mark.parametrize("shape", [(1, 576), (3, 2, 50), (7, 1)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, weight = 3 * rand(*shape), rand(shape[-1])

    output = cpu_kernels.rms_norm(x, weight, 1e-5)

    assert is_close(output, F.rms_norm(x.float(), shape[-1:], weight.float(), 1e-5))


@pytest.mark.parametrize("num_missing", [1, 50])
@pytest.mark.parametrize("num_drafts", [0, 3, 31, 32, 128])
def test_a_row_does_not_depend_on_the_drafts_after_it(num_missing: int, num_drafts: int) -> None:
    """Bit for bit, or a near tie would be decided in another way."""
    length, head_dim = 300, 64
    stored, queries = rand(length + 128, 4, head_dim), rand(num_missing + 128, 6, head_dim)

    def attend(num_drafts: int) -> Tensor:
        pool = KVCache(1, 2, head_dim, 1024, BF16, torch.device("cpu"))
        sequence = pool.new_sequence()
        sequence.reserve(length + num_drafts)
        pool.layers[0][sequence.slot_ids(0, length)] = stored[:length]
        sequence.length = length - num_missing
        slots = torch.tensor(sequence.slot_ids(sequence.length, length + num_drafts))
        part = SequenceRows(sequence, num_missing + num_drafts)
        positions = torch.arange(sequence.length, length + num_drafts)
        masks = CausalMasks(BF16, torch.device("cpu"))
        attention = BatchAttention(pool, masks, positions, slots, [part])
        new = stored[sequence.length : length + num_drafts]
        return attention(0, queries[: num_missing + num_drafts], new, 0.2)

    assert torch.equal(attend(num_drafts)[:num_missing], attend(0))


@pytest.mark.parametrize("window", [None, 5, 64, 70])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 32), (3, 64), (7, 128), (16, 256)])
def test_attention_of_single_rows(window: int | None, group: int, head_dim: int) -> None:
    """Sequences of several lengths, whose blocks lie between one another's."""
    pool = KVCache(1, 2, head_dim, 1024, BF16, torch.device("cpu"))
    sequences = [pool.new_sequence() for _ in range(3)]
    lengths = [1, 63, 200]
    for length in range(1, 201):
        for sequence, end in zip(sequences, lengths, strict=True):
            sequence.reserve(min(length, end))
    counts = [1, 4, 7]
    stored = [rand(length, 4, head_dim) for length in lengths]
    queries = rand(sum(counts), 2 * group, head_dim)
    positions: list[int] = []
    slots: list[int] = []
    for sequence, rows, length, count in zip(sequences, stored, lengths, counts, strict=True):
        pool.layers[0][sequence.slot_ids(0, length)] = rows
        sequence.length = length - count
        positions += range(length - count, length)
        slots += sequence.slot_ids(length - count, length)
    new = torch.cat([rows[-count:] for rows, count in zip(stored, counts, strict=True)])
    parts = [SequenceRows(*pair) for pair in zip(sequences, counts, strict=True)]
    masks = CausalMasks(BF16, torch.device("cpu"))
    attention = BatchAttention(pool, masks, torch.tensor(positions), torch.tensor(slots), parts)

    output = attention(0, queries, new, 0.2, window)

    expected: list[Tensor] = []
    for rows, length, count in zip(stored, lengths, counts, strict=True):
        for last in range(length - count + 1, length + 1):
            seen = rows[0 if window is None else max(0, last - window) : last].float()
            query = queries[len(expected)].float()
            keys, values = (part.repeat_interleave(group, 1) for part in seen.chunk(2, 1))
            weights = (0.2 * torch.einsum("hd,khd->hk", query, keys)).softmax(-1)
            expected.append(torch.einsum("hk,khd->hd", weights, values).flatten())
    assert is_close(output, torch.stack(expected))
