"""Asks a service for its health, over and over, and prints how long the answers took.

    python -m benchmarks.health_probe ADDRESS SECONDS

In a process of its own, so that nothing but the service delays them; `scale.py` runs it beside a
load. Prints JSON: median and 99th percentile in ms, and how many there were.
"""

import json
import statistics
import time
from typing import Any

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_INTERVAL_S = 0.01


@click.command()
@click.argument("address")
@click.argument("seconds", type=float)
def main(address: str, seconds: float) -> None:
    """Probes for so many seconds."""
    times_s = []
    with grpc.insecure_channel(address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        health.Check(request, timeout=60)  # connects
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            health.Check(request, timeout=60)
            times_s.append(time.perf_counter() - began)
            time.sleep(_INTERVAL_S)
    p99_s = statistics.quantiles(times_s, n=100, method="inclusive")[98]
    figures = {"median_ms": 1e3 * statistics.median(times_s), "p99_ms": 1e3 * p99_s}
    print(json.dumps({**figures, "count": len(times_s)}))


if __name__ == "__main__":
    main()
