"""The JSON of events: whole bodies, and chunks that differ from one another in their text alone.

The caller is `openai_responses.py`.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_TEXT = "\0"  # JSON escapes it, and escapes what looks like its escape


def to_json(body: Mapping[str, Any]) -> bytes:
    """Returns compact JSON in UTF-8."""
    return _ENCODER.encode(body).encode()


class ChunkTemplate:
    """Writes chunks around their text: the rest is the same for all tokens of an answer.

    Args:
        build: Returns the body of a chunk with a text.
    """

    def __init__(self, build: Callable[[str], Mapping[str, Any]]) -> None:
        whole = _ENCODER.encode(build(_TEXT))
        self._before, mark, self._after = whole.partition(_ENCODER.encode(_TEXT))
        assert mark, "the chunk has no text"

    def to_json(self, text: str) -> bytes:
        """Returns what `to_json` makes of the body with that text."""
        return f"{self._before}{_ENCODER.encode(text)}{self._after}".encode()
