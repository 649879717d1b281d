"""Which outcomes of a block's test are likely enough to draft for. Imports no torch."""

import heapq
from collections.abc import Iterator, Sequence


def fan_out(
    num_branches: int, num_draft_tokens: int, acceptance: float, rates: Sequence[float]
) -> list[int]:
    """Returns how many guesses to follow after 0, 1, ... all draft tokens: the likeliest outcomes.

    With a rate of acceptance a, and r_i the probability that a rejected token's i-th runner-up is
    right, that outcome has probability a^k (1 - a) r_i after k tokens, so that the guesses become
    fewer with k (SSD's geometric fan-out). After all of them the first choice is right with
    probability a, the others as above.

    Args:
        num_branches: In all, at least 1: after all tokens there is always one.
        num_draft_tokens: Of the block.
        acceptance: a.
        rates: r_1, r_2, ..., none larger than the one before.
    """
    counts = [0] * num_draft_tokens + [1]
    outcomes = heapq.nlargest(
        num_branches - 1, _outcomes(num_draft_tokens, acceptance, rates), key=lambda one: one[0]
    )
    for _, num_accepted in outcomes:
        counts[num_accepted] += 1
    return counts


def _outcomes(
    num_draft_tokens: int, acceptance: float, rates: Sequence[float]
) -> Iterator[tuple[float, int]]:
    """Yields each outcome's probability and number, but for the likeliest after all tokens."""
    for num_accepted in range(num_draft_tokens + 1):
        for rate in rates:
            yield acceptance**num_accepted * (1 - acceptance) * rate, num_accepted
