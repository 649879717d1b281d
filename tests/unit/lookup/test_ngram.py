"""The n-gram index finds what a search through the whole context finds, and does less."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgw.lookup.match import MAX_NEW_TOKENS
from specgw.lookup.ngram import NgramLookup
from tests.unit.lookup.counting import CountingTokens, random_text, read_all

Window = tuple[int, int]

windows = st.tuples(st.integers(1, 6), st.integers(0, 5)).map(lambda one: (one[0], sum(one)))
texts = st.lists(st.integers(0, 3), max_size=40)


def search(context: Sequence[int], window: Window, max_tokens: int) -> list[int]:
    """The definition: the latest occurrence of the longest n-gram, which may lead into itself."""
    min_size, max_size = window
    for size in range(min(max_size, len(context) - 1), min_size - 1, -1):
        for end in range(len(context) - 1, size - 1, -1):
            if context[end - size : end] == context[-size:]:
                text = list(context)
                for position in range(end, end + max_tokens):
                    text.append(text[position])
                return text[len(context) :]
    return []


@given(texts, windows, st.integers(1, 9), st.data())
def test_finds_what_a_search_finds(
    text: list[int], window: Window, max_tokens: int, data: st.DataObject
) -> None:
    context: list[int] = []
    lookup = NgramLookup(*window).open(context, 0)

    while text:
        count = data.draw(st.integers(1, len(text)))
        context += text[:count]
        del text[:count]
        match = lookup.find(max_tokens)

        assert list(match.token_ids) == search(context, window, max_tokens)
        assert (match.length >= window[0]) == bool(match.token_ids)


def test_the_length_of_a_match_may_exceed_the_window() -> None:
    context = [1, 2, 3, 4, 5, 9, 0, 2, 3, 4, 5]

    match = NgramLookup(2, 2).open(context, 0).find(3)

    assert match.token_ids == [9, 0, 2]
    assert match.length == 4


@pytest.mark.parametrize("text", ["varied", "repeated"])
def test_a_round_touches_as_many_tokens_in_a_long_context_as_in_a_short_one(text: str) -> None:
    touched = {}
    for length in (1_000, 100_000):
        varied = random_text(length)
        context = CountingTokens(varied if text == "varied" else varied[:50] * (length // 50))
        lookup = NgramLookup(2, 5).open(context, 0)
        read_all(lookup, length)
        context += context[500:506]
        context.num_touched = 0

        assert lookup.find(8).token_ids
        touched[length] = context.num_touched

    assert touched[100_000] == touched[1_000] < 400


def test_a_long_prompt_is_read_in_pieces() -> None:
    context = CountingTokens([*random_text(10 * MAX_NEW_TOKENS), 1_001, 1_002, 1_003, 1_001])
    lookup = NgramLookup(1, 3).open(context, 0)
    found, touched = [], []
    for _ in range(11):
        context.num_touched = 0
        found.append(list(lookup.find(2).token_ids))
        touched.append(context.num_touched)

    assert found == [[]] * 10 + [[1_002, 1_003]]
    assert max(touched) < 4 * MAX_NEW_TOKENS
