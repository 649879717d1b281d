"""Asks a service for its standard gRPC health."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specgw.channel import open_channel
from specgw.config import TlsSettings

_RETRY_S = 0.1


async def wait_until_serving(address: str, tls: TlsSettings | None = None) -> None:
    """Returns when the service at `address` says SERVING; it need not listen yet."""
    async with open_channel(address, tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                async for response in stub.Watch(  # type: ignore[attr-defined]
                    health_pb2.HealthCheckRequest(), wait_for_ready=True
                ):
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError:
                await asyncio.sleep(_RETRY_S)
