"""An answer is followed through its prediction, and found again where it departs from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgw.lookup.prediction import PredictedText, Prediction, _ends_of, num_agreed
from specgw.types import GenerateRequest, SamplingParams

PREDICTED = list(range(100, 140))


def drafted_after(answer: list[int], predicted: list[int] = PREDICTED) -> list[int]:
    prediction = Prediction(PredictedText(predicted))
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
    prediction, rest = Prediction(PredictedText(predicted)), list(answer)
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        prediction.follow(rest[:count])
        del rest[:count]

    assert prediction.num_agreed == num_agreed(predicted, answer) <= len(predicted)
    assert list(prediction.draft(9)) in [predicted[i : i + 9] for i in range(len(predicted) + 1)]


class CountedTables:
    """Stands for the function that reads a whole prediction."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr("specgw.lookup.prediction._ends_of", self)

    def __call__(self, token_ids: list[int], size: int) -> dict[int, list[int]]:
        self.count += 1
        return _ends_of(token_ids, size)


def test_a_request_s_prediction_is_read_before_its_answer_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables = CountedTables(monkeypatch)
    output = (100, 101, 5, 103)
    request = GenerateRequest("r", (1,), SamplingParams(), output, prediction=PREDICTED)

    prediction = Prediction.of(request)
    num_before = tables.count
    assert prediction is not None
    assert list(prediction.draft(2)) == [104, 105]
    prediction.follow([6, 107])

    assert list(prediction.draft(2)) == [108, 109]
    assert tables.count == num_before == 3
    assert Prediction.of(GenerateRequest("r", (1,), SamplingParams())) is None


def test_a_prediction_is_read_once_for_all_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = CountedTables(monkeypatch)

    assert num_agreed(PREDICTED, [100, 101, 5], [5, 101, 102], PREDICTED) == 2 + 1 + 40
    assert tables.count == 3
