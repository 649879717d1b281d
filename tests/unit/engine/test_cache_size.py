"""What a KV cache may take of a GPU that a verifier and a proposer share."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from specgw.config import load_config, parse_config
from specgw.engine.attention import Batch
from specgw.engine.cache_size import DeviceMemory, PoolShape, largest_pass, room_on_device
from specgw.supervisor import _child_specs
from tests.unit.engine.tiny_checkpoints import SIZES, load, save_checkpoint

GB = 1 << 30


def test_a_share_less_weights_and_workspace_is_left() -> None:
    memory = DeviceMemory(total=80 * GB, free=60 * GB, held=15 * GB)

    assert room_on_device(memory, 0.5, workspace=2 * GB) == (40 - 15 - 2) * GB


def test_what_others_hold_is_not_taken() -> None:
    memory = DeviceMemory(total=80 * GB, free=6 * GB, held=15 * GB)

    assert room_on_device(memory, 0.9, workspace=2 * GB) == 4 * GB


def test_weights_larger_than_the_share_leave_nothing() -> None:
    assert room_on_device(DeviceMemory(80 * GB, 60 * GB, 15 * GB), 0.1, 0) == 0


@given(
    utilization=st.floats(0.1, 1.0),
    draft_share=st.floats(0.05, 0.95),
    weights=st.tuples(st.integers(0, 8 * GB), st.integers(0, 8 * GB)),
    workspace=st.integers(0, GB),
    verifier_first=st.booleans(),
)
def test_two_services_on_one_gpu_keep_within_what_they_may_use_whoever_is_first(
    utilization: float,
    draft_share: float,
    weights: tuple[int, int],
    workspace: int,
    verifier_first: bool,
) -> None:
    total = 24 * GB
    shares = utilization * (1 - draft_share), utilization * draft_share
    order = (0, 1) if verifier_first else (1, 0)
    used = 0
    caches = [0, 0]
    for one in order:
        memory = DeviceMemory(total, total - used - weights[one], weights[one])
        caches[one] = room_on_device(memory, shares[one], workspace)
        used += weights[one] + caches[one]

    for own, share, cache in zip(weights, shares, caches, strict=True):
        assert cache == 0 or own + cache + workspace <= share * total + 1


@pytest.mark.parametrize("share", [0.25, 0.4])
def test_the_embedded_services_divide_the_memory(share: float, tmp_path: Path) -> None:
    args = parse_config(
        {
            "model": "tiny/target",
            "gpu_memory_utilization": 0.8,
            "speculative_config": {"model": "tiny/draft", "num_speculative_tokens": 3},
            "specgw": {"proposer": {"embedded_memory_share": share}},
        }
    )

    specs = _child_specs(args, tmp_path)
    parts = [load_config(spec.config_file).gpu_memory_utilization for spec in specs]

    assert parts == pytest.approx([0.8 * (1 - share), 0.8 * share])


def test_the_trial_pass_is_as_large_as_a_pass_can_be(tmp_path: Path) -> None:
    runner = load(save_checkpoint(LlamaConfig(**SIZES), tmp_path), max_num_seqs=8)
    seen: list[tuple[int, int]] = []
    model = runner.model

    def spy(batch: Batch) -> torch.Tensor:
        logits = model(batch)
        seen.append((len(batch.token_ids), len(logits)))
        return logits

    runner.model = spy
    largest_pass(runner, 150, 20)

    assert seen == [(150, 20)]
    assert runner.kv_cache.used_tokens == 0


@pytest.mark.parametrize("num_bytes", [0, 1, 10_000, 123_456, 1_000_000])
@pytest.mark.parametrize("is_paged", [False, True])
def test_a_cache_of_what_fits_into_memory_fits(num_bytes: int, is_paged: bool) -> None:
    shape = PoolShape(2, 2, 8, torch.float32, torch.device("cpu"), 32, is_paged)

    capacity = shape.tokens_in(num_bytes)
    pool = shape.build(capacity)

    held = sum(layer.nbytes for layer in pool.layers)
    block = 32 * shape.token_bytes
    assert capacity == 0 or num_bytes - block < held <= num_bytes
    assert capacity > 0 or num_bytes < (1 + is_paged) * block


def test_a_pool_for_a_kernel_has_its_blocks_and_one_more() -> None:
    shape = PoolShape(2, 2, 8, torch.float32, torch.device("cpu"), block_size=256, is_paged=True)

    pool = shape.build(700)

    assert (pool.capacity_tokens, pool.scratch_block) == (768, 3)
    assert pool.layers[0].shape == (4 * 256, 4, 8)
    assert shape.token_bytes * 4 * 256 == sum(layer.nbytes for layer in pool.layers)
