"""Loads everything but the models: SIMULATED devices, real services, wire and gateway.

    python -m benchmarks.scale rounds    # how close to the ideal a round of draft and verify is
    python -m benchmarks.scale gateway   # what the gateway costs, and what it adds

`rounds` asks a verifier as a gateway does, and compares with a target that never waits: a step
takes the longer of verifying and drafting. It tells the processor time of a step by thread, and how
long the verifier takes to answer a health probe meanwhile. `gateway` streams over HTTP. Its
processor time counts the gateway process alone, so it says what one core could do even where other
processes want cores too.
"""

import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import httpx

from benchmarks import gateway_load
from benchmarks.gateway_load import Figures
from benchmarks.machine import free_port, thread_seconds
from gateway.verifier_stream import VerifierStream
from specgw.channel import open_channel
from specgw.config import parse_config
from specgw.supervisor import Child, embedded_services
from specgw.types import GenerateRequest, SamplingParams
from specgw.v1 import verifier_pb2_grpc

_MODELS = {"model": "tiny/target", "served_model_name": "simulated"}
_VOCAB = 2000
_PROMPT_TOKENS = 32


@click.group()
def main() -> None:
    """Simulated devices: nothing here says anything about models."""


# Rounds of draft and verify.


@main.command()
@click.option("--sessions", multiple=True, default=(1, 16, 128), show_default=True)
@click.option("--verify-ms", default=11.0, show_default=True)
@click.option("--draft-step-ms", default=1.2, show_default=True)
@click.option("--rtt-ms", default=0.3, show_default=True, help="Added to the way of the blocks.")
@click.option("--acceptance", default=0.8, show_default=True)
@click.option("-k", "draft_tokens", default=6, show_default=True)
@click.option(
    "--runner-up-rate",
    "runner_up_rates",
    type=float,
    multiple=True,
    help="Where a draft token is wrong, how often the next choice is right, and the one after.",
)
@click.option(
    "--branches",
    multiple=True,
    default=(0, 1, 22),
    show_default=True,
    help="Blocks drafted ahead for each session; 0 for no run-ahead.",
)
@click.option(
    "--wait",
    is_flag=True,
    help="Waits for every block, however late: the same work on any machine.",
)
@click.option("--seconds", default=6.0, show_default=True, help="For each number of sessions.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Writes figures here.")
def rounds(
    sessions: Sequence[int],
    verify_ms: float,
    draft_step_ms: float,
    rtt_ms: float,
    acceptance: float,
    draft_tokens: int,
    runner_up_rates: Sequence[float],
    branches: Sequence[int],
    wait: bool,
    seconds: float,
    json_file: Path | None,
) -> None:
    """Compares tokens/s with the overlapped ideal, and says where a round's time goes."""
    simulation: dict[str, Any] = {
        "verify_ms": verify_ms,
        "draft_step_ms": draft_step_ms,
        "rtt_ms": rtt_ms,
        "acceptance_rate": acceptance,
    }
    if runner_up_rates:
        simulation["runner_up_rates"] = runner_up_rates
    draft_ms = draft_tokens * draft_step_ms + rtt_ms
    per_round = sum(acceptance**i for i in range(draft_tokens + 1))
    print(f"SIMULATION: {simulation}, K={draft_tokens}: {per_round:.2f} tokens a round at best")
    names = ("step", "wait", "forward", "sample", "answer", "draft")
    print(
        f"{'branches':>8}{'sessions':>9}{'tokens/s':>10}{'of ideal':>10}{'in turn':>9}"
        f"{'tokens/round':>14}{'hits':>7}{'wasted':>8}"
    )
    figures = []
    for count in branches:
        for row in asyncio.run(
            _measure_rounds(sessions, simulation, draft_tokens, count, wait, seconds)
        ):
            ideal = row["sessions"] * per_round / max(verify_ms, draft_ms) * 1e3
            in_turn = row["sessions"] * per_round / (verify_ms + draft_ms) * 1e3
            row |= {
                "of_ideal": row["tokens_per_s"] / ideal,
                "in_turn": row["tokens_per_s"] / in_turn,
            }
            figures.append(row)
            print(
                f"{count:>8}{row['sessions']:>9.0f}{row['tokens_per_s']:>10.0f}"
                f"{row['of_ideal']:>10.3f}{row['in_turn']:>9.3f}{row['tokens_per_round']:>14.2f}"
                f"{row['hit_rate']:>7.2f}{row['wasted']:>8.2f}   "
                + ", ".join(f"{name} {row[f'{name}_ms']:.2f} ms" for name in names),
                flush=True,
            )
            for name, value in row.items():
                if name.startswith(("processor", "health")):
                    print(f"{'':>8}{name:<40}{value:>8.2f} ms")
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2), encoding="utf-8")


async def _measure_rounds(
    sessions: Sequence[int],
    simulation: Mapping[str, Any],
    draft_tokens: int,
    branches: int,
    wait: bool,
    seconds: float,
) -> list[dict[str, float]]:
    metrics = {name: f"127.0.0.1:{free_port()}" for name in ("verifier", "proposer")}
    args = parse_config({
        **_MODELS,
        "max_num_seqs": max(sessions),
        "max_num_batched_tokens": max(2048, (draft_tokens + 1) * max(sessions) + 512),
        "speculative_config": {"model": "tiny/draft", "num_speculative_tokens": draft_tokens},
        "specgw": {
            "simulation": simulation,
            "verifier": {
                "metrics_listen": metrics["verifier"],
                "num_threads": 1,  # a device's operators take no threads of the host
                "wait_for_slow_drafts": wait,
            },
            "proposer": {
                "metrics_listen": metrics["proposer"],
                "num_threads": 1,
                "max_sessions": max(sessions),
                "kv_cache_tokens": max(sessions) * (2048 + 32 * branches),
                "max_num_batched_tokens": max(2048, max(branches, 1) * max(sessions)),
                "run_ahead": "on" if branches else "off",
                "run_ahead_branches": max(branches, 1),
            },
        },
    })  # fmt: skip
    async with (
        embedded_services(args) as services,
        open_channel(services[0].spec.address) as channel,
        httpx.AsyncClient(timeout=60, trust_env=False) as client,
    ):
        address = services[0].spec.address
        stream = VerifierStream(verifier_pb2_grpc.VerifierServiceStub(channel), address)
        figures = []
        for count in sessions:
            calls = [asyncio.create_task(_generate_for_ever(stream, n)) for n in range(count)]
            await asyncio.sleep(seconds / 3)  # prefills, and what is learned of the other side
            before = await _counters(client, metrics) | _processor_ms(services)
            began = time.perf_counter()
            health = await _probe_health(address, seconds)
            after = await _counters(client, metrics) | _processor_ms(services)
            took = time.perf_counter() - began
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
            gone = defaultdict(float, {name: n - before[name] for name, n in after.items()})
            row = {"branches": float(branches), "sessions": float(count)}
            figures.append({**row, **_round_figures(gone, took), **health})
        await stream.close()
        return figures


async def _probe_health(address: str, seconds: float) -> dict[str, float]:
    """Returns how long health probes take during so many seconds."""
    command = (sys.executable, "-m", "benchmarks.health_probe", address, str(seconds))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    figures = json.loads(output)
    return {
        f"health probe {name.removesuffix('_ms')}": figures[name]
        for name in ("median_ms", "p99_ms")
    }


def _processor_ms(services: Sequence[Child]) -> dict[str, float]:
    """Returns what each thread of the services has used so far."""
    return {
        f"processor {service.spec.name} {thread}": 1e3 * seconds
        for service in services
        for thread, seconds in thread_seconds(service.pid).items()
    }


async def _generate_for_ever(stream: VerifierStream, number: int) -> None:
    """Runs one request after the other until cancelled."""
    params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
    prompt = [(number * 7 + i) % _VOCAB for i in range(_PROMPT_TOKENS)]
    while True:
        request = GenerateRequest(f"session-{number}", prompt, params)
        async for _ in stream.generate(request, time.monotonic() + 600):
            pass
        prompt[0] = (prompt[0] + 1) % _VOCAB


async def _counters(client: httpx.AsyncClient, metrics: Mapping[str, str]) -> dict[str, float]:
    """Reads the services' samples, each summed over its labels but for that of an outcome."""
    totals: dict[str, float] = defaultdict(float)
    for service, address in metrics.items():
        for line in (await client.get(f"http://{address}/metrics")).text.splitlines():
            name, _, value = line.rpartition(" ")
            name = name.removeprefix(f"specgw_{service}_")
            if 'outcome="' not in name:
                name = name.partition("{")[0]
            if name and not line.startswith("#"):
                totals[name] += float(value)
    return totals


def _round_figures(gone: Mapping[str, float], seconds: float) -> dict[str, float]:
    def mean_ms(name: str) -> float:
        return 1e3 * gone[f"{name}_seconds_sum"] / max(1.0, gone[f"{name}_seconds_count"])

    drafted_ahead = gone["run_ahead_tokens_total"]
    return {
        "tokens_per_s": gone["output_tokens_total"] / seconds,
        "tokens_per_round": 1 + gone["accepted_tokens_total"] / max(1.0, gone["drafts_total"]),
        "hit_rate": gone['run_ahead_rounds_total{outcome="hit"}'] / max(1.0, gone["drafts_total"]),
        "wasted": 1 - gone["run_ahead_used_tokens_total"] / max(1.0, drafted_ahead),
        "step_ms": 1e3 * seconds / gone["steps_total"],
        "rows": gone["step_rows_sum"] / gone["steps_total"],
        "wait_ms": mean_ms("draft_wait"),
        "forward_ms": mean_ms("forward"),
        "sample_ms": mean_ms("sample"),
        "answer_ms": mean_ms("draft_answer"),
        "draft_ms": mean_ms("draft_work"),
        **{
            f"{name}, a step": value / gone["steps_total"]
            for name, value in gone.items()
            if name.startswith("processor")
        },
    }


# The gateway.


_PHASES = ("throughput", "latency", "many", "idle")


@main.command()
@click.option("--phase", "phases", multiple=True, type=click.Choice(_PHASES), default=_PHASES)
@click.option("--streams", default=256, show_default=True, help="For throughput and latency.")
@click.option("--many", default=1000, show_default=True, help="Streams that are open at once.")
@click.option("--rounds", default=3, show_default=True, help="How often many are opened.")
@click.option("--seconds", default=8.0, show_default=True, help="For throughput, latency and idle.")
@click.option("--period-ms", default=100.0, show_default=True, help="Of a step, for latency.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Writes figures here.")
def gateway(
    phases: Sequence[str],
    streams: int,
    many: int,
    rounds: int,
    seconds: float,
    period_ms: float,
    json_file: Path | None,
) -> None:
    """Measures throughput, added latency and memory over HTTP streams, one token an event."""
    print("SIMULATION: targets without drafts, one token an event")

    async def measure() -> dict[str, list[Figures]]:
        figures: dict[str, list[Figures]] = {}
        for phase in phases:
            figures[phase] = []
            async for one in gateway_load.measure(phase, streams, many, rounds, seconds, period_ms):
                figures[phase].append(one)
                for name, value in one.items():
                    print(f"{phase:<11} {name:<44}{value:>10.4g}", flush=True)
        return figures

    figures = asyncio.run(measure())
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
