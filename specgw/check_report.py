"""Prints what `check.py` found: as text for people, as JSON for machines."""

import json
from collections.abc import Sequence
from dataclasses import asdict

import yaml

from specgw.check import Budget, Report, SlotsLine


def as_json(report: Report) -> str:
    """Returns a report for machines."""
    return json.dumps(
        {
            "valid": not report.problems,
            "problems": report.problems,
            "notices": report.notices,
            "effective_config": report.effective_config(),
            "slots": [asdict(line) for line in report.slots],
            "budgets": [budget.to_dict() for budget in report.budgets],
            "vocabulary": report.vocabulary,
            "mask_token": report.mask_token,
            "services": [asdict(state) for state in report.services],
        },
        indent=2,
    )


def as_text(report: Report) -> str:
    """Returns a report for people, without the problems."""
    parts = []
    if config := report.effective_config():
        parts.append(("configuration", yaml.safe_dump(config, sort_keys=False).splitlines()))
    if report.slots:
        parts.append((f"slots at K = {_k(report)}", _slots_lines(report.slots)))
    parts += [
        (f"{budget.service} of {budget.model}", _budget_lines(budget)) for budget in report.budgets
    ]
    if report.vocabulary:
        parts.append(("vocabulary", _vocabulary_lines(report)))
    for state in report.services:
        facts = yaml.safe_dump(state.facts, sort_keys=False).splitlines() if state.facts else []
        parts.append((f"{state.service} at {state.address}", facts or ["nothing is known"]))
    if report.notices:
        parts.append(("notices", report.notices))
    return "\n".join(
        "\n".join([f"{title}:", *(f"  {line}" for line in lines)]) for title, lines in parts
    )


def _k(report: Report) -> int:
    return report.args.max_draft_tokens if report.args else 0


def _slots_lines(lines: Sequence[SlotsLine]) -> list[str]:
    header = f"{'algorithm':<12} {'method':<12} {'parallel':<8} {'extra rows':>10} {'KV':>4}"
    return [
        header,
        *(
            f"{line.algorithm:<12} {line.method:<12} {'yes' if line.parallel_drafting else 'no':<8}"
            f" {line.extra_slots:>10} {line.kv_lookahead:>4}{'  <- here' if line.is_used else ''}"
            for line in lines
        ),
    ]


def _budget_lines(budget: Budget) -> list[str]:
    lines = [
        f"{budget.max_requests} requests at once, {budget.rows_per_request} rows each in a step",
        f"{budget.max_num_batched_tokens} rows in a step: {budget.requests_per_step} requests and "
        f"{budget.prefill_rows} rows of prompts",
    ]
    if budget.kv_cache_tokens is not None:
        size = ""
        if budget.kv_bytes_per_token is not None:
            mib = budget.kv_cache_tokens * budget.kv_bytes_per_token / 2**20
            size = f" of {budget.kv_bytes_per_token} bytes, {mib:.1f} MiB"
        lookahead = f"; a draft takes {budget.kv_lookahead} more" if budget.kv_lookahead else ""
        lines.append(f"up to {budget.kv_cache_tokens} tokens in the KV cache{size}{lookahead}")
    return lines


def _vocabulary_lines(report: Report) -> list[str]:
    found = report.vocabulary
    lines = [
        f"{found['kinship']}: {found['target_size']} ids of the target, {found['draft_size']} of "
        f"the draft, {found['num_shared_tokens']} tokens in both",
        *found["differences"],
    ]
    if covered := found.get("coverage"):
        lines.append(
            f"{covered['num_common']} tokens stand for the same: {covered['of_target']:.1%} of the "
            f"target's, {covered['of_draft']:.1%} of the draft's; about "
            f"{covered['of_target_text']:.1%} of what the target writes, "
            f"{covered['of_draft_text']:.1%} of what the draft writes"
        )
        lines.append(f"sessions are drafted for by {found['method']}")
    if mask := report.mask_token:
        lines.append(f"mask token {mask['id']} from {mask['field']}")
    return lines
