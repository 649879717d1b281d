"""Configuration models that tell all their problems at once.

Pydantic checks keys one by one and stops there; a rule says what must hold between keys. Rules are
data. They are tried even when some keys are wrong: a rule that needs a wrong key is left out.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError
from pydantic_core.core_schema import ErrorType

_KNOWN_TYPES = frozenset(get_args(ErrorType))
_RULE = "rule"  # type of the errors that rules raise; pydantic's own have their own types


@dataclass(frozen=True, slots=True)
class Rule:
    """What must hold between keys.

    Attributes:
        key: The key that is reported, dotted if it is in a nested mapping.
        holds: Given the values, whether all is well.
        text: What is wrong otherwise; `{c.KEY}` is a value.
    """

    key: str
    holds: Callable[[Any], bool]
    text: str


class Frozen(BaseModel):
    """A mapping of known keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Ruled(Frozen):
    """A mapping of known keys with rules between them."""

    rules: ClassVar[tuple[Rule, ...]] = ()

    @classmethod
    def prepared(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what was given with what follows from it. May raise ValueError."""
        return dict(raw)

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, raw: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(raw, Mapping):
            return handler(raw)
        prepared = cls.prepared(raw)
        try:
            values = handler(prepared)
        except ValidationError as error:
            errors = [_again(dict(item)) for item in error.errors()]
            errors += _broken(cls.rules, _valid_part(cls, prepared))
        else:
            errors = list(_broken(cls.rules, values))
            if not errors:
                return values
        raise ValidationError.from_exception_data(cls.__name__, errors)


class _UnknownValue(Exception):
    """A rule asked for a key whose value is wrong."""


class _ValidPart:
    """The values of a mapping of which some are wrong."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise _UnknownValue from None


def _valid_part(model: type[BaseModel], raw: Mapping[str, Any]) -> _ValidPart:
    values: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if name not in raw:
            if not field.is_required():
                values[name] = field.get_default(call_default_factory=True)
            continue
        kind: Any = field.annotation
        if field.metadata:
            kind = Annotated[(kind, *field.metadata)]
        try:
            values[name] = TypeAdapter(kind).validate_python(raw[name])
        except ValidationError:
            nested = next((one for one in _options(kind) if _is_model(one)), None)
            if nested is not None and isinstance(raw[name], Mapping):
                prepare = getattr(nested, "prepared", dict)
                values[name] = _valid_part(nested, prepare(raw[name]))
    return _ValidPart(values)


def _options(annotation: Any) -> tuple[Any, ...]:
    inner = getattr(annotation, "__args__", ())
    return (annotation, *(option for one in inner for option in _options(one)))


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _broken(rules: Iterable[Rule], values: Any) -> Iterator[InitErrorDetails]:
    for rule in rules:
        try:
            if not rule.holds(values):
                yield _rule_error(tuple(rule.key.split(".")), rule.text.format(c=values), None)
        except _UnknownValue:
            continue


def _again(error: dict[str, Any]) -> InitErrorDetails:
    if error["type"] not in _KNOWN_TYPES:  # a rule's, or one of pydantic's own custom errors
        return _rule_error(error["loc"], error["msg"], error["input"])
    details = InitErrorDetails(type=error["type"], loc=error["loc"], input=error["input"])
    if "ctx" in error:
        details["ctx"] = error["ctx"]
    return details


def _rule_error(loc: tuple[int | str, ...], text: str, value: Any) -> InitErrorDetails:
    kind = PydanticCustomError(_RULE, "{text}", {"text": text})
    return InitErrorDetails(type=kind, loc=loc, input=value)
