"""The client's end of a gRPC connection: one channel for each peer, and errors as they were raised.

`server.py` is the other end; options that both must agree on are defined here.
"""

import re
from collections.abc import Callable

import grpc

from specgw.config import TlsSettings
from specgw.errors import (
    Cancelled,
    DeadlineExceeded,
    IncompatibleModels,
    InvalidRequest,
    ModelNotFound,
    NotReady,
    Overloaded,
    SpecgwError,
)

MAX_MESSAGE_BYTES = 16 * 2**20
RETRY_AFTER_KEY = "grpc-retry-pushback-ms"

# Both ends ping, so that each notices within 30 s that the other's machine is gone.
COMMON_OPTIONS = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)
_CHANNEL_OPTIONS = (
    *COMMON_OPTIONS,
    # A peer that comes back is found within seconds; gRPC's own limit is two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # Otherwise an environment with http_proxy sends traffic between services through it.
    ("grpc.enable_http_proxy", 0),
    # A channel opened anew must not inherit the back-off of the one it replaces.
    ("grpc.use_local_subchannel_pool", 1),
)


def open_channel(address: str, tls: TlsSettings | None = None) -> grpc.aio.Channel:
    """Opens the one channel to a peer, `host:port` or `unix:path`; it connects when first used."""
    if tls is None or address.startswith("unix:"):
        return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=tls.ca_file.read_bytes() if tls.ca_file else None,
        private_key=tls.private_key_file.read_bytes(),
        certificate_chain=tls.certificate_file.read_bytes(),
    )
    return grpc.aio.secure_channel(address, credentials, options=_CHANNEL_OPTIONS)


def status_to_error(error: grpc.aio.AioRpcError) -> SpecgwError:
    """Returns the error that the peer raised, or the one that its status stands for."""
    metadata = {key: str(value) for key, value in error.trailing_metadata() or ()}
    pushback_ms = metadata.get(RETRY_AFTER_KEY, "")
    retry_after_s = int(pushback_ms) / 1000 if pushback_ms.isdecimal() else None
    return build_error(error.code(), error.details() or "", retry_after_s)


def build_error(
    code: grpc.StatusCode, details: str, retry_after_s: float | None = None
) -> SpecgwError:
    """Returns the error that travels as a status."""
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return _overloaded(details, retry_after_s)
    build = _BY_STATUS.get(code)
    return build(details) if build else SpecgwError(f"{code.name}: {details}")


def too_large(details: str) -> InvalidRequest:
    """Returns the error for a message that is over the limit."""
    return InvalidRequest("message", _Verbatim(details), f"must fit {MAX_MESSAGE_BYTES} bytes")


class _Verbatim(str):
    """Text whose repr is itself: the repr of a value that stayed on the other side."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _overloaded(details: str, retry_after_s: float | None) -> SpecgwError:
    # gRPC itself uses this status for a message over the limit: sending it again cannot help.
    if "larger than max" in details:
        return too_large(details)
    return Overloaded(details, 1.0 if retry_after_s is None else retry_after_s)


def _invalid_request(details: str) -> InvalidRequest:
    match = re.fullmatch(r"([^:\s]+): (.*), got (.*)", details, re.DOTALL)
    field, rule, value = match.groups() if match else ("request", "was refused", details)
    return InvalidRequest(field, _Verbatim(value), rule)


def _incompatible_models(details: str) -> IncompatibleModels:
    return IncompatibleModels(details.split("\n"))


_BY_STATUS: dict[grpc.StatusCode, Callable[[str], SpecgwError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: _invalid_request,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.FAILED_PRECONDITION: _incompatible_models,
    grpc.StatusCode.UNAVAILABLE: NotReady,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}
