"""How near a step comes to reading the weights once: `python -m benchmarks.step_bandwidth`.

A step of one sequence, then a plain sum over as many bytes as the weights have, again and again:
the speed of memory changes within minutes on shared machines, so each step is compared with the
sums on both sides of it. The limit is 1: all weights are read, and nothing else takes time. The
sums read huge pages, where weights lie too; what they take from ordinary ones is told beside it.
"""

import statistics
import time
from pathlib import Path

import click
import torch
from torch import Tensor

from benchmarks.gpu_speed import weight_bytes
from specgw.engine.huge_pages import HugePages
from specgw.engine.kv_cache import SequenceCache
from specgw.engine.loading import ModelOptions, load_model
from specgw.engine.model_runner import ModelRunner, SequenceChunk

_BUFFER_BYTES = 1 << 29  # larger than any cache


class Reader:
    """Reads memory as fast as a sum does."""

    def __init__(self, num_bytes: int, buffer: Tensor) -> None:
        self._num_bytes = num_bytes
        self._buffer = buffer.fill_(1)

    def seconds(self) -> float:
        """Returns what it takes to read all the bytes."""
        num_whole, rest = divmod(self._num_bytes, self._buffer.nbytes)
        began = time.perf_counter()
        for _ in range(num_whole):
            self._buffer.sum()
        self._buffer[: rest // 8].sum()
        return time.perf_counter() - began


class Step:
    """One sequence whose next token can be computed any number of times."""

    def __init__(self, runner: ModelRunner, context: int) -> None:
        self._runner, self._context = runner, context
        self._cache: SequenceCache = runner.kv_cache.new_sequence()
        self._cache.reserve(context + 1)
        runner.forward([SequenceChunk(self._cache, [1] * context, 1)])

    def seconds(self) -> float:
        """Returns what the step takes."""
        self._cache.truncate(self._context)
        began = time.perf_counter()
        self._runner.forward([SequenceChunk(self._cache, [1], 1)])
        return time.perf_counter() - began


@click.command(help=__doc__)
@click.option("--model", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--threads", type=click.IntRange(min=1), default=torch.get_num_threads())
@click.option("--context", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--repetitions", type=click.IntRange(min=3), default=60, show_default=True)
def main(model: Path, threads: int, context: int, repetitions: int) -> None:
    """Measures and prints."""
    options = ModelOptions(
        model=str(model),
        dtype="bfloat16",
        device="cpu",
        max_model_len=context + 16,
        kv_cache_tokens=context + 64,
        max_num_seqs=1,
        num_threads=threads,
    )
    num_bytes = weight_bytes(model, torch.bfloat16)
    step, shape = Step(load_model(options), context), (min(num_bytes, _BUFFER_BYTES) // 8,)
    reader = Reader(num_bytes, HugePages().empty(shape, torch.int64))
    ordinary = Reader(num_bytes, torch.empty(shape, dtype=torch.int64))
    reads, steps, slow_reads = [reader.seconds()], [], []
    for _ in range(repetitions):
        steps.append(step.seconds())
        reads.append(reader.seconds())
        slow_reads.append(ordinary.seconds())
    shares = sorted(
        (before + after) / 2 / own
        for own, before, after in zip(steps, reads, reads[1:], strict=False)
    )
    low, high = (statistics.quantiles(shares, n=10)[i] for i in (0, -1))
    click.echo(f"{num_bytes / 1e9:.2f} GB of weights")
    for name, times in (("step", steps), ("read", reads), ("read, ordinary pages", slow_reads)):
        click.echo(
            f"{name}: median {1e3 * statistics.median(times):.1f} ms "
            f"({1e3 * min(times):.1f}-{1e3 * max(times):.1f})"
        )
    click.echo(
        f"share of the limit: median {statistics.median(shares):.2f} "
        f"(a tenth below {low:.2f}, a tenth above {high:.2f})"
    )


if __name__ == "__main__":
    main()
