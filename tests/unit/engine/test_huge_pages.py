"""Memory for weights: tensors like any other, wherever they lie."""

import gc
import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specgw.engine.huge_pages import HugePages

DTYPES = [torch.bfloat16, torch.int8, torch.int32, torch.float32, torch.int64]


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 40), min_size=1, max_size=3)),
        min_size=1,
        max_size=20,
    ),
    st.sampled_from([0, 4096, 1 << 21]),
)
def test_tensors_are_dense_aligned_and_apart(
    wanted: list[tuple[torch.dtype, list[int]]], chunk_bytes: int
) -> None:
    pages = HugePages(chunk_bytes)
    tensors = [pages.empty(shape, dtype) for dtype, shape in wanted]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)

    for number, (tensor, (dtype, shape)) in enumerate(zip(tensors, wanted, strict=True)):
        assert tensor.shape == torch.Size(shape)
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        assert bool((tensor == number).all())


def test_a_copy_has_the_values_and_is_dense() -> None:
    source = torch.arange(12).view(3, 4).transpose(0, 1)
    copy = HugePages().copy(source)

    assert torch.equal(copy, source)
    assert copy.is_contiguous()


def test_no_values_at_all() -> None:
    assert HugePages().empty((0, 5), torch.float32).shape == (0, 5)


def test_a_chunk_lives_as_long_as_a_tensor_in_it() -> None:
    pages = HugePages(chunk_bytes=1 << 22)
    first, second = (pages.empty((1000,), torch.float32) for _ in range(2))
    second.fill_(7)
    del first, pages
    gc.collect()

    assert bool((second == 7).all())


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="only Linux has them")
def test_large_tensors_lie_in_huge_pages() -> None:
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as bare:
        bare.madvise(mmap.MADV_HUGEPAGE)
        before = _huge_bytes()
        bare.write(b"1" * (64 << 20))
        if _huge_bytes() - before < 48 << 20:
            pytest.skip("this machine has none to give now")
    before = _huge_bytes()
    tensor = HugePages().empty((64 << 20,), torch.int8).fill_(1)

    assert _huge_bytes() - before >= tensor.numel() // 2  # memory may be in pieces


def _huge_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("AnonHugePages")]
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("fails", [True, False])
def test_without_them_memory_is_ordinary(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if fails:

        def refuse(*arguments: int) -> None:
            raise OSError("no such advice")

        class Mapping(mmap.mmap):
            madvise = refuse

        monkeypatch.setattr(mmap, "mmap", Mapping)
    else:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    tensor = HugePages().empty((3 << 20,), torch.int8).fill_(3)

    assert int(tensor.sum(dtype=torch.int64)) == 9 << 20
