"""Where each n-gram of a growing text occurred, the latest occurrence first."""

from array import array
from collections.abc import Sequence

from specgw.lookup.ngram import ngram_hashes

_SIZES = (8, 4, 2, 1)  # of the n-grams that are entered; longer matches are found among the first
_COMPACT_AT = 8  # deleted once they are this part of the text: to delete from its start takes long


class OccurrenceIndex:
    """Chains of occurrences, one for each n-gram of a few sizes, as in LZ77 compressors.

    Attributes:
        token_ids: The text. The caller appends to it; `extend` enters what is new. Its first tokens
            may be some that were dropped.
    """

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self._num_deleted = 0  # positions in the chains count from the first token ever
        self._num_stale = 0  # leading tokens that are dropped and not yet deleted
        self._latest: dict[int, dict[int, int]] = {size: {} for size in _SIZES}
        self._earlier: dict[int, array[int]] = {size: array("q", [0]) for size in _SIZES}

    def __len__(self) -> int:
        """Tokens that are not dropped."""
        return len(self.token_ids) - self._num_stale

    def extend(self, max_tokens: int | None = None) -> bool:
        """Enters the n-grams that end in tokens that something follows by now.

        Args:
            max_tokens: How many more tokens to read at most; all if it is none.

        Returns:
            Whether all are read.
        """
        end = len(self.token_ids)
        if max_tokens is not None:
            end = min(end, len(self._earlier[1]) + max_tokens)
        for size, latest in self._latest.items():
            earlier = self._earlier[size]  # by end of the n-gram: the end of the one before, or 0
            first, last = len(earlier), end - 1
            earlier.extend([0] * (min(size, last + 1) - first))
            first = len(earlier)
            if first > last:
                continue
            position = self._num_deleted + first
            for ngram in ngram_hashes(self.token_ids[first - size : last], size):
                earlier.append(latest.get(ngram, 0))
                latest[ngram] = position
                position += 1
        return end == len(self.token_ids)

    def latest(self, pattern: Sequence[int], limit: int) -> dict[int, int]:
        """Returns the latest ends of what `pattern` ends with, the longest n-grams first.

        Returns:
            Up to `limit` offsets into `token_ids`, each with the number of tokens known to agree.
        """
        found: dict[int, int] = {}
        for size in _SIZES:
            if size <= len(pattern) and len(found) < limit:
                for end in self._chain(pattern[-size:], limit):
                    if len(found) < limit:
                        found.setdefault(end, size)
        return found

    def drop(self, count: int) -> None:
        """Forgets the first `count` tokens, and every n-gram that one of them is in."""
        first = self._num_stale
        self._num_stale += count
        for size, latest in self._latest.items():
            hashes = ngram_hashes(self.token_ids[first : self._num_stale + size - 1], size)
            for end, ngram in enumerate(hashes, start=self._num_deleted + first + size):
                if latest.get(ngram) == end:
                    del latest[ngram]
        if self._num_stale * _COMPACT_AT >= len(self.token_ids):
            self._delete_stale()

    def _delete_stale(self) -> None:
        for earlier in self._earlier.values():
            del earlier[: self._num_stale]
        del self.token_ids[: self._num_stale]
        self._num_deleted += self._num_stale
        self._num_stale = 0

    def _chain(self, ngram: Sequence[int], limit: int) -> list[int]:
        size = len(ngram)
        found: list[int] = []
        end = self._latest[size].get(hash(tuple(ngram)), 0) - self._num_deleted
        while end >= self._num_stale + size and len(found) < limit:
            if self.token_ids[end - size : end] != ngram:  # another one with the same hash
                break
            found.append(end)
            end = self._earlier[size][end] - self._num_deleted
        return found
