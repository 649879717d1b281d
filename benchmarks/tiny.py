"""Speed and acceptance on the bundled tiny models, by draft length and batch: `make bench`.

One embedded stack; every repetition asks for the same prompts with each draft length in turn, so
that all see the same machine. Ratios are to plain decoding (0 draft tokens) of the same batch.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import click
import httpx

from benchmarks.demo import NUM_TOKENS, PROMPTS, Run, complete
from gateway.__main__ import serving
from gateway.tokenizer import load_tokenizer
from specgw.config import load_config
from specgw.supervisor import embedded_services
from specgw.telemetry import configure_logging

Cell = tuple[int, int]  # batch size, draft tokens


@click.command()
@click.option("--draft-tokens", multiple=True, default=(0, 1, 2, 4, 6, 8), show_default=True)
@click.option("--batch", multiple=True, default=(1, 8), show_default=True)
@click.option("--repetitions", default=5, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Writes figures here.")
def main(
    draft_tokens: Sequence[int], batch: Sequence[int], repetitions: int, json_file: Path | None
) -> None:
    """Measures and prints one line for each batch size and draft length."""
    configure_logging()
    cells = [(size, count) for size in batch for count in sorted({0, *draft_tokens})]
    rates, runs = asyncio.run(measure(cells, repetitions))
    figures = [summary(cell, rates, runs[cell]) for cell in cells]
    print(f"\n{'batch':>5}{'K':>4}{'tokens/s':>10}{'ratio':>8}{'accepted/round':>16}{'rate':>7}")
    for row in figures:
        print(
            f"{row['batch']:>5}{row['draft_tokens']:>4}{row['tokens_per_s']:>10.0f}"
            f"{row['ratio']:>8.2f}{row['accepted_per_round']:>16.2f}{row['acceptance']:>7.2f}"
        )
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2), encoding="utf-8")


async def measure(
    cells: Sequence[Cell], repetitions: int
) -> tuple[dict[Cell, list[float]], dict[Cell, list[Run]]]:
    """Returns tokens per second of every repetition, and all answers."""
    largest = max(count for _, count in cells)
    flags = {"port": 0, "speculative_config": _with_draft_tokens(largest)}
    args = load_config(Path("configs/tiny.yaml"), flags)
    rates: dict[Cell, list[float]] = {cell: [] for cell in cells}
    runs: dict[Cell, list[Run]] = {cell: [] for cell in cells}
    tokenizer = load_tokenizer(args.tokenizer_path)
    async with (
        embedded_services(args) as (verifier, *_),
        serving(args, [verifier.spec.address], tokenizer) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=600) as client,
    ):
        await gateway.router.ready()
        await complete(client, PROMPTS[0], None)  # warms up
        for repetition in range(repetitions):
            for size, count in cells:
                prompts = [PROMPTS[(repetition + i) % len(PROMPTS)] for i in range(size)]
                began = time.perf_counter()
                answers = await asyncio.gather(*(complete(client, p, count) for p in prompts))
                rates[size, count].append(size * NUM_TOKENS / (time.perf_counter() - began))
                runs[size, count] += answers
    return rates, runs


def summary(
    cell: Cell, rates: dict[Cell, list[float]], runs: Sequence[Run]
) -> dict[str, float | int]:
    """Returns one line of the table; the ratio is the median of those within a repetition."""
    size, count = cell
    ratios = [one / plain for one, plain in zip(rates[cell], rates[size, 0], strict=True)]
    rounds, drafted = sum(run.rounds for run in runs), sum(run.drafted for run in runs)
    accepted = sum(run.accepted for run in runs)
    return {
        "batch": size,
        "draft_tokens": count,
        "tokens_per_s": statistics.median(rates[cell]),
        "ratio": statistics.median(ratios),
        "accepted_per_round": accepted / max(1, rounds),
        "acceptance": accepted / max(1, drafted),
    }


def _with_draft_tokens(count: int) -> dict[str, str | int]:
    return {"method": "draft_model", "model": "tiny/draft", "num_speculative_tokens": count}


if __name__ == "__main__":
    main()
