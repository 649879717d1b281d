"""Rewrites a command line as vLLM's parser does, before click sees it.

`_` in a flag is `-`, and `--speculative-config.KEY VALUE` sets one key of the JSON that the flag
takes; `KEY+` splits VALUE at commas. So it is with `--structured-outputs-config`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TAKE_JSON = ("--speculative-config", "-sc", "--structured-outputs-config")


def normalized(arguments: Sequence[str]) -> list[str]:
    """Returns the same arguments without dotted flags and without `_` in flags."""
    rest: list[str] = []
    mappings: dict[str, dict[str, Any]] = {}
    words = iter(arguments)
    for word in words:
        if word == "--":
            return [*rest, *_joined(mappings), word, *words]
        flag, equals, value = word.partition("=")
        name, *path = flag.split(".")
        name = name.replace("_", "-") if name.startswith("--") else name
        if path and name in _TAKE_JSON:
            value = value if equals else next(words, "")
            _set(mappings.setdefault(name, {}), path, value)
        elif word.startswith("--"):
            rest.append(flag.replace("_", "-") + equals + value)
        else:
            rest.append(word)
    return rest + _joined(mappings)


def _joined(mappings: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [word for name, keys in mappings.items() for word in (name, json.dumps(keys))]


def _set(mapping: dict[str, Any], path: Sequence[str], text: str) -> None:
    *parents, key = path
    for parent in parents:
        inner = mapping.get(parent)
        if not isinstance(inner, dict):
            inner = mapping[parent] = {}
        mapping = inner
    if key.endswith("+"):
        mapping[key[:-1]] = text.split(",")
    else:
        mapping[key] = _parsed(text)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
