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
    model_config = ConfigDict(extra="forbid", frozen=True)


class SpeculativeConfig(_Frozen):
    """How drafts are made and tested, in the keys and meanings of vLLM's `speculative_config`."""

    method: Literal["draft_model"] = "draft_model"
    model: str
    num_speculative_tokens: Annotated[int, Field(ge=1, le=MAX_SPEC_LEN)]
    draft_sample_method: Literal["greedy"] = "greedy"
    rejection_sample_method: Literal["standard"] = "standard"

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
    """Files in PEM format. With `ca_file`, both sides must show a certificate it signed."""

    certificate_file: Path
    private_key_file: Path
    ca_file: Path | None = None


class GatewaySettings(_Frozen):
    """What is the gateway's own."""

    grpc_listen: str | None = None
    verifiers: tuple[str, ...] = ()
    max_concurrent_requests: PositiveInt = 64
    max_queued_requests: Annotated[int, Field(ge=0)] = 256
    queue_timeout_s: Seconds = 60.0
    request_timeout_s: Seconds = 600.0
    reopen_timeout_s: Seconds = 30.0
    drain_grace_s: Seconds = 30.0


class VerifierSettings(_Frozen):
    """What is the verifier's own."""

    listen: str = "127.0.0.1:50051"
    metrics_listen: str | None = None
    proposers: tuple[str, ...] = ()
    num_threads: PositiveInt | None = None
    kv_cache_tokens: PositiveInt | None = None
    max_waiting_requests: Annotated[int, Field(ge=0)] = 256
    draft_timeout_s: Seconds = 1.0
    wait_for_slow_drafts: bool = False
    drain_grace_s: Seconds = 30.0


class ProposerSettings(_Frozen):
    """What is the proposer's own."""

    listen: str = "127.0.0.1:50052"
    metrics_listen: str | None = None
    num_threads: PositiveInt | None = None
    kv_cache_tokens: PositiveInt | None = None
    max_sessions: PositiveInt = 64
    max_num_batched_tokens: PositiveInt = 2048
    drain_grace_s: Seconds = 5.0


class SpecgwSettings(_Frozen):
    """Everything that vLLM has no key for."""

    gateway: GatewaySettings = GatewaySettings()
    verifier: VerifierSettings = VerifierSettings()
    proposer: ProposerSettings = ProposerSettings()
    tls: TlsSettings | None = None
    allow_insecure: bool = False


class EngineArgs(_Frozen):
    """The whole configuration. Top-level keys are `vllm serve` flags under the same names."""

    model: str
    tokenizer: str | None = None
    served_model_name: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    api_key: tuple[str, ...] = ()
    seed: int = 0
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: str = "auto"
    max_model_len: PositiveInt | None = None
    max_num_seqs: PositiveInt = 16
    max_num_batched_tokens: PositiveInt = 2048
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    tensor_parallel_size: Literal[1] = 1
    speculative_config: SpeculativeConfig | None = None
    specgw: SpecgwSettings = SpecgwSettings()

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
