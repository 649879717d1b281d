"""The values that services exchange, as plain frozen objects. No protobuf, no torch, no I/O.

`wire.py` turns them into messages and back; names and meanings are those of `protos/specgw/v1`.
"""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specgw.errors import InvalidRequest
from specgw.hidden import HiddenFormat, HiddenStates
from specgw.structured_outputs import StructuredOutputsParams

PROTOCOL_VERSION = 1
SIMULATED_DEVICE = "simulated"
"""The device of a model that is none: its tokens are invented."""

MAX_TEMPERATURE = 2

_INT64_MAX = 2**63 - 1


class FinishReason(enum.Enum):
    """Why generation ended, by its OpenAI name."""

    STOP = "stop"
    LENGTH = "length"


class UndraftedReason(enum.Enum):
    """Why a session has no draft in a round."""

    DISABLED = "disabled"
    UNAVAILABLE = "unavailable"
    LATE = "late"
    NO_SLOT = "no_slot"
    NO_MEMORY = "no_memory"
    CONTEXT_LIMIT = "context_limit"
    RESYNC = "resync"
    EMPTY = "empty"
    ERROR = "error"
    NO_GAIN = "no_gain"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How output tokens are chosen. Names, defaults and ranges are vLLM's.

    What is a matter of text, `stop` and the flags from `skip_special_tokens` on, the gateway and
    `LLM` apply; they also tokenize `bad_words` and answer `n` times. The verifier never sees these.
    `max_tokens=None` means up to the context limit. `top_k` of 0 or -1 means all. `logprobs` and
    `prompt_logprobs` count the most probable tokens reported beside the token itself: None is no
    report, -1 the whole vocabulary.

    Raises:
        InvalidRequest: naming the field, its value and the rule.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    n: int = 1
    include_stop_str_in_output: bool = False
    detokenize: bool = True

    def __post_init__(self) -> None:
        for name, value in self._normalized().items():
            object.__setattr__(self, name, value)
        for name, is_valid, rule in self._rules():
            if not is_valid:
                raise InvalidRequest(name, getattr(self, name), rule)

    def _normalized(self) -> Mapping[str, object]:
        """Returns the fields that may be given in several forms, in the one kept."""
        allowed = self.allowed_token_ids
        return {
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "logit_bias": dict(self.logit_bias or {}),
            "bad_words": tuple(dict.fromkeys(self.bad_words or ())),
            "bad_words_token_ids": tuple(tuple(ids) for ids in self.bad_words_token_ids),
            "allowed_token_ids": None if allowed is None else tuple(allowed),
        }

    def _rules(self) -> Sequence[tuple[str, bool, str]]:
        return (*self._choice_rules(), *self._penalty_rules(), *self._end_rules())

    def _choice_rules(self) -> Sequence[tuple[str, bool, str]]:
        return (
            (
                "temperature",
                math.isfinite(self.temperature) and 0 <= self.temperature <= MAX_TEMPERATURE,
                f"must be in [0, {MAX_TEMPERATURE}]",
            ),
            ("top_p", 0 < self.top_p <= 1, "must be in (0, 1]"),
            ("top_k", self.top_k >= -1, "must be at least 1, or 0 or -1 to switch it off"),
            ("min_p", 0 <= self.min_p <= 1, "must be in [0, 1]"),
            (
                "seed",
                self.seed is None or -_INT64_MAX - 1 <= self.seed <= _INT64_MAX,
                "must fit 64 bits",
            ),
            ("n", self.n >= 1, "must be at least 1"),
            ("n", self.n == 1 or not self.is_greedy, "must be 1 at temperature 0"),
            *(
                (name, count is None or count >= -1, "must be at least 0, or -1 for all")
                for name, count in (
                    ("logprobs", self.logprobs),
                    ("prompt_logprobs", self.prompt_logprobs),
                )
            ),
        )

    def _penalty_rules(self) -> Sequence[tuple[str, bool, str]]:
        repetition = self.repetition_penalty
        return (
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "must be in [-2, 2]"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "must be in [-2, 2]"),
            (
                "repetition_penalty",
                math.isfinite(repetition) and repetition > 0,
                "must be a finite number above 0",
            ),
            (
                "logit_bias",
                all(map(math.isfinite, self.logit_bias.values())),
                "must have finite values",
            ),
            ("logit_bias", len(self.logit_bias) <= 1024, "must have at most 1024 entries"),
            ("bad_words", all(self.bad_words), "must not contain an empty string"),
            (
                "bad_words",
                len(self.bad_words_token_ids) <= 1000,
                "must have at most 1000 forms as token ids",
            ),
            ("bad_words_token_ids", all(self.bad_words_token_ids), "must not be empty"),
            ("allowed_token_ids", self.allowed_token_ids != (), "must not be empty"),
        )

    def _end_rules(self) -> Sequence[tuple[str, bool, str]]:
        return (
            (
                "max_tokens",
                self.max_tokens is None or self.max_tokens >= 1,
                "must be at least 1",
            ),
            ("min_tokens", self.min_tokens >= 0, "must not be negative"),
            (
                "min_tokens",
                self.max_tokens is None or self.min_tokens <= self.max_tokens,
                f"must be at most max_tokens = {self.max_tokens}",
            ),
            ("stop", all(self.stop), "must not contain an empty string"),
            ("stop", len(self.stop) <= 16, "must have at most 16 strings"),
            ("stop", self.detokenize or not self.stop, "needs detokenize"),
            ("stop_token_ids", len(self.stop_token_ids) <= 1024, "must have at most 1024 ids"),
            ("stop_token_ids", all(i >= 0 for i in self.stop_token_ids), "must not be negative"),
        )

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always chosen; vLLM's threshold."""
        return self.temperature < 1e-5

    def check_logprobs(self, max_logprobs: int) -> None:
        """Refuses more log probabilities for a token than are allowed; -1 allows any number.

        Raises:
            InvalidRequest: naming the field, its value and the limit.
        """
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and max_logprobs != -1 and not 0 <= count <= max_logprobs:
                raise InvalidRequest(name, count, f"must be at most max_logprobs = {max_logprobs}")

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that occurred before are more or less probable for it."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    def token_ids(self) -> Mapping[str, Sequence[int]]:
        """Returns every token id that the parameters name, by field."""
        return {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": tuple(self.logit_bias),
            "bad_words": tuple(i for ids in self.bad_words_token_ids for i in ids),
            "allowed_token_ids": self.allowed_token_ids or (),
        }


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What one service has loaded."""

    name: str
    architecture: str
    vocab_size: int
    vocab_fingerprint: str
    max_model_len: int
    dtype: str
    device: str

    @property
    def is_simulated(self) -> bool:
        """Whether no model runs."""
        return self.device == SIMULATED_DEVICE


@dataclass(frozen=True, slots=True)
class Hello:
    """Introduces a verifier to a proposer. An empty or absent expectation is not compared."""

    verifier_id: str
    target_model: ModelDescription
    max_draft_tokens: int
    protocol_version: int = PROTOCOL_VERSION
    method: str = ""
    draft_model: str = ""
    extra_slots_per_session: int | None = None
    hidden: HiddenFormat | None = None  # hidden states that it can send
    draft_sample_method: str = ""
    takes_blocks_ahead: bool = False


@dataclass(frozen=True, slots=True)
class VocabMappingSummary:
    """How a draft model's vocabulary is mapped to another one of the target.

    Coverages are shares, in [0, 1], of the tokens of each side that stand for text.
    """

    method: str
    fingerprint: str
    target_coverage: float
    draft_coverage: float


@dataclass(frozen=True, slots=True)
class HelloAck:
    """What a proposer offers a verifier, and the hidden states that it needs for that.

    No `vocab_mapping` if both models share a vocabulary.
    """

    proposer_id: str
    method: str
    draft_model: ModelDescription
    max_draft_tokens: int
    extra_slots_per_session: int
    max_sessions: int
    kv_lookahead_per_session: int = 0
    max_num_batched_tokens: int = 0
    kv_capacity_tokens: int = 0
    protocol_version: int = PROTOCOL_VERSION
    hidden: HiddenFormat | None = None
    vocab_mapping: VocabMappingSummary | None = None
    draft_sample_method: str = ""


@dataclass(frozen=True, slots=True)
class ProposerStatus:
    """A verifier's view of one proposer. `offer` is the last one it made, connected or not."""

    address: str
    is_connected: bool
    session_count: int
    detail: str
    offer: HelloAck | None = None


@dataclass(frozen=True, slots=True)
class VerifierInfo:
    """What a verifier has loaded, how much it can hold, and the proposers it knows."""

    verifier_id: str
    target_model: ModelDescription
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_capacity_tokens: int
    max_draft_tokens: int
    kv_lookahead_per_session: int
    proposers: Sequence[ProposerStatus] = ()
    protocol_version: int = PROTOCOL_VERSION
    generates_many: bool = False  # whether it has `GenerateMany`


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """How a request's drafts are sampled; fields are those of `SamplingParams`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Begins a session from the whole context, or begins it anew.

    The first `prompt_length` tokens are the prompt; what follows them is `structured_outputs`. No
    `sampling` means greedy.
    """

    session_id: int
    token_ids: Sequence[int]
    cache_salt: str = ""
    structured_outputs: StructuredOutputsParams | None = None
    prompt_length: int = 0
    sampling: DraftSampling | None = None


class Commit(NamedTuple):
    """Appends output tokens at `base_length` and asks for up to `max_draft_tokens` more.

    None are asked for if `num_taken` draft tokens, which came ahead of the commit, are tested next.
    """

    session_id: int
    base_length: int
    token_ids: Sequence[int]
    max_draft_tokens: int
    hidden: HiddenStates | None = None
    num_taken: int = 0


@dataclass(frozen=True, slots=True)
class ProposeStep:
    """Changes to a verifier's sessions, applied in the order open, commit, close."""

    open: Sequence[OpenSession] = ()
    commit: Sequence[Commit] = ()
    close: Sequence[int] = ()

    def __bool__(self) -> bool:
        return bool(self.open or self.commit or self.close)


class AcceptanceRule(enum.Enum):
    """How draft tokens were chosen, and so how a verifier may test them."""

    ONE_HOT = "one_hot"
    COUPLED = "coupled"
    PROBS = "probs"


MAX_DRAFT_SUPPORT = 1024
"""Most tokens of a draft law; a verifier tests what comes with a larger one as one-hot."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenProbs:
    """The law that one draft token was drawn from: the ids that have probability."""

    token_ids: npt.NDArray[np.int32]  # [support size]
    probs: npt.NDArray[np.float32]  # [support size]


class DraftBlock(NamedTuple):
    """Draft tokens that continue the context of `base_length` tokens, or the reason for none.

    `draft_probs` has a law for each token exactly if the rule is PROBS.
    """

    session_id: int
    base_length: int
    token_ids: Sequence[int] = ()
    reason: UndraftedReason | None = None
    draft_s: float = 0.0
    rule: AcceptanceRule = AcceptanceRule.ONE_HOT
    draft_probs: Sequence[TokenProbs] = ()


MAX_BLOCKS_AHEAD = 64
"""Most outcomes of one test that blocks are sent for."""


class BlocksAhead(NamedTuple):
    """Blocks for some outcomes of the test of the block that continues `base_length` tokens.

    An outcome is the number of draft tokens that are accepted, and the target's token after them.
    The blocks have equally many tokens. No law is sent with them: they are tested as one-hot.
    """

    session_id: int
    base_length: int
    accepted_counts: Sequence[int]  # [num_outcomes]
    target_token_ids: Sequence[int]  # [num_outcomes]
    token_ids: Sequence[int]  # [num_outcomes * tokens of a block]

    @property
    def block_size(self) -> int:
        """Tokens of each block."""
        return len(self.token_ids) // len(self.accepted_counts)

    def find(self, num_accepted: int, token_id: int) -> Sequence[int]:
        """Returns the block of an outcome; no tokens if there is none."""
        size = self.block_size
        outcomes = zip(self.accepted_counts, self.target_token_ids, strict=True)
        for i, outcome in enumerate(outcomes):
            if outcome == (num_accepted, token_id):
                return self.token_ids[i * size : (i + 1) * size]
        return ()


AnyBlock = DraftBlock | BlocksAhead
"""What a proposer sends: answers, and what nobody has asked for yet."""


class Round(NamedTuple):
    """What became of the draft tokens of one request in one step.

    `undrafted` says why a decode round had none; it is None for what was no decode round.
    """

    num_drafted: int = 0
    num_accepted: int = 0
    undrafted: UndraftedReason | None = None
    is_synthetic: bool = False  # tokens were accepted at given rates, whatever they were


@dataclass(slots=True)
class SpeculationStats:
    """Counts what became of draft tokens. Only the owner adds; readers take copies.

    A draft is a round with at least one token to verify, as in vLLM. Accepted tokens are counted
    after the output was cut at its end; bonus tokens are not among them.
    """

    draft_count: int = 0
    draft_token_count: int = 0
    accepted_token_count: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    undrafted: dict[UndraftedReason, int] = field(default_factory=dict)
    is_synthetic: bool = False  # as of some round

    def count(self, round: Round) -> None:
        """Counts a round of any kind."""
        if round.num_drafted:
            self.count_round(round.num_drafted, round.num_accepted)
            self.is_synthetic |= round.is_synthetic
        elif round.undrafted is not None:
            self.count_undrafted(round.undrafted)

    def since(self, before: "SpeculationStats") -> Round:
        """Returns the one round that was counted since a copy was taken."""
        reasons = self.undrafted.items()
        return Round(
            self.draft_token_count - before.draft_token_count,
            self.accepted_token_count - before.accepted_token_count,
            next((one for one, n in reasons if n > before.undrafted.get(one, 0)), None),
            self.is_synthetic,
        )

    def count_round(self, num_drafted: int, num_accepted: int) -> None:
        """Counts a round that verified `num_drafted` (at least 1) tokens."""
        self.draft_count += 1
        self.draft_token_count += num_drafted
        self.accepted_token_count += num_accepted
        missing = num_drafted - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * missing)
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1

    def count_undrafted(self, reason: UndraftedReason) -> None:
        """Counts a decode round without a draft."""
        self.undrafted[reason] = self.undrafted.get(reason, 0) + 1

    def plus(self, other: "SpeculationStats") -> "SpeculationStats":
        """Returns the sum of both."""
        undrafted = dict(self.undrafted)
        for reason, count in other.undrafted.items():
            undrafted[reason] = undrafted.get(reason, 0) + count
        positions = zip_longest(
            self.accepted_per_position, other.accepted_per_position, fillvalue=0
        )
        return SpeculationStats(
            draft_count=self.draft_count + other.draft_count,
            draft_token_count=self.draft_token_count + other.draft_token_count,
            accepted_token_count=self.accepted_token_count + other.accepted_token_count,
            accepted_per_position=[one + more for one, more in positions],
            undrafted=undrafted,
            is_synthetic=self.is_synthetic or other.is_synthetic,
        )

    def copy(self) -> "SpeculationStats":
        """Returns a snapshot."""
        return SpeculationStats(
            self.draft_count,
            self.draft_token_count,
            self.accepted_token_count,
            list(self.accepted_per_position),
            dict(self.undrafted),
            self.is_synthetic,
        )


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request to a verifier. It shares cached prefixes with requests of the same salt only."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling_params: SamplingParams
    output_token_ids: Sequence[int] = ()
    proposer_address: str = ""
    max_draft_tokens: int | None = None
    cache_salt: str = ""
    prediction: Sequence[int] = ()

    def samples(self) -> list["GenerateRequest"]:
        """Returns a request for each of the `n` samples of one with a seed; their seeds follow it.

        As in vLLM, the samples are independent requests.
        """
        params = self.sampling_params
        if params.n == 1:
            return [self]
        assert params.seed is not None, "samples without a seed could not be told apart"
        return [
            replace(
                self,
                request_id=f"{self.request_id}-{index}",
                sampling_params=replace(params, n=1, seed=_wrapped(params.seed + index)),
            )
            for index in range(params.n)
        ]


def _wrapped(seed: int) -> int:
    """Returns the seed as a signed number of 64 bits."""
    return (seed + 2**63) % 2**64 - 2**63


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How probable one token was, and the most probable ones beside it.

    Attributes:
        token_ids: The token itself, then the most probable ones in order, itself again among them.
        logprobs: Natural logarithms of their probabilities in the model's own distribution.
        rank: The token's place among all by probability, from 1.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int


class GenerateOutput(NamedTuple):
    """Output tokens committed in one step; the last one of a request has a finish reason.

    The first has the seed and, with prefix caching, how many tokens were in the cache already.
    If they were asked for, `logprobs` has an entry for each token, and `prompt_logprobs` of the
    first output one for each token of the prompt but the first.
    """

    token_ids: Sequence[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    seed: int | None = None
    round: Round = Round()
    cached_token_count: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
