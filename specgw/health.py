"""Asks a service whether it serves: standard gRPC health, or HTTP `/health`."""

import asyncio
import http
import urllib.error
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specgw.channel import open_channel
from specgw.config import TlsSettings

_RETRY_S = 0.1


async def is_serving(address: str, timeout_s: float, tls: TlsSettings | None = None) -> bool:
    """Returns whether the service at `address` says so within the time."""
    if address.startswith(("http://", "https://")):
        return await asyncio.to_thread(_is_http_serving, address, timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            await wait_until_serving(address, tls)
    except TimeoutError:
        return False
    return True


async def wait_until_serving(address: str, tls: TlsSettings | None = None) -> None:
    """Returns when the service at `address` says SERVING; it need not listen yet."""
    async with open_channel(address, tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            watch = stub.Watch(  # type: ignore[attr-defined]
                health_pb2.HealthCheckRequest(), wait_for_ready=True
            )
            try:
                async for response in watch:
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError:
                await asyncio.sleep(_RETRY_S)
            finally:
                watch.cancel()


def _is_http_serving(url: str, timeout_s: float) -> bool:
    # Otherwise an environment with http_proxy would have the proxy asked instead.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url.rstrip('/')}/health", timeout=timeout_s) as response:
            return bool(response.status == http.HTTPStatus.OK)
    except (urllib.error.URLError, TimeoutError):
        return False
