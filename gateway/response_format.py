"""What requests may ask of an output's text, OpenAI's way and vLLM's. For `openai_types.py`."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from specgw.errors import InvalidRequest
from specgw.structured_outputs import StructuredOutputsParams

_KNOWN = {field.name for field in fields(StructuredOutputsParams)}


def _refuse_unknown(value: object) -> object:
    for name, option in value.items() if isinstance(value, Mapping) else ():
        if name not in _KNOWN and option is not None:
            rule = "is not implemented, so it must be left out"
            raise InvalidRequest(f"structured_outputs.{name}", option, rule)
    return value


StructuredOutputs = Annotated[StructuredOutputsParams, BeforeValidator(_refuse_unknown)]


class JsonSchema(BaseModel):
    """The schema of a `response_format`. It always holds, `strict` or not."""

    model_config = ConfigDict(extra="allow")

    name: str | None = None
    description: str | None = None
    of_text: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's `response_format`."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def constraint(self) -> StructuredOutputsParams | None:
        """Returns what the text must be; none if it may be any.

        Raises:
            InvalidRequest: naming the field, its value and the rule.
        """
        if self.type == "text":
            return None
        if self.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        if self.json_schema is None:
            raise InvalidRequest("response_format.json_schema", None, "must be given")
        return StructuredOutputsParams(json=self.json_schema.of_text)


def renamed(error: InvalidRequest) -> InvalidRequest:
    """Returns an error about a constraint as the one that a `response_format` is to blame for."""
    if not error.field.startswith("structured_outputs"):
        return error
    return InvalidRequest("response_format.json_schema.schema", error.value, error.rule)
