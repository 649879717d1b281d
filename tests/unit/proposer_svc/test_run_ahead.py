"""Drafting beyond a block: what it saves, what it wastes, and that it changes no block."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proposer_svc.draft_chooser import DraftChooser
from proposer_svc.draft_model import DraftModelDrafter
from proposer_svc.draft_sampling import DraftSampler
from proposer_svc.proposer import ProposerCore
from proposer_svc.run_ahead import RunAhead
from specgw.types import (
    Commit,
    DraftBlock,
    DraftSampling,
    Hello,
    ModelDescription,
    OpenSession,
    ProposeStep,
)
from tests.doubles import ToyRunner, toy_continuation

pytestmark = pytest.mark.usefixtures("single_thread")

K = 4
PROMPT = (3, 4, 5)
SAMPLING = DraftSampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7)


class Bench:
    """A proposer with one session open."""

    def __init__(
        self,
        runner: ToyRunner | None = None,
        *,
        is_enabled: bool = True,
        sampling: DraftSampling | None = None,
    ) -> None:
        self.runner = runner or ToyRunner()
        self.ahead = RunAhead(is_enabled)
        sampler = DraftSampler("greedy" if sampling is None else "probabilistic")
        drafter = DraftModelDrafter(
            self.runner, 2048, chooser=DraftChooser(sampler), run_ahead=self.ahead
        )
        self.core = ProposerCore(drafter, max_draft_tokens=8, max_sessions=8)
        target = ModelDescription("target", "T", 50, "toy", 4096, "float32", "cpu")
        self.core.connect(Hello("v", target, 8))
        self.context = list(PROMPT)
        self.core.apply("v", ProposeStep(open=[OpenSession(1, PROMPT, sampling=sampling)]))
        while self.core.has_work():
            self.core.step()

    def ask(self, committed: Sequence[int], num_tokens: int = K) -> DraftBlock:
        """Commits tokens and returns the block that follows them."""
        step = ProposeStep(commit=[Commit(1, len(self.context), tuple(committed), num_tokens)])
        self.context += committed
        blocks = list(self.core.apply("v", step))
        while self.core.has_work():
            blocks += [block for _, block in self.core.step()]
        [block] = blocks
        return block

    def run_ahead(self, num_passes: int = 100) -> int:
        """Drafts ahead as far as it goes, or so many passes; returns how many those were."""
        count = 0
        while count < num_passes and self.core.can_run_ahead():
            self.core.run_ahead()
            count += 1
        return count

    def continuation(self, num_tokens: int) -> list[int]:
        return toy_continuation(self.context, num_tokens)


def test_a_guess_and_a_whole_block_are_drafted_ahead() -> None:
    bench = Bench()
    bench.ask([9])

    assert bench.run_ahead() == 1 + K


def test_a_right_guess_makes_the_next_block_free() -> None:
    bench = Bench()
    bench.ask([9])
    bench.run_ahead()
    bench.runner.passes.clear()

    block = bench.ask(bench.continuation(K + 1))

    assert bench.runner.passes == []
    assert list(block.token_ids) == bench.continuation(K)
    assert (bench.ahead.counts.hit_count, bench.ahead.counts.used_token_count) == (1, K)


@pytest.mark.parametrize("num_passes", range(1, K + 2))
def test_a_block_that_was_begun_is_completed(num_passes: int) -> None:
    bench = Bench()
    bench.ask([9])
    bench.run_ahead(num_passes)
    bench.runner.passes.clear()

    block = bench.ask(bench.continuation(K + 1))

    assert list(block.token_ids) == bench.continuation(K)
    # The first pass ahead guessed the target's own token and fed the last one of the block.
    assert bench.runner.passes == [[1]] * (K - (num_passes - 1))


@pytest.mark.parametrize("num_accepted", range(K + 1))
def test_a_wrong_guess_costs_what_it_took_and_no_more(num_accepted: int) -> None:
    bench, plain = Bench(), Bench(is_enabled=False)
    for one in (bench, plain):
        one.ask([9])
    bench.run_ahead()
    accepted = bench.continuation(num_accepted)
    wrong = (bench.continuation(K + 1)[num_accepted] + 1) % 50
    for one in (bench, plain):
        one.runner.passes.clear()

    blocks = [one.ask([*accepted, wrong]) for one in (bench, plain)]

    assert blocks[0].token_ids == blocks[1].token_ids
    # The guess's pass fed the last token of the block: after full acceptance that row is there.
    assert bench.runner.passes[0] == [1]
    assert bench.runner.passes[1:] == plain.runner.passes[1:]
    assert bench.ahead.counts.miss_count == 1


@pytest.mark.parametrize("num_committed", range(1, K + 1))
@pytest.mark.parametrize("num_passes", [0, 1 + K])
def test_a_drawn_token_that_the_verifier_has_looked_at_is_not_offered_again(
    num_passes: int, num_committed: int
) -> None:
    """The token in place of a rejected one may equal it, so all that is committed was drafted.

    Block verification has looked at the draft tokens after it all the same.
    """
    bench = Bench(sampling=SAMPLING)
    block = bench.ask([9])
    bench.run_ahead(num_passes)
    bench.runner.passes.clear()

    again = bench.ask(block.token_ids[:num_committed])

    assert len(again.draft_probs) == K
    assert len(bench.runner.passes) == K  # every token is new


def test_drawn_tokens_that_the_verifier_has_not_seen_make_the_next_block_free() -> None:
    bench = Bench(sampling=SAMPLING)
    block = bench.ask([9])
    bench.run_ahead()
    bench.runner.passes.clear()
    guess = toy_continuation([*bench.context, *block.token_ids], 1)[0]  # no draw: none is needed

    following = bench.ask([*block.token_ids, guess])

    assert bench.runner.passes == []
    assert len(following.draft_probs) == K


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 8), st.integers(0, 8), st.booleans(), st.integers(1, 8)),
        max_size=20,
    )
)
def test_blocks_are_those_of_a_proposer_that_never_runs_ahead(
    rounds: list[tuple[int, int, bool, int]],
) -> None:
    """Rounds of (passes ahead, tokens accepted, whether the next one is as guessed, wanted)."""
    bench = Bench()
    block = bench.ask([9])
    for num_passes, num_accepted, is_guessed, num_wanted in rounds:
        bench.run_ahead(num_passes)
        accepted = list(block.token_ids[:num_accepted])
        guess = toy_continuation([*bench.context, *accepted], 1)[0]
        block = bench.ask([*accepted, guess if is_guessed else (guess + 1) % 50], num_wanted)

        assert list(block.token_ids) == bench.continuation(num_wanted)


def test_a_full_cache_ends_the_run_and_not_the_block() -> None:
    """The block that was begun gives way: the next one is drafted from the context."""
    bench = Bench(ToyRunner(kv_cache_tokens=16))
    bench.ask([9], 8)

    assert bench.run_ahead() < 9
    assert not bench.core.can_run_ahead()
    committed = bench.continuation(2)
    assert list(bench.ask(committed, 2).token_ids) == bench.continuation(2)


def test_it_pauses_while_too_little_is_used_and_tries_again() -> None:
    ahead = RunAhead(is_enabled=True)
    num_rounds = 0
    while ahead.is_on:
        ahead.count_round(5, 0)
        num_rounds += 1
    assert 32 <= num_rounds <= 100

    for _ in range(512):
        assert not ahead.is_on
        ahead.count_round(0, 0)
    assert ahead.is_on


def test_it_goes_on_while_enough_is_used() -> None:
    ahead = RunAhead(is_enabled=True)
    for number in range(1000):
        ahead.count_round(5, 4 if number % 3 == 0 else 0)

    assert ahead.is_on
    assert ahead.counts.hit_count == 334


def test_it_is_off_unless_asked_for() -> None:
    bench = Bench(is_enabled=False)
    bench.ask([9])

    assert not bench.core.can_run_ahead()
