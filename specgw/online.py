"""Asks the running services what they are, and compares that with the configuration.

For `specgw check --online`. Nothing is changed on any of them.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import grpc

from specgw.channel import open_channel
from specgw.config import EngineArgs
from specgw.handshake import build_hello, greeting_mismatches, verifier_mismatches
from specgw.health import is_serving
from specgw.types import HelloAck
from specgw.v1 import proposer_pb2, proposer_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from specgw.wire import hello_ack_from_pb, verifier_info_from_pb

_ANY_HOST = ("0.0.0.0", "::", "")
_Response = TypeVar("_Response")


@dataclass(frozen=True, slots=True)
class ServiceState:
    """What a service says of itself.

    Attributes:
        service: `gateway`, `verifier` or `proposer`.
        address: Where it was asked.
        facts: What it answered.
        problems: What does not go with the configuration, without the address.
    """

    service: str
    address: str
    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def messages(self) -> list[str]:
        """The problems, each with the address."""
        return [f"{self.service} {self.address}: {problem}" for problem in self.problems]


@dataclass(frozen=True, slots=True)
class LocalModels:
    """What the models on this machine have in their files; empty where unknown."""

    target_fingerprint: str = ""
    draft_fingerprint: str = ""
    tokenizer_size: int = 0


async def ask_services(
    args: EngineArgs, models: LocalModels, timeout_s: float
) -> list[ServiceState]:
    """Asks the gateway, the verifiers and the proposers that the configuration names.

    Args:
        args: What to compare with.
        models: The models as they are on this machine.
        timeout_s: How long each may take.
    """
    settings = args.specgw
    verifiers = settings.gateway.verifiers or (settings.verifier.listen,)
    proposers: Sequence[str] = ()
    if args.speculative_config is not None and not args.drafts_locally:
        proposers = settings.verifier.proposers or (settings.proposer.listen,)
    questions = [
        _ask_gateway(args, timeout_s),
        *(_ask_verifier(one, args, models, timeout_s) for one in verifiers),
        *(_ask_proposer(one, args, models, timeout_s) for one in proposers),
    ]
    return list(await asyncio.gather(*questions))


async def _ask_gateway(args: EngineArgs, timeout_s: float) -> ServiceState:
    host = "127.0.0.1" if args.host in _ANY_HOST else args.host
    state = ServiceState("gateway", f"http://{host}:{args.port}")
    if not await is_serving(state.address, timeout_s):
        state.problems.append("does not serve")
    return state


async def _ask_verifier(
    address: str, args: EngineArgs, models: LocalModels, timeout_s: float
) -> ServiceState:
    state = ServiceState("verifier", address)
    request = verifier_pb2.GetVerifierInfoRequest()
    async with open_channel(address, args.specgw.tls) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        pb = await _answer(state, args, stub.GetVerifierInfo(request, timeout=timeout_s), timeout_s)
    if pb is None:
        return state
    verifier = verifier_info_from_pb(pb)
    state.facts.update(asdict(verifier))
    fingerprint = models.target_fingerprint or verifier.target_model.vocab_fingerprint
    state.problems.extend(verifier_mismatches(args, fingerprint, models.tokenizer_size, verifier))
    state.problems.extend(
        f"has no connection to {proposer.address}: {proposer.detail}"
        for proposer in verifier.proposers
        if not proposer.is_connected
    )
    return state


async def _ask_proposer(
    address: str, args: EngineArgs, models: LocalModels, timeout_s: float
) -> ServiceState:
    state = ServiceState("proposer", address)
    request = proposer_pb2.GetProposerInfoRequest()
    async with open_channel(address, args.specgw.tls) as channel:
        stub = proposer_pb2_grpc.ProposerServiceStub(channel)
        pb = await _answer(state, args, stub.GetProposerInfo(request, timeout=timeout_s), timeout_s)
    if pb is None:
        return state
    offer = _offer_from_pb(pb)
    state.facts.update(asdict(offer))
    hello = build_hello("check", offer.draft_model, args)
    state.problems.extend(greeting_mismatches(hello, offer))
    found, expected = offer.draft_model.vocab_fingerprint, models.draft_fingerprint
    if found and expected and found != expected:
        state.problems.append(
            f"vocabulary: that of {offer.draft_model.name} is {found[:12]}, that of the configured "
            f"model {expected[:12]}"
        )
    return state


def _offer_from_pb(pb: proposer_pb2.GetProposerInfoResponse) -> HelloAck:
    """A description holds what the answer to a verifier's greeting would, under the same names."""
    names = {field.name for field in proposer_pb2.HelloAck.DESCRIPTOR.fields}
    shared = names & {field.name for field in pb.DESCRIPTOR.fields}
    ack = proposer_pb2.HelloAck(**{name: getattr(pb, name) for name in shared})
    return hello_ack_from_pb(ack)


async def _answer(
    state: ServiceState, args: EngineArgs, call: Awaitable[_Response], timeout_s: float
) -> _Response | None:
    """Returns what a service answers, if it does; notes that it does not, or does not serve."""
    try:
        response = await call
    except grpc.aio.AioRpcError as error:
        state.problems.append(f"{error.code().name}: {error.details()}")
        return None
    if not await is_serving(state.address, timeout_s, args.specgw.tls):
        state.problems.append("is reachable and not serving")
    return response
