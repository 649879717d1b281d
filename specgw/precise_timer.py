"""Waits to a few hundredths of a millisecond without keeping a core busy."""

import time

_AVERAGE_WEIGHT = 0.05
_MAX_LATE_S = 0.001  # a thread that was late by more was kept from running: no habit of the clock's


class PreciseTimer:
    """Sleeps a little less than asked for: by how late the system usually wakes this thread."""

    def __init__(self) -> None:
        self._late_s = 0.0

    def now(self) -> float:
        """Returns what `wait_until` compares with."""
        return time.perf_counter()

    def wait_until(self, deadline: float) -> None:
        """Returns at `deadline`, a `time.perf_counter()`; at once if that is past."""
        left_s = deadline - time.perf_counter() - self._late_s
        if left_s <= 0:
            return
        time.sleep(left_s)
        late_s = time.perf_counter() - (deadline - self._late_s)
        self._late_s += _AVERAGE_WEIGHT * (min(late_s, _MAX_LATE_S) - self._late_s)
