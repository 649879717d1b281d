"""What a block of draft tokens is to a target with another vocabulary."""

import math

import pytest

from proposer_svc.draft_vocabulary import DraftContext
from proposer_svc.foreign_vocabulary import SESSION_VOCABULARIES, ForeignVocabulary
from proposer_svc.session_table import Session
from specgw.speculative_config import SpeculativeConfig
from specgw.types import DraftSampling, ModelDescription
from specgw.vocab_mapping import Coverage, VocabMapping, VocabMethods, choose_methods, map_vocabs
from tests.spellings import EXACT, spelling

TARGET, DRAFT = "byte-level", "SentencePiece"


def mapping(target: str = TARGET, draft: str = DRAFT) -> VocabMapping:
    return map_vocabs(spelling(target), spelling(draft), 1024, 1024)


def open_context(mapped: VocabMapping, method: str, text: bytes = b"the dog") -> DraftContext:
    context = mapped.target.encode(text).ids
    return SESSION_VOCABULARIES[method](mapped).open_context(Session("v", 1, context, 1024))


def described(fingerprint: str, vocab_size: int = 1024) -> ModelDescription:
    return ModelDescription("model", "arch", vocab_size, fingerprint, 64, "float32", "cpu")


@pytest.mark.parametrize("target", EXACT)
@pytest.mark.parametrize("draft", EXACT)
def test_a_string_is_read_as_the_target_writes_it(target: str, draft: str) -> None:
    mapped = mapping(target, draft)
    drafted = mapped.draft.encode(" the question: 你好, and so they went".encode()).ids

    block = open_context(mapped, "string").to_target(drafted, 64)

    assert list(block) == mapped.target.encode(mapped.draft.spell(drafted)).ids


def test_several_draft_tokens_may_make_one_and_one_several() -> None:
    mapped = mapping()
    context = open_context(mapped, "string")
    letters = [mapped.draft.ids_by_bytes[bytes([letter])] for letter in b" the"]
    word = mapped.draft.encode("привет".encode()).ids[:1]

    assert list(context.to_target(letters, 4)) == [mapped.target.ids_by_bytes[b" the"]]
    assert mapped.target.spell(context.to_target(word, 8)) == mapped.draft.spell(word)


def test_a_block_is_not_longer_than_was_asked_for() -> None:
    mapped = mapping()
    drafted = mapped.draft.encode(b" the quick brown fox jumps over").ids

    assert len(open_context(mapped, "string").to_target(drafted, 3)) == 3


def test_the_end_of_the_text_is_the_targets_end() -> None:
    mapped = mapping()
    context = open_context(mapped, "string")
    end, target_end = mapped.draft.roles["eos"][0], mapped.target.roles["eos"][0]

    block = context.to_target([*mapped.draft.encode(b" dog").ids, end], 8)

    assert block[-1] == target_end
    assert context.is_enough([end], 8)
    assert mapped.target.spell(block) == b" dog"


@pytest.mark.parametrize("token_from", [0, 0.5, math.inf])
def test_a_target_with_another_vocabulary_than_the_configured_one_is_refused(
    token_from: float,
) -> None:
    vocabulary = ForeignVocabulary(mapping(), VocabMethods(token_from), "a" * 64)

    assert vocabulary.mismatches(described("a" * 64)) == []
    assert vocabulary.mismatches(described("")) == []
    [other] = vocabulary.mismatches(described("b" * 64))
    [small] = vocabulary.mismatches(described("a" * 64, vocab_size=100))
    assert "sha256 aaaaaaaaaaaa, model has that of sha256 bbbbbbbbbbbb" in other
    assert "model has 100" in small


def test_each_token_of_the_intersection_is_one_of_the_targets() -> None:
    mapped = mapping()
    drafted = [mapped.draft.ids_by_bytes[spelled] for spelled in (b" the", b"\n", b"\xf0")]

    block = open_context(mapped, "token").to_target(drafted, 3)

    assert mapped.target.spell(block) == b" the\n\xf0"


@pytest.mark.parametrize(
    ("configured", "draft_sample_method", "of_target_text", "chosen"),
    [
        ("auto", "greedy", 1.0, "token"),
        ("auto", "greedy", 0.95, "string"),
        ("auto", "coupled", 0.995, "token"),
        ("auto", "coupled", 0.94, "string, from temperature 0.60 on token"),
        ("auto", "coupled", 0.75, "string"),
        ("auto", "probabilistic", 0.94, "string, from temperature 0.60 on token"),
        ("auto", "probabilistic", 0.2, "string"),
        ("token", "greedy", 0.5, "token"),
        ("string", "coupled", 1.0, "string"),
    ],
)
def test_auto_goes_by_coverage_and_temperature(
    configured: str, draft_sample_method: str, of_target_text: float, chosen: str
) -> None:
    config = SpeculativeConfig.model_validate(
        {
            "model": "tiny/foreign",
            "num_speculative_tokens": 4,
            "use_heterogeneous_vocab": True,
            "heterogeneous_vocab_method": configured,
            "draft_sample_method": draft_sample_method,
        }
    )

    methods = choose_methods(config, Coverage(1, 1.0, 1.0, 1.0, of_target_text))

    assert str(methods) == chosen


def test_sessions_are_drafted_for_by_the_method_of_their_temperature() -> None:
    vocabulary = ForeignVocabulary(mapping(), VocabMethods(0.5), "")

    def has_target_ids(sampling: DraftSampling | None) -> bool:
        return vocabulary.of(Session("v", 1, [1], 1024, sampling=sampling)).has_target_ids

    assert vocabulary.summary.method == "auto"
    assert vocabulary.takes_samples
    assert not has_target_ids(None)
    assert not has_target_ids(DraftSampling(0.0, 0, 1.0, 0.0, seed=1))
    assert not has_target_ids(DraftSampling(0.4, 0, 1.0, 0.0, seed=1))
    assert has_target_ids(DraftSampling(0.5, 0, 1.0, 0.0, seed=1))
    assert not ForeignVocabulary(mapping(), VocabMethods(math.inf), "").takes_samples
