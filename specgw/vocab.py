"""Compares vocabularies by content. No torch: every service does this."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tokenizers import Tokenizer

_NUM_DIFFERENCES_TOLD = 3
_SLOW_TOKENIZER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


class VocabKinship(Enum):
    """How two models' vocabularies are related."""

    SAME = "same"
    """The same tokens under the same ids, and embeddings of the same size."""
    PADDED = "padded twin"
    """The same tokens under the same ids; one model has more unused rows."""
    FOREIGN = "foreign"
    """Some id stands for another token."""
    UNKNOWN = "unknown"
    """One of them has no tokenizer to look at."""


@dataclass(frozen=True, slots=True)
class VocabRelation:
    """Two vocabularies side by side.

    Attributes:
        kinship: How they are related.
        target_size: Rows of the target's embedding.
        draft_size: Rows of the draft's embedding.
        num_shared_tokens: Tokens, whatever their ids, that both have.
        num_differences: Ids that stand for other tokens.
        differences: The first of those, for people.
    """

    kinship: VocabKinship
    target_size: int
    draft_size: int
    num_shared_tokens: int = 0
    num_differences: int = 0
    differences: tuple[str, ...] = ()

    @property
    def has_same_tokens(self) -> bool:
        """Whether every token has the same id in both."""
        return self.kinship in (VocabKinship.SAME, VocabKinship.PADDED)


def relate_vocabs(
    target_dir: Path, target_size: int, draft_dir: Path, draft_size: int
) -> VocabRelation:
    """Compares what the ids of two models stand for. The sizes are those of `config.json`."""
    target, draft = _read_vocab(target_dir), _read_vocab(draft_dir)
    if not target or not draft:
        return VocabRelation(VocabKinship.UNKNOWN, target_size, draft_size)
    num_shared = len(target.keys() & draft.keys())
    differences = tuple(_differences(target, draft))
    kinship = VocabKinship.FOREIGN
    if not differences:
        kinship = VocabKinship.SAME if target_size == draft_size else VocabKinship.PADDED
    return VocabRelation(
        kinship,
        target_size,
        draft_size,
        num_shared,
        len(differences),
        differences[:_NUM_DIFFERENCES_TOLD],
    )


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


def plain_token_ids(model_dir: Path) -> list[int]:
    """Returns the ids of tokens that are a word or part of one, in ASCII letters, in order."""
    vocab = _read_vocab(model_dir)
    words = ((token.lstrip("\u0120\u2581"), token_id) for token, token_id in vocab.items())
    return sorted(token_id for word, token_id in words if word.isascii() and word.isalpha())


def _differences(target: Mapping[str, int], draft: Mapping[str, int]) -> Iterator[str]:
    of_target = {token_id: token for token, token_id in target.items()}
    of_draft = {token_id: token for token, token_id in draft.items()}
    for token_id in sorted(of_target.keys() | of_draft.keys()):
        one, other = of_target.get(token_id), of_draft.get(token_id)
        if one != other:
            yield f"id {token_id} is {_quoted(one)} to the target and {_quoted(other)} to the draft"


def _quoted(token: str | None) -> str:
    return "nothing" if token is None else repr(token)


def tokenizer_json(model_dir: Path) -> str:
    """Returns a tokenizer in the form of `tokenizer.json`; empty if there is none that has it."""
    if (file := model_dir / "tokenizer.json").is_file():
        return file.read_text(encoding="utf-8")
    if any((model_dir / name).is_file() for name in _SLOW_TOKENIZER_FILES):
        from transformers import AutoTokenizer  # slow to import, and hardly ever needed

        backend = getattr(AutoTokenizer.from_pretrained(model_dir), "backend_tokenizer", None)
        return "" if backend is None else str(backend.to_str())
    return ""


def _read_vocab(model_dir: Path) -> dict[str, int]:
    if (file := model_dir / "tokenizer.json").is_file():
        vocab: dict[str, int] = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
        return vocab
    if any((model_dir / name).is_file() for name in _SLOW_TOKENIZER_FILES):
        from transformers import AutoTokenizer  # slow to import, and hardly ever needed

        slow: dict[str, int] = AutoTokenizer.from_pretrained(model_dir).get_vocab()
        return slow
    return {}
