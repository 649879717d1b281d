"""How fast passes decode, and how near that is to reading the weights at the device's bandwidth."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from specgw.engine.model_runner import ModelRunner, SequenceChunk
from specgw.engine.sampling import argmax
from specgw.model_files import read_config, weight_files

_CONTEXT = 128  # tokens before the first step
_COPIES = 20


@dataclass(frozen=True)
class StepTime:
    """Steps of one batch. A step is a pass and the tokens chosen from it, read back by the host.

    `bandwidth_share` is weight bytes / step time / bandwidth, of the median step.
    """

    how: str
    batch: int
    rows_each: int
    step_s: float
    fastest_s: float
    tokens_per_s: float
    bandwidth_share: float


def weight_bytes(model_dir: Path, dtype: torch.dtype) -> int:
    """Returns the bytes of weights that a pass reads: without an embedding that is looked up in."""
    is_tied = bool(read_config(model_dir).get("tie_word_embeddings", False))
    total = 0
    for file in weight_files(model_dir):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                if is_tied or "embed_tokens" not in name:
                    total += torch.Size(tensors.get_slice(name).get_shape()).numel()
    return total * dtype.itemsize


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Returns the bytes per second, read and written, of the fastest of some copies."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = [_timed(lambda: target.copy_(source), device) for _ in range(_COPIES)]
    return 2 * num_bytes / min(times)


def time_steps(
    runner: ModelRunner,
    how: str,
    batch: int,
    rows_each: int,
    num_steps: int,
    weights: int,
    bandwidth: float,
) -> StepTime:
    """Times steps that feed each sequence its own last tokens.

    With several rows each, as in verifying, none is rejected. There are fewer steps where contexts
    would become too long.
    """
    num_steps = min(num_steps, (runner.max_model_len - _CONTEXT) // rows_each)
    caches = [runner.kv_cache.new_sequence() for _ in range(batch)]
    prompt = [1 + i % (runner.vocab_size - 1) for i in range(_CONTEXT)]
    tokens = _step(runner, [SequenceChunk(cache, prompt, rows_each) for cache in caches])
    times = []
    for _ in range(num_steps):
        rows = [tokens[i : i + rows_each] for i in range(0, len(tokens), rows_each)]
        chunks = [SequenceChunk(*one, rows_each) for one in zip(caches, rows, strict=True)]
        began = time.perf_counter()
        tokens = _step(runner, chunks)
        times.append(time.perf_counter() - began)
    for cache in caches:
        cache.release()
    step_s = statistics.median(times)
    share = weights / step_s / bandwidth
    rate = batch * rows_each / step_s
    return StepTime(how, batch, rows_each, step_s, min(times), rate, share)


def _step(runner: ModelRunner, chunks: Sequence[SequenceChunk]) -> list[int]:
    tokens: list[int] = argmax(runner.forward(chunks)).tolist()
    return tokens


def _timed(run: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    began = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - began


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
