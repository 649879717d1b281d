"""Drafts by what mostly followed the longest match: vLLM's `suffix` method.

SuffixDecoding (Oliaro et al., 2024, arXiv:2411.04975), with the settings of Arctic Inference: a
match of `length` tokens allows `max_spec_factor * length` draft tokens, match and draft together at
most `max_tree_depth`; the draft goes on with the most frequent token while the estimated chance of
the whole is at least `min_token_prob`. Of several drafts the one with the largest sum of chances
counts. Matches are looked for in the session's own context and in the latest answers of others.

Instead of trees with a count for every node, an index keeps where n-grams of a few sizes occurred,
and counts over the latest occurrences of a match. It takes a few hundred bytes a token, whatever
the depth, and the oldest answer leaves without a walk.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from specgw.lookup.match import MAX_NEW_TOKENS, NO_MATCH, Match, common_suffix_length
from specgw.lookup.occurrences import OccurrenceIndex

_MAX_REMEMBERED_TOKENS = 2**19  # of all remembered answers: about 250 MB with their index
_MAX_OCCURRENCES = 16  # that are counted over
_MAX_LENGTHS = 4  # lengths of match that are tried, the longest first
_END_OF_ANSWER = -1


@dataclass(frozen=True, slots=True)
class SuffixSettings:
    """The `suffix_decoding_*` keys, without that prefix."""

    max_tree_depth: int
    max_cached_requests: int
    max_spec_factor: float
    min_token_prob: float


class SuffixLookup:
    """Implements `Lookup`; remembers the latest answers."""

    method = "suffix"

    def __init__(self, settings: SuffixSettings) -> None:
        self._settings = settings
        self._answers = _RememberedAnswers(settings.max_cached_requests)

    def open(
        self, token_ids: list[int], prompt_length: int, *, is_private: bool = False
    ) -> "SuffixContext":
        answers = _RememberedAnswers(0) if is_private else self._answers
        answers.num_readers += 1
        return SuffixContext(token_ids, prompt_length, self._settings, answers)


class SuffixContext:
    """Implements `ContextLookup`."""

    def __init__(
        self,
        token_ids: list[int],
        prompt_length: int,
        settings: SuffixSettings,
        answers: "_RememberedAnswers",
    ) -> None:
        self._token_ids = token_ids
        self._prompt_length = prompt_length
        self._depth = settings.max_tree_depth
        self._min_prob = settings.min_token_prob
        self._max_drafts = _max_drafts(settings)
        self._own = OccurrenceIndex(token_ids)
        self._answers = answers

    def find(self, max_tokens: int) -> Match:
        has_read_all = self._own.extend(MAX_NEW_TOKENS)
        self._answers.read()
        pattern = self._token_ids[-self._depth :]
        own = self._best(self._own, pattern, max_tokens) if has_read_all else _Draft()
        other = self._best(self._answers.index, pattern, max_tokens)
        best = own if own.score >= other.score else other
        return Match(best.token_ids, best.length) if best.token_ids else NO_MATCH

    def close(self, *, remember: bool = True) -> None:
        self._answers.num_readers -= 1
        if remember:
            self._answers.remember(self._token_ids[self._prompt_length :])

    def _best(self, index: OccurrenceIndex, pattern: Sequence[int], max_tokens: int) -> "_Draft":
        """Returns the draft with the best score; of equal ones that of the longest match."""
        occurrences = [
            (common_suffix_length(index.token_ids, end, pattern, known), end)
            for end, known in index.latest(pattern, _MAX_OCCURRENCES).items()
        ]
        best = _Draft()
        for length in sorted({length for length, _ in occurrences}, reverse=True)[:_MAX_LENGTHS]:
            ends = [end for common, end in occurrences if common >= length]
            num_tokens = min(max_tokens, self._max_drafts[length])
            draft = _most_frequent(index.token_ids, ends, num_tokens, self._min_prob)
            if draft.score > best.score:
                best = _Draft(draft.token_ids, draft.score, length)
        return best


@dataclass(frozen=True, slots=True)
class _Draft:
    token_ids: Sequence[int] = ()
    score: float = 0.0  # expected number of tokens accepted, by the estimated chances
    length: int = 0


class _RememberedAnswers:
    """The latest answers one after another, the oldest of them dropped first.

    A long answer is read, and dropped, piece by piece while others are drafted for.

    Attributes:
        index: What is read of them.
        num_readers: Contexts that call `read` in each round.
    """

    def __init__(self, max_answers: int) -> None:
        self.index = OccurrenceIndex([])
        self.num_readers = 0
        self._max_answers = max_answers
        self._lengths: deque[int] = deque()  # of answers in the index, as far as they are there
        self._unread: deque[Sequence[int]] = deque()
        self._num_read = 0  # tokens of the first of those that are in the index

    def remember(self, token_ids: Sequence[int]) -> None:
        """Adds an answer, if any are to be remembered."""
        token_ids = token_ids[-_MAX_REMEMBERED_TOKENS + 1 :]
        if not token_ids or not self._max_answers:
            return
        self._unread.append([*token_ids, _END_OF_ANSWER])
        while len(self._unread) > self._max_answers or self._num_unread > _MAX_REMEMBERED_TOKENS:
            self._end_reading()

    def read(self) -> None:
        """Reads as much of new answers as a context may in its turn, and drops as much of old."""
        num_tokens = MAX_NEW_TOKENS // max(self.num_readers, 1) + 1
        self._enter(num_tokens)
        self._drop(num_tokens)

    @property
    def _num_unread(self) -> int:
        return sum(map(len, self._unread)) - self._num_read

    def _enter(self, max_tokens: int) -> None:
        while self._unread and max_tokens > 0:
            piece = self._unread[0][self._num_read : self._num_read + max_tokens]
            if not self._num_read:
                self._lengths.append(0)
            self._lengths[-1] += len(piece)
            self._num_read += len(piece)
            max_tokens -= len(piece)
            self.index.token_ids += piece
            if self._num_read == len(self._unread[0]):
                self._end_reading()
        self.index.extend()

    def _end_reading(self) -> None:
        answer = self._unread.popleft()
        if 0 < self._num_read < len(answer):  # there was no time for the rest of it
            self.index.token_ids.append(_END_OF_ANSWER)
            self._lengths[-1] += 1
        self._num_read = 0

    def _drop(self, max_tokens: int) -> None:
        while self._lengths:
            surplus = len(self.index) - _MAX_REMEMBERED_TOKENS
            if len(self._lengths) > self._max_answers:
                surplus = self._lengths[0]
            count = min(surplus, self._lengths[0], max_tokens)
            if count <= 0:
                return
            self.index.drop(count)
            max_tokens -= count
            self._lengths[0] -= count
            if not self._lengths[0]:
                self._lengths.popleft()


def _max_drafts(settings: SuffixSettings) -> Sequence[int]:
    """Returns the most draft tokens by length of match: a match may be taken as a shorter one."""
    depth, factor = settings.max_tree_depth, settings.max_spec_factor
    most = [0]
    for length in range(1, depth + 1):
        most.append(max(most[-1], min(int(length * factor + 1e-6), depth - length)))
    return most


def _most_frequent(
    text: Sequence[int], starts: Sequence[int], num_tokens: int, min_prob: float
) -> _Draft:
    """Follows the most frequent token from occurrence to occurrence.

    Args:
        text: Where they occurred.
        starts: The positions after each occurrence.
        num_tokens: Most tokens to draft.
        min_prob: Least estimated chance of all tokens so far.
    """
    draft: list[int] = []
    chance, score = 1.0, 0.0
    while len(starts) > 1 and len(draft) < num_tokens:
        following = [_following(text, start, draft) for start in starts]
        counts = Counter(one for one in following if one != _END_OF_ANSWER)
        if not counts:
            return _Draft(draft, score)
        token_id, count = counts.most_common(1)[0]
        if chance * count / len(starts) < min_prob:
            return _Draft(draft, score)
        chance *= count / len(starts)
        score += chance
        draft.append(token_id)
        starts = [start for start, one in zip(starts, following, strict=True) if one == token_id]
    while starts and len(draft) < num_tokens:  # one occurrence is followed to the end
        token_id = _following(text, starts[0], draft)
        if token_id == _END_OF_ANSWER:
            break
        score += chance
        draft.append(token_id)
    return _Draft(draft, score)


def _following(text: Sequence[int], start: int, draft: Sequence[int]) -> int:
    """Returns the token after an occurrence and the draft; the end of the text leads into it."""
    position = start + len(draft)
    return text[position] if position < len(text) else draft[position - len(text)]
