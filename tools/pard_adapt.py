"""Makes a PARD draft of a small causal language model (An et al., 2025, arXiv:2504.18583).

    python -m tools.pard_adapt --draft Qwen/Qwen2.5-0.5B --target Qwen/Qwen2.5-7B \\
        --text prompts.jsonl --out my-pard

Interrupt it and start it again at will: what it has done is in `--work`. docs/pard.md
is the recipe.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import click
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specgw.model_files import resolve_model
from specgw.vocab import VocabKinship, relate_vocabs, tokenizer_size
from tools.acceptance import autoregressive, parallel, print_acceptance, reference
from tools.pard.adaptation import Lessons, adapt, load_draft, save
from tools.pard.layout import Places
from tools.pard.mask_token import add_mask_token, num_embeddings
from tools.pard.rollouts import Rollouts, as_written, load_or_generate
from tools.tiny.corpus import Windows
from tools.training import Schedule

_TEXT_KEYS = ("text", "prompt", "content")


@click.command()
@click.option("--draft", required=True, help="The model to adapt: a path or hub id.")
@click.option("--target", help="The model it will draft for; without one it learns the text.")
@click.option(
    "--text",
    "files",
    type=click.Path(exists=True, path_type=Path),
    multiple=True,
    required=True,
    help="Text as the target will see it: .jsonl with a text or prompt in each line, or plain.",
)
@click.option(
    "--held-out",
    "held_out_file",
    type=click.Path(exists=True, path_type=Path),
    help="Text that the table at the end is measured on; default: the end of --text.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--work", type=click.Path(path_type=Path), help="Default: OUT with .work added.")
@click.option("--num-tokens", default=8, show_default=True, help="Draft tokens of one pass.")
@click.option("--mask-token-id", type=int, help="Default: an unused row, or a new one.")
@click.option("--steps", default=1000, show_default=True)
@click.option("--learning-rate", default=1e-4, show_default=True)
@click.option("--batch-size", default=16, show_default=True)
@click.option("--micro-batch-size", default=4, show_default=True)
@click.option("--window", default=192, show_default=True, help="Tokens of one training sequence.")
@click.option("--num-rollouts", default=1024, show_default=True)
@click.option("--prompt-length", default=128, show_default=True)
@click.option("--continuation-length", default=256, show_default=True)
@click.option("--num-held-out", default=16, show_default=True, help="Prompts that are not learnt.")
@click.option("--device", help="Default: a GPU if there is one.")
@click.option("--seed", default=1, show_default=True)
def main(
    draft: str,
    target: str | None,
    files: Sequence[Path],
    held_out_file: Path | None,
    out: Path,
    work: Path | None,
    num_tokens: int,
    mask_token_id: int | None,
    steps: int,
    learning_rate: float,
    batch_size: int,
    micro_batch_size: int,
    window: int,
    num_rollouts: int,
    prompt_length: int,
    continuation_length: int,
    num_held_out: int,
    device: str | None,
    seed: int,
) -> None:
    """Adapts, saves and measures a parallel draft."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    work = work or out.with_name(f"{out.name}.work")
    work.mkdir(parents=True, exist_ok=True)
    source = resolve_model(draft)
    model = load_draft(source, device)
    size = tokenizer_size(source) or num_embeddings(model)
    mask_id, origin = add_mask_token(model, size, mask_token_id)
    click.echo(f"mask token {mask_id}: {origin}")
    places = Places(mask_id, num_tokens)
    judge = _load_target(target, source, device)
    length = prompt_length + continuation_length
    learnt = _encode(files, source)
    num_held_out_tokens = (num_held_out + 1) * prompt_length
    if held_out_file is None:
        learnt, held_out = _split(learnt, num_held_out_tokens)
    else:
        held_out = _encode([held_out_file], source)
        _check_length("--held-out", held_out, num_held_out_tokens)
    rollouts: Rollouts
    if target is None:
        rollouts = as_written(Windows(learnt, length + 1, num_rollouts, seed).batch(0))
    else:
        prompts = Windows(learnt, prompt_length, num_rollouts, seed).batch(0)
        rollouts = load_or_generate(work / "rollouts.pt", judge, prompts, continuation_length)
    lessons = Lessons(
        Schedule(steps, muon_rate=learning_rate, adam_rate=learning_rate),
        window,
        batch_size,
        micro_batch_size,
        seed,
    )
    adapt(model, rollouts, places, lessons, work / "pard.pt")
    prompts = Windows(held_out, prompt_length, num_held_out, seed).batch(0)
    answers = reference(judge, prompts, continuation_length)
    before = autoregressive(load_draft(source, device), answers)
    drafts = {"autoregressive, before": before, "parallel": parallel(model, answers, mask_id)}
    print_acceptance(answers, drafts, [num_tokens])
    save(model, places, source, out)
    click.echo(f"\nwritten to {out}")


def _load_target(target: str | None, source: Path, device: str) -> PreTrainedModel:
    """Returns what judges the drafts: the target, or else the model as it was."""
    directory = source if target is None else resolve_model(target)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    vocab_size = num_embeddings(model)
    relation = relate_vocabs(directory, vocab_size, source, vocab_size)
    if relation.kinship is VocabKinship.FOREIGN:
        raise click.UsageError(f"--target has other tokens: {'; '.join(relation.differences)}")
    return cast(PreTrainedModel, model.to(device).eval())


def _encode(files: Sequence[Path], source: Path) -> Tensor:  # [num_tokens]
    """Returns all texts as one stream, each followed by the end-of-text token if there is one."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    token_ids: list[int] = []
    for file in files:
        for text in _texts(file):
            token_ids += [*tokenizer(text, add_special_tokens=False)["input_ids"], *end]
    return torch.tensor(token_ids)


def _texts(file: Path) -> list[str]:
    content = file.read_text(encoding="utf-8")
    if file.suffix != ".jsonl":
        return [content]
    lines = [json.loads(line) for line in content.splitlines() if line.strip()]
    for number, line in enumerate(lines, start=1):
        if not any(key in line for key in _TEXT_KEYS):
            raise click.UsageError(f"{file}:{number}: needs one of {', '.join(_TEXT_KEYS)}")
    return [next(line[key] for key in _TEXT_KEYS if key in line) for line in lines]


def _split(stream: Tensor, num_held_out: int) -> tuple[Tensor, Tensor]:
    """Holds the stream's end out."""
    _check_length("--text", stream, 4 * num_held_out)
    return stream[:-num_held_out], stream[-num_held_out:]


def _check_length(option: str, stream: Tensor, needed: int) -> None:
    if len(stream) < needed:
        raise click.UsageError(f"{option}: has {len(stream)} tokens, must have at least {needed}")


if __name__ == "__main__":
    main()
