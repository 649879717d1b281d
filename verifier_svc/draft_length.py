"""How many tokens to draft for a session: the number that gives most tokens for the time it takes.

With a rate of acceptance a, a round of k draft tokens gives E(k) = (1 - a^(k+1)) / (1 - a) tokens
on average (Leviathan et al., 2023, arXiv:2211.17192, equation 1) and takes D(k) + V(n (1 + k)):
the proposer's answer, then the target's step with that many rows for n sessions. k = 0 is plain
decoding. All of it is measured; nothing that is decided here depends on a drafted token, so the
output's law stays what it is.
"""

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specgw.config import EngineArgs
from specgw.engine.model_runner import ModelRunner, SequenceChunk
from specgw.line_fit import LineFit
from specgw.types import HelloAck

_PROFILE_ROWS = (1, 2, 4, 8, 16, 32)
_PROFILE_CONTEXT = 64
_ALL_WEIGHT = 0.1  # of the newest step in the times of all numbers of rows
_OWN_WEIGHT = 0.05  # and how much more in those of about as many as it had
_OUTLIER = 3.0  # a step this many times as long as expected was disturbed
_DECAY = 0.95  # of what is known, with each new answer of a proposer
_SESSION_DECAY = 0.98  # of what is known, with each new round of a session
_PROPOSER_DECAY = 0.99  # the same, with each new round of any session
_PRIOR_TOKENS = 32.0  # tested, that the proposer's own rate counts for in a session that runs alone
_MOST_PRIORS = 4  # times that many where several run
_MIN_GAIN = 1.03  # over plain decoding, for drafts to be worth their trouble
_MIN_OPENING_GAIN = 1.15  # for those of a session that is to be opened first: it is done for good
_PROBE_TOKENS = 2
_PROBE_ROUNDS = 2  # of a session: the answer to the first may hold its prefill
_MAX_PROBE_SHARE = 0.01  # of the time that sessions without drafts take
_MIN_PROBE_ROUNDS = 16  # without drafts, before they are tried again
_MIN_ANSWERS = 3  # of a proposer before it is judged: the first ones are slow
_DRAFT_SHARE = 0.5  # of the target's pass that a draft model's takes, while that is not known
_NUM_OPENINGS = 8  # newest ones that say what a prefill takes


@dataclass(slots=True)
class AcceptanceRate:
    """How likely a draft token is accepted if those before it were, by recent rounds."""

    decay: float = _SESSION_DECAY
    num_accepted: float = 0.0
    num_tested: float = 0.0

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Counts a round: the first token that is rejected is the last one that was tested."""
        tested = min(num_accepted + 1, num_drafted)
        self.num_accepted = self.decay * self.num_accepted + num_accepted
        self.num_tested = self.decay * self.num_tested + tested

    def value(self, prior: float = 1.0, prior_tokens: float = _PRIOR_TOKENS) -> float:
        """Returns the rate, near `prior` until many more than `prior_tokens` were tested."""
        weighted = self.num_accepted + prior_tokens * prior
        return weighted / (self.num_tested + prior_tokens)


@dataclass(slots=True)
class AnswerCost:
    """Seconds from asking a proposer to its block: a line over the tokens asked for.

    While all answers were for one number, they are taken to grow with it if tokens are drafted
    one after another, and to be constant if not.
    """

    is_sequential: bool = True
    num_answers: int = 0
    _fit: LineFit = field(default_factory=lambda: LineFit(_DECAY))

    def observe(self, num_tokens: int, answer_s: float) -> None:
        """Takes in one answer."""
        self.num_answers += 1
        self._fit.observe(num_tokens, answer_s)

    def seconds(self, num_tokens: int) -> float:
        """Returns the expected time of an answer with that many tokens; none for no tokens."""
        if num_tokens == 0:
            return 0.0
        (mean_x, mean_y), slope = self._fit.mean, self._fit.slope
        most = mean_y / mean_x  # with more a token, no tokens would take less than no time
        if slope is None:
            slope = most if self.is_sequential else 0.0
        else:
            slope = min(max(slope, 0.0), most)  # blocks that were ready scatter the others
        return max(0.0, mean_y + slope * (num_tokens - mean_x))


class StepCost:
    """Seconds of a step by its rows: the profile of the target, and what steps have taken since.

    A step tells something of all others, since other work on the machine makes all slower, and most
    of those with about as many rows: the profile may also have been wrong in one place.
    """

    def __init__(self, profile: Sequence[tuple[int, float]]) -> None:
        """Takes (rows, seconds), by increasing rows; at least two."""
        self._rows = [rows for rows, _ in profile]
        # More rows never take less: a shorter time is noise of the longer one.
        seconds = [seconds for _, seconds in profile]
        self._seconds = list(itertools.accumulate(reversed(seconds), min))[::-1]
        self.num_steps = 0

    def observe(self, num_rows: int, step_s: float) -> None:
        """Takes in one step of decoding sessions."""
        self.num_steps += 1
        change = step_s / self.seconds(num_rows) - 1
        if change + 1 >= _OUTLIER:
            return
        left, share = self._place(num_rows)
        own = {left: 1 - share, left + 1: share}
        if share > 1:  # the less, the farther it is beyond the profile
            own = {left + 1: 1 / share}
        nearest = left + (share >= 0.5)
        for i in range(len(self._seconds)):
            self._seconds[i] *= 1 + (_ALL_WEIGHT + _OWN_WEIGHT * own.get(i, 0.0)) * change
        for i in range(nearest - 1, -1, -1):  # the place that the step says most of prevails
            self._seconds[i] = min(self._seconds[i : i + 2])
        for i in range(nearest + 1, len(self._seconds)):
            self._seconds[i] = max(self._seconds[i - 1 : i + 1])

    def seconds(self, num_rows: int) -> float:
        """Returns the expected time of a step."""
        left, share = self._place(num_rows)
        return self._seconds[left] + share * (self._seconds[left + 1] - self._seconds[left])

    @property
    def prefill_row_s(self) -> float:
        """The expected time of one more row where there are many."""
        (first, last), rows = self._seconds[-2:], self._rows[-1] - self._rows[-2]
        return (last - first) / rows

    def _place(self, num_rows: int) -> tuple[int, float]:
        """Returns the place in the profile before so many rows, and how far they are to the next.

        More than 1 beyond the profile, which goes on with its last slope.
        """
        right = min(max(bisect.bisect_left(self._rows, num_rows), 1), len(self._rows) - 1)
        left = right - 1
        return left, (num_rows - self._rows[left]) / (self._rows[right] - self._rows[left])


def profile_steps(runner: ModelRunner, clock: Callable[[], float]) -> StepCost:
    """Measures steps of a few rows: each twice, the shorter one counts. About a second on a CPU."""
    room = min(runner.max_model_len, runner.kv_cache.capacity_tokens)
    context = min(_PROFILE_CONTEXT, room // 2)
    cache = runner.kv_cache.new_sequence()
    runner.forward([SequenceChunk(cache, [0] * context, 1)])
    profile = []
    for num_rows in (rows for rows in _PROFILE_ROWS if rows <= room - context):
        times = []
        for _ in range(2):
            began = clock()
            runner.forward([SequenceChunk(cache, [0] * num_rows, num_rows)])
            times.append(clock() - began)
            cache.truncate(context)
        profile.append((num_rows, max(min(times), 1e-9)))
    cache.release()
    return StepCost(profile)


@dataclass(slots=True)
class SessionHistory:
    """What a session's past rounds say of its next."""

    acceptance: AcceptanceRate = field(default_factory=AcceptanceRate)
    is_drafting: bool = False  # whether drafts paid last time
    num_probes: int = 0  # rounds to try drafts in, though they do not seem to pay


@dataclass(frozen=True, slots=True)
class Opening:
    """What it takes to open a session on a proposer that computes on the target's cores.

    All sessions wait for the openings of all, and they are opened together or not at all: where
    some draft and others do not, these wait for nothing of their own.
    """

    num_rows: int = 0  # of its context, for the proposer's prefill; none if it is open
    all_rows: int = 0  # of all sessions that are to be opened, this one among them
    num_tokens: float = 1.0  # of output that is to be expected of each session, which bear it


_IS_OPEN = Opening()


class FirstBlock(NamedTuple):
    """What sessions that were opened together took to have theirs: a prefill, then drafting."""

    num_rows: int
    num_tokens: int
    answer_s: float


@dataclass(slots=True)
class ProposerHistory:
    """What a proposer's past answers say of its next: their times by how many sessions ran."""

    is_sequential: bool = True
    shares_cores: bool = False  # with the target, so that all sessions wait for its blocks
    costs: dict[int, AnswerCost] = field(default_factory=dict)  # by the bits of that number
    acceptance: AcceptanceRate = field(
        # All would be accepted, as far as is known at first; that is forgotten like all else.
        default_factory=lambda: AcceptanceRate(_PROPOSER_DECAY, _PRIOR_TOKENS, _PRIOR_TOKENS)
    )
    num_idle_rounds: int = 0  # of sessions that go without drafts, since one last tried them
    idle_s: float = 0.0  # that those took of the steps
    openings: deque[FirstBlock] = field(default_factory=lambda: deque(maxlen=_NUM_OPENINGS))
    """The newest ones that nothing else delayed."""

    @classmethod
    def of(cls, offer: HelloAck, *, shares_cores: bool = False) -> "ProposerHistory":
        """Returns that of a proposer that has just connected."""
        # By vLLM's table of slots: parallel drafts take one for each token, lookups none.
        is_sequential = offer.extra_slots_per_session == 1
        return cls(is_sequential=is_sequential, shares_cores=shares_cores)

    @classmethod
    def of_lookup(cls) -> "ProposerHistory":
        """Returns that of the verifier's own lookup, whose answers take no time."""
        history = cls(is_sequential=False)
        for _ in range(_MIN_ANSWERS):
            history.observe(1, 0.0, num_running=1)
        return history

    def observe(self, num_tokens: int, answer_s: float, num_running: int) -> None:
        """Takes in one answer."""
        cost = self.costs.setdefault(num_running.bit_length(), AnswerCost(self.is_sequential))
        cost.observe(num_tokens, answer_s)

    def is_probe_due(self, round_s: float, cost_s: float) -> bool:
        """Counts a session's round without drafts, its share of a step; whether to try some.

        The sessions share the probes, as they share what is learned from them: all together may
        lose only a small share of their time.
        """
        self.num_idle_rounds += 1
        self.idle_s += round_s
        if self.num_idle_rounds < _MIN_PROBE_ROUNDS or cost_s > _MAX_PROBE_SHARE * self.idle_s:
            return False
        self.num_idle_rounds, self.idle_s = 0, 0.0
        return True

    def cost(self, num_running: int) -> AnswerCost | None:
        """Returns what answers take while so many sessions run, or the nearest number known.

        None while there were too few to tell.
        """
        known = [bits for bits, cost in self.costs.items() if cost.num_answers >= _MIN_ANSWERS]
        if not known:
            return None
        return self.costs[min(known, key=lambda bits: abs(bits - num_running.bit_length()))]


class DraftLength:
    """Chooses the number of draft tokens, at most what the configuration allows.

    Args:
        schedule: `num_speculative_tokens_per_batch_size`: (first, last, K) by the number of running
            sessions. As in vLLM a gap, and what follows the last entry, keeps the K before it.
        is_adaptive: Whether costs are measured; else it is always the most that is allowed.
    """

    def __init__(
        self, schedule: Sequence[tuple[int, int, int]] = (), is_adaptive: bool = True
    ) -> None:
        self.step_cost: StepCost | None = None  # until `profile_steps` was called
        self.num_running = 0  # sessions in the target's steps
        self.is_adaptive = is_adaptive
        self._schedule = sorted(schedule)
        self._round_times: tuple[tuple[object, ...], list[float]] = ((), [])

    def allowed(self, room: int) -> int:
        """Returns the most draft tokens that the schedule lets a session have now."""
        if not self._schedule:
            return room
        firsts = [first for first, _, _ in self._schedule]
        index = bisect.bisect_right(firsts, self.num_running) - 1
        return room if index < 0 else min(room, self._schedule[index][2])

    def observe_step(self, num_rows: int, step_s: float) -> None:
        """Takes in a step of decoding sessions only."""
        if self.step_cost is not None:
            self.step_cost.observe(num_rows, step_s)

    def choose(
        self,
        allowed: int,
        session: SessionHistory,
        proposer: ProposerHistory,
        opening: Opening = _IS_OPEN,
        share: float = 1.0,
    ) -> int:
        """Returns how many tokens to draft next, from 0 to `allowed`; where none pay, few at times.

        Called once a round: it counts how long drafts have paused. Arguments as for `best`.
        """
        num_tokens = self.best(allowed, session, proposer, opening, share)
        session.is_drafting = num_tokens > 0
        if num_tokens > 0 or allowed <= 0:
            return num_tokens
        if not session.num_probes and self._is_probe_due(proposer, opening):
            session.num_probes = _PROBE_ROUNDS
        if session.num_probes:
            session.num_probes -= 1
            return min(allowed, _PROBE_TOKENS)
        return 0

    def best(
        self,
        allowed: int,
        session: SessionHistory,
        proposer: ProposerHistory,
        opening: Opening = _IS_OPEN,
        share: float = 1.0,
    ) -> int:
        """Returns the number that gives most tokens per second; 0 unless that is clearly more.

        A session that drafts goes on while it is any more. While too little is known it is all that
        are allowed.

        Args:
            allowed: Most tokens.
            session: The session's past.
            proposer: Its proposer's.
            opening: What is to be done before.
            share: Of the sessions that wait for its block, those that have one of their own.
        """
        if not self.is_adaptive or self.step_cost is None:
            return allowed
        cost = proposer.cost(self.num_running)
        opening_s = self.opening_s(opening.all_rows, proposer) / opening.num_tokens
        if cost is None:
            return allowed if opening_s < self.step_cost.seconds(self._num_sessions) else 0
        # Sessions that run together wait for the longest block: the more they are, the less one
        # goes its own way.
        prior_tokens = min(self._num_sessions, _MOST_PRIORS) * _PRIOR_TOKENS
        usual = proposer.acceptance.value(prior_tokens=0.0)
        rate = session.acceptance.value(usual, prior_tokens)
        times = self._times(allowed, cost, self.step_cost, share)
        least_gain = _MIN_OPENING_GAIN if opening.num_rows else _MIN_GAIN
        best, most = 0, (1.0 if session.is_drafting else least_gain) / times[0]
        tokens = power = 1.0
        for num_tokens in range(1, allowed + 1):
            power *= rate
            tokens += share * power  # now E(num_tokens), or 1 for those without drafts
            per_second = tokens / (times[num_tokens] + tokens * opening_s)
            if per_second > most:
                best, most = num_tokens, per_second
        return best

    def opening_s(self, num_rows: int, proposer: ProposerHistory) -> float:
        """Returns the time of a prefill there: what first blocks took beyond drafting.

        While that is not known it is of the target's what the draft model's pass takes of its own.
        Zero if the target's steps were not measured.
        """
        if self.step_cost is None or not num_rows:
            return 0.0
        cost, openings = proposer.cost(self.num_running), proposer.openings
        if cost is not None and openings:
            took_s = sum(max(0.0, one.answer_s - cost.seconds(one.num_tokens)) for one in openings)
            return num_rows * took_s / sum(one.num_rows for one in openings)
        share = _DRAFT_SHARE if cost is None else cost.seconds(1) / self.step_cost.seconds(1)
        return num_rows * self.step_cost.prefill_row_s * min(share, 1.0)

    def _times(
        self, allowed: int, cost: AnswerCost, step_cost: StepCost, share: float
    ) -> list[float]:
        """Returns the expected times of rounds with 0 to `allowed` tokens, the same for all.

        They are computed again when something was measured.
        """
        known = self.num_running, share, cost, cost.num_answers, step_cost, step_cost.num_steps
        if known != self._round_times[0] or len(self._round_times[1]) <= allowed:
            times = [self._seconds(num_tokens, cost, share) for num_tokens in range(allowed + 1)]
            self._round_times = known, times
        return self._round_times[1]

    def _is_probe_due(self, proposer: ProposerHistory, opening: Opening) -> bool:
        """Counts a round without drafts, by what it would cost all sessions if one tried some."""
        cost, num_sessions = proposer.cost(self.num_running), self._num_sessions
        assert self.step_cost is not None  # or all that are allowed are best
        step_s = self.step_cost.seconds(num_sessions)
        wider_s = self.step_cost.seconds(num_sessions + _PROBE_TOKENS) - step_s
        answer_s = 0.0 if cost is None else cost.seconds(_PROBE_TOKENS)
        opening_s = self.opening_s(opening.num_rows, proposer)
        if not proposer.shares_cores:  # the one that tries waits alone
            answer_s /= num_sessions
        cost_s = opening_s + _PROBE_ROUNDS * (answer_s + wider_s)
        return proposer.is_probe_due(step_s / num_sessions, cost_s)

    def _seconds(self, num_tokens: int, cost: AnswerCost, share: float) -> float:
        """Returns the expected time of a round, for all sessions that run."""
        assert self.step_cost is not None
        num_rows = round(self._num_sessions * (1 + share * num_tokens))
        return cost.seconds(num_tokens) + self.step_cost.seconds(num_rows)

    @property
    def _num_sessions(self) -> int:
        return max(self.num_running, 1)


def build_draft_length(args: EngineArgs) -> DraftLength:
    """Returns what the configuration asks for."""
    settings, config = args.specgw.verifier, args.speculative_config
    return DraftLength(
        (config and config.num_speculative_tokens_per_batch_size) or (),
        settings.draft_length == "auto" and not settings.wait_for_slow_drafts,
    )
