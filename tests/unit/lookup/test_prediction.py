"""An answer is followed through its prediction, and found again where it departs from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgw.lookup.prediction import Prediction, num_agreed

PREDICTED = list(range(100, 140))


def drafted_after(answer: list[int], predicted: list[int] = PREDICTED) -> list[int]:
    prediction = Prediction(predicted)
    prediction.follow(answer)
    return list(prediction.draft(3))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([], [100, 101, 102]),
        ([100, 101], [102, 103, 104]),
        (PREDICTED, []),  # it has come to its end
        ([100, 101, 5], []),  # departed
        ([100, 101, 5, 103], [104, 105, 106]),  # a token was replaced
        ([100, 101, 102, 5, 6, 103], [104, 105, 106]),  # tokens were inserted
        ([100, 101, 105, 106], [107, 108, 109]),  # tokens were left out
        ([5, 139], []),  # a single token far ahead says nothing
        ([5, 138, 139], []),  # nothing follows
        ([5, 130, 131], [132, 133, 134]),  # two say enough
        ([*PREDICTED[:20], 5, 101, 102], []),  # two behind do not
        ([*PREDICTED[:20], 5, 101, 102, 103, 104], [105, 106, 107]),  # four do
    ],
)
def test_draft(answer: list[int], expected: list[int]) -> None:
    assert drafted_after(answer) == expected


def test_the_nearest_place_ahead_counts() -> None:
    predicted = [1, 2, 7, 9, 1, 2, 8, 9, 1, 2, 6]

    assert drafted_after([1, 2, 7, 9, 5, 1, 2], predicted) == [8, 9, 1]


@pytest.mark.parametrize(
    ("answer", "count"),
    [([], 0), (PREDICTED, 40), ([*PREDICTED, 1, 2], 40), ([100, 5, 102, 103, 104], 3), ([5, 6], 0)],
)
def test_agreed_tokens_are_counted_once_each(answer: list[int], count: int) -> None:
    assert num_agreed(PREDICTED, answer) == count
    assert num_agreed(PREDICTED, answer * 2) <= 40


@given(st.lists(st.integers(0, 4)), st.lists(st.integers(0, 4)), st.data())
def test_it_does_not_matter_in_how_many_steps_an_answer_comes(
    predicted: list[int], answer: list[int], data: st.DataObject
) -> None:
    prediction, rest = Prediction(predicted), list(answer)
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        prediction.follow(rest[:count])
        del rest[:count]

    assert prediction.num_agreed == num_agreed(predicted, answer) <= len(predicted)
    assert list(prediction.draft(9)) in [predicted[i : i + 9] for i in range(len(predicted) + 1)]
