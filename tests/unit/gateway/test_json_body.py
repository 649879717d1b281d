from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from gateway.json_body import read_json, validate
from gateway.openai_types import CompletionRequest
from specgw.channel import MAX_MESSAGE_BYTES

HALF = b" " * (MAX_MESSAGE_BYTES // 2 + 1)


def request(*parts: bytes, content_length: int | None = None) -> Request:
    """Returns a request whose body comes in parts."""
    rest = list(parts)

    async def receive() -> Any:
        body = rest.pop(0) if rest else b""
        return {"type": "http.request", "body": body, "more_body": bool(rest)}

    headers = [(b"content-type", b"application/json")]
    if content_length is not None:
        headers.append((b"content-length", str(content_length).encode()))
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


async def test_a_body_may_come_in_parts() -> None:
    assert await read_json(request(b'{"a":', b' "\\ud83d\\ude00"}')) == {"a": "😀"}


@pytest.mark.parametrize(
    "too_long",
    [request(content_length=MAX_MESSAGE_BYTES + 1), request(HALF, HALF)],
    ids=["announced", "in parts"],
)
async def test_a_body_that_is_too_long_is_413(too_long: Request) -> None:
    with pytest.raises(HTTPException, match=f"at most {MAX_MESSAGE_BYTES} bytes") as raised:
        await read_json(too_long)

    assert raised.value.status_code == 413


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": "\\ud800"}', r"lone surrogate, '\ud800'"),
        (b'{"\\uDFFF": 1}', r"lone surrogate, '\udfff'"),
        (b'{"prompt": "\xed\xa0\x80"}', "not JSON: 'utf-8' codec"),
        (b'{"prompt": ' + b"[" * 100_000, "nested too deeply"),
        (b"{", "not JSON"),
        (b"[]", "not a JSON object"),
    ],
)
async def test_what_cannot_be_used_is_400(body: bytes, message: str) -> None:
    with pytest.raises(HTTPException) as raised:
        await read_json(request(body))

    assert raised.value.status_code == 400
    assert message in raised.value.detail


def test_a_field_too_deep_to_be_shown_is_400() -> None:
    deep: dict[str, Any] = {}
    for _ in range(1000):
        deep = {"a": deep}

    with pytest.raises(HTTPException, match="nested too deeply"):
        validate({"prompt": "x", "vllm_xargs": deep}, CompletionRequest)
