"""When a session waits for its block and when it does not, on a clock that the test holds."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from specgw.channel import MAX_MESSAGE_BYTES
from specgw.hidden import LAST, MAX_COMMIT_BYTES, HiddenFormat
from specgw.link import LinkListener
from specgw.types import (
    MAX_BLOCKS_AHEAD,
    AcceptanceRule,
    BlocksAhead,
    Commit,
    DraftBlock,
    GenerateRequest,
    Hello,
    HelloAck,
    ProposeStep,
    SamplingParams,
    TokenProbs,
    UndraftedReason,
)
from tests.scripted_proposers import SCRIPTED_MODEL
from verifier_svc.draft_laws import are_laws
from verifier_svc.draft_length import DraftLength, FirstBlock, StepCost
from verifier_svc.drafting import Drafting
from verifier_svc.session import Session, open_session

TIMEOUT_S = 1.0


class RecordingLink:
    """Keeps what it was given."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.sent: list[ProposeStep] = []

    def start(self, hello: Hello, listener: LinkListener) -> None:
        raise NotImplementedError

    def send(self, step: ProposeStep, ack: HelloAck) -> None:
        self.sent.append(step)

    def stop(self) -> None:
        raise NotImplementedError

    async def wait_stopped(self) -> None:
        raise NotImplementedError


def new_session(session_id: int, address: str = "", max_tokens: int = 100) -> Session:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    request = GenerateRequest(f"r{session_id}", (1, 2, 3), params, proposer_address=address)
    return open_session(
        session_id,
        request,
        seed=0,
        max_draft_tokens=4,
        max_model_len=1000,
        eos_token_ids=(),
    )


def costly_drafts() -> DraftLength:
    """A target whose rows take longer than any draft saves."""
    length = DraftLength()
    length.step_cost = StepCost(((1, 0.01), (2, 1.0)))
    return length


def ack(max_draft_tokens: int = 4) -> HelloAck:
    return HelloAck("p", "scripted", SCRIPTED_MODEL, max_draft_tokens, 0, 10)


class Bench:
    """Two links, and sessions that go through rounds on them."""

    def __init__(self, length: DraftLength | None = None) -> None:
        self.links = [RecordingLink("one"), RecordingLink("two")]
        self.drafting = Drafting(
            self.links, vocab_size=50, draft_timeout_s=TIMEOUT_S, length=length
        )
        self.drafting.link_up("one", ack())
        self.now = 100.0

    def ask(self, session: Session) -> ProposeStep:
        """Commits one token and asks for the next block; returns what was sent."""
        session.append([7])
        self.drafting.ask(session, self.now)
        self.drafting.flush()
        return self.links[0].sent[-1] if self.links[0].sent else ProposeStep()

    def answer(
        self,
        session: Session,
        after_s: float,
        tokens: Sequence[int] = (8, 9),
        draft_s: float = 0.0,
    ) -> None:
        self.now += after_s
        block = DraftBlock(session.session_id, len(session.context), tokens, draft_s=draft_s)
        self.drafting.receive("one", block, session, self.now)

    def round(self, session: Session, answer_s: float, draft_s: float = 0.0) -> None:
        self.ask(session)
        self.answer(session, answer_s, draft_s=draft_s)

    def refuse(self, session: Session, reason: UndraftedReason) -> None:
        block = DraftBlock(session.session_id, len(session.context), reason=reason)
        self.drafting.receive("one", block, session, self.now)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_session_that_drafts_would_not_pay_costs_the_proposer_nothing() -> None:
    """Neither a prefill nor a message, once another session has shown what drafts cost."""
    bench = Bench(costly_drafts())
    first = new_session(1)
    for _ in range(4):
        bench.round(first, answer_s=0.01)
    sent = len(bench.links[0].sent)
    second = new_session(2)

    bench.drafting.open(second, bench.now)
    for _ in range(10):
        bench.ask(second)

    assert len(bench.links[0].sent) == sent
    assert not second.draft.is_open
    assert second.draft.reason is UndraftedReason.NO_GAIN


@pytest.mark.parametrize(
    ("address", "device", "target_device", "at_once"),
    [
        ("unix:/p.sock", "cpu", "cpu", False),
        ("127.0.0.1:1", "cpu", "cpu", False),
        ("proposer:1", "cpu", "cpu", True),
        ("unix:/p.sock", "cuda:0", "cpu", True),
        ("unix:/p.sock", "cpu", "cuda:0", True),
    ],
)
def test_on_the_targets_cores_a_session_is_opened_after_the_targets_prefill(
    address: str, device: str, target_device: str, at_once: bool
) -> None:
    """Elsewhere both prefills overlap. It is opened when its first block is asked for."""
    link, session = RecordingLink(address), new_session(1)
    drafting = Drafting([link], 50, TIMEOUT_S, target_device=target_device)
    drafting.link_up(address, replace(ack(), draft_model=replace(SCRIPTED_MODEL, device=device)))
    drafting.open(session, now=1.0)
    drafting.flush()

    assert [len(step.open) for step in link.sent] == [1] * at_once

    session.append([7])
    drafting.ask(session, now=2.0)
    drafting.flush()

    assert sum(len(step.open) for step in link.sent) == 1
    assert link.sent[-1].commit[0].max_draft_tokens == 4


def test_a_session_is_not_opened_on_the_targets_cores_for_a_few_last_tokens() -> None:
    """Its proposer would compute the whole context for them, while the target waits."""
    length = DraftLength()
    length.step_cost = StepCost(((1, 0.1), (8, 0.1), (16, 0.8)))
    link = RecordingLink("unix:/p.sock")
    drafting = Drafting([link], 50, TIMEOUT_S, length=length, target_device="cpu")
    on_cpu = replace(SCRIPTED_MODEL, device="cpu")
    drafting.link_up("unix:/p.sock", replace(ack(), draft_model=on_cpu))
    now = 0.0

    def drafts(session: Session, answers_s: Sequence[float]) -> bool:
        """Lets a session draft; returns whether it is open."""
        nonlocal now
        for answer_s in answers_s:
            session.append([7])
            drafting.ask(session, now)
            now += answer_s
            block = DraftBlock(session.session_id, len(session.context), (8, 9))
            drafting.receive("unix:/p.sock", block, session, now)
        return session.draft.is_open

    assert drafts(new_session(1), [2.0, *[0.08] * 3])  # nothing is known
    assert not drafts(new_session(2, max_tokens=3), [0.1])
    assert drafts(new_session(3, max_tokens=90), [2.0])


@pytest.mark.parametrize("max_tokens", [8, 200])
def test_sessions_that_run_together_are_opened_together_or_not_at_all(max_tokens: int) -> None:
    """By what all are to be opened for, though alone one would be and another would not."""
    length = DraftLength()
    length.step_cost = StepCost(((1, 0.1), (8, 0.1), (16, 0.8)))
    drafting = Drafting(
        [RecordingLink("unix:/p.sock")], 50, TIMEOUT_S, length=length, target_device="cpu"
    )
    on_cpu = replace(SCRIPTED_MODEL, device="cpu")
    drafting.link_up("unix:/p.sock", replace(ack(), draft_model=on_cpu))
    history = drafting._peers["unix:/p.sock"].history
    for _ in range(3):
        history.observe(4, 0.02, num_running=2)
    history.openings.append(FirstBlock(3, 4, 0.4))  # seconds, where a block saves 0.3
    length.num_running = 2
    running = [new_session(1, max_tokens=5), new_session(2, max_tokens=max_tokens)]
    drafting.running = running

    for session in running:
        session.append([7])
        drafting.ask(session, 1.0)

    assert [one.draft.is_open for one in running] == [max_tokens == 200] * 2


@pytest.mark.parametrize(("address", "asks"), [("unix:/p.sock", False), ("proposer:1", True)])
def test_one_session_does_not_draft_at_the_cost_of_many(address: str, asks: bool) -> None:
    """As after a probe, which opens one. Elsewhere than on the target's cores nobody else waits."""
    length = DraftLength()
    length.step_cost, length.num_running = StepCost(((1, 0.1), (8, 0.1), (16, 0.15))), 8
    drafting = Drafting([RecordingLink(address)], 50, TIMEOUT_S, length=length, target_device="cpu")
    on_cpu = replace(SCRIPTED_MODEL, device="cpu")
    drafting.link_up(address, replace(ack(), draft_model=on_cpu))
    running = [new_session(number) for number in range(1, 9)]
    drafting.running = running
    drafting.ask(running[0], 0.0)  # nothing is known: it is opened
    for _ in range(3):
        drafting._peers[address].history.observe(1, 0.03, num_running=8)
    for session in running:
        session.has_started = True
    running[0].append([7])
    block = DraftBlock(1, 3, (7,))
    drafting.receive(address, block, running[0], 0.1)

    drafting.ask(running[0], 0.2)

    assert (running[0].draft.asked_length is not None) == asks


@pytest.mark.parametrize(
    ("address", "late_s", "is_known"),
    [("unix:/p.sock", 0.0, True), ("unix:/p.sock", 1e6, False), ("proposer:1", 0.0, False)],
)
def test_an_opening_on_the_targets_cores_is_measured(
    address: str, late_s: float, is_known: bool
) -> None:
    """By the answer to a first block that nothing else delayed; no block with it counts as one."""
    drafting = Drafting([RecordingLink(address)], 50, TIMEOUT_S, target_device="cpu")
    on_cpu = replace(SCRIPTED_MODEL, device="cpu")
    drafting.link_up(address, replace(ack(), draft_model=on_cpu))
    history = drafting._peers[address].history
    old, *new = (new_session(number) for number in (1, 2, 3))

    def round(sessions: Sequence[Session], now: float, answer_s: float) -> None:
        for session in sessions:
            session.append([7])
            drafting.ask(session, now)
        drafting.expire(sessions, now + answer_s)
        for session in sessions:
            block = DraftBlock(session.session_id, len(session.context), (8, 9))
            drafting.receive(address, block, session, now + answer_s)

    round([old], 0.0, 0.3)
    round([old], 1.0, 0.1)
    history.openings.clear()
    num_answers = sum(cost.num_answers for cost in history.costs.values())
    round([old, *new], 2.0, 0.5 + late_s)

    assert list(history.openings) == [FirstBlock(2 * 4, 4, 0.5)] * is_known
    counted = sum(cost.num_answers for cost in history.costs.values()) - num_answers
    assert counted == (0 if address.startswith("unix") else 1)
    round([old], 1e7, 0.1)
    assert sum(cost.num_answers for cost in history.costs.values()) == num_answers + counted + 1


@pytest.mark.parametrize(("address", "waits"), [("unix:/p.sock", True), ("proposer:1", False)])
def test_a_first_block_on_the_targets_cores_has_the_time_of_its_prefill(
    address: str, waits: bool
) -> None:
    length = DraftLength()
    length.step_cost, length.num_running = StepCost(((1, 0.1), (8, 0.8))), 2
    session = new_session(1)
    drafting = Drafting([RecordingLink(address)], 50, TIMEOUT_S, length=length, target_device="cpu")
    on_cpu = replace(SCRIPTED_MODEL, device="cpu")
    drafting.link_up(address, replace(ack(), draft_model=on_cpu))
    drafting.ask(session, now=0.0)

    prefill_s = 3 * 0.1 * 0.5  # rows, seconds of one, a draft model's share while it is not known
    assert drafting.needs_the_cores(session) == waits
    assert session.draft.deadline == pytest.approx(TIMEOUT_S + 2 * prefill_s * waits)


def test_a_step_does_not_wait_for_a_slow_proposer_on_its_cores() -> None:
    session = new_session(1)
    drafting = Drafting([RecordingLink("unix:/p.sock")], 50, TIMEOUT_S, target_device="cpu")
    drafting.link_up(
        "unix:/p.sock", replace(ack(), draft_model=replace(SCRIPTED_MODEL, device="cpu"))
    )
    now = 0.0
    waited: list[bool] = []
    while len(waited) < 4:
        session.append([7])
        drafting.ask(session, now)
        waited.append(drafting.needs_the_cores(session))
        now += 100.0  # it never answers, but for what it was asked for long ago
        drafting.expire([session], now)
        session.draft.asked_length = None

    assert waited == [True, True, True, False]


def test_a_proposer_that_reads_hidden_states_has_those_of_the_prompt() -> None:
    link, session = RecordingLink("unix:/p.sock"), new_session(1)
    drafting = Drafting([link], 50, TIMEOUT_S, target_device="cpu")
    on_cpu = replace(SCRIPTED_MODEL, device="cpu")
    wants_hidden = HiddenFormat((LAST,), 2, "float32")
    drafting.link_up("unix:/p.sock", replace(ack(), draft_model=on_cpu, hidden=wants_hidden))
    drafting.open(session, now=1.0)

    assert session.draft.is_open


def test_a_session_is_opened_with_its_context_and_then_only_extended(bench: Bench) -> None:
    session = new_session(1)
    bench.drafting.open(session, bench.now)
    bench.drafting.flush()
    first = bench.ask(session)
    bench.answer(session, 0.01)
    second = bench.ask(session)

    assert [o.token_ids for o in bench.links[0].sent[0].open] == [(1, 2, 3)]
    assert [(c.base_length, c.token_ids) for c in first.commit] == [(3, (7,))]
    assert [(c.base_length, c.token_ids) for c in second.commit] == [(4, (7,))]


# Blocks that come before they are asked for.


def ahead(
    session: Session, outcome: tuple[int, int], tokens: Sequence[int] = (11, 12, 13, 14)
) -> BlocksAhead:
    """Returns a block for an outcome of the round that the session is in."""
    num_accepted, token_id = outcome
    base_length = len(session.context)
    return BlocksAhead(session.session_id, base_length, (num_accepted,), (token_id,), tokens)


def in_a_round(bench: Bench) -> Session:
    """Returns a session whose first block, 8 and 9, has come."""
    session = new_session(1)
    bench.round(session, answer_s=0.01)
    return session


def commit(bench: Bench, session: Session, token_ids: Sequence[int]) -> Commit:
    """Ends the session's round; returns what the proposer is told."""
    session.append(token_ids)
    bench.drafting.ask(session, bench.now)
    bench.drafting.flush()
    [sent] = bench.links[0].sent[-1].commit
    return sent


def test_a_block_that_came_ahead_is_not_waited_for(bench: Bench) -> None:
    session = in_a_round(bench)
    bench.drafting.receive("one", ahead(session, (2, 5)), session, bench.now)
    bench.drafting.receive("one", ahead(session, (1, 5), (14, 15, 16, 17)), session, bench.now)

    sent = commit(bench, session, [8, 5])

    assert (sent.token_ids, sent.max_draft_tokens, sent.num_taken) == ((8, 5), 0, 4)
    assert session.draft.deadline is None
    assert session.draft.asked_length is None
    assert session.draft.take() == ((14, 15, 16, 17), ())
    peer = bench.drafting._peers["one"]
    assert peer.ready_rate > 0
    assert peer.answer_s is None  # nothing was waited for: it says nothing of how long to wait


def test_blocks_may_be_taken_one_after_the_other(bench: Bench) -> None:
    session = in_a_round(bench)
    block = [8, 9]
    for number in range(3):
        bench.drafting.receive("one", ahead(session, (1, 5), range(4)), session, bench.now)
        bench.drafting.receive("one", ahead(session, (2, 5), range(9, 13)), session, bench.now)
        assert commit(bench, session, [*block[:2], 5]).num_taken == 4, number
        block = list(session.draft.take()[0])
        assert block == [9, 10, 11, 12]


@pytest.mark.parametrize("size", [1, 3, 5, 100_000])
def test_a_block_of_another_size_is_not_taken(bench: Bench, size: int) -> None:
    """A shorter one is gone on with by its proposer; of a longer one nothing is kept."""
    session = in_a_round(bench)
    bench.drafting.receive("one", ahead(session, (0, 5), [1] * size), session, bench.now)
    assert len(session.draft.ahead) == (size <= session.max_draft_tokens)

    sent = commit(bench, session, [5])

    assert (sent.max_draft_tokens, sent.num_taken) == (4, 0)


@pytest.mark.parametrize("rounds", [[[7], [5]], [[9, 5]], [[8], [8, 9, 5]]])
def test_a_block_for_other_tokens_of_the_same_number_is_not_taken(
    bench: Bench, rounds: list[list[int]]
) -> None:
    """As when rounds went by without a word to the proposer."""
    session = in_a_round(bench)
    for number in range(4):
        bench.drafting.receive("one", ahead(session, (number, 5)), session, bench.now)
    for tokens in rounds[:-1]:
        session.append(tokens)

    assert commit(bench, session, rounds[-1]).num_taken == 0


@pytest.mark.parametrize("outcome", [[5], [8, 9, 5], [8, 6]])
def test_a_block_for_another_outcome_is_forgotten(bench: Bench, outcome: list[int]) -> None:
    session = in_a_round(bench)
    bench.drafting.receive("one", ahead(session, (1, 5)), session, bench.now)

    sent = commit(bench, session, outcome)

    assert (sent.max_draft_tokens, sent.num_taken) == (4, 0)
    assert session.draft.asked_length == len(session.context)
    assert session.draft.ahead == []


def test_no_more_tokens_are_taken_than_are_wanted(bench: Bench) -> None:
    session = in_a_round(bench)
    bench.drafting.receive("one", ahead(session, (0, 5), range(10, 14)), session, bench.now)
    session.max_draft_tokens = 2

    assert commit(bench, session, [5]).num_taken == 2
    assert session.draft.take()[0] == range(10, 12)


@pytest.mark.parametrize(("tokens", "num_taken"), [((8, 50, 9, 9), 1), ((-1, 8, 9, 9), 0)])
def test_a_block_ahead_is_cut_at_the_first_foreign_id(
    bench: Bench, tokens: Sequence[int], num_taken: int
) -> None:
    session = in_a_round(bench)
    bench.drafting.receive("one", ahead(session, (0, 5), tokens), session, bench.now)

    sent = commit(bench, session, [5])

    assert (sent.num_taken, sent.max_draft_tokens) == (num_taken, 0 if num_taken else 4)


def test_blocks_ahead_of_another_round_are_dropped(bench: Bench) -> None:
    session = in_a_round(bench)
    late = ahead(session, (0, 5))
    for shift in (-1, 1, 2):
        other = late._replace(base_length=late.base_length + shift)
        bench.drafting.receive("one", other, session, bench.now)
    bench.drafting.receive("two", late, session, bench.now)

    assert session.draft.ahead == []
    assert commit(bench, session, [5]).num_taken == 0
    bench.drafting.receive("one", late, session, bench.now)
    assert session.draft.ahead == []


def test_no_more_blocks_ahead_are_kept_than_agreed(bench: Bench) -> None:
    session = in_a_round(bench)
    for token_id in range(MAX_BLOCKS_AHEAD + 10):
        bench.drafting.receive("one", ahead(session, (0, token_id)), session, bench.now)

    assert len(session.draft.ahead) == MAX_BLOCKS_AHEAD


def test_a_session_that_is_lost_forgets_what_came_ahead(bench: Bench) -> None:
    session = in_a_round(bench)
    bench.drafting.receive("one", ahead(session, (0, 5)), session, bench.now)

    bench.drafting.link_down("one", "gone", {1: session})
    bench.drafting.link_up("one", ack())
    session.draft.retry_at = 0.0
    step = bench.ask(session)

    assert session.draft.ahead == []
    assert [one.num_taken for one in step.commit] == [0]
    assert len(step.open) == 1


def test_a_session_that_wants_no_drafts_takes_none(bench: Bench) -> None:
    session = in_a_round(bench)
    bench.drafting.receive("one", ahead(session, (0, 7)), session, bench.now)
    session.max_draft_tokens = 0

    bench.ask(session)

    assert session.draft.take()[0] == ()


def test_a_block_for_another_length_is_dropped(bench: Bench) -> None:
    session = new_session(1)
    bench.ask(session)
    stale = DraftBlock(1, len(session.context) - 1, (8,))
    bench.drafting.receive("one", stale, session, bench.now)

    assert session.draft.take()[0] == ()
    bench.ask(session)
    assert session.draft.reason is UndraftedReason.LATE


def test_a_block_from_another_proposer_is_dropped(bench: Bench) -> None:
    session = new_session(1)
    bench.ask(session)
    bench.drafting.receive("two", DraftBlock(1, 4, (8,)), session, bench.now)

    assert session.draft.take()[0] == ()


@pytest.mark.parametrize(
    ("tokens", "usable"),
    [((8, 9), (8, 9)), ((8, 50, 9), (8,)), ((-1, 8), ()), ((1, 2, 3, 4, 5, 6), (1, 2, 3, 4))],
)
def test_only_ids_of_the_vocabulary_that_were_asked_for_are_used(
    tokens: tuple[int, ...], usable: tuple[int, ...], bench: Bench
) -> None:
    session = new_session(1)
    bench.ask(session)
    bench.answer(session, 0.01, tokens)

    assert session.draft.take()[0] == usable


def test_a_late_session_asks_again_when_the_late_block_comes(bench: Bench) -> None:
    session = new_session(1)
    bench.ask(session)
    bench.now += TIMEOUT_S
    bench.drafting.expire([session], bench.now)
    assert session.draft.deadline is None

    sent = len(bench.links[0].sent)
    bench.ask(session)
    assert len(bench.links[0].sent) == sent
    bench.drafting.receive("one", DraftBlock(1, 4, (8,)), session, bench.now)
    bench.drafting.flush()

    commits = bench.links[0].sent[-1].commit
    assert [(c.base_length, c.token_ids) for c in commits] == [(4, (7,))]
    assert session.draft.deadline is not None
    assert session.draft.take()[0] == ()


def test_the_deadline_follows_the_proposers_answers(bench: Bench) -> None:
    session = new_session(1)
    bench.drafting.step_s = 1.0
    bench.round(session, 0.5)  # the first holds the prefill and does not count
    for _ in range(5):
        bench.round(session, 0.02)
    bench.ask(session)

    assert session.draft.deadline == pytest.approx(bench.now + 4 * 0.02)


def test_blocks_that_were_ready_do_not_shorten_the_wait_for_others(bench: Bench) -> None:
    session = new_session(1)
    bench.round(session, answer_s=0.02, draft_s=0.01)  # the first holds the prefill
    bench.round(session, answer_s=0.02, draft_s=0.01)
    for _ in range(30):
        bench.round(session, answer_s=0.001)
    bench.ask(session)

    assert bench.drafting.due_at(session) == pytest.approx(bench.now + 0.02)
    assert session.draft.deadline == pytest.approx(bench.now + 4 * 0.02)
    assert bench.drafting.ready_rate(session) > 0.95


def test_one_missed_deadline_is_forgiven_and_three_in_a_row_are_not(bench: Bench) -> None:
    sessions = [new_session(number) for number in range(1, 5)]
    for session in sessions[:2]:
        bench.ask(session)
        bench.now += TIMEOUT_S
        bench.drafting.expire(sessions, bench.now)
    bench.ask(sessions[2])
    assert sessions[2].draft.deadline is not None
    bench.now += TIMEOUT_S
    bench.drafting.expire(sessions, bench.now)
    bench.ask(sessions[3])

    assert sessions[3].draft.deadline is None
    assert sessions[3].draft.reason is UndraftedReason.UNAVAILABLE


def test_a_proposer_slower_than_its_block_could_save_rests_and_is_probed(bench: Bench) -> None:
    session = new_session(1)
    bench.drafting.step_s = 0.01  # four accepted tokens save at most 0.04 s
    bench.round(session, 0.02)
    bench.round(session, 0.1)
    sent = len(bench.links[0].sent)
    bench.ask(session)
    assert len(bench.links[0].sent) == sent
    assert session.draft.reason is UndraftedReason.UNAVAILABLE

    bench.now += 0.3  # the first probe is due
    bench.round(session, 0.005)
    bench.ask(session)

    assert session.draft.deadline is not None
    assert len(bench.links[0].sent) == sent + 2


def test_only_one_session_probes_a_slow_proposer(bench: Bench) -> None:
    sessions = [new_session(number) for number in range(1, 4)]
    bench.drafting.step_s = 0.001
    bench.round(sessions[0], 0.02)
    bench.round(sessions[0], 0.1)
    bench.now += 0.3
    for session in sessions:
        bench.ask(session)

    assert [session.draft.deadline is not None for session in sessions] == [True, False, False]


def test_resync_opens_the_session_again_from_its_context(bench: Bench) -> None:
    session = new_session(1)
    bench.round(session, 0.01)
    bench.ask(session)
    bench.refuse(session, UndraftedReason.RESYNC)
    assert session.draft.deadline is None
    step = bench.ask(session)

    assert [o.token_ids for o in step.open] == [(1, 2, 3, 7, 7, 7)]
    assert [(c.base_length, c.token_ids) for c in step.commit] == [(6, ())]
    assert step.close == ()


def test_a_refused_session_comes_back_later(bench: Bench) -> None:
    session = new_session(1)
    bench.ask(session)
    bench.refuse(session, UndraftedReason.NO_SLOT)
    step = bench.ask(session)
    assert step.close == (1,)
    assert step.commit == ()
    assert session.draft.reason is UndraftedReason.NO_SLOT

    bench.now += 1.5
    step = bench.ask(session)

    assert [o.session_id for o in step.open] == [1]


def test_the_draft_models_context_limit_ends_drafting_for_the_session(bench: Bench) -> None:
    session = new_session(1)
    bench.ask(session)
    bench.refuse(session, UndraftedReason.CONTEXT_LIMIT)
    bench.now += 3600
    bench.ask(session)

    assert session.draft.reason is UndraftedReason.CONTEXT_LIMIT
    assert len(bench.links[0].sent) == 2  # the block asked for, and the close


def test_a_lost_link_loses_its_sessions_and_another_proposer_takes_them(bench: Bench) -> None:
    session = new_session(1)
    bench.ask(session)
    bench.drafting.link_up("two", ack(max_draft_tokens=2))
    bench.drafting.link_down("one", "gone", {1: session})
    assert session.draft.deadline is None
    bench.ask(session)

    [step] = bench.links[1].sent
    assert [o.token_ids for o in step.open] == [(1, 2, 3, 7, 7)]
    assert step.commit[0].max_draft_tokens == 2


def test_a_request_goes_to_the_proposer_it_names(bench: Bench) -> None:
    bench.drafting.link_up("two", ack())
    session = new_session(1, address="two")
    bench.ask(session)

    assert bench.links[0].sent == []
    assert len(bench.links[1].sent) == 1


def test_while_the_named_proposer_is_lost_another_drafts(bench: Bench) -> None:
    session = new_session(1, address="two")

    bench.drafting.open(session, bench.now)

    assert session.draft.address == "one"


def test_while_the_named_proposer_is_slow_another_drafts(bench: Bench) -> None:
    bench.drafting.step_s = 0.01
    measured, session = new_session(1), new_session(2, address="one")
    bench.round(measured, 0.01)
    bench.round(measured, 1.0)
    bench.drafting.link_up("two", ack())

    bench.drafting.open(session, bench.now)

    assert session.draft.address == "two"


def test_sessions_spread_over_proposers(bench: Bench) -> None:
    bench.drafting.link_up("two", ack())
    for number in range(1, 9):
        bench.drafting.open(new_session(number), bench.now)

    assert [status.session_count for status in bench.drafting.status()] == [4, 4]


def test_nothing_is_asked_when_one_token_is_left(bench: Bench) -> None:
    session = new_session(1, max_tokens=2)
    bench.ask(session)

    assert bench.links[0].sent == []
    assert session.draft.reason is UndraftedReason.DISABLED


def test_closing_tells_the_proposer_once(bench: Bench) -> None:
    session = new_session(1)
    bench.ask(session)
    bench.drafting.close(session)
    bench.drafting.close(session)
    bench.drafting.flush()

    assert [step.close for step in bench.links[0].sent] == [(), (1,)]
    assert bench.drafting.status()[0].session_count == 0


def test_hidden_states_of_many_sessions_go_in_messages_that_are_not_too_large(
    bench: Bench,
) -> None:
    needed = HiddenFormat((LAST,), MAX_COMMIT_BYTES // 4, "float32")
    bench.drafting.link_up("one", replace(ack(), hidden=needed))
    sessions = [new_session(number) for number in range(1, 6)]
    for session in sessions:
        bench.drafting.open(session, bench.now)
        assert bench.drafting.needs_hidden(session)
        session.append([7])
        session.draft.hidden.append(2, torch.zeros(1, needed.size))
        bench.drafting.ask(session, bench.now)

    bench.drafting.flush()

    sent = bench.links[0].sent
    assert [[commit.session_id for commit in step.commit] for step in sent] == [[1, 2], [3, 4], [5]]
    assert [len(step.open) for step in sent] == [5, 0, 0]
    assert all(
        sum(len(c.hidden.values) for c in step.commit if c.hidden) < MAX_MESSAGE_BYTES
        for step in sent
    )


@pytest.mark.parametrize("uses_draft_probs", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_laws_are_checked_only_where_they_are_used(
    uses_draft_probs: bool, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Sequence[int]] = []

    def count(token_ids: Sequence[int], laws: Sequence[TokenProbs], vocab_size: int) -> bool:
        checked.append(token_ids)
        return are_laws(token_ids, laws, vocab_size)

    monkeypatch.setattr("verifier_svc.drafting.are_laws", count)
    drafting = Drafting([RecordingLink("one")], 50, TIMEOUT_S, uses_draft_probs=uses_draft_probs)
    drafting.link_up("one", ack())
    session = new_session(1)
    params = replace(session.request.sampling_params, temperature=temperature)
    session.request = replace(session.request, sampling_params=params)
    laws = (TokenProbs(np.array([8], np.int32), np.array([1], np.float32)),) * 2
    drafting.ask(session, 0.0)

    block = DraftBlock(1, 3, (8, 8), rule=AcceptanceRule.PROBS, draft_probs=laws)
    drafting.receive("one", block, session, 0.0)

    is_used = uses_draft_probs and temperature > 0
    assert session.draft.token_ids == (8, 8)
    assert session.draft.probs == (laws if is_used else ())
    assert len(checked) == is_used
