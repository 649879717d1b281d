"""What a model's authors recommend for requests that leave sampling parameters out, as in vLLM."""

import json
from collections.abc import Mapping
from pathlib import Path

_FILE = "generation_config.json"
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def load_sampling_defaults(model_path: Path) -> Mapping[str, float]:
    """Reads `generation_config.json`. Without the file, OpenAI's defaults hold."""
    try:
        config = json.loads((model_path / _FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return {name: config[name] for name in _NAMES if config.get(name) is not None}
