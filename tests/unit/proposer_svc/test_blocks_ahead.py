"""Blocks that are sent before they are asked for: the same as those that would be answered."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from pydantic import ValidationError

from specgw.service_settings import ProposerSettings
from specgw.types import MAX_BLOCKS_AHEAD, BlocksAhead, Commit, Hello, ProposeStep
from tests.unit.proposer_svc.test_branches import MANY, SAMPLING, Bench, K, facts

pytestmark = pytest.mark.usefixtures("single_thread")


class AheadBench(Bench):
    """A proposer whose verifier takes blocks ahead."""

    def __init__(self, method: str = "greedy", **options: object) -> None:
        super().__init__(method, takes_blocks_ahead=True, **options)  # type: ignore[arg-type]

    def sent_ahead(self, num_passes: int = 100) -> list[BlocksAhead]:
        """Drafts ahead; returns what was sent meanwhile, pass by pass."""
        sent = []
        for _ in range(num_passes):
            if not self.core.can_run_ahead():
                break
            self.core.run_ahead()
            sent += [blocks for _, blocks in self.core.blocks_ahead()]
        return sent

    def take(self, committed: Sequence[int], num_taken: int = K, session: int = 1) -> None:
        """Commits an outcome whose block was sent."""
        context = self.contexts[session]
        commit = Commit(session, len(context), tuple(committed), 0, num_taken=num_taken)
        assert self.core.apply("v", ProposeStep(commit=[commit])) == []
        assert not self.core.has_work()
        context += committed


def outcomes(sent: Sequence[BlocksAhead]) -> list[tuple[int, int, Sequence[int]]]:
    """Returns every outcome with its block."""
    return [
        (num_accepted, token_id, one.find(num_accepted, token_id))
        for one in sent
        for num_accepted, token_id in zip(one.accepted_counts, one.target_token_ids, strict=True)
    ]


@pytest.mark.parametrize(
    ("method", "sampling"),
    [("greedy", None), ("coupled", SAMPLING), ("probabilistic", None)],
)
def test_each_is_what_would_be_answered(method: str, sampling: object) -> None:
    options = {"sampling": sampling, "num_sessions": 2}
    bench = AheadBench(method, **options)
    block, _ = bench.ask([9]), bench.ask([9], session=2)
    sent = bench.sent_ahead()

    found = outcomes([one for one in sent if one.session_id == 1])

    assert len(found) == len({outcome[:2] for outcome in found}) == MANY
    for num_accepted, token_id, token_ids in found:
        reference = Bench(method, is_enabled=False, **options)  # type: ignore[arg-type]
        reference.ask([9])
        expected = reference.ask([*block.token_ids[:num_accepted], token_id])
        assert list(token_ids) == list(expected.token_ids)
    assert {one.base_length for one in sent} == {len(bench.contexts[1])}


@pytest.mark.parametrize("num_taken", [1, K - 1, K])
@pytest.mark.parametrize("number", [0, 5, MANY - 1])
def test_a_block_that_is_taken_is_gone_on_with(number: int, num_taken: int) -> None:
    """What is sent ahead and answered next is as if it had been asked for."""
    bench, reference = AheadBench(), AheadBench()
    block = bench.ask([9])
    reference.ask([9])
    num_accepted, token_id, token_ids = outcomes(bench.sent_ahead())[number]
    committed = [*block.token_ids[:num_accepted], token_id]

    bench.take(committed, num_taken)
    assert reference.ask(committed, num_taken).token_ids[:num_taken] == token_ids[:num_taken]

    assert bench.sent_ahead() == reference.sent_ahead()
    assert facts(bench.ask([1])) == facts(reference.ask([1]))
    bench.close()
    assert bench.core.load().kv_used_tokens == 0


def test_a_taken_block_counts_as_drafted_ahead() -> None:
    bench = AheadBench()
    block = bench.ask([9])
    num_accepted, token_id, _ = outcomes(bench.sent_ahead())[0]

    bench.take([*block.token_ids[:num_accepted], token_id])

    counts = bench.core.ahead
    assert (counts.hit_count, counts.miss_count, counts.used_token_count) == (1, 0, K)


def test_nothing_is_sent_to_those_who_do_not_take_it() -> None:
    bench = Bench()
    bench.ask([9])
    bench.run_ahead()

    assert bench.core.blocks_ahead() == []


def test_laws_are_not_sent_ahead() -> None:
    """A sampled session's tokens come with their laws, when they are asked for."""
    bench = AheadBench("probabilistic", sampling=SAMPLING)
    bench.ask([9])

    assert bench.sent_ahead() == []
    assert bench.core.ahead.token_count > 0


def test_a_block_goes_out_with_the_pass_that_completes_it() -> None:
    """Those after a rejection need K passes; the one after the whole block waits for its guess."""
    bench = AheadBench()
    bench.ask([9])

    sent = [bench.sent_ahead(num_passes=1) for _ in range(K + 1)]

    assert [bool(one) for one in sent] == [False] * (K - 1) + [True, True]
    assert {num_accepted for num_accepted, _, _ in outcomes(sent[-1])} == {K}


def test_no_more_can_be_configured_than_are_taken() -> None:
    ProposerSettings(run_ahead_branches=MAX_BLOCKS_AHEAD)
    with pytest.raises(ValidationError, match="run_ahead_branches"):
        ProposerSettings(run_ahead_branches=MAX_BLOCKS_AHEAD + 1)


@pytest.mark.parametrize("num_taken", [1, 1000])
def test_a_verifier_that_took_what_was_never_sent_harms_nobody(num_taken: int) -> None:
    bench = AheadBench(num_sessions=2)
    bench.ask([9])

    bench.take([33, 34], num_taken)

    reference = Bench(num_sessions=2, is_enabled=False)
    reference.ask([9])
    reference.commit([33, 34], 0)
    assert facts(bench.ask([1])) == facts(reference.ask([1]))
    assert facts(bench.ask([2], session=2)) == facts(reference.ask([2], session=2))


def test_a_session_that_takes_its_turns_is_not_idle() -> None:
    bench = AheadBench(num_sessions=2)
    table = bench.core._table
    block = bench.ask([9])
    for _ in range(8):
        bench.ask([9], session=2)
        num_accepted, token_id, token_ids = outcomes(
            [one for one in bench.sent_ahead() if one.session_id == 1]
        )[0]
        bench.take([*block.token_ids[:num_accepted], token_id])
        block = block._replace(token_ids=token_ids)

    session = table.get("v", 1)
    assert session is not None
    assert session.last_used >= table.idle_before


def test_a_lookup_sends_nothing_ahead() -> None:
    from proposer_svc.lookup import LookupDrafter
    from proposer_svc.proposer import ProposerCore
    from specgw.lookup.ngram import NgramLookup

    core = ProposerCore(LookupDrafter(NgramLookup(2, 4), 4, 2048, 512), 4, 4)
    target = replace(Bench().runner.description, vocab_size=50)
    core.connect(Hello("v", target, 4, takes_blocks_ahead=True))

    assert core.blocks_ahead() == []
