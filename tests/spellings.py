"""Tokenizers of every kind as `Spelling`s, and text that is hard to keep."""

from collections.abc import Callable
from functools import cache

from hypothesis import strategies as st
from tokenizers import Tokenizer

from specgw.spelling import Spelling
from tests import tiny_tokenizers
from tests.tiny_tokenizers import EOS

EXACT: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": tiny_tokenizers.byte_level,
    "split byte-level": tiny_tokenizers.split_byte_level,
    "SentencePiece": tiny_tokenizers.metaspace,
    "WordPiece": tiny_tokenizers.word_piece,
}
"""Kinds that can write any bytes."""

_PIECES = [
    *" \t\n\r\x00.,'\"(#1a▁Ġ",
    *("  ", "    ", "\r\n", "\n\n", "'re", "123", "1234567", " the", "question", "naïve"),
    *("e\u0301", "你好世界", "こんにちは", "привет", "😀", "👩\u200d👩\u200d👧", "🇩🇪", "\u00a0"),
    *("\ufeff", "<0x0A>", "##ing", EOS, "<s>", "a" * 700, " " * 600, "ab" * 300),
]

texts = st.lists(st.one_of(st.sampled_from(_PIECES), st.text(max_size=8)), max_size=40).map("".join)


@cache
def tokenizer(kind: str) -> Tokenizer:
    """Returns one of the tokenizers in `EXACT`, or `bert`: always the same."""
    return EXACT.get(kind, tiny_tokenizers.bert)()


@cache
def spelling(kind: str) -> Spelling:
    """Returns the same as a `Spelling`."""
    return Spelling(tokenizer(kind).to_str(), {"eos": (EOS,), "bos": ("<s>",)})
