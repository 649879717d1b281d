"""What every service gets from `server.py` and `channel.py`, on a real grpc.aio server."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from specgw.addresses import split_address
from specgw.channel import open_channel, status_to_error
from specgw.config import TlsSettings
from specgw.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    IncompatibleModels,
    InvalidRequest,
    ModelNotFound,
    NotReady,
    Overloaded,
    SpecgwError,
)
from specgw.server import (
    ServiceServer,
    drain_requested,
    run_until_drained,
    serve_metrics,
)
from specgw.v1 import proposer_pb2, proposer_pb2_grpc

SERVICE_NAME = "specgw.v1.ProposerService"
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_DEADLINE_S = 10.0


class ScriptedService(proposer_pb2_grpc.ProposerServiceServicer):
    """Raises `error`, or waits for `release`."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.started = asyncio.Event()
        self.release = asyncio.Event()
        self.cleaned_up = asyncio.Event()

    async def GetProposerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.started.set()
        if self.error is not None:
            raise self.error
        await self.release.wait()
        return proposer_pb2.GetProposerInfoResponse(method="scripted")

    async def Propose(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        try:
            yield proposer_pb2.ProposeResponse()
            self.started.set()
            if self.error is not None:
                raise self.error
            await self.release.wait()
        finally:
            self.cleaned_up.set()


class Served:
    """A scripted service, its server, and stubs on one channel to it."""

    def __init__(self, server: ServiceServer, script: ScriptedService, channel: Any) -> None:
        self.server = server
        self.script = script
        self.proposer = proposer_pb2_grpc.ProposerServiceStub(channel)
        self.health: Any = health_pb2_grpc.HealthStub(channel)
        self.reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)

    def get_info(self) -> Any:
        return self.proposer.GetProposerInfo(
            proposer_pb2.GetProposerInfoRequest(), timeout=_DEADLINE_S
        )


@contextlib.asynccontextmanager
async def serve(
    listen: str = "127.0.0.1:0",
    tls: TlsSettings | None = None,
    client_tls: TlsSettings | None = None,
    start: bool = True,
) -> AsyncIterator[Served]:
    server, script = ServiceServer(SERVICE_NAME, [listen], tls), ScriptedService()
    proposer_pb2_grpc.add_ProposerServiceServicer_to_server(script, server.grpc_server)
    if start:
        await server.start()
    async with open_channel(server.addresses[0], client_tls or tls) as channel:
        yield Served(server, script, channel)
    await server.stop(0)


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("step.commit[0].base_length", -3, "must be at least 0"),
        ModelNotFound("no model x"),
        IncompatibleModels(["vocabulary: differs", "protocol_version: differs"]),
        NotReady("draining"),
        Cancelled("gone"),
        DeadlineExceeded("too late"),
        Overloaded("queue full", 2.5),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_errors_arrive_as_they_were_raised(error: SpecgwError) -> None:
    async with serve() as served:
        served.script.error = error

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.get_info()

    returned = status_to_error(caught.value)
    assert caught.value.code().name == error.status
    assert (type(returned), str(returned)) == (type(error), str(error))
    assert getattr(returned, "retry_after_s", None) == getattr(error, "retry_after_s", None)


async def test_an_unexpected_error_is_internal_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serve() as served:
        served.script.error = ValueError("a secret path")

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.get_info()

    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(status_to_error(caught.value))
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.exc_info is not None for record in errors] == [True]


async def test_a_stream_ends_with_its_error_after_what_it_sent() -> None:
    async with serve() as served:
        served.script.error = Overloaded("full", 3.0)
        call = served.proposer.Propose(timeout=_DEADLINE_S)

        first = await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()

    assert first == proposer_pb2.ProposeResponse()
    assert isinstance(status_to_error(caught.value), Overloaded)


async def test_cancelling_a_stream_runs_its_cleanup_at_once() -> None:
    """Bug R1: cancellation reaches the handler and is not swallowed."""
    async with serve() as served:
        call = served.proposer.Propose(timeout=_DEADLINE_S)
        await call.read()

        call.cancel()

        async with asyncio.timeout(_DEADLINE_S):
            await served.script.cleaned_up.wait()


async def test_a_message_over_the_limit_is_refused_with_the_limit() -> None:
    """Bug R6."""
    async with serve() as served:
        request = health_pb2.HealthCheckRequest(service="x" * (17 * 2**20))

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.health.Check(request)

    assert isinstance(status_to_error(caught.value), InvalidRequest)
    assert "16777216" in str(status_to_error(caught.value))


@pytest.mark.parametrize("name", ["", SERVICE_NAME])
async def test_health_watch_sends_each_change_and_ends_with_the_server(name: str) -> None:
    """Bug R9."""
    async with serve() as served:
        watch = served.health.Watch(health_pb2.HealthCheckRequest(service=name))
        seen = [(await watch.read()).status]
        for is_serving in (False, True):
            served.server.health.set_serving(is_serving)
            seen.append((await watch.read()).status)

        last = asyncio.ensure_future(watch.read())
        async with asyncio.timeout(_DEADLINE_S):
            await served.server.stop(grace_s=60)  # which a watch must not hold up
        seen.append((await last).status)
        ended = await watch.read()

    assert seen == [_SERVING, _NOT_SERVING, _SERVING, _NOT_SERVING]
    assert ended is grpc.aio.EOF


async def test_health_knows_its_services_only() -> None:
    async with serve() as served:
        check = await served.health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.health.Check(health_pb2.HealthCheckRequest(service="another"))
        watch = served.health.Watch(health_pb2.HealthCheckRequest(service="another"))
        unknown = await watch.read()

    assert check.status == _SERVING
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert unknown.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def test_reflection_lists_the_services() -> None:
    async with serve() as served:
        call = served.reflection.ServerReflectionInfo(timeout=_DEADLINE_S)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = (await call.read()).list_services_response.service
        await call.done_writing()

    assert {SERVICE_NAME, "grpc.health.v1.Health"} <= {service.name for service in listed}


async def test_stopping_lets_running_calls_finish() -> None:
    async with serve() as served:
        answer = asyncio.ensure_future(served.get_info())
        await served.script.started.wait()

        stopping = asyncio.create_task(served.server.stop(grace_s=_DEADLINE_S))
        served.script.release.set()
        await stopping

        assert (await answer).method == "scripted"


async def test_a_second_server_on_a_port_fails_to_bind() -> None:
    async with serve() as served:
        with pytest.raises(ConfigError, match="cannot be bound"):
            ServiceServer(SERVICE_NAME, [served.server.addresses[0]])


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:80", "example.org:80"])
def test_other_machines_are_not_served_without_tls(address: str) -> None:
    with pytest.raises(ConfigError, match="allow_insecure"):
        ServiceServer(SERVICE_NAME, [address])


@pytest.mark.parametrize("address", ["", "localhost", ":80", "localhost:http", "localhost:70000"])
def test_malformed_addresses_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="must be host:port"):
        split_address(address)


async def test_insecure_addresses_are_served_if_allowed() -> None:
    server = ServiceServer(SERVICE_NAME, ["0.0.0.0:0"], allow_insecure=True)

    assert not server.addresses[0].endswith(":0")
    await server.stop(0)


async def test_a_unix_socket_is_served(tmp_path: Path) -> None:
    async with serve(f"unix:{tmp_path}/socket") as served:
        check = await served.health.Check(health_pb2.HealthCheckRequest())

    assert check.status == _SERVING


@pytest.fixture(scope="session")
def make_certificates(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], TlsSettings]:
    """Returns certificates for localhost, each call's signed by another authority."""

    def run(*arguments: str | Path) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)

    def make() -> TlsSettings:
        path = tmp_path_factory.mktemp("tls")
        new_key = ("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost")
        ca, ca_key, key = path / "ca.pem", path / "ca.key", path / "key.pem"
        request, certificate, names = path / "request.pem", path / "cert.pem", path / "names"
        names.write_text("subjectAltName=DNS:localhost\n")
        run(*new_key, "-x509", "-days", "2", "-keyout", ca_key, "-out", ca)
        run(*new_key, "-keyout", key, "-out", request)
        signing = ("-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-extfile", names)
        run("x509", "-req", "-in", request, "-days", "2", "-out", certificate, *signing)
        return TlsSettings(certificate_file=certificate, private_key_file=key, ca_file=ca)

    return make


async def test_mutual_tls_admits_those_whom_the_authority_signed(
    make_certificates: Callable[[], TlsSettings],
) -> None:
    tls = make_certificates()
    async with serve("localhost:0", tls) as served:
        check = await served.health.Check(health_pb2.HealthCheckRequest())

    assert check.status == _SERVING


async def test_mutual_tls_refuses_others(make_certificates: Callable[[], TlsSettings]) -> None:
    tls, foreign = make_certificates(), make_certificates()
    client_tls = foreign.model_copy(update={"ca_file": tls.ca_file})
    async with serve("localhost:0", tls, client_tls) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.health.Check(health_pb2.HealthCheckRequest(), timeout=_DEADLINE_S)

    assert isinstance(status_to_error(caught.value), NotReady)


async def test_a_health_check_shows_the_certificates_of_the_configuration(
    make_certificates: Callable[[], TlsSettings], tmp_path: Path
) -> None:
    tls = make_certificates()
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"model": "m", "specgw": {"tls": tls.model_dump(mode="json")}}))
    command = (sys.executable, "-m", "specgw.cli", "health", "--timeout", "5", "--config", config)
    async with serve("localhost:0", tls) as served:
        check = await asyncio.create_subprocess_exec(*command, *served.server.addresses)
        exit_code = await check.wait()

    assert exit_code == 0


async def test_the_first_signal_drains_and_ends_streams_that_would_not_end() -> None:
    async with serve(start=False) as served:
        draining = asyncio.create_task(
            run_until_drained(served.server, grace_s=60, on_drain=served.script.release.set)
        )
        call = served.proposer.Propose(wait_for_ready=True)
        await call.read()
        watch = served.health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == _SERVING

        last = asyncio.ensure_future(watch.read())
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(_DEADLINE_S):
            await draining

        assert (await last).status == _NOT_SERVING
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_a_second_signal_is_fatal() -> None:
    waiting = asyncio.create_task(drain_requested())
    await asyncio.sleep(0)

    os.kill(os.getpid(), signal.SIGINT)
    reason = await waiting
    handlers = {signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)

    assert (reason, handlers) == ("SIGINT", {signal.SIG_DFL})


async def test_the_end_of_the_parent_drains() -> None:
    read_end, write_end = os.pipe()
    waiting = asyncio.create_task(drain_requested(read_end))
    await asyncio.sleep(0)

    os.close(write_end)
    async with asyncio.timeout(_DEADLINE_S):
        reason = await waiting
    os.close(read_end)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    assert reason == "parent exited"


async def test_metrics_are_served_and_ended() -> None:
    close = serve_metrics("127.0.0.1:0", CollectorRegistry())

    close()
