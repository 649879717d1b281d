"""Whether to draft beyond the last block while the verifier tests it, and what came of that.

A block that was drafted ahead continues the one before it and a guess of the target's own next
token. It is of use if all of that is accepted and the guess is right; otherwise the work is wasted,
and if it runs on cores that the target needs, it delays the target. Nothing of it can reach an
answer: the verifier tests the block like any other.
"""

from dataclasses import dataclass, replace

_WEIGHT = 0.05  # of the newest round in the rate of hits
_MIN_HIT_RATE = 0.15  # below it pauses: a hit saves one drafting time, a miss costs part of one
_TRIAL_ROUNDS = 32  # before the rate counts
_PAUSE_ROUNDS = 512


@dataclass(frozen=True, slots=True)
class RunAheadCounts:
    """What was drafted ahead so far."""

    token_count: int = 0
    used_token_count: int = 0
    hit_count: int = 0  # rounds that found their block begun
    miss_count: int = 0  # rounds whose tokens drafted ahead were dropped


class RunAhead:
    """Switches itself off while it does not pay. One for all sessions."""

    def __init__(self, is_enabled: bool = False) -> None:
        self.counts = RunAheadCounts()
        self._is_enabled = is_enabled
        self._hit_rate = 1.0
        self._num_rounds = 0
        self._pause = 0

    @property
    def is_on(self) -> bool:
        """Whether to draft ahead now."""
        return self._is_enabled and not self._pause

    def count_pass(self, num_tokens: int) -> None:
        """Counts tokens that were drafted ahead."""
        self.counts = replace(self.counts, token_count=self.counts.token_count + num_tokens)

    def count_round(self, num_drafted: int, num_used: int) -> None:
        """Counts a session's commit: tokens that had been drafted ahead, and those still right."""
        if not num_drafted:
            self._pause = max(self._pause - 1, 0)
            return
        counts, is_hit = self.counts, num_used > 0
        self.counts = replace(
            counts,
            used_token_count=counts.used_token_count + num_used,
            hit_count=counts.hit_count + is_hit,
            miss_count=counts.miss_count + (not is_hit),
        )
        self._num_rounds += 1
        self._hit_rate += _WEIGHT * (is_hit - self._hit_rate)
        if self._num_rounds >= _TRIAL_ROUNDS and self._hit_rate < _MIN_HIT_RATE:
            self._pause, self._num_rounds, self._hit_rate = _PAUSE_ROUNDS, 0, 1.0
