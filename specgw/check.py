"""Judges a whole configuration without loading weights, and says what follows from it.

`specgw check` prints it, `specgw serve` too when it starts. No torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specgw.budget import decode_rows, draft_slots
from specgw.config import EngineArgs, validate_config
from specgw.errors import ConfigError
from specgw.model_checks import (
    ModelPair,
    check_models,
    mask_token,
    notice_models,
    read_models,
)
from specgw.online import LocalModels, ServiceState, ask_services
from specgw.slots import SLOTS_TABLE, extra_slots, kv_lookahead
from specgw.supported import not_run_yet, without_effect
from specgw.vllm_names import ALIASES
from specgw.vocab import tokenizer_size, vocab_fingerprint
from specgw.vocab_mapping import Coverage, choose_methods

_HIDDEN = "(hidden)"
_WITHOUT_PROPOSER = (
    "no proposer is started or asked: the verifier itself drafts, since the method has no model "
    "and specgw.verifier.proposers names none"
)
_ABOUT_MODELS = ("model", "speculative_config", *ALIASES)
# What is looked at if the whole is not valid: the first of these that is.
_MODEL_KEYS = (
    (*_ABOUT_MODELS, "dtype", "max_model_len", "tensor_parallel_size"),
    _ABOUT_MODELS,
    ("model",),
)


@dataclass(frozen=True, slots=True)
class SlotsLine:
    """One row of vLLM's slots table at this K; `is_used` marks the configured method."""

    algorithm: str
    method: str
    parallel_drafting: bool
    extra_slots: int
    kv_lookahead: int
    is_used: bool


@dataclass(frozen=True, slots=True)
class Budget:
    """What one service can do at once.

    Attributes:
        service: `verifier` or `proposer`.
        model: The model it runs.
        max_requests: Requests, or sessions, at once.
        rows_per_request: Input rows of one request in one step.
        max_num_batched_tokens: Input rows in one step.
        kv_lookahead: KV slots of a request beyond its tokens.
        kv_cache_tokens: Size of the KV cache: as configured, else full contexts for everybody,
            which a machine with less memory cuts down. None if the context's length is unknown,
            and without a model.
        kv_bytes_per_token: Bytes of keys and values of one token. None if unknown.
    """

    service: str
    model: str
    max_requests: int
    rows_per_request: int
    max_num_batched_tokens: int
    kv_lookahead: int
    kv_cache_tokens: int | None
    kv_bytes_per_token: int | None

    @property
    def requests_per_step(self) -> int:
        """How many requests decode in a step, with room left for a chunk of a prompt."""
        rows = decode_rows(self.max_num_batched_tokens, self.rows_per_request)
        return min(self.max_requests, rows // self.rows_per_request)

    @property
    def prefill_rows(self) -> int:
        """Rows left for prompts if as many requests as possible take part in a step."""
        return self.max_num_batched_tokens - self.requests_per_step * self.rows_per_request

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it for machines."""
        derived = {
            "requests_per_step": self.requests_per_step,
            "prefill_rows": self.prefill_rows,
        }
        return asdict(self) | derived


@dataclass(slots=True)
class Report:
    """What was found. With problems, the rest is what could be found in spite of them."""

    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    args: EngineArgs | None = None
    pair: ModelPair | None = None
    coverage: Coverage | None = None
    services: list[ServiceState] = field(default_factory=list)

    @property
    def slots(self) -> list[SlotsLine]:
        """The slots table of vLLM at the configured K; empty without speculation."""
        config = self.args.speculative_config if self.args else None
        if config is None:
            return []
        k = config.num_speculative_tokens
        used = (config.method, config.parallel_drafting)
        return [
            SlotsLine(
                row.algorithm,
                row.method,
                row.parallel_drafting,
                extra_slots(row.method, k, row.parallel_drafting),
                kv_lookahead(row.method, k, row.parallel_drafting),
                used == (row.method, row.parallel_drafting),
            )
            for row in SLOTS_TABLE
        ]

    @property
    def budgets(self) -> list[Budget]:
        """What each service can do at once."""
        if self.args is None:
            return []
        budgets = [_verifier_budget(self.args, self.pair)]
        if self.args.speculative_config is not None and not self.args.drafts_locally:
            budgets.append(_proposer_budget(self.args, self.pair))
        return budgets

    @property
    def vocabulary(self) -> dict[str, Any]:
        """How the draft's vocabulary relates to the target's; empty without a draft model."""
        relation = self.pair.vocab_relation if self.pair else None
        if relation is None:
            return {}
        found = {**asdict(relation), "kinship": relation.kinship.value}
        if self.coverage is not None:
            assert self.pair is not None
            assert self.pair.drafting is not None
            found["coverage"] = asdict(self.coverage)
            found["method"] = str(choose_methods(self.pair.drafting, self.coverage))
        return found

    @property
    def mask_token(self) -> dict[str, Any]:
        """Which token a parallel draft is masked with, and which field says so."""
        drafting = self.pair.drafting if self.pair else None
        if self.pair is None or self.pair.draft is None or drafting is None:
            return {}
        found = mask_token(self.pair.draft.config) if drafting.parallel_drafting else None
        return {"field": found[0], "id": found[1]} if found else {}

    def effective_config(self) -> dict[str, Any]:
        """Returns every key with its value, but for secrets and what is not set."""
        if self.args is None:
            return {}
        config = self.args.model_dump(mode="json", exclude_none=True)
        if self.args.api_key:
            config["api_key"] = [_HIDDEN] * len(self.args.api_key)
        return config


def check(
    raw: Mapping[str, Any], with_models: Callable[[EngineArgs], bool] = lambda _: True
) -> Report:
    """Judges a configuration.

    Args:
        raw: A nested mapping, as `merge_config` returns it.
        with_models: Whether the models' files are on this machine, or may be fetched to it.
    """
    report = Report()
    try:
        report.args = validate_config(raw)
    except ConfigError as error:
        report.problems += error.problems
    args = report.args or _valid_models(raw)
    if args is None:
        return report
    report.notices += without_effect(args)
    if args.drafts_locally:
        report.notices.append(_WITHOUT_PROPOSER)
    if with_models(args):
        try:
            report.pair = read_models(args)
            report.problems += check_models(report.pair)
            report.coverage = _coverage(report.pair)
            report.notices += notice_models(report.pair)
        except ConfigError as error:
            report.problems += error.problems
    report.problems += not_run_yet(args)
    if args.specgw.simulation is not None:
        report.notices.append("specgw.simulation: SIMULATION: no model runs, tokens are invented")
    report.notices += _tight_budgets(report.budgets)
    return report


async def check_online(report: Report, timeout_s: float) -> None:
    """Adds to a report what the running services say."""
    if report.args is None:
        return
    models = LocalModels()
    if report.pair is not None:
        target, draft = report.pair.target.directory, report.pair.draft
        models = LocalModels(
            vocab_fingerprint(target),
            vocab_fingerprint(draft.directory) if draft else "",
            tokenizer_size(target) or 0,
        )
    report.services += await ask_services(report.args, models, timeout_s)
    for state in report.services:
        report.problems += state.messages


def _valid_models(raw: Mapping[str, Any]) -> EngineArgs | None:
    """Returns what an invalid configuration says of its models, if that much is valid."""
    hyphened = {str(key).replace("-", "_"): value for key, value in raw.items()}
    for keys in _MODEL_KEYS:
        try:
            return validate_config({key: hyphened[key] for key in keys if key in hyphened})
        except ConfigError:
            continue
    return None


def _coverage(pair: ModelPair) -> Coverage | None:
    try:
        return pair.vocab_mapping.coverage if pair.vocab_mapping else None
    except ConfigError:
        return None  # a problem that `check_models` has told


def _verifier_budget(args: EngineArgs, pair: ModelPair | None) -> Budget:
    lengths = [args.max_model_len, pair.target.max_model_len if pair else None]
    configured = args.specgw.verifier.kv_cache_tokens
    return Budget(
        service="verifier",
        model=args.model,
        max_requests=args.max_num_seqs,
        rows_per_request=1 + args.max_draft_tokens,
        max_num_batched_tokens=args.max_num_batched_tokens,
        kv_lookahead=draft_slots(args.speculative_config).kv_lookahead,
        kv_cache_tokens=configured or _full_contexts(args.max_num_seqs, lengths),
        kv_bytes_per_token=pair.target.kv_bytes_per_token(args.dtype) if pair else None,
    )


def _proposer_budget(args: EngineArgs, pair: ModelPair | None) -> Budget:
    config, settings = args.speculative_config, args.specgw.proposer
    assert config is not None  # or there is no proposer
    draft = pair.draft if pair else None
    lengths = [config.max_model_len, args.max_model_len, draft.max_model_len if draft else None]
    kv_cache_tokens = settings.kv_cache_tokens or _full_contexts(settings.max_sessions, lengths)
    return Budget(
        service="proposer",
        model=config.model,
        max_requests=settings.max_sessions,
        rows_per_request=1 + draft_slots(config).extra_rows,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        kv_lookahead=draft_slots(config).kv_lookahead,
        kv_cache_tokens=kv_cache_tokens if config.has_draft_checkpoint else None,
        kv_bytes_per_token=draft.kv_bytes_per_token(args.dtype) if draft else None,
    )


def _full_contexts(max_requests: int, lengths: Sequence[int | None]) -> int | None:
    known = [length for length in lengths if length is not None]
    return max_requests * min(known) if known else None


def _tight_budgets(budgets: Sequence[Budget]) -> list[str]:
    return [
        f"{budget.service}: a step of {budget.max_num_batched_tokens} rows holds "
        f"{budget.requests_per_step} of {budget.max_requests} requests with "
        f"{budget.rows_per_request} rows each"
        for budget in budgets
        if budget.requests_per_step < budget.max_requests
    ]
