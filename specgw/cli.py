"""The `specgw` command. Each service is imported only when it is asked for."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from specgw import __version__, event_loop
from specgw.check import Report, check_online
from specgw.check import check as check_config
from specgw.check_report import as_json, as_text
from specgw.config import EngineArgs, load_config, merge_config
from specgw.errors import ConfigError
from specgw.exit_codes import exit_on_config_error
from specgw.telemetry import configure_logging
from specgw.vllm_flags import normalized
from specgw.vllm_names import RETIRED_FLAGS

_CONFIG = click.option("--config", "file", type=click.Path(path_type=Path), help="YAML file.")
_LISTEN = click.option("--listen", help="Address: host:port or unix:/path.")
_RETIRED = f"{__name__}.retired"  # where click keeps what was said of retired flags

# vLLM's flags by the key they set. Values are checked by the configuration, like those of the file.
_SERVE_FLAGS: Mapping[tuple[str, ...], str] = {
    ("--host",): "host",
    ("--port",): "port",
    ("--api-key",): "api_key",
    ("--served-model-name",): "served_model_name",
    ("--tokenizer",): "tokenizer",
    ("--seed",): "seed",
    ("--dtype",): "dtype",
    ("--device",): "device",
    ("--max-model-len",): "max_model_len",
    ("--max-num-seqs",): "max_num_seqs",
    ("--max-num-batched-tokens",): "max_num_batched_tokens",
    ("--enable-prefix-caching/--no-enable-prefix-caching",): "enable_prefix_caching",
    ("--enable-prompt-tokens-details/--no-enable-prompt-tokens-details",): (
        "enable_prompt_tokens_details"
    ),
    ("--gpu-memory-utilization",): "gpu_memory_utilization",
    ("--attention-backend",): "attention_backend",
    ("--enforce-eager/--no-enforce-eager",): "enforce_eager",
    ("--max-cudagraph-capture-size",): "max_cudagraph_capture_size",
    ("--tensor-parallel-size", "-tp"): "tensor_parallel_size",
    ("--speculative-config", "-sc"): "speculative_config",
    ("--spec-method",): "spec_method",
    ("--spec-model",): "spec_model",
    ("--spec-tokens",): "spec_tokens",
    ("--structured-outputs-config",): "structured_outputs_config",
}


class _VllmCommand(click.Command):
    """A command whose flags are written as those of `vllm serve`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, normalized(args))

    def invoke(self, ctx: click.Context) -> Any:
        with exit_on_config_error():
            if problems := ctx.meta.get(_RETIRED):
                raise ConfigError(problems)
        return super().invoke(ctx)


def _note_retired(ctx: click.Context, option: click.Parameter, value: object) -> None:
    if value is not None:
        flag = option.opts[0]
        ctx.meta.setdefault(_RETIRED, []).append(f"{flag}: {RETIRED_FLAGS[flag]}")


def _serve_flags(command: Callable[..., None]) -> Callable[..., None]:
    for flag in RETIRED_FLAGS:  # some took a value, some did not
        command = click.option(
            flag,
            hidden=True,
            expose_value=False,
            callback=_note_retired,
            is_flag=False,
            flag_value="",
        )(command)
    for flags, key in reversed(list(_SERVE_FLAGS.items())):
        command = click.option(*flags, key, default=None, help=f"Sets `{key}`.")(command)
    return click.argument("model", required=False)(_CONFIG(command))


@click.group()
@click.version_option(__version__)
def main() -> None:
    """Split speculative decoding as a service."""
    configure_logging()


@main.command(cls=_VllmCommand)
@_serve_flags
def serve(model: str | None, file: Path | None, **flags: Any) -> None:
    """Serves MODEL over OpenAI HTTP, with verifier and proposer as children if none are named.

    Without arguments it serves the bundled tiny models.
    """
    with exit_on_config_error():
        raw = merge_config(file, {"model": model, **flags})
        # With verifiers elsewhere, so may be the models.
        report = check_config(raw, lambda args: not args.specgw.gateway.verifiers)
        if report.problems or report.args is None:
            raise ConfigError(report.problems)
        click.echo(as_text(report), err=True)
        event_loop.run(_serve(report.args))


@main.command(cls=_VllmCommand)
@_serve_flags
@click.option("--json", "is_json", is_flag=True, help="Print a report for machines.")
@click.option("--online", is_flag=True, help="Ask the running services too.")
@click.option("--timeout", "timeout_s", default=3.0, help="Seconds to wait for each service.")
def check(
    model: str | None,
    file: Path | None,
    is_json: bool,
    online: bool,
    timeout_s: float,
    **flags: Any,
) -> None:
    """Checks what `serve` would do with the same arguments, without loading weights.

    Prints the configuration, the slots table, the budgets and the vocabularies. Ends with 2 and one
    line for each problem if there is any.
    """
    with exit_on_config_error():
        report = check_config(merge_config(file, {"model": model, **flags}))
        if online:
            asyncio.run(check_online(report, timeout_s))
        _print_report(report, is_json)
        if report.problems:
            raise ConfigError(report.problems)


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


def _print_report(report: Report, is_json: bool) -> None:
    text = as_json(report) if is_json else as_text(report)
    if text:
        click.echo(text)


async def _serve(args: EngineArgs) -> None:
    from gateway.__main__ import run
    from gateway.tokenizer import forgo_torch, load_tokenizer
    from specgw.supervisor import embedded_services

    forgo_torch()
    # While the services load their models.
    loading = asyncio.create_task(asyncio.to_thread(load_tokenizer, args.tokenizer_path))
    if args.specgw.gateway.verifiers:
        await run(args, args.specgw.gateway.verifiers, await loading)
        return
    async with embedded_services(args) as (verifier_process, *_):
        await run(args, [verifier_process.spec.address], await loading, patience_s=10)


if __name__ == "__main__":
    main()
