from collections.abc import Callable

import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer, models, pre_tokenizers

from specgw.errors import ConfigError
from specgw.spelling import Spelling
from tests import tiny_tokenizers
from tests.spellings import EXACT, spelling, texts, tokenizer


@pytest.mark.parametrize("kind", EXACT)
@given(text=texts)
@settings(max_examples=60, deadline=None)
def test_tokens_spell_any_text_and_any_part_of_it(kind: str, text: str) -> None:
    raw = text.encode()
    middle = len(raw) // 2  # maybe within a character

    for part in (raw, raw[:middle], raw[middle:]):
        tokens = spelling(kind).encode(part)
        assert spelling(kind).spell(tokens.ids) == part
        starts = [spelling(kind).spell(tokens.ids[:i]) for i in range(len(tokens.ids))]
        assert tokens.offsets == [len(before) for before in starts]


@pytest.mark.parametrize("kind", EXACT)
def test_plain_text_becomes_what_the_tokenizer_makes_of_it(kind: str) -> None:
    text = "the quick question, and 1234 dogs: naïve привет 你好"
    wanted = tokenizer(kind).encode(text, add_special_tokens=False).ids

    before = spelling(kind).space_before(text.encode())
    assert spelling(kind).encode(before + text.encode()).ids == wanted


def spelled(make: Callable[[], Tokenizer], token: str) -> bytes | None:
    made = make()
    return Spelling(made.to_str(), {}).token_bytes.get(tiny_tokenizers.token_id(made, token))


def test_letters_that_stand_for_bytes_are_not_read_as_letters() -> None:
    assert spelled(tiny_tokenizers.byte_level, "é") == b"\xe9"
    assert spelled(tiny_tokenizers.byte_level, "Ċ") == b"\n"
    assert spelled(tiny_tokenizers.metaspace, "é") == "é".encode()
    assert spelled(tiny_tokenizers.metaspace, "<0x0A>") == b"\n"
    assert spelled(tiny_tokenizers.metaspace, "▁the") == b" the"


def test_word_pieces_imply_the_space_before_a_word_but_not_before_punctuation() -> None:
    assert spelled(tiny_tokenizers.bert, "the") == b" the"
    assert spelled(tiny_tokenizers.bert, "##e") == b"e"
    assert spelled(tiny_tokenizers.bert, ",") == b","
    assert spelled(tiny_tokenizers.bert, "你") == "你".encode()


def test_special_and_unknown_tokens_stand_for_no_text() -> None:
    assert spelled(tiny_tokenizers.metaspace, tiny_tokenizers.EOS) is None
    assert spelled(tiny_tokenizers.metaspace, "<unk>") is None
    assert spelled(tiny_tokenizers.bert, "[UNK]") is None


def test_the_token_that_is_really_used_stands_for_bytes_that_several_spell() -> None:
    made = tokenizer("SentencePiece")

    ids = spelling("SentencePiece").ids_by_bytes

    assert ids[b"a"] == made.token_to_id("a") != made.token_to_id("<0x61>")
    assert ids[b"\xff"] == made.token_to_id("<0xFF>")


def test_text_that_implied_spaces_can_write_is_written() -> None:
    bert = spelling("bert")
    text = b" the quick fox, and the lazy dog: stop"

    assert bert.spell(bert.encode(text).ids) == text


def test_a_tokenizer_whose_tokens_do_not_tell_where_spaces_are_is_refused() -> None:
    vague = Tokenizer(models.BPE({"a": 0}, []))
    vague.pre_tokenizer = pre_tokenizers.Whitespace()

    with pytest.raises(ConfigError, match="where spaces are"):
        Spelling(vague.to_str(), {})
