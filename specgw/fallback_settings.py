"""`specgw.fallback_proposer`: a lookup beside the proposer, in the keys of `speculative_config`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from specgw.config_rules import Rule, Ruled
from specgw.speculative_config import MAX_TREE_DEPTH, PositiveInt, implied_ngram_window

_WINDOW = Rule(
    "prompt_lookup_min",
    lambda c: c.method != "ngram" or c.prompt_lookup_min <= c.prompt_lookup_max,
    "must be at most prompt_lookup_max = {c.prompt_lookup_max}, got {c.prompt_lookup_min}",
)


class FallbackProposer(Ruled):
    """A lookup in the verifier that drafts when it has a long match, or no proposer answers."""

    rules: ClassVar[tuple[Rule, ...]] = (_WINDOW,)

    method: Literal["ngram", "suffix"]
    """How it looks up."""
    min_match_length: PositiveInt = 5
    """Shortest match, in tokens, that is used in place of the proposer's draft. Without a proposer
    to wait for, any match is."""
    prompt_lookup_max: PositiveInt | None = None
    """As in `speculative_config`, for `ngram`. A match may be longer than the n-gram."""
    prompt_lookup_min: PositiveInt | None = None
    """As in `speculative_config`, for `ngram`."""
    suffix_decoding_max_tree_depth: PositiveInt = MAX_TREE_DEPTH
    """As in `speculative_config`, for `suffix`."""
    suffix_decoding_max_cached_requests: Annotated[int, Field(ge=0)] = 10000
    """As in `speculative_config`, for `suffix`."""
    suffix_decoding_max_spec_factor: Annotated[float, Field(ge=0)] = 1.0
    """As in `speculative_config`, for `suffix`."""
    suffix_decoding_min_token_prob: Annotated[float, Field(ge=0, le=1)] = 0.1
    """As in `speculative_config`, for `suffix`."""

    @classmethod
    def prepared(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        values = dict(raw)
        if values.get("method") == "ngram":
            for key, value in implied_ngram_window(values).items():
                if values.get(key) is None:
                    values[key] = value
        return values
