"""A target's context as the draft model would have tokenized its text. One for each session.

Only the end of the text is tokenized anew when tokens are committed: a word's tokens do not depend
on other words, and what is some words behind the end will not change any more.
"""

from bisect import bisect_right
from collections.abc import Sequence

from specgw.spelling import Tokens
from specgw.vocab_mapping import VocabMapping

_LOOK_BEHIND = 64  # bytes before the end that are still open
_MAX_OPEN = 512  # bytes; a word as long as that is cut between two of its tokens


class Retokenizer:
    """The tokens of all text committed so far.

    Attributes:
        mapping: Between the target's tokenizer and the draft model's.
        token_ids: The draft model's tokens. One list, changed in place.
        num_settled: Leading tokens that stay, whatever is committed.
        num_encoded_bytes: How much was tokenized up to now, the same bytes again included.
    """

    def __init__(self, mapping: VocabMapping) -> None:
        self.token_ids: list[int] = list(mapping.draft.leading_ids)
        self.num_encoded_bytes = 0
        self.mapping = mapping
        self.num_settled = len(self.token_ids)
        self._open = bytearray()  # the text of all later tokens
        self._is_beginning = True  # no text is settled

    def extend(self, committed: Sequence[int]) -> tuple[int, list[int]]:
        """Takes tokens of the target.

        Returns:
            How many leading ids stay what they were, and the ids that were there after those.
        """
        start, replaced = self.num_settled, self.token_ids[self.num_settled :]
        target, markers = self.mapping.target, self.mapping.markers
        for token_id in committed:
            if token_id in markers:
                self._append_marker(markers[token_id])
            else:
                self._open += target.text_of(token_id)
        tokens = self._encode_open()
        if num_settled := _num_settled(tokens, len(self._open)):
            self._settle(self.num_settled + num_settled, tokens.offsets[num_settled])
        return start, replaced

    def _append_marker(self, marker: int) -> None:
        is_there = marker in self.mapping.draft.leading_ids and self._is_beginning
        if is_there and not self._open:
            return  # the tokenizer's own BOS
        self._encode_open()
        self.token_ids.append(marker)
        self._settle(len(self.token_ids), len(self._open))

    def _encode_open(self) -> Tokens:
        """Replaces the tokens that are not settled."""
        draft = self.mapping.draft
        if self._is_beginning and self._open:
            self._open[:0] = draft.space_before(bytes(self._open))
            self._is_beginning = False
        self.num_encoded_bytes += len(self._open)
        tokens = draft.encode(bytes(self._open))
        self.token_ids[self.num_settled :] = tokens.ids
        return tokens

    def _settle(self, num_tokens: int, num_bytes: int) -> None:
        self.num_settled = num_tokens
        del self._open[:num_bytes]


def _num_settled(tokens: Tokens, length: int) -> int:
    """Returns how many leading tokens will stay, whatever is appended to the text."""
    end = length - _LOOK_BEHIND
    # Two words are left open: how the last one is cut off may depend on what comes.
    settled = max((i for i in tokens.starts[:-2] if tokens.offsets[i] <= end), default=0)
    if tokens.offsets and length - tokens.offsets[settled] > _MAX_OPEN:
        return bisect_right(tokens.offsets, end) - 1
    return settled
