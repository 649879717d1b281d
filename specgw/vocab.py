"""Compares vocabularies by content. No torch: every service does this."""

import hashlib
import json
from pathlib import Path

from tokenizers import Tokenizer

_SLOW_TOKENIZER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def vocab_fingerprint(model_dir: Path) -> str:
    """Returns a SHA-256 over every token and its id, in hex; empty if there is no tokenizer."""
    vocab = _read_vocab(model_dir)
    if not vocab:
        return ""
    return hashlib.sha256(json.dumps(sorted(vocab.items())).encode("ascii")).hexdigest()


def tokenizer_size(model_dir: Path) -> int | None:
    """Returns how many ids there are up to the largest that stands for a token."""
    vocab = _read_vocab(model_dir)
    return max(vocab.values()) + 1 if vocab else None


def _read_vocab(model_dir: Path) -> dict[str, int]:
    if (file := model_dir / "tokenizer.json").is_file():
        vocab: dict[str, int] = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
        return vocab
    if any((model_dir / name).is_file() for name in _SLOW_TOKENIZER_FILES):
        from transformers import AutoTokenizer  # slow to import, and hardly ever needed

        slow: dict[str, int] = AutoTokenizer.from_pretrained(model_dir).get_vocab()
        return slow
    return {}
