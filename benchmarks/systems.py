"""The systems under comparison, each behind the same small interface.

A system runs in processes of its own and computes only inside `generate`. specgw is driven over
HTTP as a client would; engines in process through `engine_peer.py`, vLLM in its own environment.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import yaml

from benchmarks.measurement import Batch, Completion, SpeculationCounts, StepTimes, SystemId

_PEER = Path(__file__).with_name("engine_peer.py")
_LOG_TAIL_CHARS = 4000
_COUNTERS = (  # in the order of the fields of SpeculationCounts
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "specgw_gateway_undrafted_rounds_total",
)


class SystemFailed(Exception):
    """A system did not start, or did not answer; the message holds the end of its log."""


class System(Protocol):
    """Something that completes prompts greedily and says how long it took."""

    @property
    def id(self) -> SystemId:
        """What it is, for tables and files."""

    @property
    def pid(self) -> int:
        """The root of the system's process tree."""

    @property
    def max_batch(self) -> int | None:
        """Most prompts at once; None for any number."""

    def generate(self, prompts: Sequence[str], max_tokens: int) -> Batch:
        """Completes all prompts together, each to exactly `max_tokens` tokens."""


@dataclass(frozen=True)
class Process:
    """A running child and the file its output goes to."""

    popen: "subprocess.Popen[str]"
    log: Path

    def failure(self, what: str) -> SystemFailed:
        """Returns an error that says what happened and shows the end of the log."""
        tail = self.log.read_text(errors="replace")[-_LOG_TAIL_CHARS:]
        return SystemFailed(f"{what} (exit code {self.popen.poll()})\n{tail}")

    def stop(self, grace_s: float) -> None:
        """Asks the process to end and kills it if it does not."""
        self.popen.terminate()
        try:
            self.popen.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


@contextmanager
def run_process(
    command: Sequence[str], log: Path, environment: Mapping[str, str], pipe: bool, grace_s: float
) -> Iterator[Process]:
    """Runs a child until the block ends. `environment` is added to the present one."""
    assignments = [f"{name}={value}" for name, value in environment.items()]
    stream = subprocess.PIPE if pipe else None
    with log.open("w") as output:
        popen = subprocess.Popen(
            ["env", *assignments, *command],
            stdin=stream or subprocess.DEVNULL,
            stdout=stream or output,
            stderr=output,
            text=True,
        )
    process = Process(popen, log)
    try:
        yield process
    finally:
        process.stop(grace_s)


@dataclass(frozen=True)
class SpecgwServer:
    """A running `specgw serve`: gateway, verifier and proposer, three processes."""

    process: Process
    client: httpx.Client
    model: str
    metrics_url: str  # of the verifier
    temperature: float = 0.0

    def complete(self, prompt: str, max_tokens: int, draft_tokens: int) -> Completion:
        """Completes one prompt with at most `draft_tokens` draft tokens a round."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "seed": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "num_speculative_tokens": draft_tokens,
        }
        response = self.client.post("/v1/completions", json=body)
        if response.status_code != 200:
            raise self.process.failure(f"HTTP {response.status_code}: {response.text}")
        choice = response.json()["choices"][0]
        return Completion(tuple(choice["prompt_token_ids"]), tuple(choice["token_ids"]))

    def speculation(self) -> SpeculationCounts:
        """Reads the counters that vLLM's dashboards read."""
        return parse_speculation(self.client.get("/metrics").text)

    def times(self) -> StepTimes:
        """Reads where the verifier's time went."""
        return parse_times(self.client.get(self.metrics_url).text)


def parse_speculation(exposition: str) -> SpeculationCounts:
    """Sums the speculation counters of a Prometheus exposition over all their labels.

    Rounds without a draft count only where a draft was asked for.
    """
    totals = dict.fromkeys(_COUNTERS, 0)
    for line in exposition.splitlines():
        name, _, rest = line.partition("{")
        if name in totals and 'reason="disabled"' not in rest:
            totals[name] += int(float(line.rsplit(" ", 1)[1]))
    return SpeculationCounts(*totals.values())


def parse_times(exposition: str) -> StepTimes:
    """Reads the totals of the verifier's histograms from its Prometheus exposition."""
    lines = (line for line in exposition.splitlines() if line.startswith("specgw_verifier_"))
    samples = dict(line.removeprefix("specgw_verifier_").rsplit(" ", 1) for line in lines)

    def total(name: str) -> float:
        return float(samples[f"{name}_seconds_sum"])

    return StepTimes(
        step_count=float(samples["steps_total"]),
        wait=total("draft_wait"),
        draft=total("draft_work"),
        wire=total("draft_answer") - total("draft_work"),
        forward=total("forward"),
        sample=total("sample"),
    )


@dataclass(frozen=True)
class SpecgwSystem:
    """A server, asked for a fixed number of draft tokens; 0 switches speculation off."""

    id: SystemId
    server: SpecgwServer
    max_batch: int | None = None

    @property
    def pid(self) -> int:
        """The gateway, whose children are the verifier and the proposer."""
        return self.server.process.popen.pid

    def generate(self, prompts: Sequence[str], max_tokens: int) -> Batch:
        """Sends all prompts at once, one request each, and waits for the last answer."""
        before, times = self.server.speculation(), self.server.times()

        def complete(prompt: str) -> Completion:
            return self.server.complete(prompt, max_tokens, self.id.draft_tokens)

        with ThreadPoolExecutor(len(prompts)) as clients:
            began = time.perf_counter()
            completions = tuple(clients.map(complete, prompts))
            seconds = time.perf_counter() - began
        speculation, times = self.server.speculation() - before, self.server.times() - times
        return Batch(seconds, completions, speculation, times)


@contextmanager
def run_specgw(
    config: Mapping[str, Any], work: Path, start_s: float, temperature: float = 0.0
) -> Iterator[SpecgwServer]:
    """Serves `config`, which must name `model`, `host` and `port`, until the block ends.

    The verifier's metrics are at `specgw.verifier.metrics_listen`, if the configuration has it.
    """
    file = work / "specgw.yaml"
    file.write_text(yaml.safe_dump(dict(config)))
    command = [sys.executable, "-m", "specgw.cli", "serve", "--config", str(file)]
    url = f"http://{config['host']}:{config['port']}"
    with (
        run_process(command, work / "specgw.log", {}, pipe=False, grace_s=60) as process,
        httpx.Client(base_url=url, timeout=600) as client,
    ):
        wait_until_healthy(client, process, start_s)
        listen = config.get("specgw", {}).get("verifier", {}).get("metrics_listen", "")
        url = f"http://{listen}/metrics"
        yield SpecgwServer(process, client, config["model"], url, temperature)


def wait_until_healthy(client: httpx.Client, process: Process, start_s: float) -> None:
    """Returns once `GET /health` succeeds.

    Raises:
        SystemFailed: if the process ends first or `start_s` passes.
    """
    deadline = time.monotonic() + start_s
    while time.monotonic() < deadline:
        if process.popen.poll() is not None:
            raise process.failure("specgw ended before it served")
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        time.sleep(0.5)
    raise process.failure(f"specgw did not serve within {start_s:.0f} s")


@dataclass(frozen=True)
class PeerSystem:
    """One engine, in process, in a child of its own."""

    id: SystemId
    process: Process
    max_batch: int | None = None

    @property
    def pid(self) -> int:
        """The peer."""
        return self.process.popen.pid

    def generate(self, prompts: Sequence[str], max_tokens: int) -> Batch:
        """Lets the engine complete all prompts as one batch; the engine's own clock counts."""
        answer = self.ask("generate", prompts=list(prompts), max_tokens=max_tokens)
        completions = tuple(
            Completion(tuple(output["prompt_token_ids"]), tuple(output["token_ids"]))
            for output in answer["outputs"]
        )
        return Batch(answer["seconds"], completions, SpeculationCounts(**answer["speculation"]))

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Sends one request and returns its answer.

        Raises:
            SystemFailed: if the peer ends or reports an error.
        """
        stdin, stdout = self.process.popen.stdin, self.process.popen.stdout
        assert stdin is not None  # both are pipes
        assert stdout is not None
        with suppress(BrokenPipeError):  # a peer that is gone answers with an empty line
            stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            stdin.flush()
        line = stdout.readline()
        if not line:
            self.process.popen.wait()
            raise self.process.failure(f"{self.id} ended during {op}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self.process.failure(f"{self.id} failed to {op}: {answer['error']}")
        return answer


@contextmanager
def run_peer(
    system: SystemId,
    python: Path,
    environment: Mapping[str, str],
    arguments: Mapping[str, Any],
    work: Path,
    max_batch: int | None = None,
) -> Iterator[PeerSystem]:
    """Loads an engine with its arguments (see `engine_peer.py`) and keeps it until the end.

    Args:
        system: Which engine; its product names the peer.
        python: The interpreter that has it.
        environment: Variables to run it under.
        arguments: What it is loaded with.
        work: Where its log goes.
        max_batch: Most prompts that it takes at once.
    """
    command = [str(python), str(_PEER), system.product]
    log = work / f"{str(system).replace(' ', '-')}.log"
    with run_process(command, log, environment, pipe=True, grace_s=30) as process:
        peer = PeerSystem(system, process, max_batch)
        peer.ask("load", arguments=dict(arguments))
        yield peer
