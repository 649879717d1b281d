"""What may be asked of an output's text, as far as the constraint alone tells."""

import json
from typing import Any

import pytest

from specgw.errors import InvalidRequest
from specgw.structured_outputs import StructuredOutputsParams


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "structured_outputs: must have exactly one of json"),
        ({"json_object": False}, "structured_outputs: must have exactly one of json"),
        ({"json": "{}", "regex": "a"}, "structured_outputs: must have exactly one of json"),
        ({"choice": []}, "structured_outputs.choice: must have at least one text"),
        ({"choice": ["a", 1]}, "structured_outputs.choice: must be texts"),
        ({"regex": "a" * 200_000}, "structured_outputs.regex: must have at most 131072"),
        ({"json": {"enum": ["a" * 200_000]}}, "structured_outputs.json: must have at most"),
        ({"choice": ["a" * 1000] * 200}, "structured_outputs.choice: must have at most"),
        ({"grammar": "a" * 20_000}, "structured_outputs.grammar: must have at most 16384"),
        ({"json": {"enum": [object()]}}, "structured_outputs.json: must be a JSON schema"),
        (
            {"regex": "a", "disable_any_whitespace": True},
            "structured_outputs.disable_any_whitespace: is for json and json_object",
        ),
        (
            {"json_object": True, "disable_additional_properties": True},
            "structured_outputs.disable_additional_properties: is for json",
        ),
        (
            {"choice": ["a"], "whitespace_pattern": " "},
            "structured_outputs.whitespace_pattern: is for json and json_object",
        ),
        (
            {"json": "{}", "whitespace_pattern": " ", "disable_any_whitespace": True},
            "structured_outputs.whitespace_pattern: cannot be set with disable_any_whitespace",
        ),
    ],
)
def test_what_is_no_constraint_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        StructuredOutputsParams(**fields)

    assert str(refused.value).startswith(named)


@pytest.mark.parametrize("schema", ["{", "3", '"string"', "[" * 100_000])
def test_text_that_is_no_schema_is_refused_by_name(schema: str) -> None:
    params = StructuredOutputsParams(json=schema)

    with pytest.raises(InvalidRequest) as refused:
        params.schema()

    assert str(refused.value).startswith("structured_outputs.json: must be a JSON schema")


def test_a_schema_too_deep_for_text_is_refused_by_name() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}

    with pytest.raises(InvalidRequest, match=r"^structured_outputs\.json: must be a JSON schema"):
        StructuredOutputsParams(json=schema)


def test_a_mapping_and_its_text_are_the_same_constraint() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}

    of_mapping = StructuredOutputsParams(json=schema)
    of_text = StructuredOutputsParams(json=json.dumps(schema))

    assert of_mapping == of_text
    assert hash(of_mapping) == hash(of_text)
    assert of_mapping.schema() == schema


def test_properties_are_closed_where_nothing_is_said_of_others() -> None:
    inner = {"properties": {"properties": {"type": "string"}}}
    schema = {
        "properties": {"a": inner, "b": {"type": "object"}},
        "anyOf": [{"items": inner}, {"additionalProperties": True, "properties": {"c": True}}],
        "const": inner,
    }

    closed = StructuredOutputsParams(json=schema, disable_additional_properties=True).schema()

    closed_inner = {**inner, "additionalProperties": False}
    assert closed == {
        "properties": {"a": closed_inner, "b": {"type": "object"}},
        "anyOf": [
            {"items": closed_inner},
            {"additionalProperties": True, "properties": {"c": True}},
        ],
        "const": inner,
        "additionalProperties": False,
    }
