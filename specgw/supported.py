"""What specgw runs today. The one place where what validates may still be refused.

To run more, allow it here. Keys that are accepted although they change nothing are listed too, so
that `specgw check` can say so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specgw.vllm_names import RUNNABLE_ATTENTION


@dataclass(frozen=True, slots=True)
class Supported:
    """The values of a key that run.

    Attributes:
        key: Dotted path of the key.
        values: What runs.
        name: What the other values are, for people; `{value}` is the value.
        instead: What runs, for people.
    """

    key: str
    values: tuple[object, ...]
    name: str
    instead: str


_IN = "speculative_config"
_CONSTRAINTS = "structured_outputs_config"
SUPPORTED = (
    Supported("tensor_parallel_size", (1,), "{value} GPUs for one model", "1"),
    Supported(
        f"{_IN}.method",
        ("draft_model", "ngram", "suffix"),
        "{value}",
        "draft_model, ngram and suffix",
    ),
    Supported(
        f"{_IN}.draft_tensor_parallel_size", (None, 1), "{value} GPUs for a draft model", "1"
    ),
    Supported(f"{_IN}.quantization", (None, "int8"), "{value} weights", "plain weights and int8"),
    Supported(f"{_IN}.revision", (None,), "another revision than the default", "the default"),
    Supported(f"{_IN}.draft_load_config", (None,), "other ways to load", "safetensors"),
    Supported(f"{_IN}.kv_cache_dtype", (None, "auto"), "a KV cache of {value}", "auto"),
    Supported(
        f"{_IN}.enable_adaptive_verification", (False,), "adaptive verification", "all drafts"
    ),
    Supported(
        f"{_CONSTRAINTS}.backend", ("auto", "guidance"), "the backend {value}", "auto and guidance"
    ),
    Supported(f"{_CONSTRAINTS}.reasoning_parser", ("",), "the reasoning parser {value}", "none"),
    Supported(f"{_CONSTRAINTS}.reasoning_parser_plugin", ("",), "reasoning parsers", "none"),
    Supported(f"{_CONSTRAINTS}.enable_in_reasoning", (False,), "reasoning parsers", "none"),
)


@dataclass(frozen=True, slots=True)
class WithoutEffect:
    """A key of `speculative_config` that is accepted and changes nothing.

    Attributes:
        key: The key.
        reason: Why.
        applies: Given the config, whether it changes nothing here.
    """

    key: str
    reason: str
    applies: Callable[[Any], bool] = lambda _: True


def _other_than(*methods: str) -> Callable[[Any], bool]:
    return lambda config: config.method not in methods


WITHOUT_EFFECT = (
    WithoutEffect(
        "attention_backend",
        f"specgw's engine has {' and '.join(RUNNABLE_ATTENTION)}, and chooses",
        lambda config: config.attention_backend not in RUNNABLE_ATTENTION,
    ),
    WithoutEffect("moe_backend", "specgw's engine has no choice of kernels for experts"),
    WithoutEffect("code_revision", "specgw never runs code from a checkpoint"),
    WithoutEffect("disable_padded_drafter_batch", "specgw's batches are never padded"),
    WithoutEffect("disable_eagle_block_drop", "the proposer's cache is its own: none is dropped"),
    WithoutEffect("use_local_argmax_reduction", "a draft model runs on one device"),
    WithoutEffect(
        "draft_sample_method",
        "drafts with heterogeneous_vocab_method string are greedy; the output is the same",
        lambda config: config.heterogeneous_vocab_method == "string",
    ),
    *(
        WithoutEffect(key, "it is for n-gram methods", _other_than("ngram", "ngram_gpu"))
        for key in ("prompt_lookup_max", "prompt_lookup_min")
    ),
    *(
        WithoutEffect(f"suffix_decoding_{key}", "it is for method suffix", _other_than("suffix"))
        for key in ("max_tree_depth", "max_cached_requests", "max_spec_factor", "min_token_prob")
    ),
)


def not_run_yet(args: Any) -> list[str]:
    """Returns one message for each value of an `EngineArgs` that is valid and does not run yet."""
    found = ((one, _value(args, one.key)) for one in SUPPORTED)
    return [
        f"{one.key}: specgw does not run {one.name.format(value=value)} yet; it runs {one.instead}"
        for one, value in found
        if value is not _NOTHING and value not in one.values
    ]


def without_effect(args: Any) -> list[str]:
    """Returns one message for each key of an `EngineArgs` that was given and changes nothing."""
    config = args.speculative_config
    if config is None:
        return []
    defaults = type(config).model_fields
    return [
        f"{_IN}.{one.key}: has no effect: {one.reason}"
        for one in WITHOUT_EFFECT
        if one.key in config.model_fields_set
        and getattr(config, one.key) != defaults[one.key].default
        and one.applies(config)
    ]


_NOTHING = object()


def _value(args: Any, key: str) -> Any:
    value = args
    for part in key.split("."):
        if value is None:
            return _NOTHING
        value = getattr(value, part)
    return value
