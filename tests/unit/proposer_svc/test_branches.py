"""Blocks drafted ahead for several outcomes: what is followed, and that it changes no block."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from proposer_svc.draft_chooser import DraftChooser
from proposer_svc.draft_model import DraftModelDrafter
from proposer_svc.draft_sampling import DraftSampler, row_sampling
from proposer_svc.fan_out import fan_out
from proposer_svc.proposer import ProposerCore
from proposer_svc.run_ahead import PassCost, RunAhead
from specgw.engine.kv_cache import BLOCK_SIZE
from specgw.engine.model_runner import SequenceChunk
from specgw.types import (
    Commit,
    DraftBlock,
    DraftSampling,
    Hello,
    ModelDescription,
    OpenSession,
    ProposeStep,
)
from tests.doubles import ToyRunner, toy_next

pytestmark = pytest.mark.usefixtures("single_thread")

K = 4
MANY = 2 * (K + 1) + 1  # branches: two after each number of tokens, and one more
PROMPT = tuple(range(3, 25))  # one full KV block, and rows that forks copy
SAMPLING = DraftSampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7)


class RankedRunner(ToyRunner):
    """A toy whose choices are `toy_next`, then the ids after it."""

    def _logits(self, context: Sequence[int]) -> Tensor:
        first = toy_next(context, self.vocab_size)
        return -((torch.arange(self.vocab_size) - first) % self.vocab_size).float()


class Bench:
    """A proposer with some sessions, of which the tests mostly use the first."""

    def __init__(
        self,
        method: str = "greedy",
        *,
        max_branches: int = MANY,
        is_enabled: bool = True,
        sampling: DraftSampling | None = None,
        num_sessions: int = 1,
        kv_cache_tokens: int = 4096,
        max_model_len: int = 512,
        takes_blocks_ahead: bool = False,
    ) -> None:
        self.runner = RankedRunner(kv_cache_tokens=kv_cache_tokens, max_model_len=max_model_len)
        self.ahead = RunAhead(is_enabled, max_branches, clock=lambda: 0.0)
        self.ahead.pass_cost.observe(10_000, 0.0)  # rows are known to be free
        sampler = DraftSampler(method)
        drafter = DraftModelDrafter(
            self.runner, 2048, chooser=DraftChooser(sampler), run_ahead=self.ahead
        )
        self.core = ProposerCore(drafter, max_draft_tokens=8, max_sessions=8)
        target = ModelDescription("t", "T", 50, "toy", 512, "float32", "cpu")
        self.core.connect(Hello("v", target, 8, takes_blocks_ahead=takes_blocks_ahead))
        self.contexts = {number: [*PROMPT, number] for number in range(1, num_sessions + 1)}
        opened = [
            OpenSession(number, tuple(context), sampling=sampling)
            for number, context in self.contexts.items()
        ]
        self.core.apply("v", ProposeStep(open=opened))
        self.finish()

    def commit(self, committed: Sequence[int], num_tokens: int = K, session: int = 1) -> None:
        context = self.contexts[session]
        commit = Commit(session, len(context), tuple(committed), num_tokens)
        assert self.core.apply("v", ProposeStep(commit=[commit])) == []
        context += committed

    def ask(self, committed: Sequence[int], num_tokens: int = K, session: int = 1) -> DraftBlock:
        """Commits tokens and returns the block that follows them."""
        self.commit(committed, num_tokens, session)
        [block] = self.finish()
        return block

    def finish(self) -> list[DraftBlock]:
        blocks = []
        while self.core.has_work():
            blocks += [block for _, block in self.core.step()]
        return blocks

    def run_ahead(self, num_passes: int = 100) -> None:
        """Drafts ahead as far as it goes, or so many passes."""
        for _ in range(num_passes):
            if not self.core.can_run_ahead():
                return
            self.core.run_ahead()
        assert num_passes < 100

    def close(self) -> None:
        self.core.apply("v", ProposeStep(close=list(self.contexts)))


def facts(block: DraftBlock) -> tuple[object, ...]:
    """Returns all of a block but its time."""
    laws = [(law.token_ids.tolist(), law.probs.tolist()) for law in block.draft_probs]
    return block.base_length, list(block.token_ids), block.rule, block.reason, laws


# Which outcomes are followed.


@pytest.mark.parametrize("num_branches", [1, 2, 7, 15, 22])
@pytest.mark.parametrize("acceptance", [0.5, 0.8, 0.97])
def test_branches_go_to_the_likeliest_outcomes(num_branches: int, acceptance: float) -> None:
    rates = [0.6, 0.2, 0.1, 0.05]
    rejected = {
        (k, i): acceptance**k * (1 - acceptance) * rate
        for k in range(6)
        for i, rate in enumerate(rates)
    }
    last = {(6, 1 + i): acceptance**6 * (1 - acceptance) * rate for i, rate in enumerate(rates)}
    best = sorted([*rejected.values(), *last.values()], reverse=True)[: num_branches - 1]

    counts = fan_out(num_branches, 6, acceptance, rates)

    assert sum(counts) == num_branches
    assert counts[6] >= 1
    assert counts[:6] == sorted(counts[:6], reverse=True)
    chosen = [rejected[k, i] for k, count in enumerate(counts[:6]) for i in range(count)]
    chosen += [last[6, i] for i in range(1, counts[6])]
    assert sorted(chosen, reverse=True) == pytest.approx(best)


@pytest.mark.parametrize("num_accepted", range(K + 1))
def test_the_block_after_a_likely_outcome_is_there_already(num_accepted: int) -> None:
    bench, plain = Bench(), Bench(is_enabled=False)
    block = bench.ask([9])
    plain.ask([9])
    bench.run_ahead()
    bench.runner.passes.clear()
    accepted = list(block.token_ids[:num_accepted])
    second = (toy_next([*bench.contexts[1], *accepted]) + 1) % 50
    committed = [*accepted, second]

    blocks = [one.ask(committed) for one in (bench, plain)]

    assert bench.runner.passes == []
    assert facts(blocks[0]) == facts(blocks[1])
    assert bench.ahead.counts.hit_count == 1
    assert bench.ahead.counts.used_token_count == K


def test_all_branches_of_all_sessions_are_drafted_in_one_pass_a_token() -> None:
    bench = Bench(num_sessions=3)
    for session in (1, 2, 3):
        bench.commit([9], session=session)
    bench.finish()
    bench.runner.passes.clear()

    bench.run_ahead()

    # The last token of each block is fed first, to see what follows it: one pass more for these.
    assert len(bench.runner.passes) == 1 + K
    assert len(bench.runner.passes[1]) == 3 * MANY


def test_outcomes_that_nobody_followed_are_drafted_as_ever() -> None:
    bench, plain = Bench(), Bench(is_enabled=False)
    block = bench.ask([9])
    plain.ask([9])
    bench.run_ahead()
    committed = [block.token_ids[0], (toy_next([*bench.contexts[1], block.token_ids[0]]) + 9) % 50]

    assert facts(bench.ask(committed)) == facts(plain.ask(committed))
    assert bench.ahead.counts.miss_count == 1


@pytest.mark.parametrize("num_passes", range(1, K + 1))
def test_a_commit_while_branches_are_drafted_goes_on_with_its_own(num_passes: int) -> None:
    bench = Bench()
    block = bench.ask([9])
    bench.run_ahead(num_passes)
    bench.runner.passes.clear()
    second = (toy_next([*bench.contexts[1], block.token_ids[0]]) + 1) % 50

    following = bench.ask([block.token_ids[0], second])

    assert len(following.token_ids) == K
    assert bench.runner.passes == [[1]] * (K - num_passes)


def test_prepared_blocks_do_not_wait_for_others() -> None:
    bench = Bench(num_sessions=2)
    blocks = {}
    for session in (1, 2):
        bench.commit([9], session=session)
    for block in bench.finish():
        blocks[block.session_id] = block
    bench.run_ahead()
    bench.runner.passes.clear()
    guess = toy_next([*bench.contexts[1], *blocks[1].token_ids])
    bench.commit([*blocks[1].token_ids, guess], session=1)
    bench.commit([(blocks[2].token_ids[0] + 20) % 50], session=2)

    [(_, first)] = bench.core.step()

    assert first.session_id == 1
    assert bench.runner.passes == []
    [second] = bench.finish()
    assert second.session_id == 2


def test_branches_go_on_beside_the_blocks_of_others() -> None:
    bench = Bench(num_sessions=2)
    bench.ask([9], session=1)

    bench.ask([9], session=2)

    assert max(len(rows) for rows in bench.runner.passes) > K
    assert bench.ahead.counts.token_count > 0


# What is drafted.


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["greedy", "coupled", "probabilistic"]),
    st.booleans(),
    st.integers(1, 30),
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 8), st.integers(0, 4), st.integers(1, 8)),
        max_size=8,
    ),
)
def test_blocks_and_laws_are_those_of_a_proposer_that_never_runs_ahead(
    method: str,
    is_random: bool,
    max_branches: int,
    rounds: list[tuple[int, int, int, int]],
) -> None:
    """Rounds of (passes ahead, tokens accepted, place of the next among the choices, wanted)."""
    sampling = SAMPLING if is_random else replace(SAMPLING, temperature=0.0)
    bench = Bench(method, max_branches=max_branches, sampling=sampling)
    plain = Bench(method, is_enabled=False, sampling=sampling)
    block = bench.ask([9])
    assert facts(block) == facts(plain.ask([9]))
    for num_passes, num_accepted, place, num_wanted in rounds:
        bench.run_ahead(num_passes)
        accepted = list(block.token_ids[:num_accepted])
        token_id = (toy_next([*bench.contexts[1], *accepted]) + place) % 50
        block = bench.ask([*accepted, token_id], num_wanted)

        assert facts(block) == facts(plain.ask([*accepted, token_id], num_wanted))

    for one in (bench, plain):
        one.close()
    assert bench.runner.kv_cache.used_tokens == 0


def test_coupled_guesses_follow_the_noise_that_the_target_draws_with() -> None:
    """The target that says what the draft would, had it not said it already, is followed."""
    logits = torch.linspace(0, 2, 600).unsqueeze(0).repeat(200, 1)
    sampler = DraftSampler("coupled")
    rows = [row_sampling(SAMPLING, position, 0) for position in range(200)]
    tokens, runner_ups = sampler.choose_with_runner_ups(logits.clone(), rows, 3)
    rest = logits.clone()
    rest[range(200), [token.token_id for token in tokens if token is not None]] = -torch.inf

    seconds = sampler.choose(rest, rows)

    places = [
        known.index(second.token_id)
        for known, second in zip(runner_ups, seconds, strict=True)
        if second is not None and second.token_id in known
    ]
    by_size = [1 for second in seconds if second and second.token_id >= 597]
    assert all(place == 0 for place in places)
    assert len(places) >= len(by_size) > 0


# Memory.


def test_branches_leave_no_rows_behind() -> None:
    bench = Bench()
    block = bench.ask([9])
    used = bench.runner.kv_cache.used_tokens
    bench.run_ahead()
    assert bench.runner.kv_cache.used_tokens > used

    bench.ask([(block.token_ids[0] + 20) % 50])

    rows = len(bench.contexts[1]) + K - 1
    assert bench.runner.kv_cache.used_tokens == -(-rows // BLOCK_SIZE) * BLOCK_SIZE
    bench.close()
    assert bench.runner.kv_cache.used_tokens == 0


def test_branches_give_way_to_sessions() -> None:
    """Each of two sessions fits in, with branches only one would."""
    bench = Bench(num_sessions=2, kv_cache_tokens=8 * BLOCK_SIZE)
    for _ in range(3):
        for session in (1, 2):
            assert bench.ask([9], session=session).reason is None
            bench.run_ahead()


def test_without_memory_for_all_branches_one_is_followed() -> None:
    bench = Bench(kv_cache_tokens=3 * BLOCK_SIZE)
    block = bench.ask([9])
    bench.run_ahead()
    bench.runner.passes.clear()
    guess = toy_next([*bench.contexts[1], *block.token_ids])

    bench.ask([*block.token_ids, guess])

    assert bench.runner.passes == []


def test_no_row_is_drafted_beyond_the_model_s_length() -> None:
    bench = Bench(max_model_len=len(PROMPT) + 12)
    block = bench.ask([9])
    bench.run_ahead()
    while True:
        second = (toy_next([*bench.contexts[1], block.token_ids[0]]) + 1) % 50
        step = ProposeStep(
            commit=[Commit(1, len(bench.contexts[1]), (block.token_ids[0], second), K)]
        )
        bench.contexts[1] += [block.token_ids[0], second]
        if refused := bench.core.apply("v", step):
            break
        [block] = bench.finish()
        bench.run_ahead()

    assert refused[0].reason is not None
    assert len(bench.contexts[1]) >= len(PROMPT) + 12


def test_a_failed_pass_ahead_costs_no_block() -> None:
    bench, plain = Bench(), Bench(is_enabled=False)
    block = bench.ask([9])
    plain.ask([9])

    def fail(chunks: Sequence[SequenceChunk]) -> None:
        raise RuntimeError("broken")

    bench.run_ahead(1)
    bench.runner.fault = fail
    bench.core.run_ahead()
    bench.runner.fault = lambda chunks: None
    committed = [block.token_ids[0], 3]

    assert facts(bench.ask(committed)) == facts(plain.ask(committed))


# How many.


def test_rows_that_cost_time_leave_one_branch() -> None:
    ahead = RunAhead(is_enabled=True, max_branches=22)
    for num_rows in range(1, 20):
        ahead.pass_cost.observe(num_rows, 0.02 * num_rows)
    for _ in range(200):
        ahead.observe_gap(0.15)

    assert sum(ahead.fan_out(6, num_sessions=1)) == 1


def test_rows_that_cost_nothing_leave_as_many_as_allowed() -> None:
    ahead = RunAhead(is_enabled=True, max_branches=22)
    for num_rows in range(1, 200):
        ahead.pass_cost.observe(num_rows, 0.0012)
    for _ in range(50):
        ahead.observe_gap(0.011)

    assert sum(ahead.fan_out(6, num_sessions=16)) == 22


def test_many_sessions_share_the_rows_that_there_is_time_for() -> None:
    ahead = RunAhead(is_enabled=True, max_branches=22)
    for num_rows in range(1, 200):
        ahead.pass_cost.observe(num_rows, 0.001 + 0.00001 * num_rows)
    for _ in range(200):
        ahead.observe_gap(0.014)  # 2 ms for each of 7 passes: 100 rows

    assert sum(ahead.fan_out(6, num_sessions=10)) in (9, 10)


def test_several_branches_that_seldom_hit_pause_sooner_than_one() -> None:
    """One is right in about a fifth of the rounds, and takes the time of a row a pass."""
    one, many = (RunAhead(is_enabled=True, max_branches=number) for number in (1, 22))
    for ahead in (one, many):
        ahead.pass_cost.observe(100, 0.001)
        for number in range(200):
            ahead.fan_out(6, num_sessions=1)
            ahead.count_round(5, 4 if number % 4 == 0 else 0)

    assert one.is_on
    assert not many.is_on


def test_a_line_through_one_number_of_rows_says_nothing_of_others() -> None:
    cost = PassCost()
    cost.observe(4, 0.002)

    assert cost.most_rows(0.003, num_narrow=1) == 8  # so twice as many are tried next


def test_a_wide_pass_may_take_little_more_than_a_narrow_one_even_if_none_is_done_in_time() -> None:
    ahead = RunAhead(is_enabled=True, max_branches=22)
    for num_rows in range(1, 100):
        ahead.pass_cost.observe(num_rows, 0.002 + 0.00005 * num_rows)
    for _ in range(200):
        ahead.observe_gap(0.011)  # room for five passes of seven

    assert 8 <= sum(ahead.fan_out(6, num_sessions=1)) <= 14


def test_passes_become_wider_step_by_step() -> None:
    ahead = RunAhead(is_enabled=True, max_branches=22)
    widths = []
    for _ in range(7):
        widths.append(sum(ahead.fan_out(6, num_sessions=1)))
        ahead.pass_cost.observe(widths[-1], 0.001)

    assert widths == [2, 4, 8, 16, 22, 22, 22]


def test_gaps_that_are_long_at_times_make_no_pass_wider() -> None:
    ahead = RunAhead(is_enabled=True, max_branches=22)
    for num_rows in range(1, 100):
        ahead.pass_cost.observe(num_rows, 0.001 + 0.0001 * num_rows)
    for number in range(300):
        ahead.observe_gap(0.05 if number % 3 == 0 else 0.014)

    assert sum(ahead.fan_out(6, num_sessions=1)) < 16  # a gap of 14 ms has room for 10


def test_the_rate_of_each_runner_up_is_learned() -> None:
    ahead = RunAhead(is_enabled=True, max_branches=22)
    for number in range(2000):
        rank = {0: 0, 1: 0, 2: 1}.get(number % 4)
        ahead.outcomes.observe_rejection(rank, 4)
        ahead.outcomes.observe(4, 3)

    first, second, *others = ahead.outcomes.rates
    assert first == pytest.approx(0.5, abs=0.05)
    assert second == pytest.approx(0.25, abs=0.05)
    assert max(others) < 0.02
    assert ahead.outcomes.acceptance == pytest.approx(0.75, abs=0.01)
