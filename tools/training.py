"""The training loop: Muon and AdamW; bfloat16 compute, float32 masters. For any module.

Data-parallel over threads, not parallel inside each operation: a worker computes the gradient of
whole micro-batches on one thread, so a busy neighbor delays one worker and not every operation. A
GPU has one worker.
"""

import copy
import logging
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import click
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

logger = logging.getLogger(__name__)

WORKERS = 2
LOG_EVERY, SAVE_EVERY = 25, 50
SAVE_SECONDS = 60.0  # saved as often at least, where steps are long

Batch = tuple[Tensor, ...]  # first dimension: sequences
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Schedule:
    """Learning rate over a fixed number of steps."""

    steps: int
    muon_rate: float = 5e-3
    adam_rate: float = 4e-3
    warmup: float = 0.03
    decay: float = 0.4

    def factor(self, step: int) -> float:
        done = (step + 0.5) / self.steps
        left = (1.0 - done) / self.decay if self.decay else 1.0
        return min(1.0, done / self.warmup, left)


class Trainer(Generic[Model]):
    """Owns the float32 masters, the bfloat16 replica that the workers read, and the optimizers."""

    def __init__(self, model: Model, schedule: Schedule) -> None:
        self.model = model
        self.schedule = schedule
        self.replica = copy.deepcopy(model).to(torch.bfloat16)
        torch.set_num_threads(1)
        self.device = next(model.parameters()).device
        workers = WORKERS if self.device.type == "cpu" else 1
        self.pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
        body = _matrices(model)
        rest = [w for w in model.parameters() if not any(w is other for other in body)]
        # Two Muons, so that both workers orthogonalize.
        muon = [
            Muon(
                half,
                lr=schedule.muon_rate,
                weight_decay=0.1,
                momentum=0.95,
                adjust_lr_fn="match_rms_adamw",
            )
            for half in (body[::2], body[1::2])
        ]
        adam = AdamW(rest, lr=schedule.adam_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.optimizers: list[Optimizer] = [*muon, adam]

    def step(
        self, step: int, micro_batches: list[Batch], loss: Callable[[Model, Batch], Tensor]
    ) -> float:
        """Takes one optimizer step on the mean loss of the micro-batches and returns it."""
        with torch.no_grad():
            for low, high in zip(self.replica.parameters(), self.model.parameters(), strict=True):
                low.copy_(high)
        weights = list(self.replica.parameters())

        def gradient(batch: Batch) -> tuple[float, tuple[Tensor, ...]]:
            value = loss(self.replica, tuple(part.to(self.device) for part in batch))
            return value.item(), torch.autograd.grad(value, weights)

        values, gradients = zip(*self.pool.map(gradient, micro_batches), strict=True)
        masters = list(self.model.parameters())
        for index, master in enumerate(masters):
            master.grad = torch.stack([g[index] for g in gradients]).mean(0, dtype=torch.float32)
        nn.utils.clip_grad_norm_(masters, 1.0)
        for optimizer in self.optimizers:
            rate = self.schedule.adam_rate
            if isinstance(optimizer, Muon):
                rate = self.schedule.muon_rate
            for group in optimizer.param_groups:
                group["lr"] = rate * self.schedule.factor(step)
        list(self.pool.map(lambda optimizer: optimizer.step(), self.optimizers))
        return float(sum(values)) / len(values)

    def save(self, path: Path, step: int) -> None:
        state = {
            "step": step,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def resume(self, path: Path) -> int:
        """Loads a checkpoint, if there is one, and returns the step to go on with."""
        if not path.exists():
            return 0
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return int(state["step"])


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    """Returns what Muon is for: the matrices between embedding and LM head."""
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    heads = getattr(model, "get_output_embeddings", lambda: None)()
    others = {id(weight) for weight in (*tables, *([] if heads is None else [heads.weight]))}
    return [w for w in model.parameters() if w.ndim == 2 and id(w) not in others]


def train(
    model: Model,
    schedule: Schedule,
    batches: Callable[[int], list[Batch]],
    loss: Callable[[Model, Batch], Tensor],
    checkpoint: Path,
) -> list[float]:
    """Trains `model` in place; goes on from `checkpoint` where it exists.

    Returns:
        The loss of each step that was taken now.
    """
    trainer = Trainer(model, schedule)
    first = trainer.resume(checkpoint)
    started = saved = time.monotonic()
    losses: list[float] = []
    label = f"{checkpoint.stem}, from step {first}"
    with click.progressbar(range(first, schedule.steps), label=label, show_pos=True) as steps:
        for step in steps:
            losses.append(trainer.step(step, batches(step), loss))
            if (step + 1) % LOG_EVERY == 0:
                logger.info(
                    "%s step %d/%d loss %.3f, %.2f s a step",
                    checkpoint.stem,
                    step + 1,
                    schedule.steps,
                    statistics.mean(losses[-LOG_EVERY:]),
                    (time.monotonic() - started) / (step + 1 - first),
                )
            is_due = (step + 1) % SAVE_EVERY == 0 or time.monotonic() - saved > SAVE_SECONDS
            if is_due or step + 1 == schedule.steps:
                trainer.save(checkpoint, step + 1)
                saved = time.monotonic()
    trainer.pool.shutdown()
    return losses


def micro_batches(*tensors: Tensor, size: int) -> list[Batch]:
    """Splits tensors along their first dimension into micro-batches of `size` sequences."""
    return list(zip(*(torch.split(tensor, size) for tensor in tensors), strict=True))
