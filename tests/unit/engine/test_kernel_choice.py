"""Which attention kernel a GPU gets, with doubles of the packages that have them."""

import sys
from collections.abc import Callable
from inspect import signature
from types import ModuleType
from typing import Any

import pytest
import torch

from specgw.engine import kernel_choice
from specgw.engine.attention_kernels import FlashAttention2, FlashAttention3, TorchFlash
from specgw.engine.kernel_choice import (
    CANDIDATES,
    HeadShape,
    Unusable,
    choose_kernel,
    find_function,
    try_kernel,
)
from specgw.errors import ConfigError
from tests.flash_doubles import flash_attn_2, flash_attn_3, varlen_attn

ON_CPU = HeadShape(6, 2, 16, torch.bfloat16, torch.device("cpu"))
FLASH_3, FLASH_2, VARLEN = CANDIDATES


@pytest.mark.parametrize(
    "kernel",
    [FlashAttention2(flash_attn_2), FlashAttention3(flash_attn_3), TorchFlash(varlen_attn)],
)
@pytest.mark.parametrize("heads", [(6, 2), (4, 4)])
def test_kernels_that_keep_to_their_interface_pass_the_trial(
    kernel: Any, heads: tuple[int, int]
) -> None:
    try_kernel(kernel, HeadShape(*heads, 16, torch.bfloat16, torch.device("cpu")))


def wrong_alignment(q: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Lets the first row see what the last one does, as before flash-attn 2.1."""
    kwargs["cache_seqlens"] = kwargs["cache_seqlens"] + q.shape[1] - 1
    return flash_attn_2(q, *args, **kwargs)


def no_window(*args: Any, window_size: Any, **kwargs: Any) -> torch.Tensor:
    return flash_attn_2(*args, window_size=(-1, -1), **kwargs)


def older(q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any) -> torch.Tensor:
    raise AssertionError("is not called")


def no_kernel_image(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise RuntimeError("no kernel image is available for execution on the device")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (wrong_alignment, "differs from torch's own attention by"),
        (no_window, "differs from torch's own attention by"),
        (no_kernel_image, "failed: no kernel image"),
        (older, "failed: .*unexpected keyword"),
        (lambda q, *args, **kwargs: q[:1], "returned"),
        (lambda q, *args, **kwargs: q * torch.nan, "differs .* by nan"),
    ],
)
def test_kernels_that_compute_something_else_do_not(
    function: Callable[..., torch.Tensor], reason: str
) -> None:
    with pytest.raises(Unusable, match=reason):
        try_kernel(FlashAttention2(function), ON_CPU)


def test_what_is_missing_old_or_for_other_gpus_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    reasons = []
    for function in (None, older, flash_attn_2):
        if function is not None:
            module.flash_attn_with_kvcache = function  # type: ignore[attr-defined]
        try:
            assert find_function(FLASH_2, 9) is flash_attn_2
        except Unusable as problem:
            reasons.append(str(problem))
    with pytest.raises(Unusable, match="no kernels for compute capability 7"):
        find_function(FLASH_2, 7)
    with pytest.raises(Unusable, match="No module named 'flash_attn_interface'"):
        find_function(FLASH_3, 9)

    assert reasons == [
        "has no flash_attn_with_kvcache",
        "flash_attn_with_kvcache does not take block_table",
    ]


def test_torch_has_the_function_that_is_called_with_these_parameters() -> None:
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
        with pytest.raises(Unusable, match="does not take block_table"):
            find_function(VARLEN, 9)
        return
    function = find_function(VARLEN, 9)

    theirs, ours = signature(function).parameters, signature(varlen_attn).parameters
    assert set(ours) <= set(theirs)
    assert list(theirs)[:7] == list(ours)[:7]


def test_the_first_that_works_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function in (("flash_attn_interface", no_kernel_image), ("flash_attn", flash_attn_2)):
        module = ModuleType(name)
        module.flash_attn_with_kvcache = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    pretend_gpu(monkeypatch)

    assert choose_kernel(None, ON_CPU).name == "flash-attn 2"
    assert choose_kernel("FLASH_ATTN", ON_CPU).name == "flash-attn 2"
    assert choose_kernel("TORCH_SDPA", ON_CPU).name == "scaled_dot_product_attention"


def test_without_a_kernel_contexts_are_copied_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend_gpu(monkeypatch)

    kernel = choose_kernel(None, ON_CPU)

    assert kernel.name == "scaled_dot_product_attention"
    [record] = [one for one in caplog.records if one.levelname == "WARNING"]
    reasons = record.__dict__["reasons"]
    assert [reason.split(":")[0] for reason in reasons] == [one.module for one in CANDIDATES]
    with pytest.raises(ConfigError, match=r"FLASH_ATTN cannot be used: flash_attn_interface: "):
        choose_kernel("FLASH_ATTN", ON_CPU)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "reason"),
    [(torch.float32, 64, "in float32, not in 16 bits"), (torch.float16, 12, "heads of 12")],
)
def test_models_that_no_kernel_takes_are_told_apart(
    dtype: torch.dtype, head_dim: int, reason: str
) -> None:
    shape = HeadShape(4, 4, head_dim, dtype, torch.device("cuda"))

    with pytest.raises(ConfigError, match=reason):
        choose_kernel("FLASH_ATTN", shape)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the CPU's trials count as those of a Hopper GPU."""
    monkeypatch.setattr(kernel_choice, "_unfit", lambda shape: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
