"""What requests claim of every verifier and proposer, and what those have to give.

Pure and synchronous: no clock, no waiting, no network. Capacities are what the services report of
themselves. The ledger is policy, not protection: services enforce their limits themselves, and
another gateway's requests are not in it. The caller is `admission.py`; `routing.py` opens and
closes verifiers.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from specgw.budget import (
    NOTHING,
    Budget,
    proposer_capacity,
    proposer_part,
    verifier_capacity,
    verifier_part,
)
from specgw.errors import InvalidRequest
from specgw.types import HelloAck, ProposerStatus, UndraftedReason, VerifierInfo


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks for, wherever it will run. `max_draft_tokens=None` is as configured."""

    prompt_token_count: int
    max_tokens: int
    max_draft_tokens: int | None = None

    @property
    def context_limit(self) -> int:
        """Prompt and output together, at most."""
        return self.prompt_token_count + self.max_tokens


@dataclass(frozen=True, slots=True)
class Claim:
    """One request's part of a verifier and, unless it goes undrafted, of a proposer.

    Attributes:
        number: Identifies the claim.
        verifier: Address of the verifier.
        verifier_part: What is claimed of it.
        proposer: Address of the proposer, as the verifier knows it. Empty without one.
        proposer_id: The proposer's process. Empty without one.
        proposer_part: What is claimed of it.
        undrafted: Why no proposer is claimed, if one was wanted.
    """

    number: int
    verifier: str
    verifier_part: Budget
    proposer: str = ""
    proposer_id: str = ""
    proposer_part: Budget = NOTHING
    undrafted: UndraftedReason | None = None

    @property
    def may_draft(self) -> bool:
        """Whether the verifier may speculate; without a proposer yet, it takes one that comes."""
        return self.undrafted in (None, UndraftedReason.UNAVAILABLE)


@dataclass(slots=True)
class Account:
    """A service's capacity, and what is claimed of it."""

    capacity: Budget
    used: Budget = NOTHING

    def has_room(self, part: Budget) -> bool:
        """Whether one more part fits."""
        return (self.used + part).fits(self.capacity)

    def __str__(self) -> str:
        used, capacity = self.used, self.capacity
        return (
            f"{used.sequences} of {capacity.sequences} sequences, "
            f"{used.step_tokens} of {capacity.step_tokens} step tokens, "
            f"{used.kv_tokens} of {capacity.kv_tokens} KV tokens"
        )


@dataclass(slots=True)
class _Verifier(Account):
    """A verifier's account. A closed one takes no claims but keeps those it has."""

    info: VerifierInfo | None = None
    is_open: bool = False


class Ledger:
    """The accounts of all verifiers and proposers, and the claims that are live."""

    def __init__(self) -> None:
        self._verifiers: dict[str, _Verifier] = {}  # by address
        self._proposers: dict[str, Account] = {}  # by process: two hosts may share an address
        self._claims: dict[int, Claim] = {}
        self._numbers = itertools.count(1)

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The live claims, as they stand now."""
        return tuple(self._claims.values())

    @property
    def is_open(self) -> bool:
        """Whether some verifier takes claims."""
        return any(verifier.is_open for verifier in self._verifiers.values())

    @property
    def max_sequences(self) -> int:
        """Sequences of all verifiers that take claims."""
        return sum(one.capacity.sequences for one in self._verifiers.values() if one.is_open)

    def accounts(self) -> Iterator[tuple[str, str, Account]]:
        """Yields service, name and account of every verifier and proposer known."""
        for address, verifier in self._verifiers.items():
            yield "verifier", address, verifier
        for proposer_id, proposer in self._proposers.items():
            yield "proposer", proposer_id, proposer

    def __str__(self) -> str:
        return "; ".join(f"{service} {name}: {one}" for service, name, one in self.accounts())

    # Services come, change and go.

    def open(self, address: str, info: VerifierInfo) -> None:
        """A verifier takes claims, with the capacities that it reports of itself and its proposers.

        A smaller capacity than before ends no claim. Those on a proposer that was restarted follow.
        """
        verifier = self._verifiers.setdefault(address, _Verifier(verifier_capacity(info)))
        verifier.capacity, verifier.info, verifier.is_open = verifier_capacity(info), info, True
        for status in info.proposers:
            if (offer := status.offer) is not None:
                account = self._proposers.setdefault(offer.proposer_id, Account(NOTHING))
                account.capacity = proposer_capacity(offer)
                self._follow(address, status.address, offer.proposer_id)
        self._forget_proposers()

    def close(self, address: str) -> None:
        """A verifier takes no more claims."""
        if address in self._verifiers:
            self._verifiers[address].is_open = False

    # Requests come and go.

    def check(self, demand: Demand) -> None:
        """Refuses what could never be claimed, however long it waits.

        Raises:
            InvalidRequest: with the numbers, if no verifier known could ever hold the request.
        """
        parts = [
            (address, verifier.capacity, self._part(verifier, demand, _wanted(verifier, demand)))
            for address, verifier in self._verifiers.items()
        ]
        if not parts or any(part.fits(capacity) for _, capacity, part in parts):
            return
        rule = (
            f"can never be served with a prompt of {demand.prompt_token_count} tokens: "
            + "; ".join(
                f"it takes {part.step_tokens} of at most {capacity.step_tokens} step tokens and "
                f"{part.kv_tokens} of at most {capacity.kv_tokens} KV tokens of verifier {address}"
                for address, capacity, part in parts
            )
        )
        raise InvalidRequest("max_tokens", demand.max_tokens, rule)

    def claim(self, demand: Demand, avoid: str = "") -> Claim | None:
        """Claims the request's part of the least loaded verifier that has room, if one has.

        Args:
            demand: What the request asks for.
            avoid: Address of a verifier to take only if no other has room.
        """
        by_load = sorted(
            (address == avoid, verifier.used.sequences, address)
            for address, verifier in self._verifiers.items()
            if verifier.is_open
        )
        for _, _, address in by_load:
            if (claim := self._fit(address, demand)) is not None:
                self._add(claim)
                return claim
        return None

    def release(self, claim: Claim) -> None:
        """Gives a claim back, wherever it is by now. Exactly once: a second time is a bug."""
        current = self._claims.pop(claim.number)
        verifier = self._verifiers[current.verifier]
        verifier.used -= current.verifier_part
        if current.proposer_id:
            proposer = self._proposers[current.proposer_id]
            proposer.used -= current.proposer_part
            self._forget_proposers()

    def _fit(self, address: str, demand: Demand) -> Claim | None:
        verifier = self._verifiers[address]
        assert verifier.info is not None  # known since it was opened
        num_draft_tokens = _wanted(verifier, demand)
        claim = Claim(next(self._numbers), address, NOTHING)
        if num_draft_tokens:
            claim = self._with_proposer(claim, verifier.info, demand)
            num_draft_tokens *= claim.may_draft
        part = self._part(verifier, demand, num_draft_tokens)
        return replace(claim, verifier_part=part) if verifier.has_room(part) else None

    def _with_proposer(self, claim: Claim, info: VerifierInfo, demand: Demand) -> Claim:
        """Adds the least loaded proposer with room, or the reason why there is none."""
        offers = _offers(info.proposers)
        if not offers:
            return replace(claim, undrafted=UndraftedReason.UNAVAILABLE)
        offers.sort(key=lambda offered: self._proposers[offered[1].proposer_id].used.sequences)
        for address, offer in offers:
            part = proposer_part(offer, demand.context_limit)
            if self._proposers[offer.proposer_id].has_room(part):
                return replace(
                    claim, proposer=address, proposer_id=offer.proposer_id, proposer_part=part
                )
        without_kv = Budget(part.sequences, part.step_tokens, 0)
        is_full = not self._proposers[offer.proposer_id].has_room(without_kv)
        reason = UndraftedReason.NO_SLOT if is_full else UndraftedReason.NO_MEMORY
        return replace(claim, undrafted=reason)

    def _part(self, verifier: _Verifier, demand: Demand, num_draft_tokens: int) -> Budget:
        assert verifier.info is not None
        return verifier_part(verifier.info, demand.context_limit, num_draft_tokens)

    def _add(self, claim: Claim) -> None:
        self._claims[claim.number] = claim
        self._verifiers[claim.verifier].used += claim.verifier_part
        if claim.proposer_id:
            self._proposers[claim.proposer_id].used += claim.proposer_part

    def _follow(self, verifier: str, proposer: str, proposer_id: str) -> None:
        """Moves claims to the process that now runs where theirs did."""
        for number, claim in self._claims.items():
            if (claim.verifier, claim.proposer) != (verifier, proposer):
                continue
            if claim.proposer_id != proposer_id:
                self._proposers[claim.proposer_id].used -= claim.proposer_part
                self._proposers[proposer_id].used += claim.proposer_part
                self._claims[number] = replace(claim, proposer_id=proposer_id)

    def _forget_proposers(self) -> None:
        """Forgets processes that no verifier reports any more and that hold no claim."""
        known = {
            status.offer.proposer_id
            for verifier in self._verifiers.values()
            if verifier.info is not None
            for status in verifier.info.proposers
            if status.offer is not None
        }
        for proposer_id in [*self._proposers]:
            if proposer_id not in known and self._proposers[proposer_id].used == NOTHING:
                del self._proposers[proposer_id]


def _wanted(verifier: _Verifier, demand: Demand) -> int:
    """Draft tokens per round that the request may have on a verifier."""
    assert verifier.info is not None
    most = verifier.info.max_draft_tokens
    return most if demand.max_draft_tokens is None else min(most, demand.max_draft_tokens)


def _offers(proposers: Sequence[ProposerStatus]) -> list[tuple[str, HelloAck]]:
    """Returns the proposers to choose from: the connected ones, or those that may come back."""
    known = [status for status in proposers if status.offer is not None]
    connected = [status for status in known if status.is_connected] or known
    return [(one.address, one.offer) for one in connected if one.offer is not None]
