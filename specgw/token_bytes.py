"""Which bytes each token of a `tokenizer.json` stands for.

Strings of tokens cannot be compared: `Ġ`, `▁` and no `##` are all a space, and `<0x0A>`, `Ċ` and a
line break are one byte. Bytes can. Knows no models and no pairs of tokenizers.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from specgw.errors import ConfigError

Spec = Mapping[str, Any]  # a parsed `tokenizer.json`, or a part of one

METASPACE = "▁"

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_DROPS_SPACE = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}
_IDEOGRAPHS = re.compile("[\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")


def components(spec: Spec, part: str) -> list[Spec]:
    """Returns the normalizers, pre-tokenizers or other parts of a tokenizer, none a sequence."""
    found = spec.get(part)
    if found is None:
        return []
    if found["type"] != "Sequence":
        return [found]
    (members,) = (value for key, value in found.items() if key != "type")
    return [one for member in members for one in components({part: member}, part)]


def component_types(spec: Spec, part: str) -> set[str]:
    """Returns the types of a tokenizer's components."""
    return {str(one["type"]) for one in components(spec, part)}


def read_token_bytes(spec: Spec) -> dict[int, bytes]:
    """Returns the bytes of every token that stands for text, by id.

    Special tokens and the one for unknown text stand for none. Where a tokenizer drops white space,
    as BERT's does, a token that begins a word stands for the space before it too.

    Raises:
        ConfigError: if the tokens of this kind of tokenizer do not say what they stand for.
    """
    model = spec["model"]
    spell = _speller(spec)
    found = {token_id: spell(piece) for piece, token_id in _pieces(model)}
    if (unknown := unknown_id(model)) is not None:
        found[unknown] = None
    for added in spec.get("added_tokens") or ():
        found[added["id"]] = None if added["special"] else added["content"].encode()
    return {token_id: spelled for token_id, spelled in sorted(found.items()) if spelled}


def byte_alphabet() -> dict[str, int]:
    """Returns the byte for each letter in which byte-level tokenizers write bytes (GPT-2's)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def unknown_id(model: Spec) -> int | None:
    """Returns the token that stands for text that a tokenizer's model has no tokens for."""
    if model.get("unk_id") is not None:
        return int(model["unk_id"])
    vocab = model["vocab"]
    return vocab.get(model.get("unk_token")) if isinstance(vocab, Mapping) else None


def is_byte_level(spec: Spec) -> bool:
    """Whether tokens are written in `byte_alphabet`."""
    return "ByteLevel" in component_types(spec, "pre_tokenizer") | component_types(
        spec, "normalizer"
    )


def drops_space(spec: Spec) -> bool:
    """Whether a tokenizer drops white space, so that tokens imply it."""
    return bool(component_types(spec, "pre_tokenizer") & _DROPS_SPACE)


def _pieces(model: Spec) -> Iterable[tuple[str, int]]:
    vocab = model["vocab"]
    if isinstance(vocab, Mapping):
        return vocab.items()
    return ((piece, token_id) for token_id, (piece, _) in enumerate(vocab))  # Unigram's


def _speller(spec: Spec) -> Any:
    model = spec["model"]
    continuing = model.get("continuing_subword_prefix") or ""
    in_bytes = is_byte_level(spec)
    implies_space = drops_space(spec)
    tells_words_apart = model["type"] in ("WordPiece", "WordLevel") or bool(continuing)
    if model.get("end_of_word_suffix") or (implies_space and not tells_words_apart):
        raise ConfigError(
            [
                f"tokenizer.json: its {model['type']} tokens do not say where spaces are; drafts "
                "from another vocabulary need a byte-level, SentencePiece or WordPiece tokenizer"
            ]
        )
    alphabet = byte_alphabet()

    def spell(piece: str) -> bytes | None:
        continues = bool(continuing) and piece.startswith(continuing)
        text = piece.removeprefix(continuing)
        if in_bytes:
            spelled = [alphabet.get(letter) for letter in text]
            return None if None in spelled else bytes(b for b in spelled if b is not None)
        if byte := _BYTE_TOKEN.fullmatch(text) if model.get("byte_fallback") else None:
            return bytes([int(byte[1], 16)])
        if implies_space:
            return (b" " if _begins_word(text) and not continues else b"") + text.encode()
        return text.replace(METASPACE, " ").encode()

    return spell


def _begins_word(text: str) -> bool:
    """Whether a space is before it: such tokenizers split at punctuation and ideographs too."""
    return text[:1].isalnum() and not _IDEOGRAPHS.match(text)
