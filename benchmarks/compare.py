"""Compares specgw with transformers and vLLM on one pair of models, in one interleaved run.

    python -m benchmarks.compare --target DIR --draft DIR --prompts FILE -k 7 --batch-size 1

Every repetition gives the next prompts to every system in turn, starting with another one each
time; only one system computes at a time. Greedy unless a temperature is given, past the end token,
prefill included. Systems are measured as they are used: the three specgw processes by an HTTP
client, engines in process (`specgw.LLM`, transformers, vLLM) by their own clock.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml
from transformers import AutoTokenizer

from benchmarks.machine import free_port, machine_seconds, tree_peak_bytes, tree_seconds
from benchmarks.measurement import Completion, Run, SystemId
from benchmarks.plot import draw
from benchmarks.report import (
    compare_outputs,
    render_differences,
    render_table,
    render_times,
    to_json,
)
from benchmarks.systems import (
    SpecgwSystem,
    System,
    SystemFailed,
    run_peer,
    run_specgw,
)

_START_S = 1800.0
_WARM_UP_TOKENS = 16
_VLLM_KV_CACHE_BYTES = 1 << 29  # thousands of tokens; more would only leave less memory to others


@dataclass(frozen=True)
class Plan:
    """What to run. `draft_tokens` and `vllm_draft_tokens` list the K to try, each a system."""

    target: Path
    draft: Path | None
    method: str
    speculation: Mapping[str, Any]
    draft_tokens: tuple[int, ...]
    vllm_draft_tokens: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    max_tokens: int
    max_model_len: int
    repetitions: int
    threads: int
    dtype: str
    temperature: float = 0.0

    def speculative_config(self, draft_tokens: int) -> dict[str, Any]:
        """Returns vLLM's configuration of the drafts, for vLLM and for specgw."""
        model = {"model": str(self.draft)} if self.draft is not None else {}
        return {
            "method": self.method,
            **model,
            **self.speculation,
            "num_speculative_tokens": draft_tokens,
        }


def read_prompts(file: Path, tokenizer_folder: Path, raw: bool) -> list[str]:
    """Reads one JSON object a line with the prompt under `data`, as a chat message unless raw."""
    texts = [json.loads(line)["data"] for line in file.read_text().splitlines() if line.strip()]
    if raw:
        return texts
    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_folder)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        for text in texts
    ]


def take_prompts(prompts: Sequence[str], batch_size: int, repetition: int) -> list[str]:
    """Returns the repetition's prompts, going around when there are too few."""
    start = repetition * batch_size
    return [prompts[(start + offset) % len(prompts)] for offset in range(batch_size)]


def specgw_config(plan: Plan, base: Mapping[str, Any], port: int) -> dict[str, Any]:
    """Completes the user's configuration with what the comparison fixes."""
    specgw = {**base.get("specgw", {})}
    for service in ("verifier", "proposer"):
        specgw[service] = {"num_threads": plan.threads, **specgw.get(service, {})}
    specgw["verifier"]["metrics_listen"] = f"127.0.0.1:{free_port()}"
    return {
        **_common_arguments(plan),
        **base,
        "model": str(plan.target),
        "host": "127.0.0.1",
        "port": port,
        "speculative_config": plan.speculative_config(max(plan.draft_tokens)),
        "specgw": specgw,
    }


def vllm_arguments(plan: Plan, draft_tokens: int) -> dict[str, Any]:
    """Returns the arguments of `vllm.LLM`; 0 draft tokens mean no speculation."""
    arguments = {
        **_common_arguments(plan),
        "model": str(plan.target),
        "kv_cache_memory_bytes": _VLLM_KV_CACHE_BYTES,
    }
    if draft_tokens:
        arguments["speculative_config"] = plan.speculative_config(draft_tokens)
    return arguments


def _common_arguments(plan: Plan) -> dict[str, Any]:
    return {
        "dtype": plan.dtype,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": max(plan.batch_sizes),
        "enable_prefix_caching": False,  # systems with the same prompts must not help one another
    }


@contextmanager
def start_specgw(plan: Plan, base: Mapping[str, Any], work: Path) -> Iterator[list[System]]:
    """Starts one server and returns it as one system without drafts and one for each K."""
    click.echo("starting specgw", err=True)
    config = specgw_config(plan, base, free_port())
    with run_specgw(config, work, _START_S, plan.temperature) as server:
        yield [
            SpecgwSystem(SystemId("specgw", draft_tokens), server)
            for draft_tokens in (0, *plan.draft_tokens)
        ]


@contextmanager
def start_peers(
    plan: Plan, peers: Sequence[str], vllm_python: Path | None, environment: Mapping[str, str]
) -> Iterator[list[System]]:
    """Starts the engines in process: one child for each product and K."""
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        systems: list[System] = []

        def start(system: SystemId, arguments: Mapping[str, Any], batch: int | None = None) -> None:
            click.echo(f"loading {system}", err=True)
            is_vllm = system.product == "vllm" and vllm_python is not None
            python = vllm_python if is_vllm and vllm_python else Path(sys.executable)
            variables = environment if is_vllm else {"PYTHONPATH": str(Path.cwd())}
            peer = run_peer(system, python, variables, arguments, work, batch)
            systems.append(stack.enter_context(peer))

        if "specgw" in peers:
            for count in plan.draft_tokens:
                config = specgw_config(plan, {}, port=0)
                config["speculative_config"]["num_speculative_tokens"] = count
                start(SystemId("specgw", count, "one process"), config)
        if "transformers" in peers:
            model = {"model": str(plan.target), "threads": plan.threads, "dtype": plan.dtype}
            start(SystemId("transformers", 0), model)
            if plan.draft is not None and plan.method == "draft_model":
                for count in plan.draft_tokens:
                    assisted = {**model, "draft": str(plan.draft), "draft_tokens": count}
                    start(SystemId("transformers", count), assisted, 1)
        if vllm_python is not None:
            for count in (0, *plan.vllm_draft_tokens):
                start(SystemId("vllm", count), vllm_arguments(plan, count))
        yield systems


def measure(system: System, prompts: Sequence[str], max_tokens: int, repetition: int) -> Run:
    """Runs one batch and takes the processor time of the system and of everything else."""
    machine, own, began = machine_seconds(), tree_seconds(system.pid), time.perf_counter()
    batch = system.generate(prompts, max_tokens)
    elapsed = time.perf_counter() - began
    own_cores = (tree_seconds(system.pid) - own) / elapsed
    busy_cores = (machine_seconds() - machine) / elapsed
    check_lengths(system.id, batch.completions, max_tokens)
    peak = tree_peak_bytes(system.pid)
    return Run(system.id, len(prompts), repetition, batch, own_cores, busy_cores - own_cores, peak)


def check_lengths(system: SystemId, completions: Sequence[Completion], max_tokens: int) -> None:
    """Refuses a batch whose answers are not exactly as long as asked for."""
    lengths = [len(completion.token_ids) for completion in completions]
    if any(length != max_tokens for length in lengths):
        raise SystemFailed(f"{system} returned {lengths} tokens, not {max_tokens} each")


def check_prompts(runs: Sequence[Run]) -> None:
    """Refuses a repetition in which two systems saw different prompt tokens."""
    seen = {run.system: [c.prompt_token_ids for c in run.batch.completions] for run in runs}
    if any(prompts != next(iter(seen.values())) for prompts in seen.values()):
        raise SystemFailed(
            f"the systems tokenize the prompts differently: {', '.join(map(str, seen))}"
        )


def warm_up(systems: Sequence[System], prompts: Sequence[str], batch_sizes: Sequence[int]) -> None:
    """Lets every system compile and fill its caches for every batch size."""
    for system in systems:
        for batch_size in _possible(system, batch_sizes):
            click.echo(f"warming up {system.id}, batch {batch_size}", err=True)
            system.generate(take_prompts(prompts, batch_size, 0), _WARM_UP_TOKENS)


def _possible(system: System, batch_sizes: Sequence[int]) -> list[int]:
    return [size for size in batch_sizes if system.max_batch is None or size <= system.max_batch]


def run_rounds(systems: Sequence[System], prompts: Sequence[str], plan: Plan) -> list[Run]:
    """Measures everything, one system after the other within each repetition."""
    runs: list[Run] = []
    for repetition in range(plan.repetitions):
        first = repetition % len(systems)
        for batch_size in plan.batch_sizes:
            batch = take_prompts(prompts, batch_size, repetition)
            round_runs = [
                measure(system, batch, plan.max_tokens, repetition)
                for system in (*systems[first:], *systems[:first])
                if _possible(system, [batch_size])
            ]
            check_prompts(round_runs)
            runs += round_runs
            speeds = ", ".join(f"{run.system} {run.tokens_per_second:.1f}" for run in round_runs)
            click.echo(f"repetition {repetition + 1}, batch {batch_size}: {speeds}", err=True)
    return runs


def parse_environment(assignments: Sequence[str], threads: int) -> dict[str, str]:
    """Returns the variables for vLLM: what a fair run in process needs, then the user's own."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise click.BadParameter(f"{assignment!r} is not NAME=VALUE", param_hint="--vllm-env")
        environment[name] = value
    return environment


_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_COUNT = click.IntRange(min=1)
_OUTPUT = click.Path(dir_okay=False, path_type=Path)
_PEERS = ("specgw", "transformers")


@click.command(help=__doc__)
@click.option("--target", required=True, type=_FOLDER)
@click.option("--draft", type=_FOLDER, help="Without it, a method that needs none.")
@click.option("--method", default="draft_model", show_default=True, help="As in vLLM.")
@click.option("--speculation", default="{}", help="More keys of speculative_config, as JSON.")
@click.option("--prompts", "prompts_file", required=True, type=_FILE, help="JSON lines, `data`.")
@click.option("--raw", is_flag=True, help="Send prompts as they are, without the chat template.")
@click.option("-k", "--draft-tokens", multiple=True, type=_COUNT, default=(3, 7), show_default=True)
@click.option(
    "--peer",
    "peers",
    multiple=True,
    type=click.Choice((*_PEERS, "none")),
    default=_PEERS,
    help="Engines in process beside the three processes, each with its models; default both.",
)
@click.option("--vllm-python", type=_FILE, help="Interpreter with vLLM, if it shall run too.")
@click.option("--vllm-draft-tokens", multiple=True, type=_COUNT, default=(7,), show_default=True)
@click.option("--vllm-env", multiple=True, metavar="NAME=VALUE", help="Such as LD_PRELOAD=...")
@click.option("--specgw-config", type=_FILE, help="YAML to build the servers' configuration on.")
@click.option("--batch-size", "batch_sizes", multiple=True, type=_COUNT, default=(1, 8))
@click.option("--max-tokens", type=_COUNT, default=128, show_default=True)
@click.option("--max-model-len", type=_COUNT, default=2048, show_default=True)
@click.option("--repetitions", type=_COUNT, default=8, show_default=True)
@click.option("--threads", type=_COUNT, default=os.cpu_count(), help="For every system.")
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, help="specgw alone.")
@click.option("--out", type=_OUTPUT, help="JSON with every run.")
@click.option("--plot", type=_OUTPUT, help="PNG with a bar for every system.")
def main(
    prompts_file: Path,
    raw: bool,
    speculation: str,
    peers: tuple[str, ...],
    vllm_python: Path | None,
    vllm_env: tuple[str, ...],
    specgw_config: Path | None,
    out: Path | None,
    plot: Path | None,
    **plan_options: Any,
) -> None:
    """Starts the systems, measures them, stops them, reports."""
    plan = Plan(speculation=json.loads(speculation), **plan_options)
    if plan.temperature > 0 and (vllm_python or {*peers} & {*_PEERS}):
        raise click.UsageError("--temperature is for specgw alone: --peer none, no --vllm-python")
    prompts = read_prompts(prompts_file, plan.target, raw)
    base = yaml.safe_load(specgw_config.read_text()) if specgw_config else {}
    environment = parse_environment(vllm_env, plan.threads)
    try:
        with ExitStack() as stack:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            systems = stack.enter_context(start_specgw(plan, base, work))
            systems += stack.enter_context(start_peers(plan, peers, vllm_python, environment))
            warm_up(systems, prompts, plan.batch_sizes)
            runs = run_rounds(systems, prompts, plan)
    except SystemFailed as error:
        raise click.ClickException(str(error)) from None
    comparisons = compare_outputs(runs, plan.target) if plan.temperature == 0 else []
    click.echo(render_table(runs))
    click.echo(render_times(runs))
    click.echo(render_differences(comparisons))
    if out:
        out.write_text(json.dumps(to_json(plan, runs, comparisons), indent=1))
    if plot:
        draw(runs, plot)


if __name__ == "__main__":
    main()
