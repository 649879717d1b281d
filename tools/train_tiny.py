"""Trains the models bundled in `specgw/tiny_models` from the Python standard library's own source.

    python -m tools.train_tiny                   # everything, resumable: interrupt and start again
    python -m tools.train_tiny --only evaluate   # the figures of docs/models.md

Stages: tokenizers, target, rollouts (text that the target writes), draft, pard, foreign, evaluate.
"""

import json
import logging
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import click
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from tools import pard_adapt
from tools.acceptance import autoregressive, parallel, print_acceptance, reference
from tools.pard import rollouts
from tools.tiny import distill, evaluation, foreign
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
from tools.training import Batch, Schedule, micro_batches, train

logger = logging.getLogger(__name__)

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
NUM_ROLLOUTS, PROMPT_LENGTH, CONTINUATION_LENGTH = 1024, 128, 256

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
        target = evaluation.load(self.out / "target")
        windows = Windows(self.stream, PROMPT_LENGTH, NUM_ROLLOUTS, self.seed + 1)
        prompts = windows.batch(0)[: self.scaled(NUM_ROLLOUTS)]
        path = self.checkpoint("rollouts")
        return rollouts.load_or_generate(path, target, prompts, CONTINUATION_LENGTH)

    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self._tokenizer_file, tokenizer_config(foreign=False), END_ID)

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
        data = recipe.rollouts
        rows = data.rows(step, 16, recipe.seed)
        return micro_batches(
            data.token_ids[rows], data.top_ids[rows], data.top_logprobs[rows], size=4
        )

    schedule = recipe.schedule("draft", decay=0.7)
    train(model, schedule, batches, distill.distillation_loss, recipe.checkpoint("draft"))
    export(model, recipe.vocabulary(), recipe.out / "draft")


def train_pard(recipe: Recipe) -> None:
    """Doubles the layers of the draft and runs `tools/pard_adapt.py` on the result."""
    draft = TinyLlama(DRAFT, recipe.seed)
    draft.load_state_dict(load_file(recipe.out / "draft" / "model.safetensors"))
    tokenizer = recipe.out / "draft" / "tokenizer.json"
    vocabulary = Vocabulary(tokenizer, tokenizer_config(foreign=False), END_ID)
    export(deepen(draft, PARD), vocabulary, recipe.work / "deep_draft")
    corpus = load_corpus()
    arguments = {
        "--draft": recipe.work / "deep_draft",
        "--target": recipe.out / "target",
        "--text": write_texts(recipe.work / "train.jsonl", corpus.train),
        "--held-out": write_texts(recipe.work / "held_out.jsonl", corpus.held_out),
        "--out": recipe.out / "pard",
        "--work": recipe.work,  # with the rollouts that the draft learnt from
        "--mask-token-id": MASK_ID,
        "--learning-rate": 4e-3,
        "--steps": recipe.scaled(STEPS["pard"]),
        "--num-rollouts": recipe.scaled(NUM_ROLLOUTS),
        "--num-held-out": evaluation.NUM_PROMPTS,
        "--seed": recipe.seed,
    }
    command = [f"{name}={value}" for name, value in arguments.items()]
    logger.info("python -m tools.pard_adapt %s", " ".join(command))
    pard_adapt.main(command, standalone_mode=False)


def write_texts(path: Path, texts: tuple[str, ...]) -> Path:
    """Writes texts as `tools/pard_adapt.py` reads them, and returns where."""
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def train_foreign(recipe: Recipe) -> None:
    model = TinyLlama(FOREIGN, recipe.seed)
    files = foreign.encode_files(recipe.foreign_tokenizer, load_corpus().train)
    train_on_stream(model, recipe, files, "foreign_corpus", decay=0.4)
    written = foreign.encode_rollouts(
        recipe.rollouts.token_ids, recipe.tokenizer, recipe.foreign_tokenizer, recipe.seed
    )
    train_on_stream(model, recipe, written, "foreign", decay=0.7)
    export(model, recipe.foreign_vocabulary(), recipe.out / "foreign")


def evaluate(recipe: Recipe) -> None:
    torch.set_num_threads(1)
    names = ("target", "draft", "pard", "foreign")
    models = {name: evaluation.load(recipe.out / name) for name in names}
    tokenizer = Tokenizer.from_file(str(recipe.out / "target" / "tokenizer.json"))
    foreign_tokenizer = Tokenizer.from_file(str(recipe.out / "foreign" / "tokenizer.json"))
    prompts = evaluation.held_out_prompts(tokenizer, recipe.seed)
    answers = reference(models["target"], prompts, evaluation.CONTINUATION_LENGTH)
    drafts = {
        "draft": autoregressive(models["draft"], answers),
        "pard": parallel(models["pard"], answers, MASK_ID),
        "foreign": evaluation.foreign(models["foreign"], answers, tokenizer, foreign_tokenizer),
    }
    print_costs(recipe, models)
    print_acceptance(answers, drafts, (4, 8))


def print_costs(recipe: Recipe, models: dict[str, LlamaForCausalLM]) -> None:
    click.echo("| model | parameters | bytes | one-token step, ms | held-out bits per byte |")
    click.echo("|---|---|---|---|---|")
    for name, model in models.items():
        size = sum(file.stat().st_size for file in (recipe.out / name).iterdir())
        step = evaluation.step_milliseconds(model)
        tokenizer = Tokenizer.from_file(str(recipe.out / name / "tokenizer.json"))
        loss = evaluation.bits_per_byte(model, tokenizer)
        click.echo(f"| {name} | {model.num_parameters()} | {size} | {step:.2f} | {loss:.3f} |")


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
