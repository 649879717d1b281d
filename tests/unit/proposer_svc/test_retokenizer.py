from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proposer_svc.retokenizer import Retokenizer
from specgw.vocab_mapping import VocabMapping, map_vocabs
from tests.spellings import EXACT, spelling, texts

PAIRS = list(permutations(EXACT, 2))


def mapping(target: str, draft: str) -> VocabMapping:
    return map_vocabs(spelling(target), spelling(draft), 2048, 2048)


def whole(mapped: VocabMapping, text: bytes) -> list[int]:
    draft = mapped.draft
    return [*draft.leading_ids, *draft.encode(draft.space_before(text) + text).ids]


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@given(text=texts, cuts=st.lists(st.integers(1, 9), min_size=1, max_size=60))
@settings(max_examples=25, deadline=None)
def test_the_context_spells_the_text_and_is_what_the_whole_text_becomes(
    target: str, draft: str, text: str, cuts: list[int]
) -> None:
    mapped = mapping(target, draft)
    # Byte by byte in part, as a target may write: characters end between two commits.
    ids = mapped.target.encode(text.encode()).ids
    ids += [i for byte in text.encode()[:40] for i in mapped.target.encode(bytes([byte])).ids]
    retokenizer = Retokenizer(mapped)
    at = 0

    for cut in [*cuts, len(ids)]:
        held = list(retokenizer.token_ids)
        start, replaced = retokenizer.extend(ids[at : at + cut])
        at += cut
        committed = mapped.target.spell(ids[:at])
        before = mapped.draft.space_before(committed) if committed else b""
        assert mapped.draft.spell(retokenizer.token_ids) == before + committed
        assert (held[:start], held[start:]) == (retokenizer.token_ids[:start], replaced)

    assert retokenizer.token_ids == whole(mapped, committed) or not committed


@pytest.mark.parametrize("kind", EXACT)
def test_what_a_commit_costs_does_not_depend_on_the_length_of_the_context(kind: str) -> None:
    mapped = mapping("byte-level" if kind != "byte-level" else "SentencePiece", kind)
    line = "the 12 dogs\tsaid: naïve 你好世界 '" + "x" * 90 + "'\r\n"
    retokenizer = Retokenizer(mapped)
    costs = []

    for token_id in mapped.target.encode((line * 40 + "你" * 900 + " " * 900).encode()).ids:
        before = retokenizer.num_encoded_bytes
        retokenizer.extend([token_id])
        costs.append(retokenizer.num_encoded_bytes - before)

    assert max(costs) < 700


def test_there_is_one_bos_however_often_the_text_is_extended() -> None:
    mapped = mapping("byte-level", "split byte-level")
    retokenizer = Retokenizer(mapped)

    for token_id in mapped.target.encode(b"  two  spaces\t and\n\n leading ones" * 3).ids:
        retokenizer.extend([token_id])

    bos = mapped.draft.leading_ids[0]
    assert retokenizer.token_ids.count(bos) == 1
    assert retokenizer.token_ids[0] == bos


def test_the_targets_bos_is_the_drafts_own_and_is_not_doubled() -> None:
    target = spelling("split byte-level")
    retokenizer = Retokenizer(map_vocabs(target, target, 2048, 2048))

    retokenizer.extend([*target.leading_ids, *target.encode(b"the dog").ids])

    assert retokenizer.token_ids == whole(map_vocabs(target, target, 2048, 2048), b"the dog")


def test_a_bos_that_the_draft_does_not_know_is_no_text() -> None:
    mapped = mapping("split byte-level", "byte-level")
    retokenizer = Retokenizer(mapped)

    retokenizer.extend([*mapped.target.leading_ids, *mapped.target.encode(b"the dog").ids])

    assert retokenizer.token_ids == whole(mapped, b"the dog")


def test_special_tokens_are_special_tokens_and_their_names_in_a_text_are_text() -> None:
    mapped = mapping("byte-level", "SentencePiece")
    (eos,), (draft_eos,) = mapped.target.roles["eos"], mapped.draft.roles["eos"]
    retokenizer = Retokenizer(mapped)

    retokenizer.extend(
        [*mapped.target.encode(b"stop<|end|>").ids, eos, *mapped.target.encode(b"go").ids]
    )

    assert retokenizer.token_ids.count(draft_eos) == 1
    assert mapped.draft.spell(retokenizer.token_ids) == b" stop<|end|>go"
