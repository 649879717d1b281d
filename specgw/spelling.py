"""Turns bytes into a tokenizer's tokens and back without loss.

Tokenizers normalize text, put a space before it, add special tokens and read special tokens out of
it; here they do none of that, so that the tokens of any text spell that text and nothing else.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise, takewhile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from specgw.errors import ConfigError
from specgw.token_bytes import (
    METASPACE,
    components,
    drops_space,
    is_byte_level,
    read_token_bytes,
    unknown_id,
)

_INVALID = "[\udc80-\udcff]+"  # bytes that are no UTF-8, as `surrogateescape` writes them
_WORD = re.compile(r"(?<=\S)(?=\s)")
_ROLES = ("bos", "eos", "pad", "unk")


@dataclass(slots=True)
class Tokens:
    """Some text in tokens.

    Attributes:
        ids: The tokens.
        offsets: Where in the text each token begins, in bytes.
        starts: Indices in `ids` where words begin: the tokens of one word do not depend on others.
    """

    ids: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)


class Spelling:
    """One tokenizer, as far as bytes and special tokens go. Nothing changes it.

    Attributes:
        token_bytes: The bytes of each token that stands for text, by id.
        added_tokens: The text of tokens that are not part of the model's own vocabulary, special or
            not, by id.
        special_ids: Those of them, and of the vocabulary, that stand for no text.
        roles: Ids by role: `bos`, `eos`, `pad`, `unk`.
        leading_ids: What the tokenizer puts before a text by itself, as a BOS.
    """

    def __init__(self, tokenizer_json: str, roles: dict[str, tuple[str, ...]]) -> None:
        """Takes the content of a `tokenizer.json`, and the names of tokens by role.

        Raises:
            ConfigError: if the tokens of this kind of tokenizer do not say what they stand for.
        """
        spec = json.loads(tokenizer_json)
        whole = Tokenizer.from_str(tokenizer_json)
        self.token_bytes = read_token_bytes(spec)
        self.added_tokens = {one["id"]: one["content"] for one in spec.get("added_tokens") or ()}
        self.special_ids = frozenset(whole.get_vocab().values()).difference(self.token_bytes)
        named = {role: [whole.token_to_id(name) for name in names] for role, names in roles.items()}
        self.roles = {role: [i for i in ids if i is not None] for role, ids in named.items()}
        self.leading_ids = _leading_ids(spec)
        self._unknown_id = unknown_id(spec["model"])
        self._has_space_before = _has_space_before(spec)
        # What is not text to the tokenizer, if anything, is spelled in bytes.
        literal = "" if is_byte_level(spec) else f"|{METASPACE}+"
        self._units = re.compile(f"({_INVALID}{literal})")
        self._exact = Tokenizer.from_str(json.dumps(_without_loss(spec)))

    @cached_property
    def ids_by_bytes(self) -> dict[bytes, int]:
        """The token for each byte string that is one: of several, the one that is really used."""
        found: dict[bytes, list[int]] = {}
        for token_id, spelled in self.token_bytes.items():
            found.setdefault(spelled, []).append(token_id)
        return {spelled: self._usual(spelled, ids) for spelled, ids in found.items()}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.ids_by_bytes), default=0)

    def spell(self, token_ids: Sequence[int]) -> bytes:
        """Returns the bytes that tokens stand for; special ones stand for none."""
        return b"".join(self.token_bytes.get(token_id, b"") for token_id in token_ids)

    def text_of(self, token_id: int) -> bytes:
        """Returns what a token is in a text: special ones without a role are their own names."""
        return self._texts.get(token_id, b"")

    @cached_property
    def _texts(self) -> dict[int, bytes]:
        with_role = {token_id for ids in self.roles.values() for token_id in ids}
        names = {i: name.encode() for i, name in self.added_tokens.items() if i not in with_role}
        return names | self.token_bytes

    def space_before(self, text: bytes) -> bytes:
        """Returns what this tokenizer's texts have before them: a space, or nothing."""
        return b" " if self._has_space_before and not text.startswith(b" ") else b""

    def encode(self, text: bytes) -> Tokens:
        """Returns the tokens that spell a text, which need not be whole characters.

        Bytes that no tokens spell, as where there is no fallback to bytes, become the token for
        unknown text, if there is one.
        """
        tokens = Tokens()
        offset = 0
        for part in self._units.split(text.decode("utf-8", errors="surrogateescape")):
            if part:
                self._append(tokens, offset, part)
                offset += len(_to_bytes(part))
        return tokens

    def _append(self, tokens: Tokens, offset: int, text: str) -> None:
        if self._units.fullmatch(text):
            self._append_pieces(tokens, offset, _to_bytes(text))
        elif not self._append_usual(tokens, offset, text):
            for word in _WORD.split(text):
                if not self._append_usual(tokens, offset, word):
                    self._append_pieces(tokens, offset, _to_bytes(word))
                offset += len(_to_bytes(word))

    def _append_usual(self, tokens: Tokens, offset: int, text: str) -> bool:
        """Appends what the tokenizer makes of a text, if it spells that text."""
        encoding = self._exact.encode(text, add_special_tokens=False)
        ids = encoding.ids
        if self.spell(ids) != _to_bytes(text):
            return False
        first, words = len(tokens.ids), encoding.word_ids
        tokens.ids += ids
        tokens.offsets += accumulate((len(self.token_bytes[i]) for i in ids[:-1]), initial=offset)
        tokens.starts.append(first)
        tokens.starts += [
            first + place for place, (a, b) in enumerate(pairwise(words), 1) if a != b
        ]
        return True

    def _append_pieces(self, tokens: Tokens, offset: int, raw: bytes) -> None:
        """Appends the longest tokens, from left to right, that spell bytes."""
        tokens.starts.append(len(tokens.ids))
        at = 0
        while at < len(raw):
            ends = range(min(len(raw), at + self._longest), at, -1)
            end = next((end for end in ends if raw[at:end] in self.ids_by_bytes), at + 1)
            token_id = self.ids_by_bytes.get(raw[at:end], self._unknown_id)
            if token_id is not None:
                tokens.ids.append(token_id)
                tokens.offsets.append(offset + at)
            at = end

    def _usual(self, spelled: bytes, ids: list[int]) -> int:
        if len(ids) == 1:
            return ids[0]
        text = spelled.decode("utf-8", errors="replace")
        encoded = self._exact.encode(text, add_special_tokens=False).ids
        return encoded[0] if len(encoded) == 1 and encoded[0] in ids else min(ids)


def _to_bytes(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogateescape")


def load_spelling(model_dir: Path) -> Spelling:
    """Reads a model's tokenizer.

    Raises:
        ConfigError: if it has none, or one whose tokens do not say what they stand for.
    """
    file = model_dir / "tokenizer.json"
    try:
        return Spelling(file.read_text(encoding="utf-8"), _read_roles(model_dir))
    except OSError:
        raise ConfigError(
            [f"{model_dir}: there is no tokenizer.json, which another vocabulary is mapped by"]
        ) from None
    except ConfigError as error:
        raise ConfigError([f"{model_dir}: {problem}" for problem in error.problems]) from None


def _read_roles(model_dir: Path) -> dict[str, tuple[str, ...]]:
    roles: dict[str, tuple[str, ...]] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if not (file := model_dir / name).is_file():
            continue
        settings = json.loads(file.read_text(encoding="utf-8"))
        for role in _ROLES:
            if token := settings.get(f"{role}_token"):
                roles[role] = (token["content"] if isinstance(token, dict) else token,)
    return roles


def _leading_ids(spec: dict[str, Any]) -> list[int]:
    found: list[int] = []
    for one in components(spec, "post_processor"):
        if one["type"] == "TemplateProcessing":
            before = takewhile(lambda member: "SpecialToken" in member, one["single"])
            for member in before:
                found += one["special_tokens"][member["SpecialToken"]["id"]]["ids"]
        elif "cls" in one:  # of BERT and RoBERTa
            found.append(one["cls"][1])
    return found


def _has_space_before(spec: dict[str, Any]) -> bool:
    pre_tokenizers = components(spec, "pre_tokenizer")
    return (
        any(one["type"] == "ByteLevel" and one.get("add_prefix_space") for one in pre_tokenizers)
        or any(
            one["type"] == "Metaspace" and one.get("prepend_scheme", "always") != "never"
            for one in pre_tokenizers
        )
        or any(one["type"] == "Prepend" for one in components(spec, "normalizer"))
        or drops_space(spec)
    )


def _without_loss(spec: dict[str, Any]) -> dict[str, Any]:
    """Returns a tokenizer that changes, adds and reads out nothing."""
    normalizers = [one for one in components(spec, "normalizer") if _is_lossless(one)]
    pre_tokenizers = [
        one
        | ({"add_prefix_space": False} if one["type"] == "ByteLevel" else {})
        | ({"prepend_scheme": "never"} if one["type"] == "Metaspace" else {})
        for one in map(dict, components(spec, "pre_tokenizer"))
    ]
    model = dict(spec["model"])
    if model["type"] == "BPE":
        model["dropout"] = None
    if model["type"] == "WordPiece":
        model["max_input_chars_per_word"] = 2**31
    if model["type"] in ("WordPiece", "WordLevel"):  # which fail where they need it and have none
        vocab = model["vocab"]
        model["vocab"] = {model["unk_token"]: max(vocab.values(), default=-1) + 1} | vocab
    return spec | {
        "model": model,
        "normalizer": _sequence("normalizers", normalizers),
        "pre_tokenizer": _sequence("pretokenizers", pre_tokenizers),
        "post_processor": None,
        "added_tokens": [],
        "truncation": None,
        "padding": None,
    }


def _sequence(name: str, members: list[Any]) -> dict[str, Any] | None:
    return {"type": "Sequence", name: members} if members else None


def _is_lossless(normalizer: Any) -> bool:
    replaces_space = normalizer.get("pattern") == {"String": " "}
    return normalizer["type"] == "ByteLevel" or bool(replaces_space)
