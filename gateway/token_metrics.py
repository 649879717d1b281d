"""Counts and times tokens: what happens thousands of times a second. The caller is `metrics.py`.

prometheus_client's own metrics lock for every observation and take them one by one. These have one
writer, the event loop, which reads them too.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class TokenMetrics(Collector):
    """How many output tokens there were, and the time between them.

    Args:
        labels: Names of the labels.
        label_values: Their values.
        buckets: Upper bounds of the histogram's buckets, in seconds.
    """

    def __init__(
        self, labels: Sequence[str], label_values: Sequence[str], buckets: Sequence[float]
    ) -> None:
        self._labels = labels
        self._label_values = label_values
        self._bounds = [*buckets, math.inf]
        self._counts = [0] * len(self._bounds)
        self._sum_s = 0.0
        self._num_tokens = 0

    def count(self, num_tokens: int) -> None:
        """Counts output tokens."""
        self._num_tokens += num_tokens

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Notes the time since the block before; its tokens share it."""
        self._counts[bisect_left(self._bounds, seconds / num_tokens)] += num_tokens
        self._sum_s += seconds

    def collect(self) -> Iterator[Metric]:
        generated = CounterMetricFamily(
            "vllm:generation_tokens", "Output tokens delivered.", labels=self._labels
        )
        generated.add_metric(self._label_values, self._num_tokens)
        yield generated
        latency = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds",
            "Time between output tokens; those of one block share the time since the block before.",
            labels=self._labels,
        )
        bounds = map(floatToGoString, self._bounds)
        buckets = list(zip(bounds, itertools.accumulate(self._counts), strict=True))
        latency.add_metric(self._label_values, buckets, self._sum_s)
        yield latency
