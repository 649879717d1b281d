"""Turns runs into a table, a comparison of outputs, and JSON."""

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.logit_gap import TopTwo, top_two
from benchmarks.measurement import (
    Difference,
    Run,
    Summary,
    SystemId,
    first_difference,
    paired_ratio,
    summarize,
)

_COLUMNS = (
    "system", "batch", "tok/s", "range", "x own plain", "x specgw plain", "x best vllm", "accepted",
    "per round", "undrafted", "own cores", "other cores", "peak GiB",
)  # fmt: skip
_TIMES = ("step", "wait", "draft", "wire", "forward", "sample", "other")
_BASELINE = SystemId("specgw", 0)


@dataclass(frozen=True)
class Parting:
    """One prompt whose speculative answer left the plain one, and how close the call was."""

    repetition: int
    prompt: int
    difference: Difference
    reference: TopTwo | None = None


@dataclass(frozen=True)
class Comparison:
    """A speculative system's answers against those of the same product without drafts."""

    system: SystemId
    batch_size: int
    answer_count: int
    partings: tuple[Parting, ...]


def compare_outputs(runs: Sequence[Run], target: Path) -> list[Comparison]:
    """Compares token ids, and has the reference model judge whatever differs."""
    comparisons = [
        _compare(_select(runs, summary), _plain_runs(runs, summary))
        for summary in _summaries(runs)
        if summary.system.draft_tokens
    ]
    partings = [parting for comparison in comparisons for parting in comparison.partings]
    if not partings:
        return comparisons
    judged = iter(top_two(target, [parting.difference for parting in partings]))
    return [
        replace(
            comparison,
            partings=tuple(replace(p, reference=next(judged)) for p in comparison.partings),
        )
        for comparison in comparisons
    ]


def _compare(runs: Sequence[Run], plain: Sequence[Run]) -> Comparison:
    expected = {run.repetition: run.batch.completions for run in plain}
    partings = [
        Parting(run.repetition, prompt, difference)
        for run in runs
        for prompt, actual in enumerate(run.batch.completions)
        if (difference := first_difference(expected[run.repetition][prompt], actual))
    ]
    answer_count = sum(len(run.batch.completions) for run in runs)
    return Comparison(runs[0].system, runs[0].batch_size, answer_count, tuple(partings))


def render_table(runs: Sequence[Run]) -> str:
    """Renders one row per system and batch size: medians, spread, ratios, acceptance, cores."""
    return _table([_COLUMNS, *(_row(runs, summary) for summary in _summaries(runs))])


def render_times(runs: Sequence[Run]) -> str:
    """Renders where a step's time goes, for the systems that tell: medians over the repetitions.

    `draft` and `wire` pass beside the verifier's work or while it waits.
    """
    rows: list[tuple[str, ...]] = [("ms per step", "batch", *_TIMES)]
    for summary in _summaries(runs):
        steps = [_step_ms(run) for run in _select(runs, summary) if run.batch.times is not None]
        if steps:
            medians = [f"{median(step[name] for step in steps):.2f}" for name in _TIMES]
            rows.append((str(summary.system), str(summary.batch_size), *medians))
    return _table(rows)


def _step_ms(run: Run) -> dict[str, float]:
    """Returns the parts of a mean step; waiting, forward, sample and other are all of it."""
    times = run.batch.times
    assert times is not None
    parts = {name: getattr(times, name) for name in ("wait", "draft", "wire", "forward", "sample")}
    own = parts["wait"] + parts["forward"] + parts["sample"]
    parts |= {"other": run.batch.seconds - own, "step": run.batch.seconds}
    return {name: 1e3 * seconds / max(1.0, times.step_count) for name, seconds in parts.items()}


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _row(runs: Sequence[Run], summary: Summary) -> tuple[str, ...]:
    own = _select(runs, summary)
    best = _best_vllm(runs, summary.batch_size)
    return (
        str(summary.system),
        str(summary.batch_size),
        f"{summary.tokens_per_second:.1f}",
        f"{summary.slowest:.1f}-{summary.fastest:.1f}",
        f"{paired_ratio(own, _plain_runs(runs, summary)):.2f}",
        f"{paired_ratio(own, _with(runs, _BASELINE, summary.batch_size)):.2f}",
        f"{paired_ratio(own, best):.2f}" if best else "",
        _optional("{:.0%}", summary.speculation.acceptance_rate),
        _optional("{:.2f}", summary.speculation.accepted_per_round),
        _optional("{:.0%}", summary.speculation.undrafted_rate),
        f"{summary.own_cores:.2f}",
        f"{summary.other_cores:.2f}",
        f"{summary.peak_bytes / 2**30:.2f}",
    )


def _optional(template: str, value: float | None) -> str:
    return "" if value is None else template.format(value)


def render_differences(comparisons: Sequence[Comparison]) -> str:
    """Says of every speculative system how many answers equal the plain ones, and where not."""
    lines = []
    for comparison in comparisons:
        equal = comparison.answer_count - len(comparison.partings)
        lines.append(
            f"{comparison.system}, batch {comparison.batch_size}: "
            f"{equal} of {comparison.answer_count} answers equal the plain ones"
        )
        lines += [f"  {_describe(parting)}" for parting in comparison.partings]
    return "\n".join(lines)


def _describe(parting: Parting) -> str:
    difference, reference = parting.difference, parting.reference
    text = (
        f"repetition {parting.repetition + 1}, prompt {parting.prompt + 1}, "
        f"position {difference.position}: plain {difference.expected_token_id}, "
        f"speculative {difference.actual_token_id}"
    )
    if reference is None:
        return text
    return (
        f"{text}; float32 reference: {reference.first_token_id} before "
        f"{reference.second_token_id} by {reference.gap:.4f}"
    )


def to_json(plan: Any, runs: Sequence[Run], comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Returns everything measured, down to the token ids, ready for `json.dumps`."""
    return {
        "plan": {name: _plain_value(value) for name, value in asdict(plan).items()},
        "machine": {"cores": os.cpu_count(), "architecture": platform.machine()},
        "summaries": [_summary_json(runs, summary) for summary in _summaries(runs)],
        "comparisons": [asdict(comparison) for comparison in comparisons],
        "runs": [{**asdict(run), "tokens_per_second": run.tokens_per_second} for run in runs],
    }


def _summary_json(runs: Sequence[Run], summary: Summary) -> dict[str, Any]:
    own, best = _select(runs, summary), _best_vllm(runs, summary.batch_size)
    return {
        **asdict(summary),
        "ratio_to_plain": paired_ratio(own, _plain_runs(runs, summary)),
        "ratio_to_best_vllm": paired_ratio(own, best) if best else None,
        "acceptance_rate": summary.speculation.acceptance_rate,
        "undrafted_rate": summary.speculation.undrafted_rate,
        "accepted_per_round": summary.speculation.accepted_per_round,
    }


def _plain_value(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _summaries(runs: Sequence[Run]) -> list[Summary]:
    keys = sorted({(run.batch_size, run.system) for run in runs})
    return [summarize(_with(runs, system, batch_size)) for batch_size, system in keys]


def _plain_runs(runs: Sequence[Run], summary: Summary) -> list[Run]:
    return _with(runs, summary.system.plain, summary.batch_size)


def _select(runs: Sequence[Run], summary: Summary) -> list[Run]:
    return _with(runs, summary.system, summary.batch_size)


def _with(runs: Sequence[Run], system: SystemId, batch_size: int) -> list[Run]:
    return [run for run in runs if run.system == system and run.batch_size == batch_size]


def _best_vllm(runs: Sequence[Run], batch_size: int) -> list[Run]:
    """Returns the runs of vLLM's fastest setting at this batch size; none if vLLM did not run."""
    summaries = [
        summary
        for summary in _summaries(runs)
        if summary.batch_size == batch_size and summary.system.product == "vllm"
    ]
    if not summaries:
        return []
    return _select(runs, max(summaries, key=lambda summary: summary.tokens_per_second))
