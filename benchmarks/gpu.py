"""Checks the GPU path against the CPU, then times it.

One command on a machine with a GPU:

    python -m benchmarks.gpu [--model DIR] [--out gpu.json]

Every attention kernel that works there, with and without CUDA graphs, runs the same passes as the
CPU in float32: prompts, decoding, verifying, both mixed. Exits with 1 if anything differs by more
than rounding. `--device cpu` runs the GPU's code on the CPU, graphs replaced by running again.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.gpu_passes import Agreement, are_good, build_scripts, compare, run_scripts
from benchmarks.gpu_speed import StepTime, copy_bandwidth, time_steps, weight_bytes
from specgw.engine.attention_kernels import GatheredSdpa, PagedKernel
from specgw.engine.cache_size import PoolShape
from specgw.engine.graphs import CudaRecorder, GraphLimits, run_again
from specgw.engine.kernel_choice import HeadShape, usable_kernels
from specgw.engine.kv_cache import BLOCK_SIZE
from specgw.engine.loading import ModelOptions, load_model
from specgw.engine.model_runner import ModelRunner
from specgw.engine.paged_runner import PagedRunner
from specgw.model_files import read_config, resolve_model
from specgw.telemetry import configure_logging

_SEQUENCES = 7  # of the checks
_MAX_LEN = 1024
_MAX_GRAPH_ROWS = 512


@dataclass
class Report:
    """What is written as JSON."""

    model: str
    device: str
    torch: str
    copy_bytes_per_s: float
    passed_over: dict[str, list[str]] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)


@click.command()
@click.option("--model", multiple=True, default=("tiny/target", "tiny/draft"), show_default=True)
@click.option("--device", default="cuda", show_default=True)
@click.option("--dtype", multiple=True, default=("float32", "bfloat16"), show_default=True)
@click.option("--draft-tokens", default=4, show_default=True)
@click.option("--batch", multiple=True, default=(1, 8, 32), show_default=True)
@click.option("--steps", default=100, show_default=True, help="Steps timed in each case.")
@click.option("--copy-mib", default=1024, show_default=True, help="Of the bandwidth's copies.")
@click.option("--out", type=click.Path(path_type=Path), help="Writes all of it here, as JSON.")
def main(
    model: Sequence[str],
    device: str,
    dtype: Sequence[str],
    draft_tokens: int,
    batch: Sequence[int],
    steps: int,
    copy_mib: int,
    out: Path | None,
) -> None:
    """Checks, times, prints."""
    configure_logging()
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise click.ClickException(f"torch {torch.__version__} sees no GPU: nothing was checked")
    bandwidth = copy_bandwidth(where, copy_mib << 20)
    print(f"{_device_name(where)}, torch {torch.__version__}, copies {bandwidth / 1e9:.0f} GB/s")
    reports, is_good = [], True
    for name in model:
        report = Report(name, _device_name(where), torch.__version__, bandwidth)
        reports.append(report)
        for one in dtype:
            case = _Case(name, where, getattr(torch, one), draft_tokens, max(batch))
            is_good &= _check(case, report)
            _time(case, batch, steps, report)
    if out is not None:
        out.write_text(json.dumps([asdict(one) for one in reports], indent=2), encoding="utf-8")
    print("everything agrees" if is_good else "NOT EVERYTHING AGREES")
    sys.exit(not is_good)


class _Case:
    """A model on a device in a data type: one set of weights for all runners."""

    def __init__(
        self, name: str, device: torch.device, dtype: torch.dtype, draft_tokens: int, batch: int
    ) -> None:
        self.name, self.device, self.dtype = name, device, dtype
        self.draft_tokens = draft_tokens
        self.weights = weight_bytes(resolve_model(name), dtype)
        self._num_tokens = max(batch, _SEQUENCES) * _MAX_LEN
        self._limits = GraphLimits(max(batch, _SEQUENCES), draft_tokens + 1, _MAX_GRAPH_ROWS)
        self._base = self._load(dtype, device, attention_backend="TORCH_SDPA", enforce_eager=True)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def reference(self) -> ModelRunner:
        """Returns the runner that all others must agree with: the CPU's own, in float32."""
        return self._load(torch.float32, torch.device("cpu"))

    def kernels(self, reasons: list[str]) -> list[PagedKernel]:
        """Returns all attention kernels that work here, the preferred one first."""
        pool = self._base.kv_cache
        num_heads = int(read_config(resolve_model(self.name))["num_attention_heads"])
        heads = HeadShape(num_heads, pool.num_kv_heads, pool.head_dim, self.dtype, self.device)
        return [*usable_kernels(heads, reasons), GatheredSdpa()]

    def runner(self, kernel: PagedKernel, has_graphs: bool) -> PagedRunner:
        """Returns a runner with a cache of its own."""
        base, pool = self._base, self._base.kv_cache
        kv_cache = PoolShape(
            len(pool.layers),
            pool.num_kv_heads,
            pool.head_dim,
            self.dtype,
            self.device,
            block_size=max(BLOCK_SIZE, kernel.block_size),
            is_paged=True,
        ).build(self._num_tokens)
        runner = PagedRunner(base.model, base.description, base.eos_token_ids, kv_cache, kernel)
        if has_graphs:
            on_gpu = self.device.type == "cuda"
            runner.record(self._limits, CudaRecorder(self.device) if on_gpu else run_again)
        return runner

    def _load(self, dtype: torch.dtype, device: torch.device, **options: Any) -> ModelRunner:
        return load_model(
            ModelOptions(
                self.name,
                dtype=str(dtype).removeprefix("torch."),
                device=str(device),
                max_model_len=_MAX_LEN,
                accept_shorter=True,
                kv_cache_tokens=self._num_tokens,
                **options,
            )
        )


def _check(case: _Case, report: Report) -> bool:
    """Compares every way to run with the reference; prints and reports a line for each."""
    reference = case.reference()
    scripts = build_scripts(
        reference.vocab_size, reference.max_model_len, case.draft_tokens, _SEQUENCES
    )
    expected = run_scripts(reference, scripts)
    reasons = report.passed_over.setdefault(case.dtype_name, [])
    is_good = True
    for kernel in case.kernels(reasons):
        for has_graphs in (False, True):
            runner = case.runner(kernel, has_graphs)
            agreements = compare(expected, run_scripts(runner, scripts), case.dtype)
            how = _how(kernel, has_graphs)
            if runner.graphs is not None:
                how += f" ({runner.graphs.num_graphs} shapes)"
                is_good &= runner.graphs.num_graphs > 0
            is_good &= are_good(agreements)
            _print_checks(case, how, agreements)
            report.checks += [
                {"dtype": case.dtype_name, "how": how, **asdict(one)} for one in agreements
            ]
    for reason in reasons:
        print(f"  {case.name} {case.dtype_name}: not tried: {reason}")
    return is_good


def _time(case: _Case, batches: Sequence[int], num_steps: int, report: Report) -> None:
    """Times decoding and verifying by the preferred kernel, with and without graphs."""
    kernel = case.kernels([])[0]
    for has_graphs in (False, True):
        runner = case.runner(kernel, has_graphs)
        for batch in batches:
            for rows_each in (1, case.draft_tokens + 1):
                timed = time_steps(
                    runner,
                    _how(kernel, has_graphs),
                    batch,
                    rows_each,
                    num_steps,
                    case.weights,
                    report.copy_bytes_per_s,
                )
                _print_step(case, timed)
                report.steps.append({"dtype": case.dtype_name, **asdict(timed)})


def _how(kernel: PagedKernel, has_graphs: bool) -> str:
    return f"{kernel.name}, {'graphs' if has_graphs else 'eager'}"


def _print_checks(case: _Case, how: str, agreements: Sequence[Agreement]) -> None:
    parts = [
        f"{one.kind} {one.error:.1e}"
        + (f" {one.num_other_tokens} other tokens, gap {one.worst_gap:.2g}" * (one.worst_gap > 0))
        + " FAILED" * (not one.is_good)
        for one in agreements
    ]
    print(f"  {case.name} {case.dtype_name}, {how}: {'; '.join(parts)}", flush=True)


def _print_step(case: _Case, timed: StepTime) -> None:
    print(
        f"  {case.name} {case.dtype_name}, {timed.how}, batch {timed.batch} x {timed.rows_each}: "
        f"step {timed.step_s * 1e3:.3f} ms, {timed.tokens_per_s:.0f} tokens/s, "
        f"{timed.bandwidth_share:.2f} of the bandwidth",
        flush=True,
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


if __name__ == "__main__":
    main()
