"""What a lookup finds, and the interface of the lookup methods. No model, no torch.

A lookup drafts from text that was seen before: each session's own context, and with some methods
the answers of earlier requests. The proposer serves it (`proposer_svc/lookup.py`); a verifier can
do it by itself (`verifier_svc/local_drafts.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Match:
    """Tokens that once followed what a context ends with.

    Attributes:
        token_ids: The tokens; empty if nothing was found.
        length: How many of the context's last tokens they followed.
    """

    token_ids: Sequence[int] = ()
    length: int = 0


NO_MATCH = Match()

MAX_NEW_TOKENS = 2048
"""Most tokens of a context that one call of `find` reads; about 5 ms."""


class ContextLookup(Protocol):
    """One context, whose list of token ids belongs to the caller, who only appends to it."""

    def find(self, max_tokens: int) -> Match:
        """Returns up to `max_tokens` tokens that may follow the context as it is now.

        The work depends on what was appended since the last call, not on the context's length. It
        is bounded: of a long prompt, a call reads `MAX_NEW_TOKENS` at most, and what is found in
        the context counts once all of it is read. Of earlier answers that are new, all contexts
        together read as much.
        """

    def close(self, *, remember: bool = True) -> None:
        """Ends the context. A method that remembers answers does so, unless told not to.

        It takes a short time, however long the answer is: later calls of `find` read it.
        """


class Lookup(Protocol):
    """One lookup method with its settings, and what it remembers of earlier contexts."""

    method: str

    def open(
        self, token_ids: list[int], prompt_length: int, *, is_private: bool = False
    ) -> ContextLookup:
        """Begins a context.

        Args:
            token_ids: The context, which grows.
            prompt_length: How many of its leading tokens are no answer.
            is_private: Whether it shares nothing with other contexts.
        """


def copied(token_ids: Sequence[int], start: int, max_tokens: int) -> Sequence[int]:
    """Returns the tokens from `start` on; what follows the last token is again those.

    So text that repeats itself is continued for as long as is asked, as in LZ77.
    """
    tail = token_ids[start : start + max_tokens]
    if not tail or len(tail) == max_tokens:
        return tail
    repetitions = -(-max_tokens // len(tail))
    return (list(tail) * repetitions)[:max_tokens]


def common_suffix_length(
    token_ids: Sequence[int], end: int, pattern: Sequence[int], known: int = 0
) -> int:
    """Returns how many tokens before `end` equal the last ones of `pattern`.

    Args:
        token_ids: Where to look.
        end: The position after the last token compared.
        pattern: What to compare with; the result is at most its length.
        known: How many are known to be equal.
    """
    most = min(end, len(pattern))
    length = known
    while length < most and token_ids[end - 1 - length] == pattern[-1 - length]:
        length += 1
    return length
