"""Runs a proposer: loads the draft model, serves until drained."""

import asyncio
import contextlib
from pathlib import Path

import click

from proposer_svc.metrics import ProposerMetrics
from proposer_svc.proposer import ProposerCore, build_proposer
from proposer_svc.service import SERVICE_NAME, ProposerService
from specgw.config import EngineArgs, load_config
from specgw.exit_codes import exit_on_config_error
from specgw.server import ServiceServer, freeze_objects, run_until_drained, serve_metrics
from specgw.service_options import service_options
from specgw.telemetry import configure_logging
from specgw.threads import call_in_own_thread


def run(args: EngineArgs, parent_pipe: int | None = None) -> None:
    """Loads the model and serves until SIGTERM, SIGINT or the end of the parent.

    Raises:
        ConfigError: with what is wrong with the configuration or the checkpoint.
    """
    settings = args.specgw.proposer
    proposer = call_in_own_thread(build_proposer, args)
    with contextlib.ExitStack() as stack:
        metrics = ProposerMetrics(proposer.offer.kv_capacity_tokens)
        if settings.metrics_listen is not None:
            stack.callback(serve_metrics(settings.metrics_listen, metrics.registry))
        asyncio.run(_serve(proposer, args, metrics, parent_pipe))


async def _serve(
    proposer: ProposerCore,
    args: EngineArgs,
    metrics: ProposerMetrics,
    parent_pipe: int | None,
) -> None:
    settings = args.specgw.proposer
    server = ServiceServer(
        SERVICE_NAME, [settings.listen], args.specgw.tls, args.specgw.allow_insecure
    )
    service = ProposerService(proposer, metrics)
    service.register(server.grpc_server)
    service.start()
    freeze_objects()
    await run_until_drained(
        server, grace_s=settings.drain_grace_s, parent_pipe=parent_pipe, on_drain=service.drain
    )
    await service.stop()


@click.command()
@service_options
def main(file: Path | None, listen: str | None, parent_pipe: int | None) -> None:
    """Runs a proposer service."""
    configure_logging()
    with exit_on_config_error():
        run(load_config(file, {"specgw.proposer.listen": listen}), parent_pipe)


if __name__ == "__main__":
    main()
