"""Runs a verifier: loads the target model, serves until drained."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import click

from specgw.config import EngineArgs, load_config
from specgw.engine.loading import load_model, target_options
from specgw.engine.model_runner import ModelRunner
from specgw.exit_codes import exit_on_config_error
from specgw.link import ProposerLink
from specgw.server import ServiceServer, freeze_objects, run_until_drained, serve_metrics
from specgw.service_options import service_options
from specgw.telemetry import configure_logging
from specgw.threads import call_in_own_thread
from verifier_svc.delayed_link import DelayedLink
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.proposer_link import GrpcProposerLink
from verifier_svc.service import SERVICE_NAME, VerifierService


def run(args: EngineArgs, parent_pipe: int | None = None) -> None:
    """Loads the model and serves until SIGTERM, SIGINT or the end of the parent.

    Raises:
        ConfigError: with what is wrong with the configuration or the checkpoint.
    """
    settings = args.specgw.verifier
    runner = call_in_own_thread(load_model, target_options(args))
    with contextlib.ExitStack() as stack:
        metrics = VerifierMetrics()
        if settings.metrics_listen is not None:
            stack.callback(serve_metrics(settings.metrics_listen, metrics.registry))
        asyncio.run(_serve(runner, args, metrics, parent_pipe))


async def _serve(
    runner: ModelRunner, args: EngineArgs, metrics: VerifierMetrics, parent_pipe: int | None
) -> None:
    settings = args.specgw.verifier
    server = ServiceServer(
        SERVICE_NAME, [settings.listen], args.specgw.tls, args.specgw.allow_insecure
    )
    service = VerifierService(runner, _links(args), args, metrics)
    service.register(server.grpc_server)
    service.start()
    freeze_objects()
    serving = asyncio.create_task(
        run_until_drained(
            server,
            grace_s=settings.drain_grace_s,
            parent_pipe=parent_pipe,
            on_drain=service.drain,
        )
    )
    ends: set[asyncio.Future[Any]] = {serving, service.failed}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if service.failed.done():
        serving.cancel()
        raise service.failed.result()
    await service.stop()
    await serving


def _links(args: EngineArgs) -> list[ProposerLink]:
    tls, simulation = args.specgw.tls, args.specgw.simulation
    links = [GrpcProposerLink(address, tls) for address in args.specgw.verifier.proposers]
    if simulation is None or not simulation.rtt_ms:
        return [*links]
    return [DelayedLink(link, simulation.rtt_ms / 1e3) for link in links]


@click.command()
@service_options
def main(file: Path | None, listen: str | None, parent_pipe: int | None) -> None:
    """Runs a verifier service."""
    configure_logging()
    with exit_on_config_error():
        run(load_config(file, {"specgw.verifier.listen": listen}), parent_pipe)


if __name__ == "__main__":
    main()
