"""Drafts from a prediction: what a client says the answer will be, such as the file it edits.

OpenAI's predicted outputs. To read a long prediction takes long: in services, a thread of its own
builds it, `Prediction.of`, before the answer begins.

The answer is followed through the prediction; where it departs from it,
its last tokens are looked for in the prediction, ahead first.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from functools import cached_property

from specgw.lookup.ngram import ngram_hashes
from specgw.types import GenerateRequest

METHOD = "prediction"

_SIZES = (4, 2, 1)  # of the n-grams that bring an answer back to its prediction
_NEAR = 32  # a single token does so only this far ahead


class PredictedText:
    """A predicted answer, and where its n-grams are."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids

    @cached_property
    def ends(self) -> dict[int, dict[int, list[int]]]:
        """Positions after n-grams, by size and hash, ascending; the first use builds the tables."""
        return {size: _ends_of(self.token_ids, size) for size in _SIZES}


class Prediction:
    """How far an actual answer has come in a predicted one."""

    def __init__(self, text: PredictedText) -> None:
        self._text = text
        self._newest: deque[int] = deque(maxlen=max(_SIZES))  # tokens of the actual answer
        self._next: int | None = 0  # position of the token that should come now; None if none is
        self._last = 0  # position after the last token that came as predicted
        self._agreed: set[int] = set()  # positions whose token came as predicted

    @classmethod
    def of(cls, request: GenerateRequest) -> "Prediction | None":
        """Returns a request's, as far as its output has come; none if it has none.

        What follows takes the same short time for each token, however long the prediction is.
        """
        if not request.prediction:
            return None
        text = PredictedText(request.prediction)
        text.ends  # noqa: B018 - builds them
        prediction = cls(text)
        prediction.follow(request.output_token_ids)
        return prediction

    @property
    def num_agreed(self) -> int:
        """Tokens of the prediction that the answer had where they were expected."""
        return len(self._agreed)

    def follow(self, token_ids: Sequence[int]) -> None:
        """Takes note of the answer's next tokens."""
        for token_id in token_ids:
            self._newest.append(token_id)
            if self._next is not None and self.draft(1) == [token_id]:
                self._agreed.add(self._next)
                self._last = self._next = self._next + 1
            else:
                self._next = self._find()

    def draft(self, max_tokens: int) -> Sequence[int]:
        """Returns up to `max_tokens` tokens that should come now; none while the answer departs."""
        if self._next is None:
            return []
        return list(self._text.token_ids[self._next : self._next + max_tokens])

    def _find(self) -> int | None:
        """Returns the position after what the answer ends with.

        The nearest one ahead, or else, for the longest n-gram only, the last one.
        """
        newest, tables = tuple(self._newest), self._text.ends
        for size in _SIZES:
            ends = tables[size].get(hash(newest[-size:]), []) if len(newest) >= size else []
            ahead = bisect_left(ends, self._last + 1)
            if ahead < len(ends) and (size > 1 or ends[ahead] <= self._last + _NEAR):
                return ends[ahead]
            if ends and size == _SIZES[0]:
                return ends[-1]
        return None


def num_agreed(prediction: Sequence[int], *answers: Sequence[int]) -> int:
    """Returns how many tokens of a prediction whole answers have where they are expected.

    It reads them all: not for an event loop.
    """
    text = PredictedText(prediction)
    followed = [Prediction(text) for _ in answers]
    for one, answer in zip(followed, answers, strict=True):
        one.follow(answer)
    return sum(one.num_agreed for one in followed)


def _ends_of(token_ids: Sequence[int], size: int) -> dict[int, list[int]]:
    ends: dict[int, list[int]] = {}
    for end, ngram in enumerate(ngram_hashes(token_ids, size), start=size):
        ends.setdefault(ngram, []).append(end)
    return ends
