"""Where the draft's first choice is not the target's, which of its choices is: `... runner_ups`.

The draft reads the target's own greedy answers and ranks the next token at each place. What it says
there is what it would say in a round of drafting, up to the first token that is rejected: that one
is what run-ahead prepares for. The defaults of `specgw.simulation.runner_up_rates` are from here.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from benchmarks.acceptance import generate, prompt_token_ids
from specgw.engine.loading import ModelOptions, load_model
from specgw.engine.model_runner import ModelRunner, SequenceChunk
from specgw.llm import LLM
from specgw.types import SamplingParams


@click.command()
@click.option("--target", default="tiny/target", show_default=True)
@click.option("--draft", default="tiny/draft", show_default=True)
@click.option("--dtype", default="float32", show_default=True)
@click.option("--num-prompts", default=32, show_default=True)
@click.option("--max-tokens", default=128, show_default=True)
@click.option("--batch", default=8, show_default=True)
@click.option(
    "--prompts",
    "prompt_file",
    type=click.Path(path_type=Path, exists=True),
    help="JSON lines with a prompt under `data`, in place of held-out files.",
)
@click.option("--raw", is_flag=True, help="Those prompts as they are, not as chat messages.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Writes figures here.")
def main(
    target: str,
    draft: str,
    dtype: str,
    num_prompts: int,
    max_tokens: int,
    batch: int,
    prompt_file: Path | None,
    raw: bool,
    json_file: Path | None,
) -> None:
    """Counts the draft's rank of the target's greedy token."""
    prompts = prompt_token_ids(target, prompt_file, raw, num_prompts)
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    answers = generate(LLM(target, dtype=dtype), prompts, params, batch)
    runner = load_model(ModelOptions(draft, dtype=dtype, kv_cache_tokens=4096))
    ranks: Counter[int] = Counter()
    for prompt, answer in zip(prompts, answers, strict=True):
        ranks.update(target_ranks(runner, prompt, answer.outputs[0].token_ids))
    num_wrong = sum(ranks.values()) - ranks[0]
    print(f"{sum(ranks.values())} tokens, {ranks[0] / sum(ranks.values()):.3f} the first choice")
    print("of the others, the runner-up of each rank, and all up to it:")
    rates = [ranks[rank] / num_wrong for rank in range(1, 17)]
    for rank, (rate, total) in enumerate(zip(rates, itertools.accumulate(rates), strict=True), 1):
        print(f"{rank:>4}{rate:>8.3f}{total:>8.3f}")
    if json_file is not None:
        json_file.write_text(json.dumps(sorted(ranks.items())), encoding="utf-8")


def target_ranks(
    runner: ModelRunner, prompt: Sequence[int], output: Sequence[int]
) -> Iterator[int]:
    """Yields the place of each output token among the draft's choices, 0 for the first."""
    cache = runner.kv_cache.new_sequence()
    fed = [*prompt, *output[:-1]]
    logits = runner.forward([SequenceChunk(cache, fed, len(output))]).float()
    cache.release()
    for row, token_id in zip(logits, output, strict=True):
        yield int((row > row[token_id]).sum())


if __name__ == "__main__":
    main()
