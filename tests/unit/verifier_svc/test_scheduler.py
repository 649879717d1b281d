"""The scheduler's promises, one step at a time, on a tiny random model."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

from specgw.engine.loading import ModelOptions, load_model
from specgw.engine.model_runner import ModelRunner, SequenceChunk
from specgw.errors import InvalidRequest, Overloaded
from specgw.link import InProcessLink
from specgw.types import (
    AnyBlock,
    FinishReason,
    GenerateRequest,
    ProposeStep,
    SamplingParams,
    UndraftedReason,
)
from tests.conftest import MAX_MODEL_LEN, VOCAB_SIZE
from tests.doubles import ToyRunner, toy_continuation
from tests.scripted_proposers import DeadProposer, ScriptedProposer, liar, oracle, script
from tests.verifier_harness import GREEDY, InlineVerifier, plain_answers
from verifier_svc.session import check_request

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
OTHERS = [[number, 2 * number, 90 - number] for number in range(1, 8)]


def sampled(seed: int | None, max_tokens: int = 24) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=seed, max_tokens=max_tokens, ignore_eos=True)


def test_a_stop_token_inside_an_accepted_block_ends_the_output(random_runner: ModelRunner) -> None:
    answers = plain_answers(random_runner, [PROMPT])
    expected = answers[tuple(PROMPT)]
    for place in range(1, 10):
        stop = expected[place]
        first = expected.index(stop)
        proposer = ScriptedProposer(oracle(answers))
        verifier = InlineVerifier(random_runner, [InProcessLink(proposer)], max_draft_tokens=8)
        params = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=(stop,))

        [answer] = verifier.generate([PROMPT], params)

        assert answer.token_ids == expected[: first + 1]
        assert answer.finish_reason is FinishReason.STOP
        assert answer.stop_token_id == stop
        assert answer.speculation is not None
        assert answer.speculation.accepted_token_count <= len(answer.token_ids) - 1


def test_end_of_sequence_ends_the_output_unless_ignored(random_runner: ModelRunner) -> None:
    [ignoring] = InlineVerifier(random_runner).generate([PROMPT], sampled(5, max_tokens=50))
    eos = VOCAB_SIZE - 1
    assert random_runner.eos_token_ids == (eos,)
    seed = next(
        seed
        for seed in range(200)
        if eos
        in InlineVerifier(random_runner).generate([PROMPT], sampled(seed, 50))[0].token_ids[:-1]
    )

    params = SamplingParams(temperature=0.8, seed=seed, max_tokens=50)
    [answer] = InlineVerifier(random_runner).generate([PROMPT], params)

    assert len(ignoring.token_ids) == 50
    assert answer.token_ids[-1] == eos
    assert eos not in answer.token_ids[:-1]
    assert answer.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("missing", range(1, 9))
def test_output_ends_at_the_context_limit(missing: int, random_runner: ModelRunner) -> None:
    prompt = [(5 * i) % VOCAB_SIZE for i in range(MAX_MODEL_LEN - missing)]
    answers = plain_answers(random_runner, [prompt])
    proposer = ScriptedProposer(oracle(answers))
    verifier = InlineVerifier(random_runner, [InProcessLink(proposer)], max_draft_tokens=7)

    [answer] = verifier.generate([prompt], SamplingParams(temperature=0, max_tokens=None))

    assert answer.token_ids == answers[tuple(prompt)]
    assert len(answer.token_ids) == missing
    assert answer.finish_reason is FinishReason.LENGTH


def test_a_seeded_request_says_the_same_alone_and_among_others(random_runner: ModelRunner) -> None:
    alone = InlineVerifier(random_runner).generate([PROMPT], sampled(42))[0]
    for draft in (script(1, 2, 3, 4), oracle({tuple(PROMPT): alone.token_ids})):
        link = InProcessLink(ScriptedProposer(draft))
        verifier = InlineVerifier(random_runner, [link])
        others = [verifier.submit(prompt, sampled(None)) for prompt in OTHERS]
        seeded = verifier.submit(PROMPT, sampled(42))
        verifier.run()

        assert verifier.answers[seeded].token_ids == alone.token_ids
        assert verifier.answers[seeded].seed == 42
        assert verifier.answers[others[0]].token_ids != alone.token_ids


def test_seeds_give_different_texts(random_runner: ModelRunner) -> None:
    texts = {
        tuple(answer.token_ids)
        for seed in range(20)
        for answer in InlineVerifier(random_runner).generate([PROMPT], sampled(seed))
    }

    assert len(texts) >= 19


def test_an_oracle_at_temperature_is_always_accepted(random_runner: ModelRunner) -> None:
    [plain] = InlineVerifier(random_runner).generate([PROMPT], sampled(7, 21))
    proposer = ScriptedProposer(oracle({tuple(PROMPT): plain.token_ids}))
    verifier = InlineVerifier(random_runner, [InProcessLink(proposer)], max_draft_tokens=4)

    [answer] = verifier.generate([PROMPT], sampled(7, 21))

    assert answer.token_ids == plain.token_ids
    assert [len(block) for block in answer.blocks] == [1, 5, 5, 5, 5]


def test_a_resumed_request_goes_on_as_if_never_interrupted(random_runner: ModelRunner) -> None:
    [whole] = InlineVerifier(random_runner).generate([PROMPT], sampled(9))
    verifier = InlineVerifier(random_runner)
    resumed = verifier.submit(PROMPT, sampled(9), output=whole.token_ids[:10])
    verifier.run()

    assert verifier.answers[resumed].token_ids == whole.token_ids[10:]


def test_cancelling_frees_the_session_on_both_sides_before_the_next_step(
    random_runner: ModelRunner,
) -> None:
    proposer = ScriptedProposer(script(1, 2, 3))
    verifier = InlineVerifier(random_runner, [InProcessLink(proposer)])
    kept, gone = verifier.submit(PROMPT), verifier.submit(OTHERS[0])
    verifier.step(3)
    assert len(proposer.contexts) == 2

    verifier.scheduler.inbox.cancel(gone)
    verifier.step()

    assert [session_id for _, session_id in proposer.contexts] == [kept]
    assert verifier.scheduler.snapshot.running_count == 1
    delivered = len(verifier.answers[gone].token_ids)
    verifier.answers.pop(gone)
    verifier.run()
    assert delivered < 24
    assert verifier.scheduler.snapshot.kv_used_tokens == 0


def test_a_session_that_is_cancelled_during_a_step_gets_nothing_of_it(
    random_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain_answers(random_runner, [PROMPT])[tuple(PROMPT)]
    verifier = InlineVerifier(random_runner, [InProcessLink(ScriptedProposer(script(1, 2, 3)))])
    kept, gone = verifier.submit(PROMPT), verifier.submit(OTHERS[0])
    verifier.step(3)
    delivered, forward = len(verifier.answers[gone].token_ids), random_runner.forward

    def cancel_and_forward(chunks: Sequence[SequenceChunk]) -> Tensor:
        verifier.scheduler.inbox.cancel(gone)
        return forward(chunks)

    monkeypatch.setattr(random_runner, "forward", cancel_and_forward)
    verifier.step()
    monkeypatch.undo()

    assert len(verifier.answers[gone].token_ids) == delivered
    assert verifier.scheduler.snapshot.running_count == 1
    verifier.answers.pop(gone)
    verifier.run()
    assert verifier.answers[kept].token_ids == expected
    assert verifier.scheduler.snapshot.kv_used_tokens == 0


class LateLink(InProcessLink):
    """Answers during the next forward pass, when the session has given its block up."""

    def __init__(self, proposer: ScriptedProposer) -> None:
        super().__init__(proposer)
        self.held: list[Sequence[AnyBlock]] = []

    def _propose(self, verifier_id: str, step: ProposeStep) -> Sequence[AnyBlock]:
        self.held.append(super()._propose(verifier_id, step))
        return []


def test_what_becomes_of_drafts_during_a_step_is_not_what_the_step_was_about() -> None:
    """A block that comes too late does not make the round one of the proposer's."""
    runner, now = ToyRunner(), 0.0
    link = LateLink(ScriptedProposer(script(1, 2, 3)))
    verifier = InlineVerifier(
        runner, [link], clock=lambda: now, wait_for_slow_drafts=False, draft_timeout_s=1.0
    )
    verifier.submit(PROMPT)
    verifier.step()  # the prompt

    def late_blocks_come(chunks: Sequence[SequenceChunk]) -> None:
        for blocks in link.held:
            verifier.scheduler.inbox.blocks_arrived(link, blocks)

    runner.fault = late_blocks_come
    now = 2.0
    verifier.step()

    stats = verifier.scheduler.snapshot.speculation
    assert stats.undrafted == {UndraftedReason.LATE: 1}
    assert stats.draft_count == 0


def test_joining_and_leaving_sessions_do_not_change_another_one(random_runner: ModelRunner) -> None:
    expected = plain_answers(random_runner, [PROMPT])[tuple(PROMPT)]
    verifier = InlineVerifier(random_runner, [InProcessLink(ScriptedProposer(script(8, 8)))])
    first = verifier.submit(PROMPT)
    verifier.step(5)
    second = verifier.submit(OTHERS[2])
    verifier.step(5)
    verifier.scheduler.inbox.cancel(second)
    verifier.answers.pop(second)
    verifier.run()

    assert verifier.answers[first].token_ids == expected


def test_out_of_blocks_preempts_the_youngest_and_changes_no_answer(random_model_dir: Path) -> None:
    options = ModelOptions(str(random_model_dir), dtype="float32", kv_cache_tokens=160)
    runner = load_model(options)
    expected = plain_answers(runner, [PROMPT, *OTHERS], GREEDY)
    proposer = ScriptedProposer(oracle(expected))
    verifier = InlineVerifier(runner, [InProcessLink(proposer)])

    together = verifier.generate([PROMPT, *OTHERS])

    assert verifier.scheduler.snapshot.preemption_count > 0
    assert [answer.token_ids for answer in together] == list(expected.values())
    assert runner.kv_cache.used_tokens == 0
    assert proposer.contexts == {}


def test_a_full_queue_refuses_with_the_number(random_runner: ModelRunner) -> None:
    verifier = InlineVerifier(random_runner, max_num_seqs=2, max_waiting_requests=1)
    ids = [verifier.submit(prompt) for prompt in [PROMPT, *OTHERS[:3]]]
    verifier.run()

    errors = [verifier.answers[session_id].error for session_id in ids]
    assert errors[:3] == [None, None, None]
    assert isinstance(errors[3], Overloaded)
    assert str(errors[3]) == "3 requests run or wait already, of at most 2 and 1"


def test_waiting_requests_run_when_slots_come_free(random_runner: ModelRunner) -> None:
    expected = plain_answers(random_runner, [PROMPT, *OTHERS])
    verifier = InlineVerifier(random_runner, max_num_seqs=2)

    answers = verifier.generate([PROMPT, *OTHERS])

    assert [answer.token_ids for answer in answers] == list(expected.values())


@pytest.mark.parametrize("rows", [9, 10, 16, 33])
def test_prompts_are_prefilled_in_chunks_that_fit_the_step(
    rows: int, random_runner: ModelRunner
) -> None:
    prompts = [[(3 * i) % VOCAB_SIZE for i in range(40)], PROMPT]
    expected = plain_answers(random_runner, prompts)
    link = InProcessLink(ScriptedProposer(oracle(expected)))
    verifier = InlineVerifier(random_runner, [link], max_num_batched_tokens=rows)
    num_rows: list[int] = []
    verifier.scheduler._on_step = lambda report: num_rows.append(report.num_rows)

    answers = verifier.generate(prompts)

    assert [answer.token_ids for answer in answers] == list(expected.values())
    assert max(num_rows) <= rows


def test_drafts_leave_room_for_a_prefill_chunk_and_for_everyones_row() -> None:
    """Half of a step of 24 rows: 12 rows for four sessions that would like 5 each."""
    runner = ToyRunner()
    proposer = ScriptedProposer(toy_continuation)
    verifier = InlineVerifier(
        runner, [InProcessLink(proposer)], max_draft_tokens=4, max_num_batched_tokens=24
    )
    for prompt in OTHERS[:4]:
        verifier.submit([token_id % 50 for token_id in prompt])
    verifier.step(2)
    alone = runner.passes[-1]
    verifier.submit([5] * 40)

    verifier.step()

    assert alone == [5, 5, 5, 5]
    assert runner.passes[-1] == [3, 3, 3, 3, 12]


def test_speculation_is_switched_off_by_the_request(random_runner: ModelRunner) -> None:
    proposer = ScriptedProposer(script(1, 2, 3))
    verifier = InlineVerifier(random_runner, [InProcessLink(proposer)])
    session = verifier.submit(PROMPT, max_draft_tokens=0)
    verifier.run()

    stats = verifier.answers[session].speculation
    assert stats is not None
    assert stats.undrafted == {UndraftedReason.DISABLED: 23}
    assert proposer.num_opened == 0


def test_the_smaller_limit_of_draft_tokens_holds(random_runner: ModelRunner) -> None:
    expected = plain_answers(random_runner, [PROMPT])
    proposer = ScriptedProposer(oracle(expected), max_draft_tokens=2)
    verifier = InlineVerifier(random_runner, [InProcessLink(proposer)], max_draft_tokens=6)

    [answer] = verifier.generate([PROMPT])

    assert answer.token_ids == expected[tuple(PROMPT)]
    assert max(len(block) for block in answer.blocks) == 3


def test_a_dead_proposer_is_waited_for_a_few_times_only(random_runner: ModelRunner) -> None:
    verifier = InlineVerifier(
        random_runner,
        [InProcessLink(DeadProposer())],
        draft_timeout_s=0.001,
        wait_for_slow_drafts=False,
    )
    verifier.generate([PROMPT, *OTHERS])
    before = verifier.scheduler.snapshot.step_count

    verifier.generate([PROMPT])

    assert verifier.scheduler.snapshot.step_count - before == 24


def test_a_failing_step_ends_its_sessions_and_no_others(random_runner: ModelRunner) -> None:
    expected = plain_answers(random_runner, OTHERS[:1])
    verifier = InlineVerifier(random_runner)
    broken = verifier.submit([VOCAB_SIZE + 1_000_000])  # past check_request: our own bug
    verifier.run()
    healthy = verifier.submit(OTHERS[0])
    verifier.run()

    assert verifier.answers[broken].error is not None
    assert verifier.answers[healthy].token_ids == expected[tuple(OTHERS[0])]
    assert verifier.scheduler.snapshot.kv_used_tokens == 0


def test_every_round_commits_a_token(random_runner: ModelRunner) -> None:
    expected = plain_answers(random_runner, [PROMPT])
    link = InProcessLink(ScriptedProposer(liar(expected, VOCAB_SIZE)))
    verifier = InlineVerifier(random_runner, [link])

    [answer] = verifier.generate([PROMPT])

    assert [len(block) for block in answer.blocks] == [1] * 24


def test_what_came_during_a_step_counts_when_the_next_blocks_are_asked_for() -> None:
    """Requests that come together come one by one: the first is computed before the others."""
    runner = ToyRunner()
    verifier = InlineVerifier(runner)
    verifier.submit(PROMPT)

    def others_come(chunks: Sequence[SequenceChunk]) -> None:
        if len(verifier.answers) == 1:
            for other in OTHERS[:2]:
                verifier.submit(other)

    runner.fault = others_come
    verifier.step()

    assert verifier.drafting.length.num_running == 3
    assert verifier.scheduler.snapshot.waiting_count == 2
    verifier.run()
    assert verifier.scheduler.inbox.num_requests == 0


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (GenerateRequest("r", (), GREEDY), "prompt_token_ids"),
        (GenerateRequest("r", (1,) * MAX_MODEL_LEN, GREEDY), "prompt_token_ids"),
        (GenerateRequest("r", (1, VOCAB_SIZE), GREEDY), "prompt_token_ids"),
        (GenerateRequest("r", (-1,), GREEDY), "prompt_token_ids"),
        (GenerateRequest("r", (1,), GREEDY, output_token_ids=(VOCAB_SIZE,)), "output_token_ids"),
        (GenerateRequest("r", (1,), GREEDY, output_token_ids=(1,) * 24), "output_token_ids"),
        (GenerateRequest("r", (1,), GREEDY, max_draft_tokens=-1), "max_draft_tokens"),
        (GenerateRequest("r", (1,), GREEDY, proposer_address="x:1"), "proposer_address"),
        (
            GenerateRequest("r", (1,), SamplingParams(stop_token_ids=(VOCAB_SIZE,))),
            "stop_token_ids",
        ),
    ],
)
def test_impossible_requests_are_refused_by_field_name(
    request_: GenerateRequest, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_request(request_, MAX_MODEL_LEN, VOCAB_SIZE, ["127.0.0.1:1"], 20)

    assert caught.value.field == field


@pytest.mark.parametrize(("ready_rate", "waits"), [(0.0, True), (1.0, False)])
def test_a_step_waits_for_one_of_many_unless_blocks_are_usually_ready(
    ready_rate: float, waits: bool, random_runner: ModelRunner
) -> None:
    """Its block is due in half a step's time."""
    now = [100.0]
    link = InProcessLink(ScriptedProposer(script(1, 2)))
    verifier = InlineVerifier(random_runner, [link], clock=lambda: now[0])
    for number in range(8):
        verifier.submit([number])
    verifier.step(3)
    scheduler, drafting = verifier.scheduler, verifier.drafting
    drafting.step_s = 0.01
    [peer] = drafting._peers.values()
    peer.drafted_s, peer.ready_rate = 0.005, ready_rate
    session, *others = scheduler._running
    for other in others:
        other.draft.deadline = None  # its block has come
    session.draft.asked_at, session.draft.deadline = now[0], now[0] + 1

    start_at = scheduler._start_at(now[0])

    assert start_at is not None
    assert (start_at > now[0] + 0.005) is waits
    assert waits or start_at == now[0]
    for one in (session, *others):  # others use the runner as well
        assert one.cache is not None
        one.cache.release()
