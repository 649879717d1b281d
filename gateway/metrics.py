"""Counts and times requests under vLLM's metric names, so that its dashboards work.

Every gateway has a registry of its own. The caller is `generation.py`.
"""

import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.ledger import Ledger
from gateway.token_metrics import TokenMetrics
from specgw.types import SpeculationStats, UndraftedReason

_LABELS = ("model_name", "engine")
# vLLM's buckets, so that quantiles compare.
_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_INTER_TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip


class Metrics:
    """The metrics of one gateway."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._label_values = (model_name, "0")
        self._running = self._gauge("num_requests_running", "Requests being answered.")
        self._waiting = self._gauge("num_requests_waiting", "Requests waiting for a slot.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_BUCKETS
        )
        self.tokens = TokenMetrics(_LABELS, self._label_values, _INTER_TOKEN_BUCKETS)
        self.registry.register(self.tokens)
        self.request_latency = self._histogram(
            "e2e_request_latency_seconds", "Arrival to last token.", _REQUEST_BUCKETS
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "Time waiting for a slot.", _REQUEST_BUCKETS
        )
        self._success = self._labelled_counter(
            "vllm:request_success", "Finished requests.", "finished_reason"
        )
        self._drafts = self._counter("spec_decode_num_drafts", "Number of spec decoding drafts.")
        self._draft_tokens = self._counter(
            "spec_decode_num_draft_tokens", "Number of draft tokens."
        )
        self._accepted_tokens = self._counter(
            "spec_decode_num_accepted_tokens", "Number of accepted tokens."
        )
        self._accepted_per_position = self._labelled_counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens per draft position.",
            "position",
        )
        self._prefix_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked for in prefix caches."
        )
        self._prefix_hits = self._counter("prefix_cache_hits", "Of these, tokens found.")
        self._undrafted = self._labelled_counter(
            "specgw_gateway_undrafted_rounds", "Decode rounds without a draft.", "reason"
        )
        self._undrafted_requests = self._labelled_counter(
            "specgw_gateway_undrafted_requests",
            "Requests admitted without a place on a proposer.",
            "reason",
        )
        self._failed = self._labelled_counter(
            "specgw_gateway_failed_requests", "Requests that ended with an error.", "error"
        )
        self.reopened = Counter(
            "specgw_gateway_reopened_requests",
            "Requests continued on another or restarted verifier.",
            registry=self.registry,
        )

    def watch_load(self, running: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Reads the two gauges from their owner whenever they are scraped."""
        self._running.set_function(running)
        self._waiting.set_function(waiting)

    def watch_ledger(self, ledger: Ledger) -> None:
        """Exports what is claimed of each service whenever it is scraped."""
        self.registry.register(_LedgerCollector(ledger))

    def count_undrafted_request(self, reason: UndraftedReason | None) -> None:
        """Counts a request that was admitted undrafted, if there is a reason."""
        if reason is not None:
            self._undrafted_requests.labels(*self._label_values, reason.value).inc()

    def time_request(self) -> "RequestTimer":
        """Begins to time a request that arrives now."""
        return RequestTimer(self)

    def count_finished(self, reason: str) -> None:
        """Counts a request that ended as it should."""
        self._success.labels(*self._label_values, reason).inc()

    def count_failed(self, error: str) -> None:
        """Counts a request that ended with an error or was cancelled."""
        self._failed.labels(*self._label_values, error).inc()

    def count_prefix(self, num_queried: int, num_found: int) -> None:
        """Counts what a verifier has found of one prompt in its cache."""
        self._prefix_queries.inc(num_queried)
        self._prefix_hits.inc(num_found)

    def count_speculation(self, stats: SpeculationStats) -> None:
        """Adds the totals of one request."""
        self._drafts.inc(stats.draft_count)
        self._draft_tokens.inc(stats.draft_token_count)
        self._accepted_tokens.inc(stats.accepted_token_count)
        for position, count in enumerate(stats.accepted_per_position):
            self._accepted_per_position.labels(*self._label_values, str(position)).inc(count)
        for reason, count in stats.undrafted.items():
            self._undrafted.labels(*self._label_values, reason.value).inc(count)

    def exposition(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(f"vllm:{name}", text, _LABELS, registry=self.registry)
        return gauge.labels(*self._label_values)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(f"vllm:{name}", text, _LABELS, registry=self.registry)
        return counter.labels(*self._label_values)

    def _labelled_counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(name, text, (*_LABELS, label), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(
            f"vllm:{name}", text, _LABELS, registry=self.registry, buckets=buckets
        )
        return histogram.labels(*self._label_values)


class _LedgerCollector(Collector):
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def collect(self) -> Iterator[Metric]:
        labels = ("service", "name", "kind")
        used = GaugeMetricFamily(
            "specgw_gateway_slots_used", "Claimed of a service.", labels=labels
        )
        capacity = GaugeMetricFamily(
            "specgw_gateway_slots_capacity", "Most that can be claimed of a service.", labels=labels
        )
        for service, name, account in self._ledger.accounts():
            for kind in ("sequences", "step_tokens", "kv_tokens"):
                used.add_metric([service, name, kind], getattr(account.used, kind))
                capacity.add_metric([service, name, kind], getattr(account.capacity, kind))
        yield used
        yield capacity


class RequestTimer:
    """Times one request, from its creation on."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrived = time.monotonic()
        self._last_token: float | None = None

    def admitted(self, num_prompt_tokens: int) -> None:
        """Notes that the request has a slot."""
        self._metrics.queue_time.observe(time.monotonic() - self._arrived)
        self._metrics.prompt_tokens.inc(num_prompt_tokens)

    def delivered(self, num_tokens: int) -> None:
        """Notes that a block of output tokens leaves now."""
        if not num_tokens:
            return
        now = time.monotonic()
        self._metrics.tokens.count(num_tokens)
        if self._last_token is None:
            self._metrics.first_token.observe(now - self._arrived)
        else:
            self._metrics.tokens.observe(num_tokens, now - self._last_token)
        self._last_token = now

    def finished(self, reason: str) -> None:
        """Notes that the output is complete."""
        self._metrics.request_latency.observe(time.monotonic() - self._arrived)
        self._metrics.count_finished(reason)
