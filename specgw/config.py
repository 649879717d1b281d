"""The configuration of all three programs: vLLM's names, specgw's own settings under `specgw:`.

Flags beat `SPECGW_*` variables, which beat the file, which beats the defaults. Every problem found
is reported, by the path of its key. This is the only module that reads the environment.
"""

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from specgw.errors import ConfigError

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "tiny.yaml"
MAX_SPEC_LEN = 128  # vLLM asserts this bound while running; here it is checked at load time.
_ENVIRONMENT_PREFIX = "SPECGW_"

PositiveInt = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]

# vLLM's keys that specgw knows and does not run yet: refused by name rather than ignored.
_NOT_IMPLEMENTED = frozenset({
    "attention_backend", "code_revision", "disable_eagle_block_drop",
    "disable_padded_drafter_batch", "draft_load_config", "draft_tensor_parallel_size",
    "dspark_draft_topk", "enable_adaptive_verification", "enforce_eager",
    "index_share_for_mtp_iteration", "kv_cache_dtype", "max_model_len", "moe_backend",
    "num_speculative_tokens_per_batch_size", "parallel_drafting", "prompt_lookup_max",
    "prompt_lookup_min", "quantization", "revision", "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor", "suffix_decoding_max_tree_depth",
    "suffix_decoding_min_token_prob", "synthetic_acceptance_length", "synthetic_acceptance_rates",
    "use_heterogeneous_vocab", "use_local_argmax_reduction",
})  # fmt: skip

# Keys that users put into `speculative_config` and that belong elsewhere.
_BELONGS_ELSEWHERE = {
    "tensor_parallel_size": "is a top-level key; the draft has draft_tensor_parallel_size",
    "temperature": "is a sampling parameter of the request",
    "top_p": "is a sampling parameter of the request",
    "target_model_config": "is not set by users: the target model is the top-level key `model`",
    "draft_model_config": "is not set by users: the draft model is `speculative_config.model`",
}


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class SpeculativeConfig(_Frozen):
    """How drafts are made and tested, in the keys and meanings of vLLM's `speculative_config`."""

    method: Literal["draft_model"] = "draft_model"
    """How drafts are made: by an autoregressive draft model."""
    model: str
    """The draft model: a path, a bundled `tiny/NAME`, or a hub id."""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=MAX_SPEC_LEN)]
    """Most draft tokens in one round."""
    draft_sample_method: Literal["greedy"] = "greedy"
    """How draft tokens are chosen from the draft model's distribution."""
    rejection_sample_method: Literal["standard"] = "standard"
    """How draft tokens are tested."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        for key in raw:
            if key in _BELONGS_ELSEWHERE:
                raise ValueError(f"{key} {_BELONGS_ELSEWHERE[key]}")
            if key in _NOT_IMPLEMENTED:
                raise ValueError(f"{key} is a key of vLLM that specgw does not implement yet")
        return raw


class TlsSettings(_Frozen):
    """Files in PEM format, for every connection between services."""

    certificate_file: Path
    """This service's certificate chain."""
    private_key_file: Path
    """The key of the certificate."""
    ca_file: Path | None = None
    """Certificates to trust. With it, both sides must show one that these signed."""


class GatewaySettings(_Frozen):
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


class VerifierSettings(_Frozen):
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
    draft_timeout_s: Seconds = 1.0
    """Longest wait for a block. Usually it is far shorter: it follows the proposer's answers."""
    wait_for_slow_drafts: bool = False
    """Waits for a proposer even if its blocks take longer than they can save. For tests."""
    drain_grace_s: Seconds = 30.0
    """How long running requests may go on after SIGTERM."""


class ProposerSettings(_Frozen):
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
    max_sessions: PositiveInt = 64
    """Most sessions over all verifiers; others decode without drafts."""
    max_num_batched_tokens: PositiveInt = 2048
    """Most input rows in one forward pass."""
    drain_grace_s: Seconds = 5.0
    """How long streams may go on after SIGTERM."""


class SpecgwSettings(_Frozen):
    """Everything that vLLM has no key for."""

    gateway: GatewaySettings = GatewaySettings()
    """The gateway's part."""
    verifier: VerifierSettings = VerifierSettings()
    """The verifier's part."""
    proposer: ProposerSettings = ProposerSettings()
    """The proposer's part."""
    tls: TlsSettings | None = None
    """Certificates for the connections between services. Unix sockets need none."""
    allow_insecure: bool = False
    """Lets services listen beyond loopback without TLS, on a network that can be trusted."""


class EngineArgs(_Frozen):
    """The whole configuration. Top-level keys are `vllm serve` flags under the same names."""

    model: str
    """The target model: a path, a bundled `tiny/NAME`, or a hub id."""
    tokenizer: str | None = None
    """Where the tokenizer is. None means with the model."""
    served_model_name: tuple[str, ...] = ()
    """Names under which clients ask for the model. None means `model`."""
    host: str = "127.0.0.1"
    """Where the OpenAI API listens."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port of the OpenAI API; 0 takes a free one."""
    api_key: tuple[str, ...] = ()
    """Keys that clients must show one of. None means that none is needed."""
    seed: int = 0
    """Where the seeds of requests without one come from."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Element type of both models' weights. `auto` means the checkpoint's."""
    device: str = "auto"
    """`cpu`, `cuda` or `cuda:N`. `auto` means a GPU if there is one."""
    max_model_len: PositiveInt | None = None
    """Longest context in tokens. None means the model's."""
    max_num_seqs: PositiveInt = 16
    """Most requests in one step of the verifier."""
    max_num_batched_tokens: PositiveInt = 2048
    """Most input rows in one step of the verifier: longer prompts are prefilled in chunks."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory for weights and KV cache."""
    tensor_parallel_size: Literal[1] = 1
    """GPUs for the target model."""
    speculative_config: SpeculativeConfig | None = None
    """How drafts are made and tested. None means plain decoding."""
    specgw: SpecgwSettings = SpecgwSettings()
    """Everything that vLLM has no key for."""

    @field_validator("served_model_name", "api_key", mode="before")
    @classmethod
    def _one_or_many(cls, raw: Any) -> Any:
        return (raw,) if isinstance(raw, str) else raw

    @field_validator("speculative_config", mode="before")
    @classmethod
    def _json_or_mapping(cls, raw: Any) -> Any:
        if not isinstance(raw, str):
            return raw
        try:
            parsed = json.loads(raw)
        except json.JSONDecodeError as error:
            raise ValueError(f"is not JSON: {error}") from None
        return _underscored(parsed) if isinstance(parsed, Mapping) else parsed

    @model_validator(mode="after")
    def _room_for_one_round(self) -> Self:
        rows = self.max_draft_tokens + 1
        if self.max_num_batched_tokens < rows:
            raise ValueError(
                f"max_num_batched_tokens must be at least num_speculative_tokens + 1 = {rows}, "
                f"got {self.max_num_batched_tokens}"
            )
        return self

    @property
    def max_draft_tokens(self) -> int:
        """Most draft tokens in one round; 0 without speculation."""
        config = self.speculative_config
        return config.num_speculative_tokens if config else 0

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """The names under which clients ask for the model."""
        return self.served_model_name or (self.model,)

    @property
    def tokenizer_path(self) -> str:
        """Where the tokenizer is: with the model unless told otherwise."""
        return self.tokenizer or self.model


def load_config(file: Path | None, flags: Mapping[str, Any] | None = None) -> EngineArgs:
    """Merges flags, environment and file.

    Args:
        file: YAML. Without one, flags and environment stand alone if they name a model, else on
            the bundled default.
        flags: Values by dotted key (`port`, `specgw.verifier.listen`); None values are not set.

    Raises:
        ConfigError: with every problem, each naming its key.
    """
    merged: dict[str, Any] = {}
    over = {**_environment(os.environ), **{k: v for k, v in (flags or {}).items() if v is not None}}
    if file is None and "model" not in over:
        file = DEFAULT_CONFIG
    if file is not None:
        merged = _read_yaml(file)
    for key, value in over.items():
        _set_path(merged, key.split("."), value)
    return parse_config(merged)


def parse_config(raw: Mapping[str, Any]) -> EngineArgs:
    """Validates a nested mapping.

    Raises:
        ConfigError: with every problem, each naming its key.
    """
    try:
        return EngineArgs.model_validate(_underscored(raw))
    except ValidationError as error:
        raise ConfigError([_problem(dict(item)) for item in error.errors()]) from None


def child_environment() -> dict[str, str]:
    """Returns the environment for a child whose file already holds what `SPECGW_*` said."""
    return {k: v for k, v in os.environ.items() if not k.startswith(_ENVIRONMENT_PREFIX)}


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        parsed = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"--config {file}: {error.strerror}"]) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"--config {file}: is not YAML: {error}"]) from None
    if not isinstance(parsed, dict):
        raise ConfigError([f"--config {file}: must be a mapping of keys"])
    return _underscored(parsed)


def _environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """`SPECGW_PORT` is `port`; `SPECGW_VERIFIER__LISTEN` is `specgw.verifier.listen`."""
    found: dict[str, Any] = {}
    for name, text in environ.items():
        if name.startswith(_ENVIRONMENT_PREFIX):
            key = name.removeprefix(_ENVIRONMENT_PREFIX).lower().replace("__", ".")
            found[f"specgw.{key}" if "." in key else key] = yaml.safe_load(text)
    return found


def _set_path(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError([f"{'.'.join(path)}: {key} is not a mapping in the file"])
    tree[path[-1]] = value


def _underscored(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        str(key).replace("-", "_"): _underscored(value) if isinstance(value, Mapping) else value
        for key, value in raw.items()
    }


def _problem(error: dict[str, Any]) -> str:
    path = ".".join(str(part) for part in error["loc"])
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = "unknown key" + _nearest(error["loc"])
    elif error["type"] != "value_error" and error["type"] != "missing":
        message += f", got {error['input']!r}"
    return f"{path}: {message}" if path else message


def _nearest(path: Sequence[str | int]) -> str:
    model: Any = EngineArgs
    for key in path[:-1]:
        annotation = model.model_fields[str(key)].annotation
        options = (annotation, *getattr(annotation, "__args__", ()))
        model = next(o for o in options if isinstance(o, type) and issubclass(o, BaseModel))
    close = difflib.get_close_matches(str(path[-1]), model.model_fields, n=1)
    return f"; did you mean {close[0]}?" if close else ""
