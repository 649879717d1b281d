"""Drafts what followed the same n-gram before: vLLM's `ngram` method (prompt lookup).

As in vLLM, the longest n-gram within the window counts. Of several occurrences the latest is taken,
as by vLLM's second runner; its first takes the earliest. `python -m benchmarks.lookup` compares the
two.
"""

from collections.abc import Iterator, Sequence

from specgw.lookup.match import (
    MAX_NEW_TOKENS,
    NO_MATCH,
    Match,
    common_suffix_length,
    copied,
)

_LONGEST_MATCH = 64  # how far back a match is followed to say how long it is


class NgramLookup:
    """Implements `Lookup`; remembers nothing beyond a context."""

    method = "ngram"

    def __init__(self, min_size: int, max_size: int) -> None:
        self._min_size, self._max_size = min_size, max_size

    def open(
        self, token_ids: list[int], prompt_length: int, *, is_private: bool = False
    ) -> "NgramContext":
        return NgramContext(token_ids, self._min_size, self._max_size)


class NgramContext:
    """Implements `ContextLookup` with one table for each size of n-gram, from n-gram to its end.

    Tables hold hashes: two n-grams with one hash hide a match of the older one, no more.
    """

    def __init__(self, token_ids: Sequence[int], min_size: int, max_size: int) -> None:
        self._token_ids = token_ids
        self._ends: dict[int, dict[int, int]] = {
            size: {} for size in range(max_size, min_size - 1, -1)
        }
        self._next_end = 1  # n-grams that end before this position are in the tables

    def find(self, max_tokens: int) -> Match:
        if not self._extend():
            return NO_MATCH
        token_ids = self._token_ids
        pattern = token_ids[-_LONGEST_MATCH:]
        for size, ends in self._ends.items():
            if size >= len(token_ids):
                continue
            ngram = token_ids[-size:]
            end = ends.get(hash(tuple(ngram)))
            if end is not None and token_ids[end - size : end] == ngram:
                length = common_suffix_length(token_ids, end, pattern, min(size, len(pattern)))
                return Match(copied(token_ids, end, max_tokens), length)
        return NO_MATCH

    def close(self, *, remember: bool = True) -> None:
        self._ends.clear()

    def _extend(self) -> bool:
        """Enters n-grams that something follows by now; a later one replaces an earlier.

        Returns whether those are all.
        """
        last = min(len(self._token_ids), self._next_end + MAX_NEW_TOKENS) - 1
        for size, ends in self._ends.items():
            first = max(self._next_end, size)
            if first <= last:
                ngrams = ngram_hashes(self._token_ids[first - size : last], size)
                ends.update(zip(ngrams, range(first, last + 1), strict=True))
        self._next_end = max(self._next_end, last + 1)
        return self._next_end >= len(self._token_ids)


def ngram_hashes(token_ids: Sequence[int], size: int) -> Iterator[int]:
    """Yields the hash of each n-gram in turn; without a Python step for each."""
    return map(hash, zip(*(token_ids[offset:] for offset in range(size)), strict=False))
