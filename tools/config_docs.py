"""Writes docs/configuration.md from the configuration's schema: `python -m tools.config_docs`.

With `--check` it writes nothing and exits with 1 if the file is not what it would write.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from specgw.config import EngineArgs
from specgw.slots import SLOTS_TABLE, extra_slots, kv_lookahead
from specgw.supported import SUPPORTED, WITHOUT_EFFECT
from specgw.vllm_differences import DIFFERENCES
from specgw.vllm_names import DEPRECATED_METHODS, MISPLACED_KEYS, RETIRED_FLAGS, RETIRED_KEYS

DOCUMENT = Path(__file__).parent.parent / "docs" / "configuration.md"

_KINDS = {
    "boolean": "bool",
    "integer": "int",
    "null": "none",
    "number": "float",
    "string": "str",
}
_LIMITS = {
    "minimum": "at least",
    "exclusiveMinimum": "over",
    "maximum": "at most",
    "exclusiveMaximum": "under",
}

INTRODUCTION = """\
# Configuration

Generated from `specgw/config.py` by `python -m tools.config_docs`; do not edit.

One YAML file serves all three programs; each reads its part. Top-level keys are `vllm serve` flags
under the same names, `speculative_config` has vLLM's keys, and what is specgw's own is under
`specgw`. `-` and `_` are the same in keys. Flags beat environment variables, which beat the file,
which beats the defaults: `--port 8001`, `SPECGW_PORT=8001`, `port: 8001`. A variable with two
underscores reaches into `specgw`: `SPECGW_VERIFIER__LISTEN=127.0.0.1:7000`. An unknown key is an
error that names the nearest one. Kubernetes sets `SPECGW_PORT` and the like for a Service named
`specgw`: give such pods `enableServiceLinks: false`.

`speculative_config` is a mapping in the file and in Python, and JSON after `--speculative-config`
(`-sc`); `--spec-method`, `--spec-model`, `--spec-tokens` and `--speculative-config.KEY VALUE` set
one key of it.

`specgw check`, with the same arguments as `specgw serve`, tells all problems of a configuration
and its models at once without loading weights, and prints what follows from it: every key's value,
slots, budgets, vocabularies. `--json` is for machines, `--online` asks the running services too.

Without arguments `specgw serve` uses `configs/tiny.yaml`, the bundled tiny models.
`configs/pard.yaml` drafts in parallel, `configs/ngram.yaml` and `configs/suffix.yaml` without a
model; `configs/split.yaml` is what `compose.yaml` mounts.
"""

K = 12  # of the example in the slots table


def sections(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Yields one table for the model's keys, then those of the models in it."""
    yield f"\n## {f'`{path}`' if path else 'Top level'}\n\n{model.__doc__}\n"
    yield "\n| key | type | default | meaning |\n|---|---|---|---|\n"
    schemas = model.model_json_schema()["properties"]
    nested = []
    for name, field in model.model_fields.items():
        inner = _inner_model(field)
        if inner is not None:
            nested.append((f"{path}.{name}" if path else name, inner))
        kind = "mapping" if inner is not None else _kind(schemas[name])
        meaning = " ".join((field.description or "").split())
        yield f"| `{name}` | {kind} | {_default(field)} | {meaning} |\n"
    for inner_path, inner in nested:
        yield from sections(inner, inner_path)


def chapters() -> Iterator[str]:
    """Yields what is not in the schema: one table for each list in the code."""
    yield "\n## What runs today\n\nThe rest of `speculative_config` is checked, then refused.\n"
    runs = [(f"`{one.key}`", one.instead) for one in SUPPORTED]
    yield from _table(("key", "what runs"), runs)
    yield "\nThese keys are accepted and change nothing; `specgw check` says so.\n"
    yield from _table(("key", "why"), [(f"`{one.key}`", one.reason) for one in WITHOUT_EFFECT])
    yield f"\n## Slots\n\nAs in vLLM, per request, here with K = {K}.\n"
    slots = [
        (
            row.algorithm,
            f"`{row.method}`",
            "yes" if row.parallel_drafting else "no",
            str(extra_slots(row.method, K, row.parallel_drafting)),
            str(kv_lookahead(row.method, K, row.parallel_drafting)),
        )
        for row in SLOTS_TABLE
    ]
    yield from _table(("algorithm", "method", "parallel", "extra rows", "KV lookahead"), slots)
    yield "\n## Differences from vLLM\n\n"
    yield "Every key, default and verdict is vLLM 0.32.0's except for these.\n"
    differences = [(one.id, one.vllm, one.specgw, one.reason) for one in DIFFERENCES]
    yield from _table(("name", "vLLM", "specgw", "why"), differences)
    yield "\n## Keys and flags that are refused with a hint\n\n"
    yield "Values of `method` that mean `mtp` are accepted with a warning: "
    yield ", ".join(f"`{name}`" for name in DEPRECATED_METHODS) + ".\n"
    for title, hints in (
        ("key of `speculative_config`", MISPLACED_KEYS),
        ("key that vLLM removed", RETIRED_KEYS),
        ("flag that vLLM removed", RETIRED_FLAGS),
    ):
        yield from _table((title, "hint"), [(f"`{name}`", hint) for name, hint in hints.items()])


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"\n| {' | '.join(header)} |\n|{'---|' * len(header)}\n"
    for line in lines:
        yield f"| {' | '.join(line)} |\n"


def _inner_model(field: FieldInfo) -> type[BaseModel] | None:
    for option in (field.annotation, *get_args(field.annotation)):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def _kind(schema: Mapping[str, Any]) -> str:
    """Returns a JSON schema in words."""
    if "anyOf" in schema:
        return " or ".join(_kind(option) for option in schema["anyOf"])
    if "const" in schema:
        return f"only `{schema['const']}`"
    if "enum" in schema:
        return "one of " + ", ".join(f"`{value}`" for value in schema["enum"])
    if "prefixItems" in schema:
        return f"[{', '.join(_kind(item) for item in schema['prefixItems'])}]"
    if schema["type"] == "array":
        return f"list of {_kind(schema['items'])}"
    if schema["type"] == "object":
        return "mapping"
    limits = [f"{word} {schema[key]:g}" for key, word in _LIMITS.items() if key in schema]
    return ", ".join([_KINDS[schema["type"]], *limits])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if isinstance(field.default, BaseModel):
        return "see below"
    return "none" if field.default in (None, ()) else f"`{json.dumps(field.default)}`"


@click.command()
@click.option("--check", is_flag=True, help="Only tell whether the file is up to date.")
def main(check: bool) -> None:
    """Writes docs/configuration.md."""
    text = "".join((INTRODUCTION, *sections(EngineArgs), *chapters()))
    if not check:
        DOCUMENT.write_text(text, encoding="utf-8")
    elif not DOCUMENT.is_file() or DOCUMENT.read_text(encoding="utf-8") != text:
        sys.exit(f"{DOCUMENT.name} is out of date: run python -m tools.config_docs")


if __name__ == "__main__":
    main()
