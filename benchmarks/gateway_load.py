"""What the gateway costs and what it adds, over HTTP streams of one token an event. SIMULATED.

Each phase runs a verifier, a gateway and a client, three processes, and ends in bounded time. Times
of events are the kernel's, so that the client's own work is not counted; processor time is that of
the gateway process alone, so it says what one core could do even where others want cores too.
"""

import asyncio
import bisect
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.machine import free_port, process_seconds, resident_bytes
from benchmarks.stream_client import StreamClient
from benchmarks.systems import run_specgw
from specgw.config import EngineArgs, parse_config
from specgw.supervisor import embedded_services

Figures = dict[str, float]

_MAX_TOKENS = 900
_PROMPT_TOKENS = 4
_VOCAB = 2000
_START_S = 60.0
_PATIENCE_S = 30.0  # for anything that takes a second on a machine that is not busy
_SAMPLE_S = 0.2
_MIB = 2**20
_MANY_TOKENS = 128  # each, in the phase with many streams
_MANY_VERIFY_MS = 40.0  # a step starts 16 of them, so that all are open before the first ends


@dataclass(frozen=True)
class Stack:
    """A gateway in a process of its own, in front of a simulated verifier in another."""

    port: int
    verifier: str
    pid: int


@asynccontextmanager
async def served(sessions: int, verify_ms: float) -> AsyncIterator[Stack]:
    """Runs both until the block ends."""
    port = free_port()
    args = _args(sessions, verify_ms)
    async with embedded_services(args) as (verifier, *_):
        with tempfile.TemporaryDirectory() as folder:
            config = args.model_dump(mode="json", exclude_none=True)
            config["port"] = port
            config["specgw"]["gateway"]["verifiers"] = [verifier.spec.address]
            with run_specgw(config, Path(folder), _START_S) as server:
                yield Stack(port, verifier.spec.address, server.process.popen.pid)


def _args(sessions: int, verify_ms: float) -> EngineArgs:
    return parse_config({
        "model": "tiny/target",
        "served_model_name": "simulated",
        "max_num_seqs": sessions,
        "max_num_batched_tokens": max(2048, 2 * sessions),
        "specgw": {
            "simulation": {"verify_ms": verify_ms},
            "gateway": {"max_concurrent_requests": sessions},
        },
    })  # fmt: skip


class Load:
    """Streams that are open at once; those that end are followed by others if told so."""

    def __init__(self, client: StreamClient, streams: int, max_tokens: int = _MAX_TOKENS) -> None:
        self._client = client
        self._streams = streams
        self._max_tokens = max_tokens
        self._num_opened = 0
        self.num_events = 0
        client.on_events = self._count

    def open(self) -> None:
        """Opens as many as are missing."""
        while self._client.num_open < self._streams:
            number = self._num_opened
            self._num_opened += 1
            prompt = [(number * 7 + i) % _VOCAB for i in range(_PROMPT_TOKENS)]
            self._client.open({
                "prompt": prompt,
                "max_tokens": self._max_tokens,
                "temperature": 0,
                "ignore_eos": True,
            })  # fmt: skip

    def start(self) -> None:
        """Opens the streams and returns when each has had an event.

        Raises:
            RuntimeError: if one ends before.
            TimeoutError: if that takes too long.
        """

        def is_done() -> bool:
            for stream in self._client.ended:
                raise RuntimeError(f"a stream was answered {stream.head!r} and ended")
            return self._client.num_started == self._streams

        self.open()
        self.read_until(is_done)

    def keep_up(self, seconds: float, stay_s: float = math.inf) -> None:
        """Reads for that long; a client goes away whenever another `stay_s` are over."""
        began = time.monotonic()
        next_leave = began + stay_s
        while (now := time.monotonic()) < began + seconds:
            if now >= next_leave:
                self._client.abandon()
                next_leave += stay_s
            self.open()
            self._client.read(max(0.0, min(began + seconds, next_leave) - now))

    def read_until(self, is_done: Callable[[], bool]) -> None:
        """Reads until something is so.

        Raises:
            TimeoutError: if that takes too long.
        """
        end = time.monotonic() + _PATIENCE_S
        while not is_done():
            if time.monotonic() > end:
                client = self._client
                raise TimeoutError(
                    f"{client.num_open} streams open, {client.num_started} of them started, "
                    f"{len(client.ended)} ended after {_PATIENCE_S:g} s"
                )
            self._client.read(_SAMPLE_S)

    def note_times(self) -> list[float]:
        """Returns a list that grows by the time of each event from now on."""
        times: list[float] = []

        def note(count: int, at: float) -> None:
            self._count(count, at)
            times.extend([at] * count)

        self._client.on_events = note
        return times

    def _count(self, count: int, at: float) -> None:
        self.num_events += count


def throughput(stack: Stack, streams: int, seconds: float) -> Iterator[Figures]:
    """Counts the events of streams that the engine never lets wait."""
    with StreamClient(stack.port) as client:
        load = Load(client, streams)
        load.start()
        events, busy, began = load.num_events, process_seconds(stack.pid), time.perf_counter()
        load.keep_up(seconds)
        events = load.num_events - events
        busy, took = process_seconds(stack.pid) - busy, time.perf_counter() - began
    yield {
        f"tokens/s of {streams} streams": events / took,
        "tokens per processor second of the gateway": events / busy,
        "processor time a token, us": 1e6 * busy / events,
        "cores that the gateway used": busy / took,
    }


def latency(stack: Stack, streams: int, seconds: float, period_s: float) -> Iterator[Figures]:
    """Compares when a token comes with when the verifier handed out that step's first one."""
    for what, stay_s in (("through the gateway", math.inf), ("20 clients a second leave", 0.05)):
        with _clock(stack, 1) as stop_clock, StreamClient(stack.port) as client:
            load = Load(client, streams)
            load.start()
            came = load.note_times()
            began, busy = time.time(), process_seconds(stack.pid)
            load.keep_up(seconds, stay_s)
            took, busy = time.time() - began, process_seconds(stack.pid) - busy
            steps = stop_clock()
        yield {
            f"{what}: tokens/s": len(came) / took,
            f"{what}: tokens per processor second": len(came) / busy,
            **_added(what, came, steps, period_s),
        }
    with _clock(stack, 1) as stop_clock, _clock(stack, streams) as stop_clients:
        time.sleep(seconds)
        came, steps = stop_clients(), stop_clock()
    yield _added("without it, over gRPC", came, steps, period_s)


def _added(what: str, came: Sequence[float], steps: list[float], period_s: float) -> Figures:
    """Returns quantiles of the time since the step before; a step's clock may be a little late."""
    slack_s = period_s / 10
    added = sorted(
        1e3 * (at - steps[place - 1])
        for at in came
        if 0 < (place := bisect.bisect_right(steps, at + slack_s)) < len(steps)
    )
    return {
        f"{what}: median ms": statistics.median(added),
        f"{what}: p99 ms": added[int(0.99 * len(added))],
        f"{what}: most ms": added[-1],
    }


@contextmanager
def _clock(stack: Stack, streams: int) -> Iterator[Callable[[], list[float]]]:
    """Runs clients of the verifier itself; yields what ends them and tells when tokens came."""
    command = [sys.executable, "-m", "benchmarks.step_clock", stack.verifier, str(streams)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    stdout = process.stdout

    def stop() -> list[float]:
        process.terminate()
        return [float(at) for at in json.loads(stdout.readline())]

    try:
        stdout.readline()
        yield stop
    finally:
        process.kill()
        process.communicate()


@dataclass
class MemorySamples:
    """What a process held, over time."""

    pid: int
    at: list[float] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)

    def take(self) -> None:
        """Takes a sample if the last one is old enough."""
        now = time.monotonic()
        if not self.at or now - self.at[-1] >= _SAMPLE_S:
            self.at.append(now)
            self.mib.append(resident_bytes(self.pid) / _MIB)

    @property
    def slope(self) -> float:
        """MiB a minute, by least squares; 0 for less than three samples."""
        if len(self.at) < 3:
            return 0.0
        return 60 * statistics.linear_regression(self.at, self.mib).slope


def many(stack: Stack, streams: int, max_tokens: int, rounds: int) -> Iterator[Figures]:
    """Runs many streams to their ends, again and again: memory may grow once, not every time."""
    before = resident_bytes(stack.pid) / _MIB
    for number in range(rounds):
        with StreamClient(stack.port) as client:
            load = Load(client, streams, max_tokens)
            load.start()
            running = MemorySamples(stack.pid)

            def is_over(client: StreamClient = client, running: MemorySamples = running) -> bool:
                if client.num_open == streams:
                    running.take()
                return client.num_open == 0

            load.read_until(is_over)
            complete = sum(stream.is_complete for stream in client.ended)
        yield {
            f"round {number + 1}: failed of {streams}": streams - complete,
            "events": load.num_events,
            "MiB before": before,
            "MiB with all open, most": max(running.mib),
            "MiB with all open, last": running.mib[-1],
            "MiB a minute while all are open": running.slope,
            "MiB after": resident_bytes(stack.pid) / _MIB,
        }


def idle(stack: Stack, seconds: float) -> Iterator[Figures]:
    """Watches a gateway that nobody asks."""
    busy = process_seconds(stack.pid)
    time.sleep(seconds)
    yield {
        "processor ms a second, idle": 1e3 * (process_seconds(stack.pid) - busy) / seconds,
        "MiB, idle": resident_bytes(stack.pid) / _MIB,
    }


async def measure(
    phase: str, streams: int, many_streams: int, rounds: int, seconds: float, period_ms: float
) -> AsyncIterator[Figures]:
    """Runs one phase; yields figures as they are known."""
    phases: dict[str, tuple[int, float, Callable[[Stack], Iterator[Figures]]]] = {
        "throughput": (streams, 1.0, lambda stack: throughput(stack, streams, seconds)),
        "latency": (
            streams + 1,
            period_ms,
            lambda stack: latency(stack, streams, seconds, period_ms / 1e3),
        ),
        "many": (
            many_streams,
            _MANY_VERIFY_MS,
            lambda stack: many(stack, many_streams, _MANY_TOKENS, rounds),
        ),
        "idle": (1, 1.0, lambda stack: idle(stack, seconds)),
    }
    sessions, verify_ms, work = phases[phase]
    async with served(sessions, verify_ms) as stack:
        figures = work(stack)
        while (one := await asyncio.to_thread(next, figures, None)) is not None:
            yield one
