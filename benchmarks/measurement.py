"""The values a benchmark run produces and what is derived from them. No process, no clock."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from statistics import median


@dataclass(frozen=True)
class Completion:
    """One answer, in token ids, so that systems can be compared exactly."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class SpeculationCounts:
    """Totals of vLLM's speculation counters, and rounds that asked for a draft and had none."""

    draft_count: int = 0
    draft_token_count: int = 0
    accepted_token_count: int = 0
    undrafted_count: int = 0

    def __add__(self, other: "SpeculationCounts") -> "SpeculationCounts":
        return SpeculationCounts(
            self.draft_count + other.draft_count,
            self.draft_token_count + other.draft_token_count,
            self.accepted_token_count + other.accepted_token_count,
            self.undrafted_count + other.undrafted_count,
        )

    def __sub__(self, other: "SpeculationCounts") -> "SpeculationCounts":
        return SpeculationCounts(
            self.draft_count - other.draft_count,
            self.draft_token_count - other.draft_token_count,
            self.accepted_token_count - other.accepted_token_count,
            self.undrafted_count - other.undrafted_count,
        )

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted per draft token; None where nothing was drafted."""
        return (
            self.accepted_token_count / self.draft_token_count if self.draft_token_count else None
        )

    @property
    def accepted_per_round(self) -> float | None:
        """Accepted tokens per drafted round, without the bonus token."""
        return self.accepted_token_count / self.draft_count if self.draft_count else None

    @property
    def undrafted_rate(self) -> float | None:
        """Undrafted per round; None where there was no such round."""
        rounds = self.draft_count + self.undrafted_count
        return self.undrafted_count / rounds if rounds else None


@dataclass(frozen=True, order=True)
class SystemId:
    """Which product, and with how many draft tokens a round; 0 is plain decoding.

    `variant` tells apart ways to run a product; its baseline is the product's plain decoding.
    """

    product: str
    draft_tokens: int
    variant: str = ""

    @property
    def plain(self) -> "SystemId":
        """The same product without drafts."""
        return SystemId(self.product, 0)

    def __str__(self) -> str:
        how = f"K={self.draft_tokens}" if self.draft_tokens else "plain"
        return " ".join(filter(None, (self.product, self.variant, how)))


@dataclass(frozen=True)
class StepTimes:
    """Totals over the steps of one batch, in seconds. Drafting overlaps with waiting for it.

    A step is waiting, forward, sampling and the rest, which is the caller's time less these.
    """

    step_count: float
    wait: float  # the verifier, for blocks
    draft: float  # the proposer's work
    wire: float  # from asking for a block to its arrival, without that work
    forward: float  # the target's passes
    sample: float  # from logits to tokens

    def __sub__(self, other: "StepTimes") -> "StepTimes":
        pairs = zip(astuple(self), astuple(other), strict=True)
        return StepTimes(*(mine - others for mine, others in pairs))


@dataclass(frozen=True)
class Batch:
    """What a system returned for one batch of prompts, in the order of the prompts."""

    seconds: float
    completions: tuple[Completion, ...]
    speculation: SpeculationCounts
    times: StepTimes | None = None


@dataclass(frozen=True)
class Run:
    """One batch through one system, with the cores in use meanwhile.

    `own_cores` is what the system's processes used; `other_cores` is everything else on the
    machine, idle systems included: a figure well above zero means that the run was disturbed.
    """

    system: SystemId
    batch_size: int
    repetition: int
    batch: Batch
    own_cores: float
    other_cores: float
    peak_bytes: int

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second, prefill included."""
        return sum(len(c.token_ids) for c in self.batch.completions) / self.batch.seconds


@dataclass(frozen=True)
class Difference:
    """Where two answers to one prompt part: the first position that differs, and both tokens."""

    context_token_ids: tuple[int, ...]
    position: int
    expected_token_id: int | None
    actual_token_id: int | None


def first_difference(expected: Completion, actual: Completion) -> Difference | None:
    """Returns where `actual` leaves `expected`, or None if all token ids agree."""
    length = max(len(expected.token_ids), len(actual.token_ids))
    for position in range(length):
        wanted, got = _at(expected.token_ids, position), _at(actual.token_ids, position)
        if wanted != got:
            context = expected.prompt_token_ids + expected.token_ids[:position]
            return Difference(context, position, wanted, got)
    return None


def _at(token_ids: Sequence[int], position: int) -> int | None:
    return token_ids[position] if position < len(token_ids) else None


@dataclass(frozen=True)
class Summary:
    """All repetitions of one system at one batch size."""

    system: SystemId
    batch_size: int
    tokens_per_second: float
    slowest: float
    fastest: float
    speculation: SpeculationCounts
    own_cores: float
    other_cores: float
    peak_bytes: int


def summarize(runs: Sequence[Run]) -> Summary:
    """Takes medians over the repetitions of one system at one batch size."""
    speeds = [run.tokens_per_second for run in runs]
    return Summary(
        system=runs[0].system,
        batch_size=runs[0].batch_size,
        tokens_per_second=median(speeds),
        slowest=min(speeds),
        fastest=max(speeds),
        speculation=sum((run.batch.speculation for run in runs), SpeculationCounts()),
        own_cores=median(run.own_cores for run in runs),
        other_cores=median(run.other_cores for run in runs),
        peak_bytes=max(run.peak_bytes for run in runs),
    )


def paired_ratio(runs: Sequence[Run], baseline: Sequence[Run]) -> float:
    """Returns the median over repetitions of how much faster `runs` are than `baseline`.

    Each repetition is compared with the same repetition of the baseline, which had the same prompts
    and ran close in time, so neighbours' noise and differences between prompts cancel.
    """
    speeds = {run.repetition: run.tokens_per_second for run in baseline}
    return median(run.tokens_per_second / speeds[run.repetition] for run in runs)
