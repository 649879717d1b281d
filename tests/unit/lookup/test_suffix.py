"""Suffix drafts are those of the definition, by counts over occurrences; memory is bounded."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgw.lookup.match import MAX_NEW_TOKENS, NO_MATCH
from specgw.lookup.occurrences import OccurrenceIndex
from specgw.lookup.suffix import SuffixLookup, SuffixSettings
from tests.unit.lookup.counting import CountingTokens, random_text, read_all

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)
SETTINGS = SuffixSettings(24, 10, 1.0, 0.1)
LONG = 100_000


@given(texts, st.lists(st.integers(1, 20), max_size=5), st.integers(1, 20))
def test_the_index_finds_the_latest_occurrences(
    text: list[int], drops: list[int], limit: int
) -> None:
    tokens: list[int] = []
    index = OccurrenceIndex(tokens)
    for token_id in text:
        tokens.append(token_id)
        index.extend()
        if drops and len(tokens) > drops[-1]:
            index.drop(drops.pop())
    for size in (1, 2, 4, 8):
        pattern = tokens[-size:]
        first = len(tokens) - len(index)
        ends = [e for e in range(first + size, len(tokens)) if tokens[e - size : e] == pattern]

        found = index.latest(pattern, limit)

        if size <= len(tokens):
            assert [e for e, n in found.items() if n == size] == ends[::-1][:limit]
        assert len(found) <= limit


@given(texts)
def test_what_is_dropped_leaves_nothing(text: list[int]) -> None:
    index = OccurrenceIndex([])
    for _ in range(3):
        index.token_ids += [*text, -1]
        index.extend()
        index.drop(len(text) + 1)

    assert index.token_ids == []
    assert not any(index._latest.values())


def best_path(
    contexts: Sequence[Sequence[int]], length: int, pattern: Sequence[int], settings: SuffixSettings
) -> tuple[list[int], float]:
    """The definition for one length of match, on texts that end in tokens found nowhere else."""
    suffix = list(pattern[-length:])
    paths = [
        list(text[end:])
        for text in reversed(contexts)  # of equally frequent tokens, the latest counts
        for end in reversed(range(length, len(text)))
        if list(text[end - length : end]) == suffix
    ]
    draft: list[int] = []
    chance, score = 1.0, 0.0
    most = min(int(length * settings.max_spec_factor), settings.max_tree_depth - length)
    while len(draft) < most:
        alive = [path for path in paths if path[: len(draft)] == draft]
        counts = Counter(path[len(draft)] for path in alive if len(path) > len(draft))
        if not counts:
            break
        token_id, count = counts.most_common(1)[0]
        chance *= count / len(alive)
        if chance < settings.min_token_prob:
            break
        draft.append(token_id)
        score += chance
    return draft, score


@pytest.mark.parametrize(
    ("answers", "context", "expected"),
    [
        ([[1, 2, 3, 4, 5, 6, 7, 8]], [9, 2, 3, 4], [5, 6, 7]),  # as long as the match
        ([[1, 2, 3], [1, 2, 4], [1, 2, 4]], [9, 1, 2], [4]),  # the most frequent
        ([[1, 2], [1, 2], [1, 2, 3]], [9, 1, 2], [3]),  # ends of answers count as other tokens
        ([[5, 6, 7, 8]], [5, 6, 1, 1, 5, 6], [1, 1]),  # of equal ones, its own context's
        ([[5, 6, 7, 8]], [1, 2, 3], []),  # nothing matches
        ([[1, 2, 3]], [7, 3], []),  # nothing follows
    ],
)
def test_drafts(answers: list[list[int]], context: list[int], expected: list[int]) -> None:
    lookup = SuffixLookup(SETTINGS)
    for answer in answers:
        lookup.open([0, *answer], 1).close()

    match = lookup.open(context, len(context)).find(8)

    assert list(match.token_ids) == expected


@given(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=6), min_size=1, max_size=2))
def test_the_draft_has_the_best_score_of_all_lengths(answers: list[list[int]]) -> None:
    settings = SuffixSettings(12, 10, 2.0, 0.3)
    lookup = SuffixLookup(settings)
    pattern = [7, *answers[0][:3]]
    answers = [[*answer, 100 + number] for number, answer in enumerate(answers)]
    for answer in answers:
        lookup.open(answer, 0).close()

    match = lookup.open(pattern, len(pattern)).find(100)

    # Its own context holds no repetition of its end, or the draft may come from there.
    own = [pattern] if pattern[-1] in pattern[:-1] else []
    if not own:
        scores = [best_path(answers, n, pattern, settings)[1] for n in range(1, 4)]
        _, score = best_path(answers, max(match.length, 1), pattern, settings)
        assert score == pytest.approx(max(scores))


def test_least_chance_ends_a_draft() -> None:
    lookup = SuffixLookup(SuffixSettings(24, 10, 4.0, 0.6))
    for answer in ([1, 2, 3, 4], [1, 2, 3, 5]):
        lookup.open(answer, 0).close()

    assert lookup.open([9, 1], 2).find(8).token_ids == [2, 3]


@pytest.mark.parametrize(("factor", "expected"), [(0.0, 0), (0.5, 2), (1.0, 4), (3.0, 12)])
def test_factor_bounds_the_draft_by_the_match(factor: float, expected: int) -> None:
    lookup = SuffixLookup(SuffixSettings(24, 10, factor, 0.1))
    lookup.open(list(range(100)), 0).close()

    assert len(lookup.open([99, 40, 41, 42, 43], 5).find(50).token_ids) == expected


def test_depth_bounds_match_and_draft_together() -> None:
    lookup = SuffixLookup(SuffixSettings(10, 10, 1.0, 0.1))
    lookup.open(list(range(100)), 0).close()

    match = lookup.open(list(range(50)), 50).find(50)

    assert match.token_ids == [50, 51, 52, 53, 54]


def test_answers_are_forgotten_first_in_first_out() -> None:
    lookup = SuffixLookup(SuffixSettings(24, 2, 1.0, 0.1))
    for first in (10, 20, 30):
        lookup.open([0, first, first + 1, first + 2], 1).close()

    found = [lookup.open([5, first, first + 1], 3).find(1) for first in (10, 20, 30)]

    assert [list(one.token_ids) for one in found] == [[], [22], [32]]


def test_nothing_is_remembered_of_prompts_or_without_a_cache() -> None:
    lookup, forgetful = (SuffixLookup(SuffixSettings(24, n, 1.0, 0.1)) for n in (10, 0))
    lookup.open([1, 2, 3, 4], 4).close()
    forgetful.open([1, 2, 3, 4], 0).close()

    assert lookup.open([9, 1, 2], 3).find(2) == NO_MATCH
    assert forgetful.open([9, 1, 2], 3).find(2) == NO_MATCH


def test_tokens_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specgw.lookup.suffix._MAX_REMEMBERED_TOKENS", 100)
    lookup = SuffixLookup(SETTINGS)
    reader = lookup.open([0, 990, 991], 3)
    for start in range(30):
        lookup.open([start] * 30, 0).close()
        reader.find(1)
        assert len(lookup._answers.index) <= 100
        assert len(lookup._answers.index.token_ids) <= 115
    for _ in range(3):
        lookup.open(list(range(1000)), 0).close()

    assert reader.find(1).token_ids == [992]
    assert len(lookup._answers.index) == 100
    assert lookup._answers._num_unread == 0


@pytest.mark.parametrize("text", ["varied", "repeated"])
def test_a_round_touches_as_many_tokens_in_a_long_context_as_in_a_short_one(text: str) -> None:
    touched = {}
    for length in (1_000, 100_000):
        varied = random_text(length)
        context = CountingTokens(varied if text == "varied" else varied[:50] * (length // 50))
        lookup = SuffixLookup(SETTINGS).open(context, length)
        read_all(lookup, length)
        context += context[500:506]
        context.num_touched = 0

        assert lookup.find(8).token_ids
        touched[length] = context.num_touched

    assert abs(touched[100_000] - touched[1_000]) < 1_000
    assert touched[100_000] < 2_000


def test_a_long_prompt_is_read_in_pieces() -> None:
    context = CountingTokens([*random_text(10 * MAX_NEW_TOKENS), 1_001, 1_002, 1_003, 1_001])
    lookup = SuffixLookup(SETTINGS).open(context, len(context))
    found, touched = [], []
    for _ in range(11):
        context.num_touched = 0
        found.append(list(lookup.find(1).token_ids))
        touched.append(context.num_touched)

    assert found == [[]] * 10 + [[1_002]]
    assert max(touched) < 6 * MAX_NEW_TOKENS


@pytest.mark.parametrize("num_contexts", [1, 16])
def test_a_long_answer_is_read_and_dropped_in_pieces(num_contexts: int) -> None:
    """All contexts together read and drop what one call may; until then others are drafted for."""
    lookup = SuffixLookup(SuffixSettings(24, 2, 1.0, 0.1))
    lookup.open([1, 2, 3], 0).close()
    contexts = [lookup.open([0, 1, 2], 3) for _ in range(num_contexts)]
    assert [list(one.find(1).token_ids) for one in contexts] == [[3]] * num_contexts
    index = lookup._answers.index

    lookup.open([*random_text(LONG), 7, 8, 9], 0).close()
    lengths = [len(index)]
    while lookup._answers._num_unread:
        assert [list(one.find(1).token_ids) for one in contexts] == [[3]] * num_contexts
        lengths.append(len(index))
    lookup.open([4, 5], 0).close()
    lookup.open([5, 6], 0).close()
    while len(index) > 6:
        for one in contexts:
            one.find(1)
        lengths.append(len(index))

    assert lengths[0] == 4
    assert max(lengths) > LONG
    steps = [abs(after - before) for before, after in pairwise(lengths)]
    assert max(steps) <= MAX_NEW_TOKENS + num_contexts
    assert len(steps) >= 2 * LONG / (MAX_NEW_TOKENS + num_contexts)


def test_an_answer_that_is_overtaken_while_it_is_read_ends_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specgw.lookup.suffix.MAX_NEW_TOKENS", 4)
    lookup = SuffixLookup(SuffixSettings(24, 1, 1.0, 0.0))
    reader = lookup.open([0], 1)
    lookup.open([1, 2, 3, 4, 5, 6, 7, 8], 0).close()
    reader.find(1)
    lookup.open([9, 1], 0).close()
    for _ in range(3):
        reader.find(1)

    assert lookup.open([0, 5], 2).find(1) == NO_MATCH
    assert lookup._answers.index.token_ids[-3:] == [9, 1, -1]


def test_a_context_that_is_dropped_is_not_remembered() -> None:
    lookup = SuffixLookup(SETTINGS)
    lookup.open([1, 2, 3], 0).close(remember=False)

    assert lookup.open([9, 1, 2], 3).find(2) == NO_MATCH
