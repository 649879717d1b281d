"""What an output's text must be: the constraints of vLLM's `structured_outputs`.

Checks here need the constraint alone; `grammar.py` compiles it.
"""

import json as json_format
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specgw.errors import InvalidRequest

_MAX_CHARS = 128 * 1024
_MAX_GRAMMAR_CHARS = 16 * 1024  # translating EBNF takes time by the square of its length
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")
_SUBSCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SUBSCHEMAS = (
    "additionalProperties",
    "allOf",
    "anyOf",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "oneOf",
    "prefixItems",
    "then",
)


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """Exactly one constraint on the text of an output, and options. Names are vLLM's.

    Attributes:
        json: A JSON schema, as text or as a mapping; kept as text.
        regex: A regular expression that the whole text matches.
        choice: Texts, one of which the output is.
        grammar: A context-free grammar: EBNF with a rule `root`, or Lark with a rule `start`.
        json_object: Whether the output is any JSON object.
        disable_any_whitespace: Lets JSON have no whitespace between its parts.
        disable_additional_properties: Lets objects have no properties but those that the schema
            lists, where it does not say whether they may.
        whitespace_pattern: A regular expression for the whitespace between parts of JSON.

    Raises:
        InvalidRequest: naming the field, its value and the rule.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        if self.json is not None and not isinstance(self.json, str):
            object.__setattr__(self, "json", _dumped(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", tuple(self.choice))
        object.__setattr__(self, "json_object", self.json_object or None)
        given = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            rule = f"must have exactly one of {', '.join(_CONSTRAINTS)}"
            raise InvalidRequest("structured_outputs", given, rule)
        for name, is_valid, rule in self._rules():
            if not is_valid:
                raise self.refusal(rule, name)

    def _rules(self) -> Sequence[tuple[str, bool, str]]:
        is_json = self.json is not None or self.json_object is not None
        choice = self.choice or ()
        return (
            ("json", len(self.json or "") <= _MAX_CHARS, _at_most(_MAX_CHARS)),
            ("regex", len(self.regex or "") <= _MAX_CHARS, _at_most(_MAX_CHARS)),
            ("choice", self.choice is None or len(choice) > 0, "must have at least one text"),
            ("choice", all(isinstance(one, str) for one in choice), "must be texts"),
            (
                "choice",
                sum(len(str(one)) + 1 for one in choice) <= _MAX_CHARS,
                _at_most(_MAX_CHARS),
            ),
            (
                "grammar",
                len(self.grammar or "") <= _MAX_GRAMMAR_CHARS,
                _at_most(_MAX_GRAMMAR_CHARS),
            ),
            (
                "disable_any_whitespace",
                is_json or not self.disable_any_whitespace,
                "is for json and json_object",
            ),
            (
                "disable_additional_properties",
                self.json is not None or not self.disable_additional_properties,
                "is for json",
            ),
            (
                "whitespace_pattern",
                is_json or self.whitespace_pattern is None,
                "is for json and json_object",
            ),
            (
                "whitespace_pattern",
                self.whitespace_pattern is None or not self.disable_any_whitespace,
                "cannot be set with disable_any_whitespace",
            ),
        )

    @property
    def constraint(self) -> str:
        """The name of the constraint."""
        return next(name for name in _CONSTRAINTS if getattr(self, name) is not None)

    def refusal(self, rule: str, name: str = "") -> InvalidRequest:
        """Returns the error that says what is wrong with a field, by default the constraint."""
        name = name or self.constraint
        return InvalidRequest(f"structured_outputs.{name}", getattr(self, name), rule)

    def limited(
        self, *, without_whitespace: bool, without_additional_properties: bool
    ) -> "StructuredOutputsParams":
        """Returns the same constraint with what is disabled for all constraints of its kind.

        Raises:
            InvalidRequest: for a whitespace pattern where JSON may have no whitespace.
        """
        is_json = self.json is not None or self.json_object is not None
        return replace(
            self,
            disable_any_whitespace=self.disable_any_whitespace or (is_json and without_whitespace),
            disable_additional_properties=self.disable_additional_properties
            or (self.json is not None and without_additional_properties),
        )

    def schema(self) -> Any:
        """Returns the JSON schema of `json` or `json_object`.

        Raises:
            InvalidRequest: if `json` is not a JSON schema at all.
        """
        if self.json is None:
            return {"type": "object"}
        try:
            schema = json_format.loads(str(self.json))
        except (ValueError, RecursionError) as error:
            raise self.refusal(f"must be a JSON schema: {error}") from None
        if not isinstance(schema, dict | bool):
            raise self.refusal("must be a JSON schema, which is an object or a boolean")
        if self.disable_additional_properties:
            _close(schema)
        return schema


def _dumped(schema: Mapping[str, Any]) -> str:
    try:
        return json_format.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        rule = f"must be a JSON schema: {error}"
        raise InvalidRequest("structured_outputs.json", type(schema).__name__, rule) from None


def _at_most(num_chars: int) -> str:
    return f"must have at most {num_chars} characters"


def _close(schema: Any) -> None:
    """Forbids properties that are not listed, wherever some are and nothing is said of others."""
    if isinstance(schema, list):
        for one in schema:
            _close(one)
    if not isinstance(schema, dict):
        return
    for name in _SUBSCHEMA_MAPS:
        if isinstance(schema.get(name), dict):
            for one in schema[name].values():
                _close(one)
    for name in _SUBSCHEMAS:
        _close(schema.get(name))
    if "properties" in schema or "patternProperties" in schema:
        schema.setdefault("additionalProperties", False)
