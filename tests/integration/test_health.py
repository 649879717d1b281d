"""`specgw health` and what waits for services, against real servers."""

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.http_server import HttpServer
from specgw.health import is_serving


async def test_http_health_is_never_asked_of_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def health(request: Request) -> Response:
        return Response()

    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    server = HttpServer(Starlette(routes=[Route("/health", health)]), "127.0.0.1", 0)
    await server.start()
    try:
        assert await is_serving(server.url, 5)
    finally:
        await server.stop(0)
