"""Builds the lookup method that a configuration names, and describes it as a draft model is."""

from typing import Protocol

from specgw.lookup.match import Lookup
from specgw.lookup.ngram import NgramLookup
from specgw.lookup.suffix import SuffixLookup, SuffixSettings
from specgw.types import ModelDescription

LOOKUP_METHODS = ("ngram", "suffix")
"""Values of `method` that need no model."""

DEFAULT_MAX_MODEL_LEN = 2**17
"""Longest context of a proposer that is told no length: without a model, none follows."""


class LookupConfig(Protocol):
    """The keys of `speculative_config` that lookup methods read."""

    @property
    def method(self) -> str: ...
    @property
    def prompt_lookup_min(self) -> int | None: ...
    @property
    def prompt_lookup_max(self) -> int | None: ...
    @property
    def suffix_decoding_max_tree_depth(self) -> int: ...
    @property
    def suffix_decoding_max_cached_requests(self) -> int: ...
    @property
    def suffix_decoding_max_spec_factor(self) -> float: ...
    @property
    def suffix_decoding_min_token_prob(self) -> float: ...


def build_lookup(config: LookupConfig) -> Lookup:
    """Returns the configured method, one of `LOOKUP_METHODS`, which remembers nothing yet."""
    if config.method == "suffix":
        return SuffixLookup(
            SuffixSettings(
                config.suffix_decoding_max_tree_depth,
                config.suffix_decoding_max_cached_requests,
                config.suffix_decoding_max_spec_factor,
                config.suffix_decoding_min_token_prob,
            )
        )
    assert config.method == "ngram", config.method
    assert config.prompt_lookup_min is not None  # filled in when it was validated
    assert config.prompt_lookup_max is not None
    return NgramLookup(config.prompt_lookup_min, config.prompt_lookup_max)


def describe_lookup(method: str, max_model_len: int) -> ModelDescription:
    """Returns what stands for the draft model: it has no vocabulary of its own."""
    return ModelDescription(
        name=method,
        architecture="",
        vocab_size=0,
        vocab_fingerprint="",
        max_model_len=max_model_len,
        dtype="",
        device="cpu",
    )
