"""Whether to draft beyond the last block while the verifier tests it, how far, and what came of it.

What was drafted ahead is of use if the outcome of the round is one that it was drafted for;
otherwise the work is wasted, and if it runs on cores that the target needs, it delays the target.
Nothing of it can reach an answer: the verifier tests the block like any other.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from proposer_svc.fan_out import fan_out
from specgw.line_fit import LineFit

_WEIGHT = 0.05  # of the newest round in the rate of hits
_MIN_HIT_RATE = 0.15  # below it pauses: a hit saves one drafting time, a miss costs part of one
_MIN_WIDE_HIT_RATE = 0.4  # the same with several branches: if less, they come too late to be used
_MOST_WIDER = 1.3  # a pass may take that many times what a narrow one does, if it must
_SHORT_GAP_WEIGHT = 0.2  # of the newest gap, if it is shorter than the average
_FIRST_GAP_S = 0.01  # before any is known
_TRIAL_ROUNDS = 32  # before the rate counts
_PAUSE_ROUNDS = 512
_DECAY = 0.995  # of what is known, with each new round or pass
_NUM_RATES = 4  # runner-ups of a token that may be followed
_PRIOR_TIMES = 8.0
_PRIOR_ACCEPTANCE = 0.8
_PRIOR_RATE = 0.5  # of each runner-up, if none before it is right


@dataclass(frozen=True, slots=True)
class RunAheadCounts:
    """What was drafted ahead so far."""

    token_count: int = 0
    used_token_count: int = 0
    hit_count: int = 0  # rounds that found their block begun
    miss_count: int = 0  # rounds whose tokens drafted ahead were dropped


@dataclass(slots=True)
class Share:
    """How often something was so, of recent times."""

    hits: float
    times: float

    def observe(self, count: float, of: float) -> None:
        """Takes in some times more."""
        self.hits = _DECAY * self.hits + count
        self.times = _DECAY * self.times + of

    @property
    def value(self) -> float:
        """The share."""
        return self.hits / self.times


class Outcomes:
    """How blocks fare with the target: how much is accepted, and what it says instead."""

    def __init__(self) -> None:
        self._acceptance = Share(_PRIOR_TIMES * _PRIOR_ACCEPTANCE, _PRIOR_TIMES)
        # Of each runner-up, if none before it was right.
        self._by_rank = [Share(_PRIOR_TIMES * _PRIOR_RATE, _PRIOR_TIMES) for _ in range(_NUM_RATES)]

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Counts a round."""
        self._acceptance.observe(num_accepted, min(num_accepted + 1, num_drafted))

    def observe_rejection(self, rank: int | None, num_known: int) -> None:
        """Counts which of the known runner-ups was right, from 0; None for none of them."""
        for place, share in enumerate(self._by_rank[:num_known]):
            share.observe(place == rank, 1)
            if place == rank:
                return

    @property
    def acceptance(self) -> float:
        """Probability that a draft token is accepted if those before it were."""
        return self._acceptance.value

    @property
    def rates(self) -> Sequence[float]:
        """Probability of each runner-up of a rejected token, none larger than the one before."""
        rates: list[float] = []
        left = 1.0
        for share in self._by_rank:
            rates.append(min(left * share.value, *rates[-1:], 1.0))
            left *= 1 - share.value
        return rates


@dataclass(slots=True)
class PassCost:
    """Seconds of a pass that feeds one row to each of some sequences: a line over their number."""

    most_seen: int = 1
    _fit: LineFit = field(default_factory=lambda: LineFit(_DECAY))

    def observe(self, num_rows: int, pass_s: float) -> None:
        """Takes in one pass."""
        self.most_seen = max(self.most_seen, num_rows)
        self._fit.observe(num_rows, pass_s)

    def most_rows(self, pass_s: float, num_narrow: int) -> float:
        """Returns how many rows a pass may have to take so long, or little more than a narrow one.

        At most twice as many as any had so far: passes become wider step by step, and no wide one
        is tried that is known to be too slow.
        """
        at_most = 2.0 * max(self.most_seen, num_narrow)
        (mean_x, mean_y), slope = self._fit.mean, self._fit.slope
        if slope is None or slope <= 0:
            return at_most
        pass_s = max(pass_s, _MOST_WIDER * (mean_y + slope * (num_narrow - mean_x)))
        return min(mean_x + (pass_s - mean_y) / slope, at_most)


class RunAhead:
    """Decides how much to draft ahead, and switches itself off while that does not pay.

    One for all sessions. Branches are as many as the time between a block and the commit after it
    has room for, or as cost next to nothing, by what passes with more rows are seen to take: where
    rows cost time, as on CPUs, that is one, the block fully accepted and the draft's own guess
    after it.
    """

    def __init__(
        self,
        is_enabled: bool = False,
        max_branches: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.counts = RunAheadCounts()
        self.outcomes = Outcomes()
        self.pass_cost = PassCost()
        self.clock = clock
        self._max_branches = max_branches
        self._is_enabled = is_enabled
        self._hit_rate = 1.0
        self._num_rounds = 0
        self._pause = 0
        self._num_runner_ups = _NUM_RATES
        self._is_wide = False  # whether there are several branches now
        self._gap_s = _FIRST_GAP_S  # from a block to the commit after it

    @property
    def is_on(self) -> bool:
        """Whether to draft ahead now."""
        return self._is_enabled and not self._pause

    @property
    def num_runner_ups(self) -> int:
        """How many runner-ups of each draft token to keep: those followed, and one to learn of."""
        if not self.is_on or self._max_branches == 1:
            return 0
        return self._num_runner_ups

    def fan_out(self, num_draft_tokens: int, num_sessions: int) -> Sequence[int]:
        """Returns how many guesses of a session to follow after 0, 1, ... all tokens of its block.

        Args:
            num_draft_tokens: Of that block.
            num_sessions: That share the passes.
        """
        num_branches = self._max_branches
        if num_branches > 1:
            # The guess after the whole block takes one pass more than the others.
            pass_s = self._gap_s / (num_draft_tokens + 1)
            num_rows = self.pass_cost.most_rows(pass_s, num_sessions)
            num_branches = int(max(1, min(num_branches, num_rows / num_sessions)))
        self._is_wide = num_branches > 1
        outcomes = self.outcomes
        counts = fan_out(num_branches, num_draft_tokens, outcomes.acceptance, outcomes.rates)
        self._num_runner_ups = min(_NUM_RATES, max(counts) + 1)
        return counts

    def observe_gap(self, gap_s: float) -> None:
        """Takes in the time from a block to the commit after it."""
        # Follows the short ones: what is drafted ahead may itself be why others are long.
        is_short = gap_s < self._gap_s
        self._gap_s += (_SHORT_GAP_WEIGHT if is_short else _WEIGHT / 2) * (
            min(gap_s, 2 * self._gap_s) - self._gap_s
        )

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
        least = _MIN_WIDE_HIT_RATE if self._is_wide else _MIN_HIT_RATE
        if self._num_rounds >= _TRIAL_ROUNDS and self._hit_rate < least:
            self._pause, self._num_rounds, self._hit_rate = _PAUSE_ROUNDS, 0, 1.0
