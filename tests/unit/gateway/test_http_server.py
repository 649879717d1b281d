import socket

import pytest
from starlette.applications import Starlette

from gateway.http_server import HttpServer
from specgw.errors import ConfigError


def test_a_port_in_use_is_a_configuration_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(ConfigError, match=f"port {port}: cannot be listened on"):
            HttpServer(Starlette(), "127.0.0.1", port)
