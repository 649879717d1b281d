"""The verifier's Prometheus metrics: counters from the scheduler's snapshot, and histograms."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from verifier_svc.scheduler import Snapshot, StepReport

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


class VerifierMetrics:
    """One verifier's metrics in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._forward_seconds = Histogram(
            "specgw_verifier_forward_seconds",
            "Time of one forward pass.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._sample_seconds = Histogram(
            "specgw_verifier_sample_seconds",
            "Time from the logits of one forward pass to its tokens.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._wait_seconds = Histogram(
            "specgw_verifier_draft_wait_seconds",
            "Time before one forward pass that was waited for blocks.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._rows = Histogram(
            "specgw_verifier_step_rows",
            "Input rows of one forward pass.",
            buckets=_ROWS,
            registry=self.registry,
        )
        self._answer_seconds = Histogram(
            "specgw_verifier_draft_answer_seconds",
            "Time from asking for a block to its arrival.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._draft_seconds = Histogram(
            "specgw_verifier_draft_work_seconds",
            "Part of the answer time that the proposer worked.",
            buckets=_SECONDS,
            registry=self.registry,
        )

    def watch(self, read: Callable[[], Snapshot], kv_capacity_tokens: int) -> None:
        """Exports the scheduler's snapshot at every scrape."""
        self.registry.register(_SnapshotCollector(read, kv_capacity_tokens))

    def observe_step(self, report: StepReport) -> None:
        """Takes one step's figures."""
        self._forward_seconds.observe(report.forward_s)
        self._sample_seconds.observe(report.sample_s)
        self._wait_seconds.observe(report.wait_s)
        self._rows.observe(report.num_rows)

    def observe_answer(self, answer_s: float, draft_s: float) -> None:
        """Takes one block's figures."""
        self._answer_seconds.observe(answer_s)
        self._draft_seconds.observe(draft_s)


class _SnapshotCollector(Collector):
    def __init__(self, read: Callable[[], Snapshot], kv_capacity_tokens: int) -> None:
        self._read = read
        self._kv_capacity_tokens = kv_capacity_tokens

    def collect(self) -> Iterator[Metric]:
        snapshot = self._read()
        for name, text, value in (
            ("running_sessions", "Sessions that take part in steps.", snapshot.running_count),
            ("waiting_requests", "Requests that wait for room.", snapshot.waiting_count),
            ("kv_used_tokens", "Tokens of the KV cache in use.", snapshot.kv_used_tokens),
            ("kv_capacity_tokens", "Size of the KV cache.", self._kv_capacity_tokens),
        ):
            yield GaugeMetricFamily(f"specgw_verifier_{name}", text, value=value)
        stats = snapshot.speculation
        for name, text, value in (
            ("steps", "Forward passes.", snapshot.step_count),
            ("output_tokens", "Output tokens committed.", snapshot.output_token_count),
            ("preemptions", "Sessions whose KV cache was taken.", snapshot.preemption_count),
            ("prefix_cache_queries", "Tokens of started requests.", snapshot.prefix_query_count),
            ("prefix_cache_hits", "Of these, tokens in the cache.", snapshot.prefix_hit_count),
            ("draft_tokens", "Draft tokens verified.", stats.draft_token_count),
            ("accepted_tokens", "Draft tokens accepted.", stats.accepted_token_count),
        ):
            yield CounterMetricFamily(f"specgw_verifier_{name}", text, value=value)
        yield _drafts(snapshot)
        yield _undrafted(snapshot)
        yield _connected(snapshot)


def _drafts(snapshot: Snapshot) -> Metric:
    rounds = CounterMetricFamily(
        "specgw_verifier_drafts",
        "Rounds with draft tokens, by where they were found.",
        labels=["source"],
    )
    for source, count in snapshot.drafts_by_source.items():
        rounds.add_metric([source], count)
    return rounds


def _undrafted(snapshot: Snapshot) -> Metric:
    rounds = CounterMetricFamily(
        "specgw_verifier_undrafted_rounds", "Decode rounds without a draft.", labels=["reason"]
    )
    for reason, count in snapshot.speculation.undrafted.items():
        rounds.add_metric([reason.value], count)
    return rounds


def _connected(snapshot: Snapshot) -> Metric:
    connected = GaugeMetricFamily(
        "specgw_verifier_proposer_connected", "Whether a proposer can be asked.", labels=["address"]
    )
    for proposer in snapshot.proposers:
        connected.add_metric([proposer.address], float(proposer.is_connected))
    return connected
