"""The configuration of all three programs: vLLM's names, specgw's own settings under `specgw:`.

Flags beat `SPECGW_*` variables, which beat the file, which beats the defaults. Every problem found
is reported, by the path of its key. This is the only module that reads the environment.

`parse_config` is what services use: it accepts what validates and runs. `validate_config` accepts
what validates, whether it runs or not.
"""

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from specgw.config_rules import Rule, Ruled
from specgw.errors import ConfigError
from specgw.service_settings import (
    GatewaySettings,
    ProposerSettings,
    SpecgwSettings,
    TlsSettings,
    VerifierSettings,
)
from specgw.slots import extra_slots
from specgw.speculative_config import (
    DRAFT_MODEL_METHODS,
    MAX_SPEC_LEN,
    PositiveInt,
    SpeculativeConfig,
)
from specgw.supported import not_run_yet
from specgw.vllm_names import ALIASES, DEPRECATED_METHODS, MISPLACED_KEYS, RETIRED_KEYS

__all__ = [
    "DEFAULT_CONFIG",
    "MAX_SPEC_LEN",
    "EngineArgs",
    "GatewaySettings",
    "ProposerSettings",
    "SpecgwSettings",
    "SpeculativeConfig",
    "TlsSettings",
    "VerifierSettings",
    "child_environment",
    "load_config",
    "merge_config",
    "parse_config",
    "validate_config",
]

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "tiny.yaml"
_ENVIRONMENT_PREFIX = "SPECGW_"
_MODEL_IS_TARGET = ("mtp", "dspark")  # without a model of their own, they read the target's


def _one_or_many(raw: Any) -> Any:
    return (raw,) if isinstance(raw, str) else raw


def _json_or_mapping(raw: Any) -> Any:
    if not isinstance(raw, str):
        return raw
    try:
        parsed = json.loads(raw)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from None
    return _underscored(parsed) if isinstance(parsed, Mapping) else parsed


def _draft_rows(args: Any) -> int:
    """Input rows that one request takes in a drafting step."""
    c = args.speculative_config
    return 1 + extra_slots(c.method, c.num_speculative_tokens, c.parallel_drafting) if c else 1


def _reads_draft_model(args: Any) -> bool:
    c = args.speculative_config
    return c is not None and c.method in DRAFT_MODEL_METHODS


def _draft_gpus(args: Any) -> int:
    gpus: int = args.speculative_config.draft_tensor_parallel_size or args.tensor_parallel_size
    return gpus


def _alias_rule(alias: str, key: str) -> Rule:
    flag = "--" + alias.replace("_", "-")
    text = f"{flag} and speculative_config.{key} are mutually exclusive"
    return Rule(alias, lambda args: getattr(args, alias) is None, text)


_RULES = (
    Rule(
        "max_num_batched_tokens",
        lambda args: (
            args.speculative_config is None
            or args.max_num_batched_tokens > args.speculative_config.num_speculative_tokens
        ),
        "must be more than num_speculative_tokens = "
        "{c.speculative_config.num_speculative_tokens}, got {c.max_num_batched_tokens}",
    ),
    Rule(
        "specgw.proposer.max_num_batched_tokens",
        lambda args: args.specgw.proposer.max_num_batched_tokens >= _draft_rows(args),
        "must hold the rows of one request, one and its extra slots, "
        "got {c.specgw.proposer.max_num_batched_tokens}",
    ),
    Rule(
        "speculative_config.draft_tensor_parallel_size",
        lambda args: (
            not _reads_draft_model(args) or _draft_gpus(args) in (1, args.tensor_parallel_size)
        ),
        "must be 1 or tensor_parallel_size = {c.tensor_parallel_size}, "
        "got {c.speculative_config.draft_tensor_parallel_size}",
    ),
    Rule(
        "speculative_config.draft_tensor_parallel_size",
        lambda args: (
            args.speculative_config is None
            or args.speculative_config.method != "draft_model"
            or _draft_gpus(args) == args.tensor_parallel_size
            or _draft_gpus(args) != 1
        ),
        "must be tensor_parallel_size = {c.tensor_parallel_size} with method draft_model, "
        "got {c.speculative_config.draft_tensor_parallel_size}",
    ),
    Rule(
        "speculative_config.max_model_len",
        lambda args: (
            args.speculative_config is None
            or (args.speculative_config.max_model_len or 0) <= (args.max_model_len or 2**63)
        ),
        "must be at most the target's max_model_len = {c.max_model_len}, "
        "got {c.speculative_config.max_model_len}",
    ),
    *(_alias_rule(alias, key) for alias, key in ALIASES.items()),
)


class EngineArgs(Ruled):
    """The whole configuration. Top-level keys are `vllm serve` flags under the same names."""

    rules: ClassVar[tuple[Rule, ...]] = _RULES

    model: str
    """The target model: a path, a bundled `tiny/NAME`, or a hub id."""
    tokenizer: str | None = None
    """Where the tokenizer is. None means with the model."""
    served_model_name: Annotated[tuple[str, ...], BeforeValidator(_one_or_many)] = ()
    """Names under which clients ask for the model. None means `model`."""
    host: str = "127.0.0.1"
    """Where the OpenAI API listens."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port of the OpenAI API; 0 takes a free one."""
    api_key: Annotated[tuple[str, ...], BeforeValidator(_one_or_many)] = ()
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
    tensor_parallel_size: PositiveInt = 1
    """GPUs for the target model."""
    speculative_config: Annotated[SpeculativeConfig | None, BeforeValidator(_json_or_mapping)] = (
        None
    )
    """How drafts are made and tested: a mapping, or JSON. None means plain decoding."""
    spec_method: str | None = None
    """Another name for `speculative_config.method`."""
    spec_model: str | None = None
    """Another name for `speculative_config.model`."""
    spec_tokens: int | None = None
    """Another name for `speculative_config.num_speculative_tokens`."""
    specgw: SpecgwSettings = SpecgwSettings()
    """Everything that vLLM has no key for."""

    @classmethod
    def prepared(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        values = dict(raw)
        given = {key: values.pop(alias) for alias, key in ALIASES.items() if _is_set(values, alias)}
        drafting = _parsed(values.get("speculative_config"))
        if drafting is None and given:
            drafting = {}
        if not isinstance(drafting, Mapping):
            return values | _restored(given)
        twice = {key: value for key, value in given.items() if key in drafting}
        drafting = {**drafting, **{k: v for k, v in given.items() if k not in twice}}
        is_for_target = drafting.get("method") in (*_MODEL_IS_TARGET, *DEPRECATED_METHODS)
        if is_for_target and drafting.get("model") is None and "model" in values:
            drafting["model"] = values["model"]
        return values | {"speculative_config": drafting} | _restored(twice)

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
    return parse_config(merge_config(file, flags))


def merge_config(file: Path | None, flags: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the nested mapping that `load_config` validates.

    Raises:
        ConfigError: if the file cannot be read.
    """
    merged: dict[str, Any] = {}
    over = {**_environment(os.environ), **{k: v for k, v in (flags or {}).items() if v is not None}}
    if file is None and "model" not in over:
        file = DEFAULT_CONFIG
    if file is not None:
        merged = _read_yaml(file)
    for key, value in over.items():
        _set_path(merged, key.split("."), value)
    return merged


def parse_config(raw: Mapping[str, Any]) -> EngineArgs:
    """Validates a nested mapping and refuses what does not run yet.

    Raises:
        ConfigError: with every problem, each naming its key.
    """
    args = validate_config(raw)
    if problems := not_run_yet(args):
        raise ConfigError(problems)
    return args


def validate_config(raw: Mapping[str, Any]) -> EngineArgs:
    """Validates a nested mapping, by vLLM's rules and specgw's.

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


def _is_set(values: Mapping[str, Any], key: str) -> bool:
    return values.get(key) is not None


def _parsed(raw: Any) -> Any:
    try:
        return _json_or_mapping(raw)
    except ValueError:
        return raw  # reported when the key is validated


def _restored(given: Mapping[str, Any]) -> dict[str, Any]:
    return {alias: given[key] for alias, key in ALIASES.items() if key in given}


def _problem(error: dict[str, Any]) -> str:
    path = ".".join(str(part) for part in error["loc"])
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = _unknown(error["loc"])
    elif error["type"] not in ("value_error", "missing", "rule"):
        message += f", got {error['input']!r}"
    return f"{path}: {message}" if path else message


def _unknown(path: Sequence[str | int]) -> str:
    key = str(path[-1])
    if path[0] == "speculative_config":
        for table in (MISPLACED_KEYS, RETIRED_KEYS):
            if key in table:
                return table[key]
    return "unknown key" + _nearest(path)


def _nearest(path: Sequence[str | int]) -> str:
    model: Any = EngineArgs
    for key in path[:-1]:
        annotation = model.model_fields[str(key)].annotation
        options = (annotation, *getattr(annotation, "__args__", ()))
        model = next(o for o in options if isinstance(o, type) and issubclass(o, BaseModel))
    close = difflib.get_close_matches(str(path[-1]), model.model_fields, n=1)
    return f"; did you mean {close[0]}?" if close else ""
