"""Lists that count what is read of them, and texts to put into them."""

import random
from typing import Any


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
