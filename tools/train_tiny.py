"""Trains the models bundled in `specgw/tiny_models` from the Python standard library's own source.

    python -m tools.train_tiny                   # everything, resumable: interrupt and start again
    python -m tools.train_tiny --only evaluate   # the figures of docs/models.md

Stages: tokenizers, target, rollouts (text that the target writes), draft, pard, foreign, evaluate.
"""

import logging
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import click
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from tools.tiny import distill, evaluation, foreign, rollouts
from tools.tiny.corpus import Windows, encode_files, load_corpus
from tools.tiny.model import Shape, TinyLlama, Vocabulary, deepen, export
from tools.tiny.tokenizers import (
    END_ID,
    FOREIGN_BOS_ID,
    FOREIGN_END_ID,
    FOREIGN_VOCAB_SIZE,
    MASK_ID,
    VOCAB_SIZE,
    load_or_train,
    tokenizer_config,
)
from tools.tiny.training import Batch, Schedule, load_weights, micro_batches, train

ROOT = Path(__file__).resolve().parent.parent

TARGET = Shape(VOCAB_SIZE, 22, 192, 416, heads=4, kv_heads=2, head_dim=64)
DRAFT = Shape(VOCAB_SIZE, 2, 160, 384, heads=4, kv_heads=2, head_dim=32)
# Twice the draft's depth: one pass has to do what the draft does in several.
PARD = replace(DRAFT, layers=2 * DRAFT.layers)
FOREIGN = Shape(FOREIGN_VOCAB_SIZE, 2, 160, 384, heads=4, kv_heads=2, head_dim=32)

# Optimizer steps at scale 1.
STEPS = {
    "shallow": 500,
    "target": 400,
    "draft_corpus": 1000,
    "draft": 1000,
    "pard": 700,
    "foreign_corpus": 350,
    "foreign": 300,
}
NUM_ROLLOUTS = 1024

# Training windows: until this part of the steps, their length, how many a step.
SHORT_TO_LONG = ((0.6, 256, 16), (0.9, 512, 8), (1.0, 1024, 4))
PHASES = {
    "shallow": ((1.0, 128, 16),),
    "target": ((0.75, 256, 8), (0.92, 512, 4), (1.0, 1024, 2)),
    "draft_corpus": SHORT_TO_LONG,
    "foreign_corpus": SHORT_TO_LONG,
    "foreign": ((1.0, 512, 12),),
}

STAGES = ("target", "rollouts", "draft", "pard", "foreign", "evaluate")


@dataclass(frozen=True)
class Recipe:
    """Where things are and how long to train."""

    out: Path
    work: Path
    seed: int
    scale: float

    def scaled(self, count: int) -> int:
        return max(1, round(count * self.scale))

    def schedule(self, name: str, decay: float) -> Schedule:
        return Schedule(self.scaled(STEPS[name]), decay=decay)

    def checkpoint(self, name: str) -> Path:
        return self.work / f"{name}.pt"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_or_train(self._tokenizer_file, load_corpus().train, foreign=False)

    @cached_property
    def foreign_tokenizer(self) -> Tokenizer:
        return load_or_train(self._foreign_file, load_corpus().train, foreign=True)

    @property
    def _tokenizer_file(self) -> Path:
        return self.work / "tokenizer.json"

    @property
    def _foreign_file(self) -> Path:
        return self.work / "foreign_tokenizer.json"

    @cached_property
    def stream(self) -> Tensor:  # [num_tokens]
        return encode_files(self.tokenizer, load_corpus().train, END_ID)

    @cached_property
    def rollouts(self) -> rollouts.Rollouts:
        target = load_weights(TinyLlama(TARGET, self.seed), self.checkpoint("target"))
        windows = Windows(self.stream, rollouts.PROMPT_LENGTH, NUM_ROLLOUTS, self.seed + 1)
        prompts = windows.batch(0)[: self.scaled(NUM_ROLLOUTS)]
        return rollouts.load_or_generate(self.checkpoint("rollouts"), target, prompts)

    def vocabulary(self, *, pard_token: int | None = None) -> Vocabulary:
        config = tokenizer_config(foreign=False)
        return Vocabulary(self._tokenizer_file, config, END_ID, pard_token=pard_token)

    def foreign_vocabulary(self) -> Vocabulary:
        config = tokenizer_config(foreign=True)
        return Vocabulary(self._foreign_file, config, FOREIGN_END_ID, bos_id=FOREIGN_BOS_ID)


def train_target(recipe: Recipe) -> None:
    """Trains half of the layers on short windows first, then all of them: cheaper by a third."""
    shallow = TinyLlama(replace(TARGET, layers=TARGET.layers // 2), recipe.seed)
    train_on_stream(shallow, recipe, recipe.stream, "shallow", decay=0.0)
    model = deepen(shallow, TARGET)
    train_on_stream(model, recipe, recipe.stream, "target", decay=0.7)
    export(model, recipe.vocabulary(), recipe.out / "target")


def train_on_stream(
    model: TinyLlama, recipe: Recipe, stream: Tensor, name: str, decay: float
) -> None:
    schedule = recipe.schedule(name, decay)

    def batches(step: int) -> list[Batch]:
        done = (step + 1) / schedule.steps
        _, length, size = next(phase for phase in PHASES[name] if done <= phase[0])
        windows = Windows(stream, length + 1, size, recipe.seed + model.shape.layers)
        return micro_batches(windows.batch(step), size=max(1, size // 4))

    train(model, schedule, batches, distill.next_token_loss, recipe.checkpoint(name))


def train_draft(recipe: Recipe) -> None:
    model = TinyLlama(DRAFT, recipe.seed)
    train_on_stream(model, recipe, recipe.stream, "draft_corpus", decay=0.4)

    def batches(step: int) -> list[Batch]:
        rows = rollout_rows(recipe, step, batch_size=16)
        data = recipe.rollouts
        return micro_batches(
            data.token_ids[rows], data.top_ids[rows], data.top_logprobs[rows], size=4
        )

    schedule = recipe.schedule("draft", decay=0.7)
    train(model, schedule, batches, distill.distillation_loss, recipe.checkpoint("draft"))
    export(model, recipe.vocabulary(), recipe.out / "draft")


def train_pard(recipe: Recipe) -> None:
    draft = load_weights(TinyLlama(DRAFT, recipe.seed), recipe.checkpoint("draft"))
    model = deepen(draft, PARD)
    schedule = recipe.schedule("pard", decay=0.7)
    batch_size = 16

    def batches(step: int) -> list[Batch]:
        rows = rollout_rows(recipe, step, batch_size)
        generator = torch.Generator().manual_seed(recipe.seed + step)
        slack = recipe.rollouts.token_ids.shape[1] - distill.PARD_WINDOW
        start = int(torch.randint(slack + 1, (1,), generator=generator))
        window = slice(start, start + distill.PARD_WINDOW)
        data = recipe.rollouts
        seeds = torch.arange(batch_size) + batch_size * step
        return micro_batches(
            data.token_ids[rows, window],
            data.top_ids[rows, window],
            data.top_logprobs[rows, window],
            seeds,
            size=4,
        )

    train(model, schedule, batches, distill.pard_loss, recipe.checkpoint("pard"))
    export(model, recipe.vocabulary(pard_token=MASK_ID), recipe.out / "pard")


def train_foreign(recipe: Recipe) -> None:
    model = TinyLlama(FOREIGN, recipe.seed)
    files = foreign.encode_files(recipe.foreign_tokenizer, load_corpus().train)
    train_on_stream(model, recipe, files, "foreign_corpus", decay=0.4)
    written = foreign.encode_rollouts(
        recipe.rollouts.token_ids, recipe.tokenizer, recipe.foreign_tokenizer, recipe.seed
    )
    train_on_stream(model, recipe, written, "foreign", decay=0.7)
    export(model, recipe.foreign_vocabulary(), recipe.out / "foreign")


def rollout_rows(recipe: Recipe, step: int, batch_size: int) -> Tensor:  # [batch_size]
    """Returns which rollouts make up a step's batch: a new order each epoch."""
    total = len(recipe.rollouts.token_ids)
    batch_size = min(batch_size, total)
    epoch, place = divmod(step, total // batch_size)
    generator = torch.Generator().manual_seed(recipe.seed + epoch)
    order = torch.randperm(total, generator=generator)
    return order[place * batch_size : (place + 1) * batch_size]


def evaluate(recipe: Recipe) -> None:
    torch.set_num_threads(1)
    names = ("target", "draft", "pard", "foreign")
    models = {name: evaluation.load(recipe.out / name) for name in names}
    tokenizer = Tokenizer.from_file(str(recipe.out / "target" / "tokenizer.json"))
    foreign_tokenizer = Tokenizer.from_file(str(recipe.out / "foreign" / "tokenizer.json"))
    reference = evaluation.continue_greedily(
        models["target"], evaluation.held_out_prompts(tokenizer, recipe.seed)
    )
    drafts = {
        "draft": evaluation.autoregressive(models["draft"], reference),
        "pard": evaluation.parallel(models["pard"], reference, MASK_ID),
        "foreign": evaluation.foreign(models["foreign"], reference, tokenizer, foreign_tokenizer),
    }
    print_costs(recipe, models)
    print_acceptance(reference, drafts)


def print_costs(recipe: Recipe, models: dict[str, LlamaForCausalLM]) -> None:
    click.echo("| model | parameters | bytes | one-token step, ms | held-out bits per byte |")
    click.echo("|---|---|---|---|---|")
    for name, model in models.items():
        size = sum(file.stat().st_size for file in (recipe.out / name).iterdir())
        step = evaluation.step_milliseconds(model)
        tokenizer = Tokenizer.from_file(str(recipe.out / name / "tokenizer.json"))
        loss = evaluation.bits_per_byte(model, tokenizer)
        click.echo(f"| {name} | {model.num_parameters()} | {size} | {step:.2f} | {loss:.3f} |")


def print_acceptance(reference: evaluation.Reference, drafts: dict[str, evaluation.Draft]) -> None:
    click.echo("\n| draft | K | accepted per draft token | per round | rounds | by position |")
    click.echo("|---|---|---|---|---|---|")
    for name, draft in drafts.items():
        for k in (4, 8):
            played = evaluation.play(reference, draft, k)
            positions = " ".join(f"{n / played.rounds:.2f}" for n in played.per_position)
            click.echo(
                f"| {name} | {k} | {played.rate:.3f} | {played.per_round:.2f} "
                f"| {played.rounds} | {positions} |"
            )


RUN = {
    "target": train_target,
    "rollouts": lambda recipe: recipe.rollouts,
    "draft": train_draft,
    "pard": train_pard,
    "foreign": train_foreign,
    "evaluate": evaluate,
}


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=ROOT / "specgw" / "tiny_models")
@click.option("--work", type=click.Path(path_type=Path), default=ROOT / "build" / "tiny")
@click.option("--seed", default=1, show_default=True)
@click.option("--scale", default=1.0, show_default=True, help="Multiplies every step count.")
@click.option(
    "--only", type=click.Choice(STAGES), multiple=True, help="Stages to run; default all."
)
def main(out: Path, work: Path, seed: int, scale: float, only: tuple[str, ...]) -> None:
    """Trains and measures the bundled tiny models; about an hour and a half on two cores."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    work.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(out, work, seed, scale)
    for stage in STAGES:
        if not only or stage in only:
            RUN[stage](recipe)


if __name__ == "__main__":
    main()
