"""The proposer's core on a toy model: what it drafts, what it feeds, and whom it refuses."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proposer_svc.draft_model import DraftModelDrafter
from proposer_svc.draft_vocabulary import SharedVocabulary
from proposer_svc.proposer import ProposerCore, RoundCounts, build_proposer
from proposer_svc.session_table import Session
from specgw.budget import PREFILL_CHUNK
from specgw.config import parse_config
from specgw.engine.model_runner import SequenceChunk
from specgw.errors import ConfigError, IncompatibleModels
from specgw.hidden import LAST, HiddenFormat, HiddenStates
from specgw.link import InProcessLink, Proposer, ProposerLink
from specgw.types import (
    AnyBlock,
    Commit,
    DraftBlock,
    Hello,
    HelloAck,
    ModelDescription,
    OpenSession,
    ProposeStep,
    UndraftedReason,
)
from tests.doubles import ToyRunner, toy_continuation

pytestmark = pytest.mark.usefixtures("single_thread")


def build(
    runner: ToyRunner | None = None,
    max_draft_tokens: int = 4,
    max_sessions: int = 8,
    max_num_batched_tokens: int = 2048,
    tokenizer_size: int | None = None,
) -> tuple[ProposerCore, ToyRunner]:
    """Returns a proposer that verifiers `v` and `w` are connected to."""
    runner = runner or ToyRunner()
    drafter = DraftModelDrafter(
        runner, max_num_batched_tokens, SharedVocabulary(runner.description, tokenizer_size)
    )
    proposer = ProposerCore(drafter, max_draft_tokens, max_sessions)
    proposer.connect(hello("v"))
    proposer.connect(hello("w"))
    return proposer, runner


def hello(
    verifier_id: str, vocab_size: int = 50, fingerprint: str = "toy", max_draft_tokens: int = 8
) -> Hello:
    target = ModelDescription("target", "T", vocab_size, fingerprint, 4096, "float32", "cpu")
    return Hello(verifier_id, target, max_draft_tokens)


def open_sessions(proposer: Proposer, *prompts: Sequence[int], verifier_id: str = "v") -> None:
    """Opens sessions 1, 2, ... and prefills them."""
    opened = [OpenSession(number, prompt) for number, prompt in enumerate(prompts, 1)]
    proposer.apply(verifier_id, ProposeStep(open=opened))
    assert run(proposer) == []


def ask(proposer: Proposer, *commits: Commit, verifier_id: str = "v") -> list[DraftBlock]:
    """Returns every block that answers the commits."""
    refusals = proposer.apply(verifier_id, ProposeStep(commit=commits))
    return [*refusals, *run(proposer)]


def run(proposer: Proposer) -> list[DraftBlock]:
    blocks: list[DraftBlock] = []
    while proposer.has_work():
        blocks += [block for _, block in proposer.step()]
    return blocks


# What is drafted, and what it costs.


def test_a_block_is_the_draft_models_own_continuation() -> None:
    proposer, _ = build()
    open_sessions(proposer, [3, 4, 5])

    [block] = ask(proposer, Commit(1, 3, [9], 4))

    assert (block.session_id, block.base_length, block.reason) == (1, 4, None)
    assert list(block.token_ids) == toy_continuation([3, 4, 5, 9], 4)
    assert block.draft_s > 0


def test_opening_prefills_the_whole_context_and_answers_nothing() -> None:
    proposer, runner = build()

    open_sessions(proposer, [3, 4, 5])

    assert runner.passes == [[3]]


def test_an_empty_commit_asks_for_a_block() -> None:
    proposer, runner = build()
    open_sessions(proposer, [3, 4, 5])

    [block] = ask(proposer, Commit(1, 3, [], 2))

    assert (block.base_length, list(block.token_ids)) == (3, toy_continuation([3, 4, 5], 2))
    assert runner.passes[1:] == [[1], [1]]


def test_after_full_acceptance_two_rows_are_fed() -> None:
    proposer, runner = build()
    open_sessions(proposer, [3, 4, 5])
    [first] = ask(proposer, Commit(1, 3, [9], 4))
    runner.passes.clear()

    [second] = ask(proposer, Commit(1, 4, [*first.token_ids, 8], 4))

    assert runner.passes == [[2], [1], [1], [1]]
    assert list(second.token_ids) == toy_continuation([3, 4, 5, 9, *first.token_ids, 8], 4)


@pytest.mark.parametrize("num_accepted", [0, 1, 2, 3])
def test_after_a_rejection_one_row_is_fed(num_accepted: int) -> None:
    proposer, runner = build()
    open_sessions(proposer, [3, 4, 5])
    [first] = ask(proposer, Commit(1, 3, [9], 4))
    recovered = (first.token_ids[num_accepted] + 1) % 50
    committed = [*first.token_ids[:num_accepted], recovered]
    runner.passes.clear()

    [second] = ask(proposer, Commit(1, 4, committed, 4))

    assert runner.passes == [[1], [1], [1], [1]]
    assert list(second.token_ids) == toy_continuation([3, 4, 5, 9, *committed], 4)


def test_a_round_takes_a_pass_for_each_draft_token() -> None:
    proposer, _ = build()
    open_sessions(proposer, [1, 2])
    assert proposer.rounds == RoundCounts()

    for length in range(2, 7):
        ask(proposer, Commit(1, length, [7], 4))

    assert proposer.rounds == RoundCounts(round_count=5, pass_count=20)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 49)), min_size=1, max_size=30
    )
)
def test_drafts_follow_the_committed_context_whatever_is_accepted(
    rounds: list[tuple[int, int, int]],
) -> None:
    """Bug K5: a cache that is truncated wrongly makes acceptance decay over a generation."""
    proposer, runner = build()
    context = [3, 4, 5]
    open_sessions(proposer, context)
    committed = [9]
    for num_wanted, num_accepted, next_token in rounds:
        base_length = len(context)
        context += committed
        drafted: Sequence[int] = ()
        for block in ask(proposer, Commit(1, base_length, committed, num_wanted)):
            assert block.base_length == len(context)
            drafted = block.token_ids
        assert list(drafted) == toy_continuation(context, num_wanted)
        committed = [*drafted[:num_accepted], next_token]

    num_fed = sum(sum(rows) for rows in runner.passes)
    assert num_fed <= len(context) + sum(num_wanted for num_wanted, _, _ in rounds)


def test_sessions_of_two_verifiers_share_each_forward_pass() -> None:
    proposer, runner = build()
    open_sessions(proposer, [1, 2], [3, 4], verifier_id="v")
    open_sessions(proposer, [5, 6], verifier_id="w")
    runner.passes.clear()

    proposer.apply("v", ProposeStep(commit=[Commit(1, 2, [7], 4), Commit(2, 2, [8], 2)]))
    proposer.apply("w", ProposeStep(commit=[Commit(1, 2, [9], 3)]))
    blocks = proposer.step()

    assert runner.passes == [[1, 1, 1], [1, 1, 1], [1, 1], [1]]
    assert {
        (verifier_id, block.session_id): list(block.token_ids) for verifier_id, block in blocks
    } == {
        ("v", 1): toy_continuation([1, 2, 7], 4),
        ("v", 2): toy_continuation([3, 4, 8], 2),
        ("w", 1): toy_continuation([5, 6, 9], 3),
    }


def test_asking_for_no_tokens_costs_nothing_and_the_gap_is_caught_up_in_one_pass() -> None:
    """Bugs D1 and D3: speculation off for a while, then on again."""
    proposer, runner = build()
    open_sessions(proposer, [3, 4, 5])
    context = [3, 4, 5]
    runner.passes.clear()

    for token_id in range(40):
        assert ask(proposer, Commit(1, len(context), [token_id], 0)) == []
        context.append(token_id)
    assert runner.passes == []
    [block] = ask(proposer, Commit(1, len(context), [9], 1))

    assert runner.passes == [[41]]
    assert list(block.token_ids) == toy_continuation([*context, 9], 1)


def test_more_tokens_than_agreed_are_clipped() -> None:
    """Bugs B7 and D7."""
    proposer, _ = build(max_draft_tokens=3)
    open_sessions(proposer, [3, 4, 5])

    [block] = ask(proposer, Commit(1, 3, [9], 100))

    assert len(block.token_ids) == 3


def test_a_commit_takes_the_place_of_one_not_yet_answered() -> None:
    """Bug B3: a block of an older context must not follow."""
    proposer, _ = build()
    open_sessions(proposer, [3, 4, 5])
    proposer.apply("v", ProposeStep(commit=[Commit(1, 3, [9], 4)]))

    [block] = ask(proposer, Commit(1, 4, [8], 4))

    assert (block.base_length, list(block.token_ids)) == (5, toy_continuation([3, 4, 5, 9, 8], 4))


def test_opening_again_begins_anew() -> None:
    """Bug K4: a shortened context must not meet the rows of the longer one."""
    proposer, _ = build()
    open_sessions(proposer, [3, 4, 5, 6, 7])

    open_sessions(proposer, [3, 8])
    [block] = ask(proposer, Commit(1, 2, [9], 4))

    assert list(block.token_ids) == toy_continuation([3, 8, 9], 4)


# Long prompts.


def test_a_long_prompt_does_not_delay_the_blocks_of_others() -> None:
    proposer, runner = build(ToyRunner(max_model_len=4096), max_num_batched_tokens=300)
    open_sessions(proposer, [1, 2])
    runner.passes.clear()

    proposer.apply(
        "v",
        ProposeStep(
            open=[OpenSession(2, [5] * 1000)],
            commit=[Commit(2, 1000, [6], 4), Commit(1, 2, [7], 4)],
        ),
    )
    [(_, first)] = proposer.step()
    rest = run(proposer)

    assert first.session_id == 1
    assert runner.passes[0] == [1, PREFILL_CHUNK]
    assert [block.session_id for block in rest] == [2]
    assert max(sum(rows) for rows in runner.passes) <= 300
    assert list(rest[0].token_ids) == toy_continuation([5] * 1000 + [6], 4)


def test_a_prompt_alone_is_prefilled_with_all_the_rows_there_are() -> None:
    proposer, runner = build(ToyRunner(max_model_len=4096), max_num_batched_tokens=600)

    open_sessions(proposer, [5] * 1000)

    assert runner.passes == [[600], [400]]


def test_sessions_beyond_the_row_limit_take_turns() -> None:
    proposer, runner = build(max_num_batched_tokens=2)
    open_sessions(proposer, [1], [2], [3])
    runner.passes.clear()

    blocks = ask(proposer, *(Commit(number, 1, [7], 2) for number in (1, 2, 3)))

    assert [block.session_id for block in blocks] == [1, 2, 3]
    assert max(sum(rows) for rows in runner.passes) <= 2


# The context limit.


def test_blocks_shrink_and_end_at_the_draft_models_context_limit() -> None:
    """Bugs K1 and K2: past the limit the request goes on undrafted, and neighbours are drafted."""
    proposer, _ = build(ToyRunner(max_model_len=10))
    open_sessions(proposer, [1] * 7, [2, 2])

    lengths = []
    for length in range(7, 12):
        mine, other = ask(proposer, Commit(1, length, [3], 4), Commit(2, length - 5, [3], 4))
        lengths.append((len(mine.token_ids), mine.reason, len(other.token_ids)))

    limit = UndraftedReason.CONTEXT_LIMIT
    assert lengths == [(3, None, 4), (2, None, 4), (1, None, 4), (0, limit, 4), (0, limit, 4)]
    assert proposer.load().session_count == 2


def test_a_prompt_beyond_the_context_limit_is_not_prefilled() -> None:
    proposer, runner = build(ToyRunner(max_model_len=10))

    open_sessions(proposer, [1] * 11)
    [block] = ask(proposer, Commit(1, 11, [2], 4))

    assert (runner.passes, block.reason) == ([], UndraftedReason.CONTEXT_LIMIT)


# Vocabularies.


def test_ids_beyond_the_targets_vocabulary_are_never_drafted() -> None:
    proposer, _ = build(ToyRunner(vocab_size=64))
    for verifier_id, vocab_size in (("v", 20), ("w", 64)):
        proposer.connect(hello(verifier_id, vocab_size))
        step = ProposeStep([OpenSession(1, [1, 2])], [Commit(1, 2, [7], 4)])
        proposer.apply(verifier_id, step)

    blocks = dict(proposer.step())

    assert all(token_id < 20 for token_id in blocks["v"].token_ids)
    assert list(blocks["w"].token_ids) == toy_continuation([1, 2, 7], 4, 64)
    assert max(blocks["w"].token_ids) >= 20


def test_padding_ids_are_never_drafted() -> None:
    proposer, _ = build(ToyRunner(vocab_size=64), tokenizer_size=20)
    proposer.connect(hello("v", 64))
    open_sessions(proposer, [1, 2])

    [block] = ask(proposer, Commit(1, 2, [7], 4))

    assert all(token_id < 20 for token_id in block.token_ids)


# Refusals.


def test_an_unknown_session_and_another_base_length_ask_for_a_resync() -> None:
    proposer, _ = build()
    open_sessions(proposer, [1, 2])

    blocks = ask(proposer, Commit(9, 5, [7], 4), Commit(1, 3, [7, 8], 4), Commit(9, 5, [7], 0))

    resync = UndraftedReason.RESYNC
    assert blocks == [DraftBlock(9, 6, reason=resync), DraftBlock(1, 5, reason=resync)]
    assert proposer.load() == type(proposer.load())()


def test_a_session_without_a_slot_is_refused_until_it_is_opened_again() -> None:
    proposer, _ = build(max_sessions=2)
    open_sessions(proposer, [1, 2], verifier_id="v")
    open_sessions(proposer, [1, 2], [3, 4], verifier_id="w")

    [block] = ask(proposer, Commit(2, 2, [7], 4), verifier_id="w")
    proposer.apply("v", ProposeStep(close=[1]))
    proposer.apply("w", ProposeStep(open=[OpenSession(2, [3, 4, 7])]))
    [later] = ask(proposer, Commit(2, 3, [], 4), verifier_id="w")

    assert block.reason is UndraftedReason.NO_SLOT
    assert list(later.token_ids) == toy_continuation([3, 4, 7], 4)


@pytest.mark.parametrize("bad_id", [-1, 50, 2**31 - 1])
def test_an_impossible_token_id_ends_its_own_session_only(bad_id: int) -> None:
    proposer, _ = build()
    open_sessions(proposer, [1, 2], [3, bad_id], [5, 6])

    blocks = ask(proposer, *(Commit(number, 2, [7], 4) for number in (1, 2)))
    blocks += ask(proposer, Commit(3, 2, [bad_id], 4))
    blocks += ask(proposer, Commit(3, 3, [7], 4))

    reasons = [(block.session_id, block.reason) for block in blocks]
    error = UndraftedReason.ERROR
    assert reasons == [(2, error), (1, None), (3, error), (3, error)]


def test_an_empty_context_is_refused() -> None:
    proposer, _ = build()
    open_sessions(proposer, [])

    [block] = ask(proposer, Commit(1, 0, [7], 4))

    assert block.reason is UndraftedReason.ERROR


def test_a_failing_batch_costs_its_sessions_one_round() -> None:
    proposer, runner = build()
    open_sessions(proposer, [1, 2], [3, 4])
    error = UndraftedReason.ERROR

    def fail(chunks: Sequence[SequenceChunk]) -> None:
        raise RuntimeError("the model is broken")

    healthy, runner.fault = runner.fault, fail
    failed = ask(proposer, Commit(1, 2, [7], 4), Commit(2, 2, [7], 4))
    runner.fault = healthy
    freed = runner.kv_cache.used_tokens
    open_sessions(proposer, [1, 2, 7])
    [block] = ask(proposer, Commit(1, 3, [], 4))

    assert failed == [DraftBlock(1, 3, (), error, failed[0].draft_s), failed[1]]
    assert (failed[1].reason, freed) == (error, 0)
    assert list(block.token_ids) == toy_continuation([1, 2, 7], 4)


def test_logits_that_are_not_numbers_end_their_own_session_only() -> None:
    """Bug K10."""
    proposer, _ = build(ToyRunner(poison=[13]))
    open_sessions(proposer, [1, 2], [3, 4])

    good, bad = ask(proposer, Commit(1, 2, [7], 3), Commit(2, 2, [13], 3))

    assert list(good.token_ids) == toy_continuation([1, 2, 7], 3)
    assert (bad.session_id, bad.reason) == (2, UndraftedReason.ERROR)
    assert proposer.load().session_count == 1


# Hidden states of the target.


class Reader(DraftModelDrafter):
    """Drafts as if it read hidden states, and keeps those that it is given."""

    hidden = HiddenFormat((LAST,), 2, "float16")

    def __init__(self, runner: ToyRunner) -> None:
        super().__init__(runner, 512)
        self.read: list[HiddenStates | None] = []

    def commit(self, session: Session, token_ids: Sequence[int]) -> None:
        self.read.append(session.hidden)
        super().commit(session, token_ids)


def test_a_drafter_is_given_the_hidden_states_that_it_needs() -> None:
    drafter = Reader(ToyRunner())
    proposer = ProposerCore(drafter, 4, max_sessions=8)
    with pytest.raises(IncompatibleModels, match="hidden states"):
        proposer.connect(hello("v"))
    proposer.connect(replace(hello("v"), hidden=HiddenFormat((LAST,), 2, "float32")))
    open_sessions(proposer, [1, 2], [3, 4])
    states = HiddenStates(bytes(8), "float16", (2, 2))
    wrong = HiddenStates(bytes(8), "float32", (1, 2))

    refusal, block = ask(proposer, Commit(1, 2, [7], 4, states), Commit(2, 2, [7], 4, wrong))

    assert proposer.offer.hidden == drafter.hidden
    assert (drafter.read, block.session_id, len(block.token_ids)) == ([states], 1, 4)
    assert (refusal.session_id, refusal.reason) == (2, UndraftedReason.ERROR)


def test_hidden_states_that_nobody_asked_for_are_refused() -> None:
    proposer, _ = build()
    open_sessions(proposer, [1, 2])

    [block] = ask(proposer, Commit(1, 2, [7], 4, HiddenStates(bytes(8), "float16", (2, 2))))

    assert block.reason is UndraftedReason.ERROR


# Memory.


def test_without_memory_a_session_goes_undrafted_and_active_ones_keep_their_rows() -> None:
    """Bug K8: over budget, sessions run undrafted rather than prefill in turns."""
    proposer, runner = build(ToyRunner(kv_cache_tokens=48))
    open_sessions(proposer, [1] * 20)
    context = [1] * 20

    reasons = []
    for _ in range(8):
        proposer.apply("v", ProposeStep(open=[OpenSession(2, [2] * 20)]))
        mine, other = ask(proposer, Commit(1, len(context), [3], 4), Commit(2, 20, [3], 4))
        context.append(3)
        reasons.append((mine.reason, other.reason))

    assert set(reasons) == {(UndraftedReason.NO_MEMORY, None)} or set(reasons) == {
        (None, UndraftedReason.NO_MEMORY)
    }
    assert max(rows for passed in runner.passes[1:] for rows in passed) <= 20


def test_the_rows_of_an_idle_session_make_room_and_are_fed_again_when_it_is_asked() -> None:
    proposer, runner = build(ToyRunner(kv_cache_tokens=48, has_prefix_cache=False))
    open_sessions(proposer, [1] * 20)
    first = ask(proposer, Commit(1, 20, [3], 2))
    context = [2] * 20
    proposer.apply("v", ProposeStep(open=[OpenSession(2, context)]))

    reasons = []
    for _ in range(8):
        [block] = ask(proposer, Commit(2, len(context), [3], 2))
        context.append(3)
        reasons.append(block.reason)
    proposer.apply("v", ProposeStep(close=[2]))
    runner.passes.clear()
    [again] = ask(proposer, Commit(1, 21, [*first[0].token_ids, 5], 2))

    assert reasons[0] is UndraftedReason.NO_MEMORY
    assert reasons[-1] is None
    assert runner.passes == [[24], [1]]
    assert list(again.token_ids) == toy_continuation([1] * 20 + [3, *first[0].token_ids, 5], 2)


def test_sessions_that_begin_alike_share_rows_and_draft_as_if_alone() -> None:
    proposer, runner = build()
    contexts = [[1] * 40 + [number] for number in range(3)]
    open_sessions(proposer, contexts[0])
    ask(proposer, Commit(1, 41, [5], 4))
    runner.passes.clear()

    for number in (2, 3):
        proposer.apply("v", ProposeStep(open=[OpenSession(number, contexts[number - 1])]))
    blocks = ask(proposer, Commit(2, 41, [5], 4), Commit(3, 41, [5], 4))

    assert runner.passes[0] == [42 - 2 * 16, 42 - 2 * 16]
    assert [list(block.token_ids) for block in blocks] == [
        toy_continuation([*context, 5], 4) for context in contexts[1:]
    ]


def test_rows_of_draft_tokens_are_nobodys_prefix() -> None:
    """A block of drafts crosses the end of a cache block and is refused by the verifier."""
    proposer, runner = build()
    open_sessions(proposer, [1] * 13)
    [refused] = ask(proposer, Commit(1, 13, [3], 6))
    ask(proposer, Commit(1, 14, [9], 6))

    context = [1] * 13 + [3, *refused.token_ids]
    proposer.apply("v", ProposeStep(open=[OpenSession(2, context)]))
    runner.passes.clear()
    ask(proposer, Commit(2, len(context), [5], 2))

    assert runner.passes[0] == [len(context) + 1]


def test_sessions_of_another_salt_share_nothing() -> None:
    proposer, runner = build()
    for number, salt in enumerate(("", "one", "other"), start=1):
        proposer.apply("v", ProposeStep(open=[OpenSession(number, [1] * 40, salt)]))
        runner.passes.clear()
        ask(proposer, Commit(number, 40, [5], 1))

        assert runner.passes[0] == [41]


def test_every_way_out_frees_the_rows() -> None:
    """Bugs K9 and B5: no leak over many sessions that end in every possible way."""
    proposer, runner = build()
    for round_number in range(200):
        open_sessions(proposer, [1, 2], [3] * 30, [5, 6])
        open_sessions(proposer, [1, 2], verifier_id="w")
        ask(proposer, Commit(1, 2, [7], 4), Commit(2, 30, [round_number % 50], 3))
        ask(proposer, Commit(3, 99, [7], 4))
        proposer.apply("v", ProposeStep(commit=[Commit(1, 3, [8], 4)], close=[1, 2, 3, 77]))
        proposer.disconnect("w")
        proposer.connect(hello("w"))

        assert run(proposer) == []
        assert (runner.kv_cache.used_tokens, proposer.load().session_count) == (0, 0)


# Greeting verifiers.


def test_the_smaller_number_of_draft_tokens_holds() -> None:
    proposer, _ = build(max_draft_tokens=4)

    assert proposer.connect(hello("x", max_draft_tokens=2)).max_draft_tokens == 2
    assert proposer.connect(hello("x", max_draft_tokens=9)).max_draft_tokens == 4


def test_padded_vocabularies_of_other_sizes_are_compatible() -> None:
    proposer, _ = build()

    ack = proposer.connect(hello("x", vocab_size=64))

    assert (ack.method, ack.extra_slots_per_session, ack.max_sessions) == ("draft_model", 1, 8)


def test_a_foreign_tokenizer_of_the_same_size_is_refused_by_name() -> None:
    proposer, _ = build()

    with pytest.raises(IncompatibleModels, match=r"target \(50 ids.*foreign.*toy \(50 ids"):
        proposer.connect(hello("x", fingerprint="foreign"))


def test_every_mismatch_is_one_line() -> None:
    proposer, _ = build()
    foreign = hello("x", fingerprint="foreign").target_model

    with pytest.raises(IncompatibleModels) as caught:
        proposer.connect(Hello("x", foreign, max_draft_tokens=0, protocol_version=2))

    assert [line.split(":")[0] for line in caught.value.mismatches] == [
        "protocol_version",
        "max_draft_tokens",
        "vocabulary",
    ]


def test_a_second_connection_replaces_the_first() -> None:
    proposer, _ = build()
    open_sessions(proposer, [1, 2])

    proposer.connect(hello("v"))
    [block] = ask(proposer, Commit(1, 2, [7], 4))

    assert block.reason is UndraftedReason.RESYNC


def test_disconnecting_frees_the_sessions_of_that_verifier() -> None:
    proposer, runner = build()
    open_sessions(proposer, [1, 2], [3, 4], verifier_id="v")
    open_sessions(proposer, [5, 6], verifier_id="w")

    proposer.disconnect("v")
    [block] = ask(proposer, Commit(1, 2, [7], 4), verifier_id="w")

    assert proposer.load().session_count == 1
    assert runner.kv_cache.used_tokens == runner.kv_cache.block_size
    assert list(block.token_ids) == toy_continuation([5, 6, 7], 4)


def test_a_proposer_needs_a_speculative_config() -> None:
    with pytest.raises(ConfigError, match="speculative_config"):
        build_proposer(parse_config({"model": "target"}))


class Recorder:
    """Implements `LinkListener`."""

    def __init__(self) -> None:
        self.blocks: list[AnyBlock] = []
        self.ack: HelloAck | None = None
        self.detail = ""

    def link_up(self, link: ProposerLink, ack: HelloAck) -> None:
        self.ack = ack

    def link_down(self, link: ProposerLink, detail: str) -> None:
        self.detail = detail

    def blocks_arrived(self, link: ProposerLink, blocks: Sequence[AnyBlock]) -> None:
        self.blocks += blocks


def test_the_core_works_behind_the_in_process_link() -> None:
    proposer, _ = build()
    link, listener = InProcessLink(proposer), Recorder()

    link.start(hello("x"), listener)
    assert listener.ack is not None
    step = ProposeStep([OpenSession(1, [1, 2])], [Commit(1, 2, [7], 4), Commit(5, 2, [7], 4)])
    link.send(step, listener.ack)
    link.stop()

    tokens = {block.session_id: list(block.token_ids) for block in listener.blocks}
    assert tokens == {5: [], 1: toy_continuation([1, 2, 7], 4)}
    assert proposer.load().session_count == 0
