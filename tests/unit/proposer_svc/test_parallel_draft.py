"""Parallel drafting on a toy model: what one pass is fed, what it drafts, what it leaves behind."""

import logging
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proposer_svc.parallel_draft import ParallelDrafter
from proposer_svc.proposer import ProposerCore, RoundCounts
from specgw.types import Commit, OpenSession, ProposeStep, UndraftedReason
from tests.doubles import ToyRunner, toy_next
from tests.unit.proposer_svc.test_proposer import ask, hello, open_sessions, run

pytestmark = pytest.mark.usefixtures("single_thread")

MASK = 48


def build(
    runner: ToyRunner | None = None,
    max_draft_tokens: int = 4,
    max_num_batched_tokens: int = 2048,
    mask_token_id: int = MASK,
    num_trained_tokens: int | None = None,
) -> tuple[ProposerCore, ToyRunner]:
    """Returns a proposer that verifiers `v` and `w` are connected to."""
    runner = runner or ToyRunner()
    drafter = ParallelDrafter(
        runner,
        max_num_batched_tokens,
        mask_token_id=mask_token_id,
        max_draft_tokens=max_draft_tokens,
        num_trained_tokens=num_trained_tokens,
    )
    proposer = ProposerCore(drafter, max_draft_tokens, max_sessions=8)
    proposer.connect(hello("v"))
    proposer.connect(hello("w"))
    return proposer, runner


def parallel_continuation(context: Sequence[int], length: int) -> list[int]:
    """Returns what the toy model says after the context and after each mask behind it.

    In place of the mask, the first of the others, which are equally probable.
    """
    said = [toy_next([*context, *[MASK] * number]) for number in range(length)]
    return [0 if token_id == MASK else token_id for token_id in said]


def test_a_block_comes_from_one_pass_over_the_missing_tokens_and_the_masks() -> None:
    proposer, runner = build()
    open_sessions(proposer, [3, 4, 5])
    runner.passes.clear()

    [block] = ask(proposer, Commit(1, 3, [9], 4))

    assert (block.base_length, block.reason) == (4, None)
    assert list(block.token_ids) == parallel_continuation([3, 4, 5, 9], 4)
    assert runner.passes == [[1 + 3]]


def test_the_slots_offered_are_those_of_the_table() -> None:
    proposer, _ = build(max_draft_tokens=7)

    offer = proposer.offer

    assert (offer.method, offer.extra_slots_per_session) == ("draft_model", 7)
    assert offer.kv_lookahead_per_session == 7


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 49)), min_size=1, max_size=30
    )
)
def test_masks_leave_no_trace_whatever_is_accepted(rounds: list[tuple[int, int, int]]) -> None:
    """A mask's row that stayed would be read as a token of the context."""
    proposer, runner = build()
    context = [3, 4, 5]
    open_sessions(proposer, context)
    committed = [9]
    num_drafted = 0
    for num_wanted, num_accepted, next_token in rounds:
        base_length = len(context)
        context += committed
        drafted: Sequence[int] = ()
        for block in ask(proposer, Commit(1, base_length, committed, num_wanted)):
            drafted = block.token_ids
        assert list(drafted) == parallel_continuation(context, num_wanted)
        committed = [*drafted[:num_accepted], next_token]
        num_drafted += num_wanted

    # Each token of the context once, but for a context's last one that was asked about twice.
    num_fed = sum(sum(rows) for rows in runner.passes)
    assert num_fed <= len(context) + num_drafted
    blocks = -(-len(context) // runner.kv_cache.block_size)
    assert runner.kv_cache.used_tokens <= blocks * runner.kv_cache.block_size


def test_sessions_with_unlike_block_lengths_share_the_pass() -> None:
    proposer, runner = build()
    open_sessions(proposer, [1, 2], [3, 4], verifier_id="v")
    open_sessions(proposer, [5, 6], verifier_id="w")
    runner.passes.clear()

    proposer.apply("v", ProposeStep(commit=[Commit(1, 2, [7], 4), Commit(2, 2, [8, 9], 1)]))
    proposer.apply("w", ProposeStep(commit=[Commit(1, 2, [9], 3)]))
    blocks = proposer.step()

    assert runner.passes == [[4, 2, 3]]
    assert {
        (verifier_id, block.session_id): list(block.token_ids) for verifier_id, block in blocks
    } == {
        ("v", 1): parallel_continuation([1, 2, 7], 4),
        ("v", 2): parallel_continuation([3, 4, 8, 9], 1),
        ("w", 1): parallel_continuation([5, 6, 9], 3),
    }


def test_the_mask_token_is_never_drafted() -> None:
    mask = 49
    assert toy_next([mask, mask]) == mask  # what the model would say from the third token on
    proposer, _ = build(mask_token_id=mask)
    open_sessions(proposer, [3, 4])

    [block] = ask(proposer, Commit(1, 2, [5], 4))

    assert block.token_ids[0] == toy_next([3, 4, 5])
    assert len(block.token_ids) == 4
    assert mask not in block.token_ids


def test_ids_beyond_the_targets_vocabulary_are_never_drafted() -> None:
    proposer, _ = build()
    proposer.connect(hello("v", vocab_size=12))
    open_sessions(proposer, [1, 2])

    [block] = ask(proposer, Commit(1, 2, [7], 4))

    assert max(parallel_continuation([1, 2, 7], 4)) >= 12 > max(block.token_ids)


def test_masks_end_at_the_context_limit() -> None:
    """The toy model refuses a row past it."""
    proposer, _ = build(ToyRunner(max_model_len=10))
    open_sessions(proposer, [1] * 7, [2, 2])

    lengths = []
    for length in range(7, 12):
        mine, other = ask(proposer, Commit(1, length, [3], 4), Commit(2, length - 5, [3], 4))
        lengths.append((len(mine.token_ids), mine.reason, len(other.token_ids)))

    limit = UndraftedReason.CONTEXT_LIMIT
    assert lengths == [(3, None, 4), (2, None, 4), (1, None, 4), (0, limit, 4), (0, limit, 4)]


def test_blocks_longer_than_trained_for_are_cut_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        proposer, runner = build(max_draft_tokens=4, num_trained_tokens=2)
    open_sessions(proposer, [3, 4])
    runner.passes.clear()

    [block] = ask(proposer, Commit(1, 2, [5], 4))

    assert list(block.token_ids) == parallel_continuation([3, 4, 5], 2)
    assert runner.passes == [[2]]
    assert "trained for shorter blocks" in caplog.text


def test_masks_count_in_the_rows_of_a_pass() -> None:
    proposer, runner = build(max_num_batched_tokens=10)
    open_sessions(proposer, [1], [2], [3])
    runner.passes.clear()

    blocks = ask(proposer, *(Commit(number, 1, [7], 4) for number in (1, 2, 3)))

    assert runner.passes == [[4, 4], [4]]
    assert [block.session_id for block in blocks] == [1, 2, 3]
    assert all(len(block.token_ids) == 4 for block in blocks)


def test_a_prompt_is_prefilled_without_masks() -> None:
    proposer, runner = build(ToyRunner(max_model_len=4096), max_num_batched_tokens=300)
    step = ProposeStep([OpenSession(1, [5] * 1000)], [Commit(1, 1000, [6], 4)])
    proposer.apply("v", step)

    [block] = run(proposer)

    assert sum(sum(rows) for rows in runner.passes) == 1001 + 3
    assert max(sum(rows) for rows in runner.passes) <= 300
    assert list(block.token_ids) == parallel_continuation([5] * 1000 + [6], 4)


def test_logits_that_are_not_numbers_end_their_own_session_only() -> None:
    proposer, _ = build(ToyRunner(poison=[13]))
    open_sessions(proposer, [1, 2], [3, 4])

    good, bad = ask(proposer, Commit(1, 2, [7], 3), Commit(2, 2, [13], 3))

    assert list(good.token_ids) == parallel_continuation([1, 2, 7], 3)
    assert (bad.session_id, bad.reason) == (2, UndraftedReason.ERROR)


def test_a_round_is_one_pass() -> None:
    proposer, _ = build()
    open_sessions(proposer, [1, 2])
    assert proposer.rounds == RoundCounts()

    for length in range(2, 7):
        ask(proposer, Commit(1, length, [7], 4))

    assert proposer.rounds == RoundCounts(round_count=5, pass_count=5)
