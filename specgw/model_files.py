"""Finds the directory of a model. No torch: the gateway looks for tokenizers here."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from specgw.errors import ConfigError

_TINY_MODELS = Path(__file__).parent / "tiny_models"
_TINY_PREFIX = "tiny/"
_WEIGHTS = "*.safetensors"
_NEEDED_FILES = ["*.json", _WEIGHTS, "*.model", "*.txt", "*.jinja"]
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def resolve_model(model: str, with_weights: bool = True) -> Path:
    """Returns the directory of a model.

    Args:
        model: `tiny/NAME` for a bundled model; a path; else a Hugging Face hub id, looked up on
            the network or, failing that, in the local cache.
        with_weights: Whether weights are fetched too if the model comes from the hub.

    Raises:
        ConfigError: if there is no such model.
    """
    if model.startswith(_TINY_PREFIX):
        return _bundled(model.removeprefix(_TINY_PREFIX))
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or model.startswith((".", "~")):
        raise ConfigError([f"{model}: there is no such directory"])
    try:
        patterns = [one for one in _NEEDED_FILES if with_weights or one != _WEIGHTS]
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            [
                f"{model}: neither a directory nor a model that the Hugging Face hub or its local "
                f"cache has: {reason}"
            ]
        ) from None


def weight_files(model_dir: Path) -> list[Path]:
    """Returns the safetensors files of a model.

    Raises:
        ConfigError: if there are none; it says so if there are pickles instead.
    """
    files = sorted(model_dir.glob("model*.safetensors")) or sorted(model_dir.glob("*.safetensors"))
    if files:
        return files
    pickles = [file.name for pattern in _PICKLES for file in sorted(model_dir.glob(pattern))]
    if pickles:
        raise ConfigError(
            [
                f"{model_dir}: the weights are pickles ({pickles[0]}), which can run any code when "
                "they are loaded; convert them to safetensors"
            ]
        )
    raise ConfigError([f"{model_dir}: there is no *.safetensors file"])


def is_on_hub(model: str) -> bool:
    """Whether a name stands for a model of the hub rather than for a directory."""
    return not model.startswith(_TINY_PREFIX) and not Path(model).expanduser().is_dir()


def read_config(model_dir: Path) -> dict[str, Any]:
    """Returns what a model's `config.json` says.

    Raises:
        ConfigError: if there is no such file, or it is not a JSON mapping.
    """
    try:
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError([f"{model_dir}: config.json cannot be used: {error}"]) from None
    if not isinstance(config, dict):
        raise ConfigError([f"{model_dir}: config.json cannot be used: it is not a mapping"])
    return config


def read_local_config(model: str) -> dict[str, Any]:
    """Returns what the `config.json` of a model on this machine says; nothing if it has none."""
    try:
        return read_config(_local_directory(model))
    except ConfigError:
        return {}


def _local_directory(model: str) -> Path:
    if model.startswith(_TINY_PREFIX):
        return _bundled(model.removeprefix(_TINY_PREFIX))
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    try:
        cached = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        cached = None
    return Path(cached).parent if isinstance(cached, str) else path


def _bundled(name: str) -> Path:
    bundled = sorted(path.name for path in _TINY_MODELS.glob("*") if path.is_dir())
    if name not in bundled:
        raise ConfigError([f"tiny/{name}: the bundled models are {', '.join(bundled) or 'none'}"])
    return _TINY_MODELS / name
