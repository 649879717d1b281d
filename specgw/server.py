"""The server's end of gRPC, the same for every service: health, reflection, errors, TLS, drain.

A service registers its servicer on `ServiceServer.grpc_server`, and its entry point runs
`run_until_drained`. `channel.py` is the other end.
"""

import asyncio
import contextlib
import gc
import inspect
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, start_http_server

from specgw.addresses import is_local, split_address
from specgw.channel import COMMON_OPTIONS, RETRY_AFTER_KEY
from specgw.config import TlsSettings
from specgw.errors import ConfigError, Overloaded, SpecgwError

logger = logging.getLogger(__name__)

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]]"

_SERVER_OPTIONS = (
    *COMMON_OPTIONS,
    # Clients ping every 20 s, idle or not; the default minimum of 300 s ends in too_many_pings.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    # A process that stood still for a while reads the pings of that time at once.
    ("grpc.http2.max_ping_strikes", 0),
    # A second instance fails to bind instead of taking half of the connections.
    ("grpc.so_reuseport", 0),
)
_MAX_DETAILS_LENGTH = 4000  # longer ones would not fit HTTP/2 trailers
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class ServiceServer:
    """A grpc.aio server for one service. Register the servicer before `start`.

    Args:
        service_name: Full name of the service, as in `specgw.v1.ProposerService`.
        listen: Addresses, `host:port` (port 0 takes a free one) or `unix:/path`.

    Raises:
        ConfigError: for an address that cannot be listened on.
    """

    def __init__(
        self,
        service_name: str,
        listen: Sequence[str],
        tls: TlsSettings | None = None,
        allow_insecure: bool = False,
    ) -> None:
        for address in listen:
            check_listen_address(address, tls, allow_insecure)
        self.grpc_server = grpc.aio.server(
            interceptors=[_ErrorInterceptor()], options=_SERVER_OPTIONS
        )
        self.health = HealthService([service_name])
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc_server)
        names = (service_name, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc_server)
        self.addresses = tuple(_bind(self.grpc_server, address, tls) for address in listen)

    async def start(self) -> None:
        """Begins to serve, and says so to health checks."""
        await self.grpc_server.start()
        self.health.set_serving(True)
        logger.info("serving", extra={"addresses": ",".join(self.addresses)})

    async def stop(self, grace_s: float) -> None:
        """Turns health to NOT_SERVING, lets running calls finish for `grace_s`, ends the rest."""
        self.health.shut_down()
        await self.grpc_server.stop(grace_s)


class HealthService(health_pb2_grpc.HealthServicer):
    """grpc.health.v1 for the whole server and its services, which are well or not together.

    Unlike the one that comes with gRPC, it ends its watches when the server shuts down, which
    would wait its whole grace for them, and a watcher that reads slowly does not hold up others.
    """

    def __init__(self, service_names: Sequence[str]) -> None:
        self._names = {"", *service_names}
        self._is_serving = False
        self._is_shut_down = False
        self._changed = asyncio.Event()  # replaced at every change

    def set_serving(self, is_serving: bool) -> None:
        if not self._is_shut_down:
            self._set(is_serving)

    def shut_down(self) -> None:
        """Turns to NOT_SERVING for good; watches end after they have sent that."""
        self._is_shut_down = True
        self._set(False)

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service}")
        return self._response()

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        if request.service not in self._names:
            yield health_pb2.HealthCheckResponse(status=_SERVICE_UNKNOWN)
        sent = None
        while True:
            changed, is_last = self._changed, self._is_shut_down
            if request.service in self._names and self._is_serving != sent:
                sent = self._is_serving
                yield self._response()
            if is_last:
                return
            await changed.wait()

    def _set(self, is_serving: bool) -> None:
        self._is_serving = is_serving
        self._changed.set()
        self._changed = asyncio.Event()

    def _response(self) -> health_pb2.HealthCheckResponse:
        return health_pb2.HealthCheckResponse(status=_SERVING if self._is_serving else _NOT_SERVING)


async def run_until_drained(
    server: ServiceServer,
    *,
    grace_s: float,
    parent_pipe: int | None = None,
    on_drain: Callable[[], None] | None = None,
) -> None:
    """Serves until SIGTERM, SIGINT or the parent's death, then drains.

    `on_drain` is called once health says NOT_SERVING; it ends calls that would never end by
    themselves.
    """
    await server.start()
    reason = await drain_requested(parent_pipe)
    logger.info("draining", extra={"reason": reason, "grace_s": grace_s})
    server.health.shut_down()
    if on_drain is not None:
        on_drain()
    await server.stop(grace_s)
    logger.info("stopped")


async def drain_requested(parent_pipe: int | None = None) -> str:
    """Waits for the reason to drain. A signal after that ends the process at once.

    Args:
        parent_pipe: Read end of a pipe whose write end only the parent holds. Its end of file
            says that the parent is gone, even by SIGKILL.
    """
    loop = asyncio.get_running_loop()
    reason: asyncio.Future[str] = loop.create_future()

    def request(why: str) -> None:
        if not reason.done():
            reason.set_result(why)

    def read_parent_pipe(pipe: int) -> None:
        if not os.read(pipe, 1):
            request("parent exited")

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, request, number.name)
    if parent_pipe is not None:
        loop.add_reader(parent_pipe, read_parent_pipe, parent_pipe)
    try:
        return await reason
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        if parent_pipe is not None:
            loop.remove_reader(parent_pipe)


def freeze_objects() -> None:
    """Keeps the garbage collector from what there is. Entry points call it when they serve.

    The modules and models of a service are a third of a million objects. A full collection would
    stop every thread for 0.2 s, and find nothing among them.
    """
    gc.collect()
    gc.freeze()


def serve_metrics(listen: str, registry: CollectorRegistry) -> Callable[[], None]:
    """Serves Prometheus metrics over HTTP from a thread; returns what ends it."""
    host, port = split_address(listen)
    http_server, thread = start_http_server(port, host, registry)

    def close() -> None:
        http_server.shutdown()
        http_server.server_close()
        thread.join()

    return close


def check_listen_address(address: str, tls: TlsSettings | None, allow_insecure: bool) -> None:
    """Refuses an address that other machines reach without TLS.

    Raises:
        ConfigError: naming the address and the settings that would allow it.
    """
    if not is_local(address) and tls is None and not allow_insecure:
        raise ConfigError([
            f"listen address {address}: other machines reach it without TLS; "
            "set specgw.tls, or specgw.allow_insecure: true on a network you trust"
        ])  # fmt: skip


def _bind(server: grpc.aio.Server, address: str, tls: TlsSettings | None) -> str:
    try:
        if tls is None or address.startswith("unix:"):
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, _server_credentials(tls))
    except RuntimeError:
        raise ConfigError([f"listen address {address}: cannot be bound; is it in use?"]) from None
    if address.startswith("unix:"):
        return address
    return f"{address.rpartition(':')[0]}:{port}"


def _server_credentials(tls: TlsSettings) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials(
        [(tls.private_key_file.read_bytes(), tls.certificate_file.read_bytes())],
        root_certificates=tls.ca_file.read_bytes() if tls.ca_file else None,
        require_client_auth=tls.ca_file is not None,
    )


class _ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a handler raises into the status that the caller sees.

    Cancellation passes through untouched: a handler that swallows it leaks memory in gRPC.
    """

    async def intercept_service(
        self,
        continuation: _Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler | None":
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        behavior, build = _behavior_of(handler)
        method = handler_call_details.method

        async def call(request: Any, context: _Context) -> Any:
            async with _errors_as_status(method, context):
                return await behavior(request, context)

        async def stream(request: Any, context: _Context) -> None:
            # Closed here rather than by the garbage collector, so that `finally` runs at once.
            async with (
                _errors_as_status(method, context),
                contextlib.aclosing(behavior(request, context)) as responses,
            ):
                async for response in responses:
                    await context.write(response)

        wrapped: _Handler = build(
            stream if inspect.isasyncgenfunction(behavior) else call,
            handler.request_deserializer,
            handler.response_serializer,
        )
        return wrapped


def _behavior_of(handler: _Handler) -> tuple[Any, Any]:
    return {
        (False, False): (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
        (False, True): (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
        (True, False): (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
        (True, True): (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
    }[handler.request_streaming, handler.response_streaming]


@contextlib.asynccontextmanager
async def _errors_as_status(method: str, context: _Context) -> AsyncIterator[None]:
    try:
        yield
    except SpecgwError as error:
        metadata: tuple[tuple[str, str], ...] = ()
        if isinstance(error, Overloaded):
            metadata = ((RETRY_AFTER_KEY, str(round(error.retry_after_s * 1000))),)
        details = str(error)[:_MAX_DETAILS_LENGTH]
        await context.abort(grpc.StatusCode[error.status], details, metadata)
    except grpc.aio.AbortError:
        raise
    except Exception:
        logger.exception("call failed", extra={"method": method})
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; see the server's log")
