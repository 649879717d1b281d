"""What is specgw's own in the configuration: each service's settings, under `specgw:`."""

from typing import Annotated, Literal

from pydantic import Field, FilePath, field_validator

from specgw.config_rules import Frozen
from specgw.fallback_settings import FallbackProposer
from specgw.types import MAX_DRAFT_SUPPORT

PositiveInt = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Milliseconds = Annotated[float, Field(ge=0, le=60_000)]


class TlsSettings(Frozen):
    """Files in PEM format, for every connection between services."""

    certificate_file: FilePath
    """This service's certificate chain."""
    private_key_file: FilePath
    """The key of the certificate."""
    ca_file: FilePath | None = None
    """Certificates to trust. With it, both sides must show one that these signed."""


class GatewaySettings(Frozen):
    """What is the gateway's own."""

    grpc_listen: str | None = None
    """Address of the gRPC API, `host:port` or `unix:/path`. None means HTTP only."""
    verifiers: tuple[str, ...] = ()
    """Verifiers to use. None means that `specgw serve` starts its own."""
    max_concurrent_requests: PositiveInt = 64
    """Most requests answered at once, whatever the verifiers have room for."""
    max_concurrent_requests_per_key: PositiveInt | None = None
    """Most requests answered at once for one API key; as many again may wait. None means any."""
    max_queued_requests: Annotated[int, Field(ge=0)] = 256
    """Most requests that wait for room; more are refused with 429."""
    queue_timeout_s: Seconds = 60.0
    """Longest wait before a request is refused with 429."""
    request_timeout_s: Seconds = 600.0
    """Most time for one request, waiting included."""
    reopen_timeout_s: Seconds = 30.0
    """How long a request that lost its verifier waits for another."""
    drain_grace_s: Seconds = 30.0
    """How long running requests may go on after SIGTERM."""


class VerifierSettings(Frozen):
    """What is the verifier's own."""

    listen: str = "127.0.0.1:50051"
    """Address, `host:port` or `unix:/path`. Another host than loopback needs TLS."""
    metrics_listen: str | None = None
    """Address of the Prometheus endpoint. None means that there is none."""
    proposers: tuple[str, ...] = ()
    """Proposers that may draft. Each request uses one, while it is well."""
    num_threads: PositiveInt | None = None
    """Threads of each operator. None leaves it to torch."""
    kv_cache_tokens: PositiveInt | None = None
    """Size of the KV cache. None takes what memory allows."""
    cpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Most of the host's memory for the KV cache of a model on the CPU."""
    max_waiting_requests: Annotated[int, Field(ge=0)] = 256
    """Most requests that wait for one of the `max_num_seqs` places; more are refused."""
    max_prefill_tokens_beside_decodes: PositiveInt | None = None
    """Most prompt rows of a step in which other sessions decode. None takes as many as make a
    round, the step and the wait for its blocks, three times as long, by the times measured."""
    draft_timeout_s: Seconds = 1.0
    """Longest wait for a block. Usually it is far shorter: it follows the proposer's answers."""
    draft_length: Literal["auto", "fixed"] = "auto"
    """How many tokens are drafted: as many as pay by what is measured, or always the most."""
    wait_for_slow_drafts: bool = False
    """Waits for a proposer even if its blocks take longer than they can save. For tests; implies
    `draft_length: fixed`."""
    logits_processors: tuple[str, ...] = ()
    """Your own changes to logits, `package.module:Class`; `docs/sampling.md` has the interface."""
    drain_grace_s: Seconds = 30.0
    """How long running requests may go on after SIGTERM."""


class ProposerSettings(Frozen):
    """What is the proposer's own."""

    listen: str = "127.0.0.1:50052"
    """Address, `host:port` or `unix:/path`. Another host than loopback needs TLS."""
    metrics_listen: str | None = None
    """Address of the Prometheus endpoint. None means that there is none."""
    num_threads: PositiveInt | None = None
    """Threads of each operator. None leaves it to torch."""
    kv_cache_tokens: PositiveInt | None = None
    """Size of the KV cache. None takes what memory allows."""
    cpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Most of the host's memory for the KV cache of a model on the CPU."""
    embedded_memory_share: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Part of `gpu_memory_utilization` for the draft when `specgw serve` starts both services, and
    in `specgw.LLM`."""
    run_ahead: Literal["auto", "on", "off"] = "auto"
    """Whether to draft beyond a block while the target tests it. `auto` means on a GPU, or where
    `listen` is for other machines: on shared cores it would slow the target. It pauses by itself
    while too little of it is used."""
    run_ahead_branches: Annotated[int, Field(ge=1, le=64)] = 22
    """Most blocks drafted ahead for a session, each for another outcome of the round. With 1 that
    is the whole block accepted and the draft's own guess after it. More are drafted in the same
    passes, so far as measured times leave room; under `run_ahead: auto` only where the draft model
    has a device of its own."""
    yield_cores: Literal["auto", "on", "off"] = "auto"
    """Whether the draft model computes at the lowest priority, so that it does so while a target on
    the same cores waits. `auto` means on a CPU where `listen` is for this machine alone. Linux
    compares priorities within a container and within a session, as of `specgw serve`: elsewhere
    give a proposer beside its target few `cpu_shares`."""
    max_sessions: PositiveInt = 64
    """Most sessions over all verifiers; others decode without drafts."""
    max_draft_support: Annotated[PositiveInt, Field(le=MAX_DRAFT_SUPPORT)] = 64
    """Most tokens of a draft law: with `draft_sample_method: probabilistic` laws are cut to so many
    before they are drawn from."""
    max_num_batched_tokens: PositiveInt = 2048
    """Most input rows in one forward pass."""
    drain_grace_s: Seconds = 5.0
    """How long streams may go on after SIGTERM."""


class SimulationSettings(Frozen):
    """A device that is not there. Of the models, only configuration and tokenizer are read."""

    verify_ms: Milliseconds = 11.0
    """Time of one step of the target."""
    verify_row_ms: Milliseconds = 0.0
    """What each input row adds to it."""
    draft_step_ms: Milliseconds = 1.2
    """Time of one forward pass of the draft model."""
    draft_row_ms: Milliseconds = 0.0
    """What each input row adds to it."""
    acceptance_rate: Annotated[float, Field(ge=0, le=1)] = 0.8
    """Probability that a draft token is the target's, if all before it were."""
    runner_up_rates: tuple[Annotated[float, Field(ge=0, le=1)], ...] = (0.68, 0.15, 0.08, 0.04)
    """Where it is not: probability that the draft's second choice is, its third, and so on; the sum
    is at most 1. The default is Qwen2.5-Coder 0.5B for 1.5B, `python -m benchmarks.runner_ups`."""
    rtt_ms: Milliseconds = 0.0
    """What is added to the way between verifier and proposer and back."""

    @field_validator("runner_up_rates")
    @classmethod
    def _is_distribution(cls, rates: tuple[float, ...]) -> tuple[float, ...]:
        if sum(rates) > 1 + 1e-9:
            raise ValueError(f"the sum must be at most 1, not {sum(rates):g}")
        return rates


class SpecgwSettings(Frozen):
    """Everything that vLLM has no key for."""

    gateway: GatewaySettings = GatewaySettings()
    """The gateway's part."""
    verifier: VerifierSettings = VerifierSettings()
    """The verifier's part."""
    proposer: ProposerSettings = ProposerSettings()
    """The proposer's part."""
    simulation: SimulationSettings | None = None
    """Simulates both models' device: for load tests of everything else. None runs the models."""
    fallback_proposer: FallbackProposer | None = None
    """A lookup beside the proposer: it drafts when it has a long match, or no proposer answers."""
    tls: TlsSettings | None = None
    """Certificates for the connections between services. Unix sockets need none."""
    allow_insecure: bool = False
    """Lets services listen beyond loopback without TLS, on a network that can be trusted."""
