"""How many tokens are drafted, in a world whose true costs the test knows."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgw.engine.model_runner import SequenceChunk
from specgw.types import HelloAck
from tests.doubles import ToyRunner
from tests.scripted_proposers import SCRIPTED_MODEL
from verifier_svc.draft_length import (
    AcceptanceRate,
    AnswerCost,
    DraftLength,
    FirstBlock,
    Opening,
    ProposerHistory,
    SessionHistory,
    StepCost,
    profile_steps,
)

MAX_DRAFT_TOKENS = 8
# Seconds of a step of the target: flat while it waits for memory, then growing with every row.
PROFILE = ((1, 0.050), (4, 0.051), (8, 0.060), (16, 0.100), (32, 0.200))


def offer(extra_slots: int) -> HelloAck:
    return HelloAck("p", "scripted", SCRIPTED_MODEL, MAX_DRAFT_TOKENS, extra_slots, 10)


def expected_tokens(num_tokens: int, rate: float) -> float:
    """Returns the output tokens that a round of so many draft tokens gives on average."""
    return sum(rate**i for i in range(num_tokens + 1))


class World:
    """Sessions in lockstep, with a draft model that takes `draft_s` for each token."""

    def __init__(
        self, rate: float, draft_s: float, num_sessions: int, *, is_parallel: bool = False
    ):
        self.rate, self.draft_s, self.num_sessions = rate, draft_s, num_sessions
        self.is_parallel = is_parallel
        self.step_cost = StepCost(PROFILE)
        self.length = DraftLength()
        self.length.step_cost = StepCost(PROFILE)
        self.length.num_running = num_sessions
        self.sessions = [SessionHistory() for _ in range(num_sessions)]
        self.proposer = ProposerHistory.of(
            offer(MAX_DRAFT_TOKENS if is_parallel else 1), shares_cores=True
        )
        self.rng = random.Random(0)
        self.num_tokens = 0
        self.seconds = 0.0

    def answer_s(self, num_tokens: int) -> float:
        if self.is_parallel or num_tokens == 0:
            return self.draft_s * (num_tokens > 0)
        return 0.002 + self.draft_s * num_tokens

    def round_s(self, num_tokens: int) -> float:
        return self.answer_s(num_tokens) + self.step_cost.seconds(
            self.num_sessions * (1 + num_tokens)
        )

    def best(self) -> float:
        """Returns the tokens per second of the best constant choice."""
        return max(expected_tokens(k, self.rate) / self.round_s(k) for k in range(9))

    def plain(self) -> float:
        return 1 / self.round_s(0)

    @property
    def session(self) -> SessionHistory:
        """One of them."""
        return self.sessions[0]

    def run(self, num_rounds: int) -> float:
        """Returns tokens per second of one session."""
        num_tokens, seconds = 0, 0.0
        for _ in range(num_rounds):
            asked = [
                self.length.choose(MAX_DRAFT_TOKENS, session, self.proposer)
                for session in self.sessions
            ]
            noise = self.rng.uniform(0.9, 1.1)
            num_tokens += sum(map(self.accept, self.sessions, asked)) + self.num_sessions
            answer_s = self.answer_s(max(asked))
            if any(asked):
                self.proposer.observe(max(asked), answer_s * noise, self.num_sessions)
            num_rows = self.num_sessions + sum(asked)
            step_s = self.step_cost.seconds(num_rows)
            self.length.observe_step(num_rows, step_s * noise)
            seconds += answer_s + step_s
        return num_tokens / self.num_sessions / seconds

    def accept(self, session: SessionHistory, num_drafted: int) -> int:
        """Tests a session's drafts; returns how many are accepted."""
        accepted = 0
        while accepted < num_drafted and self.rng.random() < self.rate:
            accepted += 1
        if num_drafted:
            session.acceptance.observe(num_drafted, accepted)
            self.proposer.acceptance.observe(num_drafted, accepted)
        return accepted


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98])
@pytest.mark.parametrize("draft_s", [0.0005, 0.005, 0.02, 0.1])
@pytest.mark.parametrize("num_sessions", [1, 4, 16])
@pytest.mark.parametrize("is_parallel", [False, True])
def test_the_choice_is_near_the_best_constant_one_and_never_much_below_plain_decoding(
    rate: float, draft_s: float, num_sessions: int, is_parallel: bool
) -> None:
    world = World(rate, draft_s, num_sessions, is_parallel=is_parallel)
    world.run(100)  # learns

    reached = world.run(4000)

    assert reached >= 0.9 * world.best()
    assert reached >= 0.98 * world.plain()


def test_a_draft_that_becomes_good_is_found() -> None:
    world = World(0.0, 0.01, 1)
    world.run(500)
    assert world.length.best(MAX_DRAFT_TOKENS, world.session, world.proposer) == 0
    world.rate = 0.9

    world.run(2000)

    assert world.run(1000) >= 0.9 * world.best()


def test_without_knowledge_the_most_is_drafted() -> None:
    length, session, proposer = DraftLength(), SessionHistory(), ProposerHistory.of(offer(1))

    assert length.choose(5, session, proposer) == 5
    length.step_cost = StepCost(PROFILE)
    assert length.choose(5, session, proposer) == 5


def saved_s(world: World) -> float:
    """Returns the seconds that drafts save a session with each token."""
    return 1 / world.plain() - 1 / world.best()


def opening_rows(world: World, seconds: float) -> int:
    """Returns how many rows the proposer's prefill computes in that time."""
    row_s = (PROFILE[-1][1] - PROFILE[-2][1]) / (PROFILE[-1][0] - PROFILE[-2][0])
    return round(seconds / (row_s * world.answer_s(1) / PROFILE[0][1]))


def test_a_session_with_few_tokens_to_come_is_not_opened_for_them() -> None:
    """Its prefill on the target's cores would take longer than the drafts save."""
    world = World(0.9, 0.005, 1)
    world.run(100)
    num_rows = opening_rows(world, 20 * saved_s(world))

    def best(num_tokens: int) -> int:
        opening = Opening(num_rows, num_rows, num_tokens)
        return world.length.best(MAX_DRAFT_TOKENS, world.session, world.proposer, opening)

    assert best(10) == 0
    assert best(40) > 0


def test_a_session_is_opened_for_a_clear_gain_only() -> None:
    """However cheap that is: what was opened for drafts that hardly pay is lost."""
    world = World(0.45, 0.005, 4)
    world.run(100)
    session = SessionHistory()
    assert 1.05 < world.best() / world.plain() < 1.12

    assert world.length.best(MAX_DRAFT_TOKENS, session, world.proposer) > 0
    assert world.length.best(MAX_DRAFT_TOKENS, session, world.proposer, Opening(1, 1, 1e4)) == 0


def test_a_session_that_is_drafted_for_alone_is_not_worth_that_all_wait() -> None:
    world = World(0.9, 0.005, 8)
    world.run(100)

    def best(share: float) -> int:
        session = SessionHistory()
        return world.length.best(MAX_DRAFT_TOKENS, session, world.proposer, share=share)

    assert best(1.0) > 0
    assert best(1 / 8) == 0


def test_an_opening_takes_what_first_blocks_took_beyond_drafting() -> None:
    world = World(0.9, 0.02, 1)
    world.run(100)
    drafting_s = world.answer_s(4)
    guessed_s = world.length.opening_s(100, world.proposer)

    for num_rows, prefill_s in ((100, 0.2), (300, 0.6)):
        first = FirstBlock(num_rows, 4, prefill_s + drafting_s)
        world.proposer.openings.append(first)

    assert guessed_s != pytest.approx(0.2, rel=0.1)
    assert world.length.opening_s(100, world.proposer) == pytest.approx(0.2, rel=0.1)
    for _ in range(20):  # cached prompts take no time
        world.proposer.openings.append(FirstBlock(100, 4, 0.0))
    assert world.length.opening_s(100, world.proposer) == 0.0


def test_sessions_that_are_accepted_less_than_those_before_draft_fewer_tokens() -> None:
    """What sessions long gone had is forgotten within some hundred tokens."""
    world = World(0.99, 0.005, 4)
    world.run(500)
    others = World(0.7, 0.005, 4)
    others.length, others.proposer = world.length, world.proposer
    before = world.length.best(MAX_DRAFT_TOKENS, SessionHistory(), world.proposer)

    others.run(20)

    found = world.length.best(MAX_DRAFT_TOKENS, SessionHistory(), world.proposer)
    times = [others.round_s(k) for k in range(MAX_DRAFT_TOKENS + 1)]
    assert expected_tokens(found, 0.7) / times[found] >= 0.9 * others.best()
    assert found < before


def test_each_of_many_sessions_waits_for_the_openings_of_all() -> None:
    world = World(0.9, 0.002, 4)
    world.run(100)
    enough_s = 64 * saved_s(world) / 4

    def best(opening_s: float) -> int:
        num_rows = opening_rows(world, opening_s)
        opening = Opening(num_rows, 4 * num_rows, 64)
        return world.length.best(MAX_DRAFT_TOKENS, world.session, world.proposer, opening)

    assert best(enough_s * 0.5) > 0
    assert best(enough_s * 2) == 0


@pytest.mark.parametrize("num_sessions", [1, 8])
@pytest.mark.parametrize("opening_s", [0.0, 0.5, 2.0])
def test_trying_drafts_costs_all_sessions_a_hundredth_at_most(
    num_sessions: int, opening_s: float
) -> None:
    """Every try opens another session, as where answers are short."""
    world = World(0.0, 0.02, num_sessions)
    world.run(100)
    plain_s, num_rows = world.round_s(0), opening_rows(world, opening_s)
    seconds, lost_s, num_probes = 0.0, 0.0, 0
    for _ in range(20_000):
        asked = world.length.choose(
            MAX_DRAFT_TOKENS,
            world.session,
            world.proposer,
            Opening(num_rows, num_rows * num_sessions, 64),
        )
        seconds += plain_s / num_sessions  # a session's share of a round
        if asked:
            wider_s = world.step_cost.seconds(num_sessions + asked) - plain_s
            lost_s += world.answer_s(asked) + wider_s
        if asked and world.session.num_probes == 1:  # the first of two
            lost_s += opening_s
            num_probes += 1

    assert num_probes > 1 or opening_s > 1
    assert lost_s <= 0.011 * seconds + opening_s


def test_drafts_elsewhere_that_seemed_dear_are_tried_again_soon() -> None:
    """Only the session that tries them waits: many sessions bear it easily."""
    rounds = []
    for shares_cores in (True, False):
        world = World(0.8, 0.001, 64)
        world.proposer.shares_cores = shares_cores
        for _ in range(20):  # as when many prompts came at once
            world.proposer.observe(MAX_DRAFT_TOKENS, 0.5, num_running=64)
        asked = (
            world.length.choose(MAX_DRAFT_TOKENS, world.session, world.proposer)
            for _ in range(1_000_000)
        )
        rounds.append(next(n for n, num_tokens in enumerate(asked) if num_tokens) / 64)

    assert rounds[1] < 64
    assert rounds[0] > 5 * rounds[1]


def test_a_number_of_sessions_is_not_judged_by_its_first_answer() -> None:
    length, session, proposer = DraftLength(), SessionHistory(), ProposerHistory.of(offer(1))
    length.step_cost = StepCost(PROFILE)
    for _ in range(3):
        proposer.observe(4, 0.001, num_running=1)
    length.num_running = 2
    proposer.observe(4, 10.0, num_running=2)

    assert length.choose(5, session, proposer) > 0


def test_drafts_that_were_slow_at_first_are_found_though_every_answer_is_short() -> None:
    """Only the second answer to a session tells: the first one holds its prefill."""
    length, proposer = DraftLength(), ProposerHistory.of(offer(1))
    length.step_cost, length.num_running = StepCost(PROFILE), 1
    for _ in range(3):
        proposer.observe(4, 10.0, num_running=1)
    drafted = []
    for _ in range(20_000):
        session, num_rounds = SessionHistory(), 64
        answers = [length.choose(5, session, proposer) for _ in range(num_rounds)]
        for number, asked in enumerate(one for one in answers if one):
            if number > 0:
                proposer.observe(asked, 0.001 * asked, num_running=1)
            session.acceptance.observe(asked, asked)
        drafted.append(sum(answers))
        if drafted[-1] == 5 * num_rounds:
            return
    raise AssertionError("drafting never came back")


def test_a_session_whose_drafts_fail_drafts_less_than_others() -> None:
    world = World(0.9, 0.005, 2)
    for _ in range(200):
        for session, num_accepted in zip(world.sessions, (0, 4), strict=True):
            session.acceptance.observe(4, num_accepted)
            world.proposer.acceptance.observe(4, num_accepted)
        world.proposer.observe(4, 0.022, num_running=2)

    bad, good = (
        world.length.best(MAX_DRAFT_TOKENS, session, world.proposer) for session in world.sessions
    )

    assert bad < good


def test_a_session_is_not_opened_for_less_than_plain_decoding_takes() -> None:
    """Even while nothing is known of the drafts, as where no answer has more than one block."""
    length, session, proposer = DraftLength(), SessionHistory(), ProposerHistory.of(offer(1))
    length.step_cost = StepCost(PROFILE)

    assert length.best(5, session, proposer, Opening(100, 100, 4)) == 0
    assert length.best(5, session, proposer, Opening(10, 10, 4)) == 5


def test_a_proposer_is_not_judged_by_its_first_answer() -> None:
    length, session, proposer = DraftLength(), SessionHistory(), ProposerHistory.of(offer(1))
    length.step_cost = StepCost(PROFILE)
    for _ in range(2):
        proposer.observe(4, 10.0, num_running=1)
        assert length.choose(5, session, proposer) == 5
    proposer.observe(4, 10.0, num_running=1)

    assert length.choose(5, session, proposer) == 0


def test_a_fixed_length_is_kept_whatever_it_costs() -> None:
    world = World(0.0, 1.0, 1)
    world.length.is_adaptive = False
    world.run(100)

    assert world.length.choose(5, world.session, world.proposer) == 5


@pytest.mark.parametrize(
    ("num_running", "allowed"), [(0, 8), (1, 8), (4, 8), (5, 4), (8, 4), (9, 4), (20, 0), (99, 0)]
)
def test_the_schedule_by_batch_size(num_running: int, allowed: int) -> None:
    """vLLM: a gap, and what follows the last entry, keeps the K before it."""
    length = DraftLength(schedule=((10, 50, 0), (1, 4, 10), (5, 7, 4)))
    length.num_running = num_running

    assert length.allowed(8) == allowed


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=50))
def test_a_rate_of_acceptance_is_one(rounds: list[tuple[int, int]]) -> None:
    rate = AcceptanceRate()
    for drafted, accepted in rounds:
        rate.observe(drafted, min(accepted, drafted))

    assert 0 <= rate.value(0.5) <= 1


def test_an_answers_cost_is_the_line_through_what_was_measured() -> None:
    cost = AnswerCost()
    for num_tokens in (2, 5, 8, 3):
        cost.observe(num_tokens, 0.004 + 0.003 * num_tokens)

    assert cost.seconds(6) == pytest.approx(0.022)
    assert cost.seconds(0) == 0


@pytest.mark.parametrize(("is_sequential", "expected"), [(True, 0.01), (False, 0.02)])
def test_answers_for_one_number_alone(is_sequential: bool, expected: float) -> None:
    cost = AnswerCost(is_sequential)
    cost.observe(4, 0.02)

    assert cost.seconds(2) == pytest.approx(expected)


def test_a_step_costs_what_the_profile_says_scaled_by_what_is_seen() -> None:
    cost = StepCost(((1, 0.010), (4, 0.009), (8, 0.018)))  # the first was disturbed

    assert cost.seconds(1) == pytest.approx(0.009)
    assert cost.seconds(6) == pytest.approx(0.0135)
    assert cost.seconds(12) == pytest.approx(0.027)
    for _ in range(100):
        cost.observe(4, 0.018)
    assert cost.seconds(4) == pytest.approx(0.018, rel=1e-3)
    assert 0.027 < cost.seconds(8) < 0.036
    before = cost.seconds(8)
    cost.observe(4, 10.0)  # somebody else's doing
    assert cost.seconds(8) == before


@pytest.mark.parametrize("wrong", [0.5, 0.8, 1.3, 3.0])
def test_a_profile_that_is_wrong_in_one_place_is_mended(wrong: float) -> None:
    """By steps there, beside many others: else drafts would be tried over and over, or never."""
    true = {1: 0.010, 4: 0.010, 8: 0.012, 16: 0.020, 32: 0.040}
    cost = StepCost([(rows, s * (wrong if rows == 16 else 1.0)) for rows, s in true.items()])
    for _ in range(60):
        for rows in (8, 8, 8, 16):
            cost.observe(rows, true[rows])

    assert cost.seconds(8) == pytest.approx(true[8], rel=0.05)
    assert cost.seconds(16) == pytest.approx(true[16], rel=0.05)
    assert [cost.seconds(rows) for rows in range(1, 64)] == sorted(map(cost.seconds, range(1, 64)))


@pytest.mark.parametrize("num_rows", [33, 64, 640, 5000])
@pytest.mark.parametrize("flatness", [1.0, 0.1])
def test_steps_far_beyond_the_profile_settle(num_rows: int, flatness: float) -> None:
    """On a GPU steps of many rows take little longer than those of few."""
    rows = [1, 2, 4, 8, 16, 32]
    cost = StepCost([(n, 0.010 + 0.0001 * n) for n in rows])
    true_s = 0.010 + 0.0001 * flatness * num_rows
    for _ in range(200):
        cost.observe(num_rows, true_s)
    settled = []
    for _ in range(20):
        cost.observe(num_rows, true_s)
        settled.append(cost.seconds(num_rows))

    assert settled == [pytest.approx(true_s, rel=0.02)] * 20
    assert cost.prefill_row_s >= 0


def test_the_profile_leaves_nothing_behind() -> None:
    runner = ToyRunner()
    ticks = iter(range(1000))

    cost = profile_steps(runner, lambda: float(next(ticks)))

    assert runner.kv_cache.used_tokens == 0
    assert cost.seconds(5) == pytest.approx(1.0)
    cache = runner.kv_cache.new_sequence()
    runner.forward([SequenceChunk(cache, [1], 1)])


def test_blocks_that_were_ready_at_some_lengths_only_do_not_make_the_others_dear() -> None:
    """By chance all blocks of five tokens were ready, and some of six were not."""
    cost = AnswerCost()
    for number in range(20):
        cost.observe(5 + number % 2, 0.0075 if number % 4 == 1 else 0.0005)

    assert cost.seconds(6) - cost.seconds(5) < 0.0006
