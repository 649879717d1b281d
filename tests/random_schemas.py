"""JSON schemas drawn at random, of a size that an output of a few hundred tokens can have."""

import random
from typing import Any

_WORDS = ("id", "name", "size", "x", "is_last", "tags", "größe", "a b", 'say "so"')


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Returns a schema that allows something and bounds the length of all that it allows."""
    kinds = [_string, _integer, _constant, _boolean, _pattern]
    if depth:
        kinds += [_object, _array, _any_of] * 2
    return rng.choice(kinds)(rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        items = [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    fewest = rng.randint(0, 2)
    return {
        "type": "array",
        "items": random_schema(rng, depth - 1),
        "minItems": fewest,
        "maxItems": fewest + rng.randint(0, 2),
    }


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    fewest = rng.randint(0, 4)
    return {"type": "string", "minLength": fewest, "maxLength": fewest + rng.randint(0, 8)}


def _pattern(rng: random.Random, depth: int) -> dict[str, Any]:
    patterns = ("^[a-z]{2,5}$", "^(red|green|blue)$", "^[0-9]{4}-[0-9]{2}$", "^\\w+@\\w{1,3}$")
    return {"type": "string", "pattern": rng.choice(patterns), "maxLength": 16}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(-1_000, 1_000)
    return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 2_000)}


def _constant(rng: random.Random, depth: int) -> dict[str, Any]:
    values = [None, True, 0, -3.5, "", "yes", "größer", ["a", 1], {"b": None}]
    return {"enum": rng.sample(values, rng.randint(1, 4))}


def _boolean(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null"])}
