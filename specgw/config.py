"""The configuration of all three programs: where it comes from, and how its problems are told.

Flags beat `SPECGW_*` variables, which beat the file, which beats the defaults. Every problem found
is reported, by the path of its key. This is the only module that reads the environment.

`parse_config` is what services use: it accepts what validates and runs. `validate_config` accepts
what validates, whether it runs or not.
"""

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from specgw.engine_args import EngineArgs, underscored
from specgw.errors import ConfigError
from specgw.service_settings import (
    GatewaySettings,
    ProposerSettings,
    SimulationSettings,
    SpecgwSettings,
    TlsSettings,
    VerifierSettings,
)
from specgw.speculative_config import MAX_SPEC_LEN, SpeculativeConfig
from specgw.supported import not_run_yet
from specgw.vllm_names import MISPLACED_KEYS, RETIRED_KEYS

__all__ = [
    "DEFAULT_CONFIG",
    "MAX_SPEC_LEN",
    "EngineArgs",
    "GatewaySettings",
    "ProposerSettings",
    "SimulationSettings",
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
_SPIN_COUNT = "30000"  # about half a millisecond; libgomp's own is ten times that


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
        return EngineArgs.model_validate(underscored(raw))
    except ValidationError as error:
        raise ConfigError([_problem(dict(item)) for item in error.errors()]) from None


def child_environment() -> dict[str, str]:
    """Returns the environment for a child whose file already holds what `SPECGW_*` said.

    Unless the user says how OpenMP's threads wait, those of one child leave the cores to the other
    one soon after a pass.
    """
    own = {k: v for k, v in os.environ.items() if not k.startswith(_ENVIRONMENT_PREFIX)}
    if "OMP_WAIT_POLICY" not in own:
        own.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    return own


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        parsed = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"--config {file}: {error.strerror}"]) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"--config {file}: is not YAML: {error}"]) from None
    if not isinstance(parsed, dict):
        raise ConfigError([f"--config {file}: must be a mapping of keys"])
    return underscored(parsed)


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
