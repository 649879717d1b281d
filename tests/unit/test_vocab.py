"""Fingerprints of vocabularies."""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from specgw.vocab import VocabKinship, relate_vocabs, vocab_fingerprint


def save_tokenizer(path: Path, vocab: dict[str, int]) -> Path:
    path.mkdir()
    Tokenizer(WordLevel(vocab, unk_token="a")).save(str(path / "tokenizer.json"))
    return path


def test_the_same_vocabulary_has_the_same_fingerprint_in_any_order(tmp_path: Path) -> None:
    one = save_tokenizer(tmp_path / "one", {"a": 0, "b": 1})
    other = save_tokenizer(tmp_path / "other", {"b": 1, "a": 0})

    assert vocab_fingerprint(one) == vocab_fingerprint(other)
    assert len(vocab_fingerprint(one)) == 64


def test_another_id_or_token_gives_another_fingerprint(tmp_path: Path) -> None:
    vocabs: list[dict[str, int]] = [
        {"a": 0, "b": 1},
        {"a": 1, "b": 0},
        {"a": 0, "c": 1},
        {"a": 0, "b": 1, "\u20ac": 2},
    ]

    found = {
        vocab_fingerprint(save_tokenizer(tmp_path / str(i), vocab))
        for i, vocab in enumerate(vocabs)
    }

    assert len(found) == len(vocabs)


def test_an_added_token_counts(tmp_path: Path) -> None:
    plain = save_tokenizer(tmp_path / "plain", {"a": 0})
    extended = save_tokenizer(tmp_path / "extended", {"a": 0})
    tokenizer = Tokenizer.from_file(str(extended / "tokenizer.json"))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(extended / "tokenizer.json"))

    assert vocab_fingerprint(plain) != vocab_fingerprint(extended)


def test_without_a_tokenizer_the_fingerprint_is_empty(tmp_path: Path) -> None:
    assert vocab_fingerprint(tmp_path) == ""


def test_twins_may_be_padded_differently(tmp_path: Path) -> None:
    one = save_tokenizer(tmp_path / "one", {"a": 0, "b": 1})
    other = save_tokenizer(tmp_path / "other", {"b": 1, "a": 0})

    assert relate_vocabs(one, 2, other, 2).kinship is VocabKinship.SAME
    padded = relate_vocabs(one, 2, other, 8)
    assert padded.kinship is VocabKinship.PADDED
    assert (padded.target_size, padded.draft_size, padded.num_shared_tokens) == (2, 8, 2)


def test_the_first_foreign_tokens_are_named(tmp_path: Path) -> None:
    one = save_tokenizer(tmp_path / "one", {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4})
    other = save_tokenizer(tmp_path / "other", {"a": 0, "c": 1, "b": 2, "d": 4})

    relation = relate_vocabs(one, 5, other, 5)

    assert relation.kinship is VocabKinship.FOREIGN
    assert relation.num_shared_tokens == 4
    assert relation.differences == (
        "id 1 is 'b' to the target and 'c' to the draft",
        "id 2 is 'c' to the target and 'b' to the draft",
        "id 3 is 'd' to the target and nothing to the draft",
    )


def test_without_a_tokenizer_nothing_is_known(tmp_path: Path) -> None:
    one = save_tokenizer(tmp_path / "one", {"a": 0})

    assert relate_vocabs(one, 1, tmp_path, 1).kinship is VocabKinship.UNKNOWN
