"""Finds the directory of a model. No torch: the gateway looks for tokenizers here."""

from pathlib import Path

from huggingface_hub import snapshot_download

from specgw.errors import ConfigError

_TINY_MODELS = Path(__file__).parent / "tiny_models"
_TINY_PREFIX = "tiny/"
_NEEDED_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def resolve_model(model: str) -> Path:
    """Returns the directory of a model.

    Args:
        model: `tiny/NAME` for a bundled model; a path; else a Hugging Face hub id, looked up on
            the network or, failing that, in the local cache.

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
        return Path(snapshot_download(model, allow_patterns=_NEEDED_FILES))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            [
                f"{model}: neither a directory nor a model that the Hugging Face hub or its local "
                f"cache has: {reason}"
            ]
        ) from None


def _bundled(name: str) -> Path:
    bundled = sorted(path.name for path in _TINY_MODELS.glob("*") if path.is_dir())
    if name not in bundled:
        raise ConfigError([f"tiny/{name}: the bundled models are {', '.join(bundled) or 'none'}"])
    return _TINY_MODELS / name
