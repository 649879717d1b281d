"""The proposer's Prometheus metrics. Counted by the engine thread, read by the scraper's."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from proposer_svc.proposer import ProposerLoad, RoundCounts
from proposer_svc.run_ahead import RunAheadCounts
from specgw.types import AnyBlock, DraftBlock, UndraftedReason

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class ProposerMetrics:
    """One proposer's metrics in a registry of their own, and the totals that its info tells."""

    def __init__(self, kv_capacity_tokens: int) -> None:
        self.registry = CollectorRegistry()
        self.draft_token_count = 0
        self.resync_count = 0
        self._draft_tokens = Counter(
            "specgw_proposer_draft_tokens", "Draft tokens made.", registry=self.registry
        )
        self._refused = Counter(
            "specgw_proposer_undrafted",
            "Blocks answered without tokens.",
            ["reason"],
            registry=self.registry,
        )
        self._resyncs = Counter(
            "specgw_proposer_resyncs",
            "Sessions that had to be opened again.",
            registry=self.registry,
        )
        self._rounds = Counter(
            "specgw_proposer_rounds",
            "Batches over all sessions that made blocks.",
            registry=self.registry,
        )
        self._round_passes = Counter(
            "specgw_proposer_round_passes",
            "Forward passes of the draft model in those batches: one each if drafting is parallel.",
            registry=self.registry,
        )
        self._counted = RoundCounts()
        self._taken_counted = 0
        self._ahead_tokens = Counter(
            "specgw_proposer_run_ahead_tokens",
            "Tokens drafted before they were asked for.",
            registry=self.registry,
        )
        self._ahead_used = Counter(
            "specgw_proposer_run_ahead_used_tokens",
            "Those of them that began a block; the others were wasted.",
            registry=self.registry,
        )
        self._ahead_rounds = Counter(
            "specgw_proposer_run_ahead_rounds",
            "Rounds of a session for which tokens were drafted ahead, by whether they were used.",
            ["outcome"],
            registry=self.registry,
        )
        self._ahead_counted = RunAheadCounts()
        self._draft_seconds = Histogram(
            "specgw_proposer_draft_seconds",
            "Time of one step over all sessions.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._sessions = Gauge("specgw_proposer_sessions", "Sessions held.", registry=self.registry)
        self._kv_used = Gauge(
            "specgw_proposer_kv_used_tokens",
            "Tokens of the KV cache in use, whole blocks counted.",
            registry=self.registry,
        )
        Gauge(
            "specgw_proposer_kv_capacity_tokens",
            "Capacity of the KV cache in tokens.",
            registry=self.registry,
        ).set(kv_capacity_tokens)
        for reason in UndraftedReason:
            self._refused.labels(reason.value)

    def count_blocks(self, blocks: Sequence[AnyBlock]) -> None:
        """Counts what was answered; of what was sent ahead, `count_taken` counts what is used."""
        answers = [block for block in blocks if isinstance(block, DraftBlock)]
        self._count_tokens(sum(len(block.token_ids) for block in answers))
        for block in answers:
            if block.reason is not None:
                self._refused.labels(block.reason.value).inc()
            if block.reason is UndraftedReason.RESYNC:
                self.resync_count += 1
                self._resyncs.inc()

    def count_taken(self, token_count: int) -> None:
        """Takes the count so far of draft tokens that were sent ahead and are tested."""
        before, self._taken_counted = self._taken_counted, token_count
        self._count_tokens(token_count - before)

    def _count_tokens(self, num_tokens: int) -> None:
        self.draft_token_count += num_tokens
        self._draft_tokens.inc(num_tokens)

    def observe_step(self, draft_s: float) -> None:
        """Takes one step's time."""
        self._draft_seconds.observe(draft_s)

    def count_rounds(self, rounds: RoundCounts) -> None:
        """Takes the counts so far."""
        self._rounds.inc(rounds.round_count - self._counted.round_count)
        self._round_passes.inc(rounds.pass_count - self._counted.pass_count)
        self._counted = rounds

    def count_ahead(self, ahead: RunAheadCounts) -> None:
        """Takes the counts so far."""
        before, self._ahead_counted = self._ahead_counted, ahead
        self._ahead_tokens.inc(ahead.token_count - before.token_count)
        self._ahead_used.inc(ahead.used_token_count - before.used_token_count)
        self._ahead_rounds.labels("hit").inc(ahead.hit_count - before.hit_count)
        self._ahead_rounds.labels("miss").inc(ahead.miss_count - before.miss_count)

    def set_load(self, load: ProposerLoad) -> None:
        """Takes what is in use now."""
        self._sessions.set(load.session_count)
        self._kv_used.set(load.kv_used_tokens)
