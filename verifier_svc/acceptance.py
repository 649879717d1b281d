"""Which rule accepts draft tokens, from the configuration."""

import logging
import math
from dataclasses import dataclass

from specgw.speculative_config import SpeculativeConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How blocks are tested; the keys are `rejection_sample_method` and `draft_sample_method`.

    Attributes:
        uses_draft_probs: Whether drafts are drawn from laws that come with them. Blocks without
            one, and those of greedy requests, are tested by the one-hot rule all the same.
        by_block: Whether those are tested as wholes.
        synthetic_rates: The chance that the first 1, 2, .. K tokens are all accepted, whatever
            they are; empty for a real test.
    """

    uses_draft_probs: bool = False
    by_block: bool = False
    synthetic_rates: tuple[float, ...] = ()


def build_acceptance(config: SpeculativeConfig | None) -> Acceptance:
    """Returns the configured rule; warns of one that changes the output."""
    if config is None:
        return Acceptance()
    rates = _synthetic_rates(config)
    if rates:
        logger.warning("drafts are accepted at given rates: the output is synthetic")
    return Acceptance(
        uses_draft_probs=config.draft_sample_method == "probabilistic" and not rates,
        by_block=config.rejection_sample_method == "block",
        synthetic_rates=rates,
    )


def _synthetic_rates(config: SpeculativeConfig) -> tuple[float, ...]:
    """Returns the rates; from a mean length those of least variance, as in vLLM."""
    if config.rejection_sample_method != "synthetic":
        return ()
    if config.synthetic_acceptance_rates is not None:
        return config.synthetic_acceptance_rates
    length = config.synthetic_acceptance_length
    assert length is not None, "a rule of the configuration"
    whole = math.floor(length - 1)
    rates = [1.0] * whole + [length - 1 - whole] + [0.0] * config.num_speculative_tokens
    return tuple(rates[: config.num_speculative_tokens])
