import numpy as np
import pytest
from tokenizers import Tokenizer, models

from specgw.spelling import Spelling
from specgw.vocab_mapping import map_vocabs
from tests.spellings import spelling

KINDS = ("byte-level", "split byte-level", "SentencePiece", "WordPiece", "bert")


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("draft", KINDS)
def test_paired_tokens_stand_for_the_same_and_none_is_paired_twice(target: str, draft: str) -> None:
    mapping = map_vocabs(spelling(target), spelling(draft), 2048, 2048)

    ours = mapping.draft_to_target[mapping.draft_to_target >= 0]
    theirs = np.flatnonzero(mapping.draft_to_target >= 0)
    assert len(set(ours.tolist())) == len(ours) == mapping.coverage.num_common > 30
    for theirs_id, our_id in zip(theirs.tolist(), ours.tolist(), strict=True):
        if theirs_id not in mapping.markers.values():
            assert mapping.draft.token_bytes[theirs_id] == mapping.target.token_bytes[our_id]


def test_specials_are_paired_by_role_where_their_texts_differ() -> None:
    target = words({"a": 0, "<end>": 1}, eos="<end>")
    draft = words({"</s>": 0, "a": 1}, eos="</s>")

    mapping = map_vocabs(target, draft, 2, 2)

    assert mapping.draft_to_target.tolist() == [1, 0]


def test_identical_vocabularies_are_paired_whole() -> None:
    mapping = map_vocabs(spelling("byte-level"), spelling("byte-level"), 400, 512)

    assert mapping.draft_to_target[:400].tolist() == list(range(400))
    assert (mapping.draft_to_target[400:] == -1).all()  # padding
    assert mapping.coverage.of_target == pytest.approx(1, abs=0.01)


def test_ids_beyond_an_embedding_are_not_paired() -> None:
    mapping = map_vocabs(spelling("byte-level"), spelling("byte-level"), 300, 350)

    assert len(mapping.draft_to_target) == 350
    assert mapping.draft_to_target.max() < 300


def test_the_mapping_does_not_depend_on_the_order_of_a_vocabulary() -> None:
    tokens = {"a": 0, "▁": 1, " ": 2, "b": 3}
    target = words(tokens, eos="")
    draft = words(dict(reversed(tokens.items())), eos="")

    one, other = map_vocabs(target, draft, 4, 4), map_vocabs(draft, target, 4, 4)

    assert one.fingerprint == other.fingerprint
    assert one.draft_to_target.tolist() == [0, -1, 2, 3]  # two tokens are a space; one is used


def test_one_other_token_is_left_out_and_the_rest_is_paired() -> None:
    tokens = {letter: place for place, letter in enumerate("abcdefgh")}
    odd = {("X" if letter == "d" else letter): place for letter, place in tokens.items()}

    mapping = map_vocabs(words(tokens, eos=""), words(odd, eos=""), 8, 8)

    assert mapping.draft_to_target.tolist() == [0, 1, 2, -1, 4, 5, 6, 7]
    assert mapping.coverage.num_common == 7


def test_what_vocabularies_have_in_common_is_weighed_by_how_often_it_occurs() -> None:
    target = words({letter: place for place, letter in enumerate("abcd")}, eos="")
    frequent = words({"a": 0, "w": 1, "x": 2, "y": 3}, eos="")
    rare = words({"w": 0, "x": 1, "y": 2, "d": 3}, eos="")

    frequent_coverage = map_vocabs(target, frequent, 4, 4).coverage
    rare_coverage = map_vocabs(target, rare, 4, 4).coverage

    assert frequent_coverage.of_draft == rare_coverage.of_draft == 0.25
    assert frequent_coverage.of_draft_text == pytest.approx(1 / (1 + 1 / 2 + 1 / 3 + 1 / 4))
    assert rare_coverage.of_draft_text == pytest.approx(frequent_coverage.of_draft_text / 4)
    assert frequent_coverage.of_target_text == frequent_coverage.of_draft_text
    assert rare_coverage.of_target_text == rare_coverage.of_draft_text


def test_special_tokens_are_no_part_of_what_text_has_in_common() -> None:
    twin = spelling("byte-level")

    coverage = map_vocabs(twin, twin, 1024, 1024).coverage

    assert coverage.num_common > len(twin.token_bytes)
    assert (coverage.of_target, coverage.of_draft) == (1, 1)
    assert (coverage.of_target_text, coverage.of_draft_text) == (1, 1)


def words(vocab: dict[str, int], eos: str) -> Spelling:
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    if eos:
        tokenizer.add_special_tokens([eos])
    return Spelling(tokenizer.to_str(), {"eos": (eos,)})
