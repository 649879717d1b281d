"""The server's end of HTTP: binds at once, drains when told. The caller is `__main__.py`."""

import asyncio
import contextlib
import ipaddress
import math
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from specgw.errors import ConfigError

# Longer than clients and load balancers keep idle connections (httpx 5 s, most balancers 60 s): who
# closes first must not be the server, or a request sent at that moment is lost.
_KEEP_ALIVE_S = 75


class HttpServer:
    """uvicorn in the running loop, with the life of a gRPC server.

    Raises:
        ConfigError: if the address cannot be listened on.
    """

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        self._socket = _listen(host, port)
        bound_host, bound_port = self._socket.getsockname()[:2]
        self.is_loopback = ipaddress.ip_address(bound_host).is_loopback
        self.url = f"http://{f'[{bound_host}]' if ':' in bound_host else bound_host}:{bound_port}"
        self._server = _QuietServer(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                log_level="warning",
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to serve; requests that came since the socket was bound are answered now."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def stop(self, grace_s: float) -> None:
        """Stops listening, lets running requests finish for `grace_s`, cancels the rest."""
        if self._serving is None:
            return
        self._server.config.timeout_graceful_shutdown = math.ceil(grace_s)
        self._server.should_exit = True
        await self._serving
        for connection in self._server.server_state.connections:
            if connection.transport is not None:  # its client does not read what is left
                connection.transport.abort()
        await asyncio.sleep(0)  # aborted transports close their sockets in the next turn


class _QuietServer(uvicorn.Server):
    """uvicorn that leaves signals to the process's owner."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError([f"host {host}, port {port}: cannot be listened on: {reason}"]) from None
    # Connections inherit it. asyncio would set it only for sockets of protocol TCP by name, and
    # without it a chunk waits up to 40 ms for the acknowledgement of the one before.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
