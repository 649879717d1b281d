"""Writes docs/configuration.md from the configuration's schema: `python -m tools.config_docs`.

With `--check` it writes nothing and exits with 1 if the file is not what it would write.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from specgw.config import EngineArgs

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

Without arguments `specgw serve` uses `configs/tiny.yaml`, the bundled tiny models.
`configs/split.yaml` is what `compose.yaml` mounts.
"""


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
        yield f"| `{name}` | {kind} | {_default(field)} | {field.description} |\n"
    for inner_path, inner in nested:
        yield from sections(inner, inner_path)


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
    if schema["type"] == "array":
        return f"list of {_kind(schema['items'])}"
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
    text = INTRODUCTION + "".join(sections(EngineArgs))
    if not check:
        DOCUMENT.write_text(text, encoding="utf-8")
    elif not DOCUMENT.is_file() or DOCUMENT.read_text(encoding="utf-8") != text:
        sys.exit(f"{DOCUMENT.name} is out of date: run python -m tools.config_docs")


if __name__ == "__main__":
    main()
