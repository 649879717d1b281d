"""Asks the running services what they are, and compares that with the configuration.

For `specgw check --online`. Nothing is changed on any of them.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from specgw.channel import open_channel
from specgw.config import EngineArgs
from specgw.health import is_serving
from specgw.slots import extra_slots
from specgw.types import PROTOCOL_VERSION, ModelDescription
from specgw.v1 import proposer_pb2, proposer_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from specgw.wire import model_description_from_pb

_ANY_HOST = ("0.0.0.0", "::", "")


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
class Fingerprints:
    """The vocabularies that are expected; empty where unknown."""

    target: str = ""
    draft: str = ""


async def ask_services(
    args: EngineArgs, fingerprints: Fingerprints, timeout_s: float
) -> list[ServiceState]:
    """Asks the gateway, the verifiers and the proposers that the configuration names.

    Args:
        args: What to compare with.
        fingerprints: Of the models as they are on this machine.
        timeout_s: How long each may take.
    """
    settings = args.specgw
    verifiers = settings.gateway.verifiers or (settings.verifier.listen,)
    proposers: Sequence[str] = ()
    if args.speculative_config is not None:
        proposers = settings.verifier.proposers or (settings.proposer.listen,)
    questions = [
        _ask_gateway(args, timeout_s),
        *(_ask_verifier(one, args, fingerprints.target, timeout_s) for one in verifiers),
        *(_ask_proposer(one, args, fingerprints.draft, timeout_s) for one in proposers),
    ]
    return list(await asyncio.gather(*questions))


async def _ask_gateway(args: EngineArgs, timeout_s: float) -> ServiceState:
    host = "127.0.0.1" if args.host in _ANY_HOST else args.host
    state = ServiceState("gateway", f"http://{host}:{args.port}")
    if not await is_serving(state.address, timeout_s):
        state.problems.append("does not serve")
    return state


async def _ask_verifier(
    address: str, args: EngineArgs, fingerprint: str, timeout_s: float
) -> ServiceState:
    state = ServiceState("verifier", address)
    async with open_channel(address, args.specgw.tls) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        try:
            info = await stub.GetVerifierInfo(
                verifier_pb2.GetVerifierInfoRequest(), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            state.problems.append(_unreachable(error))
            return state
    if not await is_serving(address, timeout_s, args.specgw.tls):
        state.problems.append("is reachable and not serving")
    model = model_description_from_pb(info.target_model)
    state.facts.update(
        target_model=model.name,
        max_model_len=model.max_model_len,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_draft_tokens=info.max_draft_tokens,
        kv_capacity_tokens=info.kv_capacity_tokens,
        running_count=info.running_count,
        waiting_count=info.waiting_count,
    )
    _compare(state, "protocol_version", info.protocol_version, PROTOCOL_VERSION)
    _compare(state, "max_draft_tokens", info.max_draft_tokens, args.max_draft_tokens)
    _compare(state, "max_num_seqs", info.max_num_seqs, args.max_num_seqs)
    _compare(
        state, "max_num_batched_tokens", info.max_num_batched_tokens, args.max_num_batched_tokens
    )
    _compare_vocab(state, model, fingerprint)
    for proposer in info.proposers:
        if not proposer.connected:
            state.problems.append(f"has no connection to {proposer.address}: {proposer.detail}")
    return state


async def _ask_proposer(
    address: str, args: EngineArgs, fingerprint: str, timeout_s: float
) -> ServiceState:
    state = ServiceState("proposer", address)
    config = args.speculative_config
    assert config is not None  # or nobody would ask
    async with open_channel(address, args.specgw.tls) as channel:
        stub = proposer_pb2_grpc.ProposerServiceStub(channel)
        try:
            info = await stub.GetProposerInfo(
                proposer_pb2.GetProposerInfoRequest(), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            state.problems.append(_unreachable(error))
            return state
    if not await is_serving(address, timeout_s, args.specgw.tls):
        state.problems.append("is reachable and not serving")
    model = model_description_from_pb(info.draft_model)
    state.facts.update(
        method=info.method,
        draft_model=model.name,
        max_draft_tokens=info.max_draft_tokens,
        extra_slots_per_session=info.extra_slots_per_session,
        max_sessions=info.max_sessions,
        max_num_batched_tokens=info.max_num_batched_tokens,
        kv_capacity_tokens=info.kv_capacity_tokens,
        session_count=info.session_count,
    )
    slots = extra_slots(config.method, info.max_draft_tokens or 1, config.parallel_drafting)
    _compare(state, "protocol_version", info.protocol_version, PROTOCOL_VERSION)
    _compare(state, "method", info.method, config.method)
    _compare(state, "max_draft_tokens", info.max_draft_tokens, args.max_draft_tokens)
    _compare(state, "extra_slots_per_session", info.extra_slots_per_session, slots)
    _compare_vocab(state, model, fingerprint)
    return state


def _compare(state: ServiceState, name: str, found: object, expected: object) -> None:
    if found != expected:
        state.problems.append(f"{name} is {found}, the configuration says {expected}")


def _compare_vocab(state: ServiceState, model: ModelDescription, fingerprint: str) -> None:
    if fingerprint and model.vocab_fingerprint and model.vocab_fingerprint != fingerprint:
        state.problems.append(
            f"the vocabulary of {model.name} is {model.vocab_fingerprint[:12]}, that of the "
            f"configured model is {fingerprint[:12]}"
        )


def _unreachable(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"
