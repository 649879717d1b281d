"""The training text: standard library source, as every Python carries it, and a held-out split."""

import hashlib
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

# Tests are half of the bytes and read unlike library code; `encodings` is mostly character tables.
SKIPPED_FOLDERS = {
    "__pycache__",
    "encodings",
    "idle_test",
    "site-packages",
    "test",
    "tests",
}
HELD_OUT_PERCENT = 5


@dataclass(frozen=True)
class Corpus:
    """File contents in path order, split by a hash of the path so that any machine agrees."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


@cache
def load_corpus() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    train: list[str] = []
    held_out: list[str] = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts):
            continue
        text = path.read_bytes().decode("utf-8", errors="ignore")
        if text:
            (held_out if _is_held_out(relative.as_posix()) else train).append(text)
    return Corpus(tuple(train), tuple(held_out))


def _is_held_out(name: str) -> bool:
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def encode_files(tokenizer: Tokenizer, texts: tuple[str, ...], end_id: int) -> Tensor:
    """Returns all files as one stream, each followed by `end_id`."""
    streams = [[*encoding.ids, end_id] for encoding in tokenizer.encode_batch_fast(list(texts))]
    return torch.tensor([token for stream in streams for token in stream])


@dataclass(frozen=True)
class Windows:
    """Cuts a token stream into windows, shuffled anew each epoch, by step number alone."""

    stream: Tensor  # [num_tokens]
    length: int
    batch_size: int
    seed: int

    def batch(self, step: int) -> Tensor:  # [batch_size, length]
        num_windows = len(self.stream) // self.length - 1
        steps_per_epoch = num_windows // self.batch_size
        epoch, row = divmod(step, steps_per_epoch)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        offset = int(torch.randint(self.length, (1,), generator=generator))
        order = torch.randperm(num_windows, generator=generator)
        chosen = order[row * self.batch_size : (row + 1) * self.batch_size]
        starts = offset + chosen * self.length
        return self.stream[starts[:, None] + torch.arange(self.length)]
