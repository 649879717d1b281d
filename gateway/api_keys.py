"""Lets only callers with a known key through to the model, over HTTP and gRPC alike."""

import hmac
from collections.abc import Sequence

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.openai_responses import error_fields

UNKNOWN_KEY = "the API key is missing or wrong"
_GUARDED = ("/v1", "/tokenize", "/detokenize")
_CALLER = "specgw.caller"  # key of the ASGI scope


def find_key(authorization: str, api_keys: Sequence[str]) -> int | None:
    """Returns the number of the key that an `authorization` header or metadata carries, if one.

    All keys are compared, and each in constant time, so that timing tells nothing.
    """
    scheme, _, token = authorization.partition(" ")
    matches = [hmac.compare_digest(token.strip().encode(), key.encode()) for key in api_keys]
    return matches.index(True) if scheme.lower() == "bearer" and any(matches) else None


def caller_of(scope: Scope) -> int | None:
    """Returns the number of the key that a request was let through with, if there are keys."""
    caller: int | None = scope.get(_CALLER)
    return caller


class ApiKeyGuard:
    """ASGI middleware that answers 401 in front of the guarded routes."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._api_keys = api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and scope["path"].startswith(_GUARDED):
            authorization = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
            caller = find_key(authorization, self._api_keys)
            if caller is None:
                body = error_fields(UNKNOWN_KEY, 401)
                app = JSONResponse(body, 401, {"www-authenticate": "Bearer"})
            scope = {**scope, _CALLER: caller}
        await app(scope, receive, send)
