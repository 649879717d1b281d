"""The errors that cross a service boundary, each with the gRPC status it travels as.

SpecgwError
  InvalidRequest      INVALID_ARGUMENT     the caller's fault; names the field and its value
  ModelNotFound       NOT_FOUND            no model is served under that name
  IncompatibleModels  FAILED_PRECONDITION  draft and target, or two versions, cannot work together
  Overloaded          RESOURCE_EXHAUSTED   no slot, no free block or a full queue; come back later
  NotReady            UNAVAILABLE          loading, draining or gone; the only one retried
  Cancelled           CANCELLED            the caller went away
  DeadlineExceeded    DEADLINE_EXCEEDED    the caller's time is up
ConfigError           none: raised before anything listens; carries every problem found
"""

from collections.abc import Sequence

_MAX_VALUE_CHARS = 200  # of a refused value in a message


class SpecgwError(Exception):
    """An expected failure, told to the caller by its status."""

    status = "INTERNAL"


class InvalidRequest(SpecgwError):
    """A field of the request has a value that it cannot have."""

    status = "INVALID_ARGUMENT"

    def __init__(self, field: str, value: object, rule: str) -> None:
        super().__init__(f"{field}: {rule}, got {_shortened(value)}")
        self.field = field
        self.value = value
        self.rule = rule


class ModelNotFound(SpecgwError):
    """No model is served under the requested name."""

    status = "NOT_FOUND"


class IncompatibleModels(SpecgwError):
    """Two services cannot work together. Each mismatch is one line of the message."""

    status = "FAILED_PRECONDITION"

    def __init__(self, mismatches: Sequence[str]) -> None:
        super().__init__("\n".join(mismatches))
        self.mismatches = tuple(mismatches)


class Overloaded(SpecgwError):
    """There is no room now. The request may be sent again after `retry_after_s`."""

    status = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotReady(SpecgwError):
    """The service is loading, draining or gone."""

    status = "UNAVAILABLE"


class Cancelled(SpecgwError):
    """The caller went away."""

    status = "CANCELLED"


class DeadlineExceeded(SpecgwError):
    """The caller's time is up."""

    status = "DEADLINE_EXCEEDED"


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."


class ConfigError(Exception):
    """The configuration cannot be used. Carries one message for each problem."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)
