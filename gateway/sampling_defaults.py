"""What a model's authors recommend for requests that leave sampling parameters out, as in vLLM."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

_FILE = "generation_config.json"
_NAMES = ("temperature", "top_p", "top_k", "repetition_penalty")
_NOT_IMPLEMENTED = {"min_p": 0.0}


def load_sampling_defaults(model_path: Path) -> Mapping[str, float]:
    """Reads `generation_config.json`. Without the file, OpenAI's defaults hold."""
    try:
        config = json.loads((model_path / _FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    for name, neutral in _NOT_IMPLEMENTED.items():
        if config.get(name, neutral) not in (neutral, None):
            logger.warning(
                "recommended sampling parameter is not implemented and not applied",
                extra={"parameter": name, "value": config[name], "file": _FILE},
            )
    return {name: config[name] for name in _NAMES if config.get(name) is not None}
