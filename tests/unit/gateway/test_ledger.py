"""The ledger's arithmetic, for any order of claims, releases, restarts and changes of capacity."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from gateway.ledger import Account, Claim, Demand, Ledger
from specgw.budget import NOTHING, Budget
from specgw.errors import InvalidRequest
from specgw.types import HelloAck, ModelDescription, ProposerStatus, UndraftedReason, VerifierInfo

MODEL = ModelDescription("m", "", 10, "", 10_000, "", "")
DEMAND = Demand(prompt_token_count=10, max_tokens=20)
K = 4


def offer(proposer_id: str = "p", **changes: Any) -> HelloAck:
    return replace(
        HelloAck(proposer_id, "draft_model", MODEL, K, 1, 64, K, 2048, 10_000), **changes
    )


def status(
    ack: HelloAck | None, address: str = "host:1", is_connected: bool = True
) -> ProposerStatus:
    return ProposerStatus(address, is_connected, 0, "", ack)


def verifier(*proposers: ProposerStatus, **changes: Any) -> VerifierInfo:
    return replace(VerifierInfo("v", MODEL, 8, 2048, 10_000, K, K, proposers), **changes)


def account(ledger: Ledger, name: str) -> Account:
    return {one: found for _, one, found in ledger.accounts()}[name]


def taken(ledger: Ledger, demand: Demand = DEMAND) -> Claim:
    claim = ledger.claim(demand)
    assert claim is not None
    return claim


class TestClaims:
    """What one request takes, and where."""

    def test_a_drafted_request_takes_its_part_of_both(self) -> None:
        ledger = Ledger()
        ledger.open("v:1", verifier(status(offer())))

        claim = taken(ledger)

        assert claim.verifier_part == Budget(1, 1 + K, 30 + K)
        assert claim.proposer_part == Budget(1, 2, 30 + K)
        assert (claim.proposer, claim.undrafted) == ("host:1", None)

    def test_a_request_that_wants_no_drafts_takes_one_row_and_no_proposer(self) -> None:
        ledger = Ledger()
        ledger.open("v:1", verifier(status(offer())))

        claim = taken(ledger, replace(DEMAND, max_draft_tokens=0))

        assert claim.verifier_part == Budget(1, 1, 30)
        assert (claim.proposer, claim.undrafted) == ("", None)

    def test_a_part_is_never_more_than_the_models_context(self) -> None:
        ledger = Ledger()
        model = replace(MODEL, max_model_len=30)
        ledger.open("v:1", replace(verifier(kv_capacity_tokens=30), target_model=model))

        assert taken(ledger).verifier_part.kv_tokens == 30

    @pytest.mark.parametrize(
        ("room", "reason"),
        [
            ({"max_sessions": 1}, UndraftedReason.NO_SLOT),
            ({"max_num_batched_tokens": 3}, UndraftedReason.NO_SLOT),
            ({"kv_capacity_tokens": 40}, UndraftedReason.NO_MEMORY),
        ],
    )
    def test_what_fits_the_verifier_only_is_undrafted(
        self, room: dict[str, Any], reason: UndraftedReason
    ) -> None:
        ledger = Ledger()
        ledger.open("v:1", verifier(status(offer(**room))))

        first, second = taken(ledger), taken(ledger)

        assert first.undrafted is None
        assert (second.undrafted, second.may_draft) == (reason, False)
        assert second.verifier_part == Budget(1, 1, 30)

    def test_without_a_proposer_yet_drafting_is_left_to_the_verifier(self) -> None:
        ledger = Ledger()
        ledger.open("v:1", verifier(status(None, is_connected=False)))

        claim = taken(ledger)

        assert (claim.undrafted, claim.may_draft) == (UndraftedReason.UNAVAILABLE, True)
        assert claim.verifier_part.step_tokens == 1 + K

    def test_connected_proposers_go_before_lost_ones_and_the_least_loaded_first(self) -> None:
        ledger = Ledger()
        lost = status(offer("lost"), "host:0", is_connected=False)
        ledger.open("v:1", verifier(lost, status(offer("p")), status(offer("q"), "host:2")))

        claims = [taken(ledger) for _ in range(4)]

        assert sorted(claim.proposer_id for claim in claims) == ["p", "p", "q", "q"]

    def test_a_proposer_of_two_verifiers_is_one_account(self) -> None:
        ledger = Ledger()
        for address in ("v:1", "v:2"):
            ledger.open(address, verifier(status(offer(max_sessions=1))))

        claims = [taken(ledger), taken(ledger)]

        assert {claim.verifier for claim in claims} == {"v:1", "v:2"}
        assert [claim.undrafted for claim in claims] == [None, UndraftedReason.NO_SLOT]

    def test_claims_follow_a_restarted_proposer(self) -> None:
        ledger = Ledger()
        ledger.open("v:1", verifier(status(offer("before"))))
        claim = taken(ledger)

        ledger.open("v:1", verifier(status(offer("after"))))

        assert [name for _, name, _ in ledger.accounts()] == ["v:1", "after"]
        assert account(ledger, "after").used == claim.proposer_part
        ledger.release(claim)
        assert account(ledger, "after").used == NOTHING

    def test_step_tokens_leave_room_for_a_prefill_chunk(self) -> None:
        ledger = Ledger()
        ledger.open("v:1", verifier(max_num_seqs=100, max_num_batched_tokens=2 * 3 * (1 + K)))

        claims = [ledger.claim(DEMAND) for _ in range(4)]

        assert [claim is not None for claim in claims] == [True, True, True, False]

    def test_closed_verifiers_get_no_claims_and_keep_theirs(self) -> None:
        ledger = Ledger()
        ledger.open("v:1", verifier())
        claim = taken(ledger)

        ledger.close("v:1")

        assert ledger.claim(DEMAND) is None
        assert account(ledger, "v:1").used == claim.verifier_part

    def test_a_claim_given_back_twice_is_a_bug(self) -> None:
        ledger = Ledger()
        ledger.open("v:1", verifier())
        claim = taken(ledger)
        ledger.release(claim)

        with pytest.raises(KeyError):
            ledger.release(claim)

        assert account(ledger, "v:1").used == NOTHING

    def test_what_fits_one_of_two_verifiers_is_not_impossible(self) -> None:
        ledger = Ledger()
        ledger.open("v:1", verifier(kv_capacity_tokens=16))
        with pytest.raises(InvalidRequest, match="34 of at most 16 KV tokens of verifier v:1"):
            ledger.check(DEMAND)

        ledger.open("v:2", verifier(kv_capacity_tokens=64))

        ledger.check(DEMAND)
        assert taken(ledger).verifier == "v:2"


ADDRESSES = st.sampled_from(["v:1", "v:2"])
AMOUNTS = st.integers(1, 12)


class LedgerMachine(RuleBasedStateMachine):
    """Two verifiers that share one proposer and have one of their own each; all may change."""

    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.live: dict[int, Claim] = {}
        self.excused: set[str] = set()  # accounts whose capacity shrank below what was claimed

    @rule(
        address=ADDRESSES,
        sequences=AMOUNTS,
        rows=st.integers(1, 40),
        kv_tokens=st.integers(1, 400),
        sessions=AMOUNTS,
        generation=st.integers(0, 2),
        is_connected=st.booleans(),
    )
    def report(
        self,
        address: str,
        sequences: int,
        rows: int,
        kv_tokens: int,
        sessions: int,
        generation: int,
        is_connected: bool,
    ) -> None:
        shared = offer(f"shared-{generation}", max_sessions=sessions)
        own = offer(f"own-{address}-{generation}", kv_capacity_tokens=kv_tokens)
        proposers = status(shared, "host:1", is_connected), status(own, "host:2")
        info = verifier(
            *proposers,
            max_num_seqs=sequences,
            max_num_batched_tokens=max(rows, 1 + K),
            kv_capacity_tokens=kv_tokens,
        )
        self.ledger.open(address, info)
        self.excused = {
            name for _, name, one in self.ledger.accounts() if not one.used.fits(one.capacity)
        }

    @rule(address=ADDRESSES)
    def lose(self, address: str) -> None:
        self.ledger.close(address)

    @rule(
        target=claims,
        prompt=st.integers(1, 60),
        output=st.integers(1, 60),
        max_draft_tokens=st.none() | st.integers(0, K),
        avoid=ADDRESSES,
    )
    def claim(
        self, prompt: int, output: int, max_draft_tokens: int | None, avoid: str
    ) -> Claim | None:
        claim = self.ledger.claim(Demand(prompt, output, max_draft_tokens), avoid)
        if claim is not None:
            self.live[claim.number] = claim
            for name in filter(None, (claim.verifier, claim.proposer_id)):
                one = account(self.ledger, name)
                assert one.used.fits(one.capacity)
        return claim

    @rule(claim=consumes(claims))
    def release(self, claim: Claim | None) -> None:
        if claim is not None:
            del self.live[claim.number]
            self.ledger.release(claim)

    @invariant()
    def nothing_is_negative(self) -> None:
        for _, _, one in self.ledger.accounts():
            assert min(one.used.sequences, one.used.step_tokens, one.used.kv_tokens) >= 0

    @invariant()
    def nothing_exceeds_its_capacity(self) -> None:
        for _, name, one in self.ledger.accounts():
            assert one.used.fits(one.capacity) or name in self.excused

    @invariant()
    def every_account_is_the_sum_of_the_live_claims(self) -> None:
        assert {claim.number for claim in self.ledger.claims} == set(self.live)
        expected = {name: NOTHING for _, name, _ in self.ledger.accounts()}
        for claim in self.ledger.claims:
            expected[claim.verifier] += claim.verifier_part
            if claim.proposer_id:
                expected[claim.proposer_id] += claim.proposer_part
        assert {name: one.used for _, name, one in self.ledger.accounts()} == expected


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
