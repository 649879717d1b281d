"""The table of configurations in `data/speculative_configs.yaml`, its checkpoints, our verdicts.

Each row has an `id`; `config` and `args`, the speculative and the other keys; `target`, by default
the checkpoint of that name; the `verdict`: `runs`, `not yet` (valid, but refused because specgw
does not run it), or `refused`; what the refusal `says`; the `method` that it comes to; vLLM's
verdict (`vllm`, by default accepted) and, if it is another one, its method (`vllm_method`); and the
`difference`, the entry of `specgw.vllm_differences` that explains why the two differ. vLLM is asked
as if arctic-inference was installed in rows that say `with_arctic`.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from specgw.config import validate_config
from specgw.errors import ConfigError
from specgw.model_checks import check_models, read_models
from specgw.supported import not_run_yet

_FILE = Path(__file__).parent / "data" / "speculative_configs.yaml"
_NUM_TOKENS = 64
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": _NUM_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": 0,
}
_NAMES = {
    "words": [f"w{i}" for i in range(_NUM_TOKENS)],
    "others": [f"x{i}" for i in range(_NUM_TOKENS)],
    "shifted": [f"w{i if i < 40 else i + 1}" for i in range(_NUM_TOKENS)],
}


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration and what is said of it."""

    id: str
    verdict: str
    config: Any = None
    args: Mapping[str, Any] = field(default_factory=dict)
    target: str = "target"
    says: str = ""
    vllm: str = "accepted"
    vllm_config: Any = None
    method: str | None = None
    vllm_method: str | None = None
    difference: str | None = None
    with_arctic: bool = False

    def raw(self, checkpoints: Path) -> dict[str, Any]:
        """Returns the whole configuration as a user would give it."""
        raw = {"model": f"@{self.target}", **self.args}
        if self.config is not None:
            raw["speculative_config"] = self.config
        placed: dict[str, Any] = _placed(raw, checkpoints)
        return placed

    @property
    def differs(self) -> bool:
        """Whether the table says that specgw and vLLM differ."""
        is_valid = self.verdict != "refused"
        return is_valid != (self.vllm == "accepted") or self.vllm_method is not None


@dataclass(frozen=True, slots=True)
class Judgement:
    """What specgw says of a configuration; `method` is None if it is not valid."""

    verdict: str
    messages: list[str]
    method: str | None = None


def rows() -> list[Row]:
    """Reads the table."""
    return [Row(**row) for row in _table()["rows"]]


def save_checkpoints(directory: Path) -> None:
    """Writes the folders that the rows name: no weights, only what is looked at without them."""
    for name, given in _table()["checkpoints"].items():
        folder = directory / name
        folder.mkdir()
        config = {**_CONFIG, **given.get("config", {})}
        (folder / "config.json").write_text(json.dumps(config))
        _save_tokenizer(given.get("vocab", "words"), folder)
        _save_weights(given.get("weights", "safetensors"), folder)


def judge(raw: Mapping[str, Any]) -> Judgement:
    """Returns what specgw says of a configuration."""
    try:
        args = validate_config(raw)
        problems = check_models(read_models(args))
    except ConfigError as error:
        return Judgement("refused", list(error.problems))
    if problems:
        return Judgement("refused", problems)
    method = args.speculative_config.method if args.speculative_config else None
    problems = not_run_yet(args)
    return Judgement("not yet" if problems else "runs", problems, method)


def _table() -> dict[str, Any]:
    table: dict[str, Any] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return table


def _placed(value: Any, checkpoints: Path) -> Any:
    """Replaces `@name` by a path, in JSON text too."""
    if isinstance(value, str) and value.startswith("@"):
        return str(checkpoints / value[1:])
    if isinstance(value, str):
        return value.replace('"@', f'"{checkpoints}/')
    if isinstance(value, dict):
        return {key: _placed(one, checkpoints) for key, one in value.items()}
    return value


def _save_tokenizer(vocab: str, folder: Path) -> None:
    if vocab == "none":
        return
    names = _NAMES[vocab]
    tokens = {token: token_id for token_id, token in enumerate(names)}
    Tokenizer(WordLevel(tokens, unk_token=names[0])).save(str(folder / "tokenizer.json"))


def _save_weights(kind: str, folder: Path) -> None:
    if kind == "pickle":
        (folder / "pytorch_model.bin").write_bytes(b"not opened")
    elif kind == "safetensors":
        header = b"{}"
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
