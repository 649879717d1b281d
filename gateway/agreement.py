"""Counts what predictions were worth, off the event loop."""

import asyncio
from collections.abc import Sequence

from specgw.lookup.prediction import num_agreed


async def count_agreed(prediction: Sequence[int], answers: Sequence[Sequence[int]]) -> int:
    """Returns how many tokens of a prediction all answers have where they are expected."""
    return await asyncio.to_thread(num_agreed, prediction, *answers) if prediction else 0
