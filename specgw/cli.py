"""The `specgw` command. Each service is imported only when it is asked for."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from specgw import __version__
from specgw.config import EngineArgs, load_config
from specgw.exit_codes import exit_on_config_error
from specgw.telemetry import configure_logging

_CONFIG = click.option("--config", "file", type=click.Path(path_type=Path), help="YAML file.")
_LISTEN = click.option("--listen", help="Address: host:port or unix:/path.")

# vLLM's flags by the key they set. Values are checked by the configuration, like those of the file.
_SERVE_FLAGS = {
    "--host": "host",
    "--port": "port",
    "--api-key": "api_key",
    "--served-model-name": "served_model_name",
    "--tokenizer": "tokenizer",
    "--seed": "seed",
    "--dtype": "dtype",
    "--device": "device",
    "--max-model-len": "max_model_len",
    "--max-num-seqs": "max_num_seqs",
    "--max-num-batched-tokens": "max_num_batched_tokens",
    "--gpu-memory-utilization": "gpu_memory_utilization",
    "--speculative-config": "speculative_config",
}


def _serve_flags(command: Callable[..., None]) -> Callable[..., None]:
    for flag, key in reversed(_SERVE_FLAGS.items()):
        command = click.option(flag, key, help=f"Sets `{key}`.")(command)
    return click.option("--tensor-parallel-size", "-tp", help="Only 1.")(command)


@click.group()
@click.version_option(__version__)
def main() -> None:
    """Split speculative decoding as a service."""
    configure_logging()


@main.command()
@click.argument("model", required=False)
@_CONFIG
@_serve_flags
def serve(model: str | None, file: Path | None, **flags: Any) -> None:
    """Serves MODEL over OpenAI HTTP, with verifier and proposer as children if none are named.

    Without arguments it serves the bundled tiny models.
    """
    with exit_on_config_error():
        asyncio.run(_serve(load_config(file, {"model": model, **flags})))


@main.command()
@_CONFIG
@_LISTEN
def verifier(file: Path | None, listen: str | None) -> None:
    """Runs a verifier service: the target model."""
    from verifier_svc.__main__ import run

    with exit_on_config_error():
        run(load_config(file, {"specgw.verifier.listen": listen}))


@main.command()
@_CONFIG
@_LISTEN
def proposer(file: Path | None, listen: str | None) -> None:
    """Runs a proposer service: the draft model."""
    from proposer_svc.__main__ import run

    with exit_on_config_error():
        run(load_config(file, {"specgw.proposer.listen": listen}))


@main.command()
@click.argument("address")
@_CONFIG
@click.option("--timeout", "timeout_s", default=3.0, help="Seconds to wait for an answer.")
def health(address: str, file: Path | None, timeout_s: float) -> None:
    """Exits with 0 if the service at ADDRESS serves: host:port, unix:/path or http://host:port.

    The configuration is where the certificates are, if services use TLS.
    """
    from specgw.health import is_serving

    with exit_on_config_error():
        tls = load_config(file).specgw.tls if file else None
    if not asyncio.run(is_serving(address, timeout_s, tls)):
        raise click.ClickException(f"{address} does not serve")


async def _serve(args: EngineArgs) -> None:
    from gateway.__main__ import run
    from specgw.supervisor import embedded_services

    if args.specgw.gateway.verifiers:
        await run(args, args.specgw.gateway.verifiers)
        return
    async with embedded_services(args) as (verifier_process, *_):
        await run(args, [verifier_process.spec.address])


if __name__ == "__main__":
    main()
