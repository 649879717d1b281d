"""When the verifier drafts by itself beside a proposer, and that nobody waits then."""

import pytest

from specgw.config import parse_config
from specgw.lookup.ngram import NgramLookup
from specgw.types import Commit, DraftBlock, ProposeStep, UndraftedReason
from tests.unit.verifier_svc.test_drafting import TIMEOUT_S, RecordingLink, ack, new_session
from verifier_svc.drafting import PROPOSER, Drafting
from verifier_svc.local_drafts import ADDRESS, LocalDrafts, build_local_drafts
from verifier_svc.session import Session


class Bench:
    """A proposer, a lookup beside it, and one session: its prompt is 1, 2, 3."""

    def __init__(self, min_match_length: int = 3) -> None:
        self.link = RecordingLink("one")
        self.local = LocalDrafts(NgramLookup(1, 3), min_match_length=min_match_length)
        self.drafting = Drafting([self.link], 50, TIMEOUT_S, local=self.local)
        self.drafting.link_up("one", ack())
        self.session = new_session(1)
        self.now = 100.0

    @property
    def sent(self) -> ProposeStep:
        return self.link.sent[-1]

    def ask(self, *committed: int) -> None:
        self.session.append(committed)
        self.drafting.ask(self.session, self.now)
        self.drafting.flush()

    def receive(self, *token_ids: int, reason: UndraftedReason | None = None) -> None:
        block = DraftBlock(1, len(self.session.context), token_ids, reason)
        self.drafting.receive("one", block, self.session, self.now)

    def expire(self) -> None:
        self.now += TIMEOUT_S
        self.drafting.expire([self.session], self.now)

    @property
    def drafted(self) -> tuple[str, list[int]]:
        draft = self.session.draft
        return draft.source, list(draft.token_ids)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def is_waiting(session: Session) -> bool:
    return session.draft.deadline is not None


def test_a_short_match_leaves_the_round_to_the_proposer(bench: Bench) -> None:
    bench.ask(9, 3)
    assert is_waiting(bench.session)
    bench.receive(7, 8)

    assert bench.drafted == (PROPOSER, [7, 8])


def test_a_long_match_is_used_and_the_proposer_only_follows(bench: Bench) -> None:
    bench.ask(9, 1, 2, 3)

    assert not is_waiting(bench.session)
    assert bench.drafted == ("ngram", [9, 1, 2, 3])
    assert bench.sent.commit == (Commit(1, 7, (), 0),)

    bench.session.draft.take()
    bench.ask(9, 5)
    assert is_waiting(bench.session)
    assert bench.sent.commit == (Commit(1, 7, (9, 5), 4),)


def test_a_late_block_is_replaced_by_any_match(bench: Bench) -> None:
    bench.ask(9, 3)
    bench.expire()

    assert not is_waiting(bench.session)
    assert bench.drafted == ("ngram", [9, 3, 9, 3])


def test_a_block_that_comes_before_the_step_after_all_is_used(bench: Bench) -> None:
    bench.ask(9, 3)
    bench.expire()
    bench.receive(7, 8)

    assert bench.drafted == (PROPOSER, [7, 8])


def test_a_session_that_went_on_without_a_late_block_keeps_its_own_draft(bench: Bench) -> None:
    bench.ask(9, 3)
    bench.expire()
    bench.session.draft.take()
    bench.ask(9)
    assert bench.drafted == ("ngram", [3, 9, 3, 9])
    bench.drafting.receive("one", DraftBlock(1, 5, (7,)), bench.session, bench.now)

    assert bench.drafted[0] in ("ngram", PROPOSER)
    assert bench.session.draft.asked_length in (None, 6)


@pytest.mark.parametrize("reason", [UndraftedReason.EMPTY, UndraftedReason.NO_SLOT])
def test_a_refusal_is_replaced_by_any_match(bench: Bench, reason: UndraftedReason) -> None:
    bench.ask(9, 3)
    bench.receive(reason=reason)

    assert bench.drafted == ("ngram", [9, 3, 9, 3])


def test_a_lost_proposer_is_replaced_at_once_and_from_then_on(bench: Bench) -> None:
    bench.ask(9, 3)
    bench.drafting.link_down("one", "killed", {1: bench.session})
    assert bench.drafted == ("ngram", [9, 3, 9, 3])

    bench.session.draft.take()
    bench.ask(9)
    assert bench.drafted == ("ngram", [3, 9, 3, 9])
    assert not is_waiting(bench.session)


def test_a_slow_proposer_is_replaced_but_for_its_probes(bench: Bench) -> None:
    for _ in range(3):
        bench.ask(9, 3)
        bench.expire()
        bench.drafting.close(bench.session)
        bench.session = new_session(1)
    bench.ask(9, 3)
    assert bench.drafted == ("ngram", [9, 3, 9, 3])

    bench.now += 10.0
    bench.ask(9, 3)
    assert is_waiting(bench.session)


def test_nothing_found_is_nothing_drafted_and_says_why(bench: Bench) -> None:
    bench.drafting.link_down("one", "killed", {})
    bench.ask(9)

    assert bench.drafted[1] == []
    assert bench.session.draft.reason is UndraftedReason.UNAVAILABLE


def test_no_more_is_drafted_than_is_of_use(bench: Bench) -> None:
    bench.drafting.link_down("one", "killed", {})
    bench.session = new_session(1, max_tokens=4)
    bench.ask(1)
    assert bench.drafted == ("ngram", [2, 3])
    bench.session.draft.take()
    bench.ask(2, 3)
    assert bench.session.draft.reason is UndraftedReason.DISABLED
    assert bench.session.draft.token_ids == ()


def test_ids_that_the_target_does_not_have_are_cut() -> None:
    bench = Bench(min_match_length=1)
    bench.session.context += [60]
    bench.ask(3)

    assert is_waiting(bench.session)
    assert bench.sent.commit[0].max_draft_tokens == 4


def test_a_session_that_ends_is_forgotten(bench: Bench) -> None:
    bench.ask(9, 1, 2, 3)
    assert bench.local.session_count == 1
    bench.drafting.close(bench.session)

    assert bench.local.session_count == 0


def test_a_lookup_in_place_of_a_proposer_is_told_as_one() -> None:
    config = {"method": "suffix", "num_speculative_tokens": 5}
    args = parse_config({"model": "m", "speculative_config": config, "max_num_seqs": 3})
    drafting = Drafting([], 50, TIMEOUT_S, local=build_local_drafts(args, 100))

    [status] = drafting.status()

    assert drafting.addresses == (ADDRESS,)
    assert status.is_connected
    assert status.offer is not None
    assert (status.offer.method, status.offer.max_draft_tokens) == ("suffix", 5)
    assert (status.offer.extra_slots_per_session, status.offer.max_sessions) == (0, 3)


def test_without_a_lookup_nothing_changes() -> None:
    args = parse_config({"model": "m"})
    local = build_local_drafts(args, 100)
    session = new_session(1)
    session.append([1, 2, 3])

    assert local.draft(session, 4, is_alone=True).token_ids == ()
    assert not local.has_lookup
    assert local.offer is None


def test_a_fallback_is_built_with_its_own_settings() -> None:
    args = parse_config(
        {
            "model": "m",
            "speculative_config": {"model": "tiny/draft", "num_speculative_tokens": 4},
            "specgw": {
                "fallback_proposer": {
                    "method": "ngram",
                    "min_match_length": 2,
                    "prompt_lookup_max": 2,
                    "prompt_lookup_min": 1,
                }
            },
        }
    )
    local = build_local_drafts(args, 100)
    session = new_session(1)
    session.append([9, 3])
    assert local.draft(session, 1, is_alone=True).token_ids == [9]
    assert local.draft(session, 1, is_alone=False).token_ids == ()
    session.append([9, 3])

    assert local.draft(session, 1, is_alone=False).token_ids == [9]
    assert local.offer is None
