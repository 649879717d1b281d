"""Lists that count what is read of them, and texts to put into them."""

import random
from typing import Any

from specgw.lookup.match import MAX_NEW_TOKENS, ContextLookup


class CountingTokens(list[int]):
    """Token ids that count how many of them were read by index or slice."""

    num_touched = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.num_touched += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Any:
        raise AssertionError("the whole context was read")


def random_text(length: int, num_ids: int = 1_000) -> list[int]:
    """Returns the same random ids each time."""
    return random.Random(length).choices(range(num_ids), k=length)


def read_all(lookup: ContextLookup, length: int) -> None:
    """Lets a lookup read a context of so many tokens, however many calls that takes."""
    for _ in range(length // MAX_NEW_TOKENS + 1):
        lookup.find(8)
