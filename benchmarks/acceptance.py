"""How much of each method's drafts the target accepts: `python -m benchmarks.acceptance`.

The bundled tiny models in float32, greedy, in one process; or otherwise, as the options say. The
prompts are cut from files that no model was trained on. Every answer is compared with the one
without speculation; if one differs, the table says so and the exit code is 1. To measure one more
method, add a line to `METHODS`.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from tokenizers import Tokenizer

from benchmarks.compare import read_prompts
from proposer_svc.proposer import RoundCounts
from specgw.llm import LLM
from specgw.model_files import resolve_model
from specgw.request_output import RequestOutput
from specgw.types import SamplingParams
from tools.tiny.evaluation import held_out_prompts

TARGET = "tiny/target"


@dataclass(frozen=True)
class Models:
    """What is measured. With `draft`, methods use that model in place of their own.

    Draft models draft greedily or `coupled`: so sampled answers too are those without speculation.
    """

    target: str = TARGET
    draft: str | None = None
    dtype: str = "float32"
    draft_sample_method: str = "greedy"


@dataclass(frozen=True)
class Method:
    """One line of the table: configuration without the number of draft tokens."""

    name: str
    speculative_config: Mapping[str, Any]
    specgw: Mapping[str, Any] = field(default_factory=dict)


_FIXED_LENGTH = {"verifier": {"draft_length": "fixed"}}  # else K depends on times
_FOREIGN = {"model": "tiny/foreign", "use_heterogeneous_vocab": True}
METHODS = (
    Method("AR", {"model": "tiny/draft"}),
    Method("n-gram", {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}),
    Method("suffix", {"method": "suffix"}),
    Method("best of two", {"model": "tiny/draft"}, {"fallback_proposer": {"method": "suffix"}}),
    Method("PARD", {"model": "tiny/pard", "parallel_drafting": True}),
    Method("TLI token", {**_FOREIGN, "heterogeneous_vocab_method": "token"}),
    Method("TLI string", {**_FOREIGN, "heterogeneous_vocab_method": "string"}),
)


@dataclass(frozen=True)
class Row:
    """What one method did. A round is a step of the target after the prompt, drafted or not."""

    method: str
    draft_tokens: int
    batch: int
    accepted_per_round: float
    rounds: int
    acceptance: float  # accepted of all draft tokens
    by_position: Sequence[float]  # of the drafted rounds
    draft_passes_per_round: float  # of the proposer's own rounds, for all sessions together
    is_lossless: bool


@click.command()
@click.option("--draft-tokens", multiple=True, default=(4, 8), show_default=True)
@click.option("--batch", multiple=True, default=(1, 8), show_default=True)
@click.option("--num-prompts", default=8, show_default=True)
@click.option("--max-tokens", default=128, show_default=True)
@click.option("--method", "names", multiple=True, help="Methods by name; default all.")
@click.option("--target", default=TARGET, show_default=True, help="Another target model.")
@click.option("--draft", help="Another draft model, for every method measured.")
@click.option("--dtype", default="float32", show_default=True)
@click.option("--temperature", default=0.0, show_default=True, help="Above 0, with seeds.")
@click.option(
    "--draft-sample-method",
    type=click.Choice(["greedy", "coupled"]),
    default="greedy",
    show_default=True,
    help="Of draft models.",
)
@click.option(
    "--prompts",
    "prompt_file",
    type=click.Path(path_type=Path, exists=True),
    help="JSON lines with a prompt under `data`, in place of held-out files.",
)
@click.option("--raw", is_flag=True, help="Those prompts as they are, not as chat messages.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Writes figures here.")
def main(
    draft_tokens: Sequence[int],
    batch: Sequence[int],
    num_prompts: int,
    max_tokens: int,
    names: Sequence[str],
    target: str,
    draft: str | None,
    dtype: str,
    temperature: float,
    draft_sample_method: str,
    prompt_file: Path | None,
    raw: bool,
    json_file: Path | None,
) -> None:
    """Measures and prints one line for each method, draft length and batch size."""
    unknown = sorted(set(names) - {method.name for method in METHODS})
    if unknown:
        raise click.BadParameter(f"no such method: {', '.join(unknown)}", param_hint="--method")
    models = Models(target, draft, dtype, draft_sample_method)
    prompts = prompt_token_ids(target, prompt_file, raw, num_prompts)
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=max_tokens)
    plain = generate(build_llm(models), prompts, params, max(batch))
    expected = [answer.outputs[0].token_ids for answer in plain]
    rows = []
    print(HEADER, flush=True)
    for method in METHODS:
        if names and method.name not in names:
            continue
        for count in draft_tokens:
            for size in batch:
                rows.append(measure(models, method, count, size, prompts, params, expected))
                print(as_text(rows[-1]), flush=True)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=2), encoding="utf-8")
    sys.exit(0 if all(row.is_lossless for row in rows) else 1)


def prompt_token_ids(target: str, file: Path | None, raw: bool, count: int) -> list[list[int]]:
    """Returns prompts from a file, or from held-out files."""
    folder = resolve_model(target)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if file is not None:
        texts = read_prompts(file, folder, raw)[:count]
        return [tokenizer.encode(text).ids for text in texts]
    prompts: list[list[int]] = held_out_prompts(tokenizer, seed=1)[:count].tolist()
    return prompts


def build_llm(models: Models, method: Method | None = None, draft_tokens: int = 0) -> LLM:
    """Loads the target, with a method's proposer if there is one."""
    if method is None:
        return LLM(models.target, dtype=models.dtype)
    drafting = {**method.speculative_config, "num_speculative_tokens": draft_tokens}
    if "model" in drafting:
        drafting["draft_sample_method"] = models.draft_sample_method
    if models.draft is not None:
        drafting["model"] = models.draft
    return LLM(
        models.target,
        dtype=models.dtype,
        speculative_config=drafting,
        specgw={**method.specgw, **_FIXED_LENGTH},
    )


def generate(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams, batch: int
) -> list[RequestOutput]:
    """Answers the prompts, `batch` at a time."""
    answers = []
    for start in range(0, len(prompts), batch):
        answers += llm.generate(prompts[start : start + batch], params)
    return answers


def measure(
    models: Models,
    method: Method,
    draft_tokens: int,
    batch: int,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    expected: Sequence[Sequence[int]],
) -> Row:
    """Answers all prompts with a method's drafts."""
    llm = build_llm(models, method, draft_tokens)
    answers = generate(llm, prompts, params, batch)
    stats = [answer.speculation for answer in answers]
    drafted = sum(one.draft_count for one in stats)
    rounds = drafted + sum(sum(one.undrafted.values()) for one in stats)
    accepted = sum(one.accepted_token_count for one in stats)
    counts = [0] * draft_tokens
    for one in stats:
        for position, count in enumerate(one.accepted_per_position):
            counts[position] += count
    proposed = llm.proposer.rounds if llm.proposer is not None else RoundCounts()
    return Row(
        method=method.name,
        draft_tokens=draft_tokens,
        batch=batch,
        accepted_per_round=accepted / max(1, rounds),
        rounds=rounds,
        acceptance=accepted / max(1, sum(one.draft_token_count for one in stats)),
        by_position=[count / max(1, drafted) for count in counts],
        draft_passes_per_round=proposed.pass_count / max(1, proposed.round_count),
        is_lossless=[answer.outputs[0].token_ids for answer in answers] == list(expected),
    )


HEADER = (
    "| method | K | batch | accepted per round | rounds | of draft tokens | draft passes per round "
    "| lossless | by position |\n|---|---|---|---|---|---|---|---|---|"
)


def as_text(row: Row) -> str:
    """Returns a line of the table."""
    positions = " ".join(f"{share:.2f}" for share in row.by_position)
    return (
        f"| {row.method} | {row.draft_tokens} | {row.batch} | {row.accepted_per_round:.2f} "
        f"| {row.rounds} | {row.acceptance:.3f} | {row.draft_passes_per_round:.2f} "
        f"| {'yes' if row.is_lossless else 'NO'} | {positions} |"
    )


if __name__ == "__main__":
    main()
