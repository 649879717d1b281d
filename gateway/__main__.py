"""Runs the gateway: one event loop, one HTTP server, one gRPC server if asked for."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from gateway.admission import Admission
from gateway.generation import TextGenerator
from gateway.http_server import HttpServer
from gateway.ledger import Ledger
from gateway.metrics import Metrics
from gateway.openai_api import OpenAIApi, build_app
from gateway.request_builder import RequestBuilder
from gateway.routing import Router
from gateway.sampling_defaults import load_sampling_defaults
from gateway.service import SERVICE_NAME, GatewayService
from gateway.tokenizer import Tokenizer, forgo_torch, load_tokenizer
from specgw import event_loop
from specgw.config import EngineArgs, load_config
from specgw.errors import ConfigError
from specgw.exit_codes import exit_on_config_error
from specgw.grammar import GrammarCompiler
from specgw.grammar_worker import GrammarWorker
from specgw.handshake import verifier_mismatches
from specgw.model_files import resolve_model
from specgw.server import ServiceServer, drain_requested
from specgw.telemetry import configure_logging, tell_simulation, tell_synthetic

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway that serves: where it listens, and what it is made of."""

    url: str
    grpc_addresses: tuple[str, ...]
    router: Router
    admission: Admission
    metrics: Metrics


async def run(
    args: EngineArgs,
    verifiers: Sequence[str],
    tokenizer: Tokenizer,
    patience_s: float = 0.0,
) -> None:
    """Serves until SIGTERM or SIGINT, then lets running requests finish within the grace.

    Raises:
        ConfigError: if an address cannot be listened on.
    """
    async with serving(args, verifiers, tokenizer, patience_s):
        _spare_streams_from_collections()
        reason = await drain_requested()
        logger.info("draining", extra={"reason": reason})


def _spare_streams_from_collections() -> None:
    """Has Python look for garbage less often, and never in what is loaded by now.

    With 256 streams open, each full collection holds all of them up for 20 ms. A request leaves
    about a hundred objects in cycles behind: some ten megabytes before the next one.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 5)


@asynccontextmanager
async def serving(
    args: EngineArgs, verifiers: Sequence[str], tokenizer: Tokenizer, patience_s: float = 0.0
) -> AsyncIterator[Gateway]:
    """Serves inside the block, from a verifier's first sign on; leaving it drains.

    After `patience_s` without a verifier it goes on: requests are refused until there is one.
    """
    settings = args.specgw.gateway
    metrics = Metrics(args.served_model_names[0])
    if args.specgw.simulation is not None:
        tell_simulation(metrics.registry, "gateway")
    if args.is_synthetic:
        tell_synthetic(metrics.registry, "gateway")
    ledger = Ledger()
    admission = Admission(
        ledger,
        settings.max_concurrent_requests,
        settings.max_queued_requests,
        settings.queue_timeout_s,
        settings.max_concurrent_requests_per_key,
    )
    router = Router(
        verifiers,
        ledger,
        partial(verifier_mismatches, args, tokenizer.fingerprint, tokenizer.vocab_size),
        tls=args.specgw.tls,
        reopen_timeout_s=settings.reopen_timeout_s,
        on_reopen=metrics.reopened.inc,
        on_change=admission.grant,
    )
    # Which tokens there are decides; how many rows the model has, and how it ends, does not.
    grammars = GrammarWorker(
        GrammarCompiler(
            tokenizer.backend.to_str,
            0,
            [tokenizer.eos_token_id or 0],
            args.structured_outputs_config,
        )
    )
    builder = RequestBuilder(
        router,
        grammars,
        args.max_model_len,
        args.max_draft_tokens,
        args.max_logprobs,
        args.seed,
    )
    generator = TextGenerator(tokenizer, router, admission, metrics, settings.request_timeout_s)
    defaults = load_sampling_defaults(resolve_model(args.model))
    api = OpenAIApi(args, tokenizer, builder, generator, metrics, defaults)
    service = GatewayService(args, tokenizer, builder, generator, router, admission)
    http_server = HttpServer(build_app(api, args.api_key), args.host, args.port)
    grpc_server = _build_grpc_server(args, service)
    await router.start()
    await http_server.start()
    if grpc_server is not None:
        await grpc_server.start()
    reporting = asyncio.create_task(_report_health(router, grpc_server))
    addresses = grpc_server.addresses if grpc_server else ()
    with suppress(TimeoutError):
        await asyncio.wait_for(router.ready(), patience_s)
    logger.info("serving HTTP", extra={"url": http_server.url})
    if not args.api_key and not http_server.is_loopback:
        logger.warning("anyone who reaches this host can use the API", extra={"host": args.host})
    try:
        yield Gateway(http_server.url, addresses, router, admission, metrics)
    finally:
        stopping = [http_server.stop(settings.drain_grace_s)]
        if grpc_server is not None:
            stopping.append(grpc_server.stop(settings.drain_grace_s))
        await asyncio.gather(*stopping)
        reporting.cancel()
        await asyncio.wait([reporting])
        await router.stop()
        grammars.stop()


def _build_grpc_server(args: EngineArgs, service: GatewayService) -> ServiceServer | None:
    listen = args.specgw.gateway.grpc_listen
    if listen is None:
        return None
    server = ServiceServer(SERVICE_NAME, [listen], args.specgw.tls, args.specgw.allow_insecure)
    service.register(server.grpc_server)
    return server


async def _report_health(router: Router, server: ServiceServer | None) -> None:
    """Keeps the gRPC health what `/health` says: serving as long as some verifier is."""
    while server is not None:
        server.health.set_serving(router.is_ready)
        await router.changed()


@click.command()
@click.option("--config", "file", type=click.Path(path_type=Path), help="YAML configuration.")
def main(file: Path | None) -> None:
    """Runs a gateway for the verifiers in `specgw.gateway.verifiers`."""
    configure_logging()
    forgo_torch()
    with exit_on_config_error():
        args = load_config(file)
        verifiers = args.specgw.gateway.verifiers
        if not verifiers:
            raise ConfigError(["specgw.gateway.verifiers: must name at least one address"])
        event_loop.run(run(args, verifiers, load_tokenizer(args.tokenizer_path)))


if __name__ == "__main__":
    main()
