"""Reads the JSON body of a request, as far as it may be trusted: its size, its text, its depth.

The caller is `openai_api.py`.
"""

import json
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from gateway.openai_types import first_problem
from specgw.channel import MAX_MESSAGE_BYTES
from specgw.errors import Cancelled, InvalidRequest

BodyModel = TypeVar("BodyModel", bound=BaseModel)

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_TOO_DEEP = "the body is nested too deeply"


async def read_json(request: Request) -> dict[str, Any]:
    """Returns the object that the body is.

    Raises:
        InvalidRequest: for another content type.
        HTTPException: 413 if it is too long, 400 if it is not an object with text in Unicode.
        Cancelled: if the client went away.
    """
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise InvalidRequest("content-type", content_type, "must be application/json")
    try:
        text = (await _read(request)).decode()
        raw = json.loads(text)
        if _SURROGATE_ESCAPE.search(text):  # half of a pair alone is no text: it cannot be encoded
            json.dumps(raw, ensure_ascii=False).encode()
    except ClientDisconnect:
        raise Cancelled("the client went away") from None
    except RecursionError:
        raise HTTPException(400, _TOO_DEEP) from None
    except UnicodeEncodeError as error:
        lone = ascii(error.object[error.start])
        raise HTTPException(400, f"the body has text with a lone surrogate, {lone}") from None
    except ValueError as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise HTTPException(400, "the body is not a JSON object")
    return raw


def validate(raw: dict[str, Any], model: type[BodyModel]) -> BodyModel:
    """Returns a body with the fields of `model`.

    Raises:
        InvalidRequest: naming the first field that is wrong.
    """
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise first_problem(error) from None
    except RecursionError:
        raise HTTPException(400, _TOO_DEEP) from None


async def _read(request: Request) -> bytes:
    too_long = HTTPException(413, f"the body must be at most {MAX_MESSAGE_BYTES} bytes")
    if int(request.headers.get("content-length", 0)) > MAX_MESSAGE_BYTES:
        raise too_long
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_MESSAGE_BYTES:
            raise too_long
    return bytes(body)
