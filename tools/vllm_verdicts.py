"""Asks vLLM for its verdicts. Run by `vllm_config_agreement` in vLLM's own environment.

Reads configurations from standard input, a JSON list of mappings as `specgw serve` would take them,
and writes a JSON list to the file that the argument names: for each, `accepted` and the method, or
`refused` and the message.
"""

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Judges what comes in on standard input."""
    from vllm.config import ParallelConfig, StructuredOutputsConfig, speculative
    from vllm.engine.arg_utils import EngineArgs, ModelConfig

    def judge(raw: dict[str, Any]) -> tuple[str, str]:
        drafting = raw.get("speculative_config")
        speculative.has_arctic_inference = lambda: raw["with_arctic"]
        try:
            StructuredOutputsConfig(**raw.get("structured_outputs_config", {}))
            if isinstance(drafting, str):
                drafting = json.loads(drafting)
            target = ModelConfig(model=raw["model"], max_model_len=raw.get("max_model_len"), seed=0)
            parallel = ParallelConfig(tensor_parallel_size=raw.get("tensor_parallel_size", 1))
            flags = {key: raw[key] for key in raw if key.startswith("spec_")}
            config = EngineArgs(
                model=raw["model"], speculative_config=drafting, **flags
            ).create_speculative_config(target, parallel)
        except Exception as error:
            return "refused", f"{type(error).__name__}: {error}"
        return "accepted", str(config.method) if config else ""

    verdicts = [judge(raw) for raw in json.load(sys.stdin)]
    Path(sys.argv[1]).write_text(json.dumps(verdicts), encoding="utf-8")


if __name__ == "__main__":
    main()
