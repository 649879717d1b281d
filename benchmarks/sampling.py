"""What it costs to make tokens of a step's logits: `python -m benchmarks.sampling --model DIR`.

One verify step after another, each with its own forward pass, by all parameters in turn: sequences
of one row (plain decoding), and of a block whose drafts are all accepted, which is the most that
there can be to do. Figures are medians over the repetitions. Processor time counts all threads,
also while they wait for one another: beside other work, only `--threads 1` tells the truth.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import torch
from torch import Tensor

from gateway.tokenizer import load_tokenizer
from specgw.engine.loading import ModelOptions, load_model
from specgw.types import GenerateRequest, SamplingParams
from verifier_svc.verifier import Verified, Verifier, VerifyRows

_SAMPLED = SamplingParams(temperature=0.8)
PARAMETERS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 0.8 (and below)": _SAMPLED,
    "top-k 40": replace(_SAMPLED, top_k=40),
    "top-p 0.95": replace(_SAMPLED, top_p=0.95),
    "top-k 40, top-p 0.95": replace(_SAMPLED, top_k=40, top_p=0.95),
    "min-p 0.05": replace(_SAMPLED, min_p=0.05),
    "repetition penalty 1.1": replace(_SAMPLED, repetition_penalty=1.1),
    "frequency penalty 0.5": replace(_SAMPLED, frequency_penalty=0.5),
    "presence penalty 0.5": replace(_SAMPLED, presence_penalty=0.5),
    "logit bias of 10 tokens": replace(_SAMPLED, logit_bias=dict.fromkeys(range(10), 1.0)),
}


@dataclass(frozen=True)
class StepCost:
    """Seconds of one step, by the clock or on processors: its forward pass and what came after."""

    forward: float
    sampling: float

    @property
    def share(self) -> float:
        """What is not the forward pass, of all."""
        return self.sampling / (self.forward + self.sampling)


class TimedVerifier(Verifier):
    """A verifier that says when the logits were there."""

    forward_end = (0.0, 0.0)

    def _forward(self, batch: Sequence[VerifyRows]) -> tuple[Tensor, Tensor | None]:
        results = super()._forward(batch)
        self.forward_end = _clocks()
        return results


class Block:
    """A sequence whose next block can be verified any number of times."""

    def __init__(self, verifier: Verifier, context: Sequence[int], seed: int) -> None:
        self._verifier = verifier
        self._context = tuple(context)
        self._seed = seed
        self._cache = verifier.runner.kv_cache.new_sequence()

    def rows(self, params: SamplingParams, drafts: Sequence[int]) -> VerifyRows:
        """Returns the rows of a step in which nothing of an earlier one is left."""
        length = len(self._context)
        self._cache.truncate(length - 1)
        self._cache.reserve(length + len(drafts))
        request = GenerateRequest("request", self._context, params)
        return VerifyRows(
            self._cache,
            length,
            self._context[self._cache.length :],
            drafts,
            is_complete=True,
            sampling_params=params,
            seed=self._seed,
            processors=self._verifier.processors_for(request),
        )


@click.command()
@click.option("--model", default="tiny/target", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--sequences", default=8, show_default=True)
@click.option("--draft-tokens", default=7, show_default=True, help="Of the wide blocks.")
@click.option("--context", default=256, show_default=True, help="Tokens of each sequence.")
@click.option("--repetitions", default=11, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--only", multiple=True, type=click.Choice(list(PARAMETERS)), help="By default all.")
def main(
    model: str,
    dtype: str,
    sequences: int,
    draft_tokens: int,
    context: int,
    repetitions: int,
    threads: int,
    only: Sequence[str],
) -> None:
    """Measures and prints one table."""
    torch.set_grad_enabled(False)
    options = ModelOptions(
        model,
        dtype=dtype,
        kv_cache_tokens=sequences * (context + 128),
        max_num_seqs=sequences,
        num_threads=threads,
    )
    verifier = TimedVerifier(load_model(options))
    blocks = [
        Block(verifier, token_ids, seed)
        for seed, token_ids in enumerate(_contexts(model, sequences, context))
    ]
    print("| parameters | rows | forward ms | sampling ms | share | on processors, ms | share |")
    print("|---|---|---|---|---|---|---|", flush=True)
    cases = [(name, drafted) for drafted in (0, draft_tokens) for name in only or PARAMETERS]
    drafts = {case: _accepted_drafts(verifier, blocks, *case) for case in cases}
    costs: dict[tuple[str, int], list[tuple[StepCost, ...]]] = {case: [] for case in cases}
    for _ in range(repetitions):
        for case in cases:
            costs[case].append(_cost(verifier, blocks, PARAMETERS[case[0]], drafts[case]))
    for (name, drafted), measured in costs.items():
        print(_line(name, sequences * (drafted + 1), measured), flush=True)


def _contexts(model: str, count: int, length: int) -> list[list[int]]:
    """Cuts this file's own tokens, again and again, into contexts that begin at different ones."""
    text = Path(__file__).read_text()
    token_ids = load_tokenizer(model).backend.encode(text).ids
    token_ids *= 1 + (length + 64 * count) // len(token_ids)
    return [token_ids[64 * one : 64 * one + length] for one in range(count)]


def _accepted_drafts(
    verifier: Verifier, blocks: Sequence[Block], name: str, count: int
) -> list[list[int]]:
    """Returns drafts of which the target accepts all, found one token at a time."""
    params = PARAMETERS[name]
    drafts: list[list[int]] = [[] for _ in blocks]
    for _ in range(count):
        rows = [one.rows(params, some) for one, some in zip(blocks, drafts, strict=True)]
        drafts = [list(one.output_token_ids) for one in verifier.verify(rows)]
    return drafts


def _cost(
    verifier: TimedVerifier,
    blocks: Sequence[Block],
    params: SamplingParams,
    drafts: Sequence[Sequence[int]],
) -> tuple[StepCost, ...]:
    """Returns what a step costs by the clock and on processors."""
    rows = [one.rows(params, some) for one, some in zip(blocks, drafts, strict=True)]
    began = _clocks()
    verified = verifier.verify(rows)
    ended = _clocks()
    _check(verified, drafts)
    times = zip(began, verifier.forward_end, ended, strict=True)
    return tuple(StepCost(middle - first, last - middle) for first, middle, last in times)


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _check(verified: Sequence[Verified], drafts: Sequence[Sequence[int]]) -> None:
    if [one.num_accepted for one in verified] != [len(one) for one in drafts]:
        raise click.ClickException("a draft was not accepted: the step was not the one to measure")


def _line(name: str, num_rows: int, costs: Sequence[tuple[StepCost, ...]]) -> str:
    by_clock, on_processors = zip(*costs, strict=True)
    forward = statistics.median(one.forward for one in by_clock)
    cells = [name, str(num_rows), f"{1e3 * forward:.0f}"]
    for those in (by_clock, on_processors):
        sampling = statistics.median(one.sampling for one in those)
        share = statistics.median(one.share for one in those)
        cells += [f"{1e3 * sampling:.1f}", f"{share:.1%}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
