"""What must hold between the keys of `speculative_config`: vLLM 0.32.0's rules and a few more.

Data. A message comes after the key and a colon; `{c.KEY}` is the key's value. Rules that vLLM does
not have, or not when it loads a configuration, are in `vllm_differences.py`.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from specgw.config_rules import Rule

NGRAM_METHODS = ("ngram", "ngram_gpu")
ALWAYS_PARALLEL_METHODS = ("dflash", "dspark")
_WITHOUT_LAW = (*NGRAM_METHODS, "suffix")
_MAY_BE_PARALLEL = ("draft_model", "eagle", "eagle3", *ALWAYS_PARALLEL_METHODS)


def _is_decreasing(rates: Sequence[float]) -> bool:
    return all(later <= earlier for earlier, later in itertools.pairwise(rates))


def _is_apart(schedule: Sequence[tuple[int, int, int]]) -> bool:
    ordered = sorted(schedule)
    return all(first[1] < second[0] for first, second in itertools.pairwise(ordered))


def _rates(c: Any) -> Sequence[float]:
    """The rates that count, if any."""
    rates: Sequence[float] | None = c.synthetic_acceptance_rates
    return rates or () if c.rejection_sample_method == "synthetic" else ()


def _schedule(c: Any) -> Sequence[tuple[int, int, int]]:
    return c.num_speculative_tokens_per_batch_size or ()


_SYNTHETIC = (
    Rule(
        "rejection_sample_method",
        lambda c: (
            c.rejection_sample_method != "synthetic"
            or (c.synthetic_acceptance_rates is None) != (c.synthetic_acceptance_length is None)
        ),
        "synthetic needs exactly one of synthetic_acceptance_rates and synthetic_acceptance_length",
    ),
    Rule(
        "synthetic_acceptance_rates",
        lambda c: c.rejection_sample_method == "synthetic" or c.synthetic_acceptance_rates is None,
        "goes only with rejection_sample_method synthetic, got {c.rejection_sample_method}",
    ),
    Rule(
        "synthetic_acceptance_length",
        lambda c: c.rejection_sample_method == "synthetic" or c.synthetic_acceptance_length is None,
        "goes only with rejection_sample_method synthetic, got {c.rejection_sample_method}",
    ),
    Rule(
        "synthetic_acceptance_rates",
        lambda c: (
            c.rejection_sample_method != "synthetic"
            or c.synthetic_acceptance_rates is None
            or len(c.synthetic_acceptance_rates) == c.num_speculative_tokens
        ),
        "must have num_speculative_tokens = {c.num_speculative_tokens} entries, "
        "got {c.synthetic_acceptance_rates}",
    ),
    Rule(
        "synthetic_acceptance_rates",
        lambda c: all(0 <= rate <= 1 for rate in _rates(c)),
        "must be in [0, 1], got {c.synthetic_acceptance_rates}",
    ),
    Rule(
        "synthetic_acceptance_rates",
        lambda c: _is_decreasing(_rates(c)),
        "must not increase, got {c.synthetic_acceptance_rates}",
    ),
    Rule(
        "synthetic_acceptance_length",
        lambda c: (
            c.rejection_sample_method != "synthetic"
            or c.synthetic_acceptance_length is None
            or 1 <= c.synthetic_acceptance_length <= c.num_speculative_tokens + 1
        ),
        "must be in [1, num_speculative_tokens + 1] with num_speculative_tokens = "
        "{c.num_speculative_tokens}, got {c.synthetic_acceptance_length}",
    ),
)

_SCHEDULE_KEY = "num_speculative_tokens_per_batch_size"
_SCHEDULE = (
    Rule(
        _SCHEDULE_KEY,
        lambda c: c.num_speculative_tokens_per_batch_size != (),
        "must have at least one entry [start, end, K]",
    ),
    Rule(
        _SCHEDULE_KEY,
        lambda c: all(start > 0 and end > 0 for start, end, _ in _schedule(c)),
        "batch sizes must be at least 1, got {c.num_speculative_tokens_per_batch_size}",
    ),
    Rule(
        _SCHEDULE_KEY,
        lambda c: all(start <= end for start, end, _ in _schedule(c)),
        "an entry must not start after its end, got {c.num_speculative_tokens_per_batch_size}",
    ),
    Rule(
        _SCHEDULE_KEY,
        lambda c: all(k >= 0 for *_, k in _schedule(c)),
        "K must be at least 0, got {c.num_speculative_tokens_per_batch_size}",
    ),
    Rule(
        _SCHEDULE_KEY,
        lambda c: _is_apart(_schedule(c)),
        "entries must not overlap, got {c.num_speculative_tokens_per_batch_size}",
    ),
    Rule(
        _SCHEDULE_KEY,
        lambda c: not _schedule(c) or min(_schedule(c))[0] == 1,
        "the first entry must start at batch size 1, got {c.num_speculative_tokens_per_batch_size}",
    ),
)

_SUFFIX = (
    Rule(
        "suffix_decoding_max_tree_depth",
        lambda c: c.method != "suffix" or c.suffix_decoding_max_tree_depth >= 1,
        "must be at least 1, got {c.suffix_decoding_max_tree_depth}",
    ),
    Rule(
        "suffix_decoding_max_cached_requests",
        lambda c: c.method != "suffix" or c.suffix_decoding_max_cached_requests >= 0,
        "must be at least 0, got {c.suffix_decoding_max_cached_requests}",
    ),
    Rule(
        "suffix_decoding_max_spec_factor",
        lambda c: c.method != "suffix" or c.suffix_decoding_max_spec_factor >= 0,
        "must be at least 0, got {c.suffix_decoding_max_spec_factor}",
    ),
    Rule(
        "suffix_decoding_min_token_prob",
        lambda c: c.method != "suffix" or 0 <= c.suffix_decoding_min_token_prob <= 1,
        "must be in [0, 1], got {c.suffix_decoding_min_token_prob}",
    ),
)

_METHODS = (
    Rule(
        "parallel_drafting",
        lambda c: not c.parallel_drafting or c.method in _MAY_BE_PARALLEL,
        f"goes only with method {', '.join(_MAY_BE_PARALLEL)}, got {{c.method}}",
    ),
    Rule(
        "use_heterogeneous_vocab",
        lambda c: not c.use_heterogeneous_vocab or c.method == "draft_model",
        "goes only with method draft_model, got {c.method}",
    ),
    Rule(
        "draft_sample_method",
        lambda c: (
            c.draft_sample_method != "probabilistic" or c.heterogeneous_vocab_method != "string"
        ),
        "must not be probabilistic with heterogeneous_vocab_method string: what the target makes "
        "of a text is drawn from no law; token allows it",
    ),
    Rule(
        "rejection_sample_method",
        lambda c: c.rejection_sample_method != "block" or c.draft_sample_method == "probabilistic",
        "block goes only with draft_sample_method probabilistic: it needs the drafts' laws, "
        "got {c.draft_sample_method}",
    ),
    Rule(
        "draft_sample_method",
        lambda c: c.draft_sample_method != "probabilistic" or c.method not in _WITHOUT_LAW,
        "must not be probabilistic with method {c.method}, whose drafts are not drawn from a law",
    ),
    Rule(
        "heterogeneous_vocab_method",
        lambda c: c.heterogeneous_vocab_method == "auto" or c.use_heterogeneous_vocab,
        "goes only with use_heterogeneous_vocab",
    ),
    Rule(
        "prompt_lookup_min",
        lambda c: (
            c.method not in NGRAM_METHODS
            or (c.prompt_lookup_min or 0) <= (c.prompt_lookup_max or 0)
        ),
        "must be at most prompt_lookup_max = {c.prompt_lookup_max}, got {c.prompt_lookup_min}",
    ),
    Rule(
        "index_share_for_mtp_iteration",
        lambda c: c.index_share_for_mtp_iteration is None or c.method == "mtp",
        "goes only with method mtp, got {c.method}",
    ),
    Rule(
        "dspark_draft_topk",
        lambda c: c.dspark_draft_topk is None or c.method == "dspark",
        "goes only with method dspark, got {c.method}",
    ),
    Rule(
        "enable_adaptive_verification",
        lambda c: not c.enable_adaptive_verification or c.method == "dspark",
        "goes only with method dspark, got {c.method}",
    ),
    Rule(
        "disable_padded_drafter_batch",
        lambda c: (
            not c.disable_padded_drafter_batch
            or not (c.method in ("draft_model", "extract_hidden_states") or c.parallel_drafting)
        ),
        "goes neither with method {c.method} nor with parallel_drafting",
    ),
    Rule(
        "use_local_argmax_reduction",
        lambda c: not c.use_local_argmax_reduction or c.draft_sample_method != "probabilistic",
        "goes only with greedy drafts, got draft_sample_method {c.draft_sample_method}",
    ),
)

SPECULATIVE_RULES = (*_SYNTHETIC, *_SCHEDULE, *_SUFFIX, *_METHODS)
