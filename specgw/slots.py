"""How much room drafts take: vLLM's tables of extra input rows and of KV lookahead. Pure numbers.

`extra_slots` is vLLM's `SpeculativeConfig.max_num_new_slots_for_drafting` and `kv_lookahead` its
`VllmConfig.num_lookahead_tokens`, both of 0.32.0. In specgw the proposer spends the extra rows; the
verifier needs its 1 + K rows for any method.
"""

from dataclasses import dataclass

_EAGLE_FAMILY = ("eagle", "eagle3", "mtp", "dflash", "dspark")
_NO_DRAFT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator", "custom_class",
                "extract_hidden_states")  # fmt: skip
METHODS = ("draft_model", *_EAGLE_FAMILY, *_NO_DRAFT_KV)


@dataclass(frozen=True, slots=True)
class SlotsRow:
    """One row of the table that `specgw check` prints.

    Attributes:
        algorithm: The name in vLLM's table.
        method: The value of `method`.
        parallel_drafting: The value of `parallel_drafting`.
    """

    algorithm: str
    method: str
    parallel_drafting: bool


SLOTS_TABLE = (
    SlotsRow("EAGLE3", "eagle3", False),
    SlotsRow("P-EAGLE", "eagle3", True),
    SlotsRow("DFlash", "dflash", True),
    SlotsRow("DSpark", "dspark", True),
    SlotsRow("MTP", "mtp", False),
    SlotsRow("N-gram", "ngram", False),
    SlotsRow("Draft model", "draft_model", False),
    SlotsRow("PARD", "draft_model", True),
)


def extra_slots(method: str, num_speculative_tokens: int, parallel_drafting: bool = False) -> int:
    """Returns the input rows that one request adds to a drafting step, beyond its own.

    Args:
        method: One of `METHODS`, or a deprecated name that ends in `_mtp`.
        num_speculative_tokens: K, at least 1.
        parallel_drafting: Whether all K tokens come from one forward pass. Means nothing for
            `dflash` and `dspark`, which always draft so.
    """
    name = _canonical(method)
    # In vLLM's order: `parallel_drafting` counts for any method, needed or not.
    if name == "dflash":
        return num_speculative_tokens
    if parallel_drafting or name == "dspark":
        return num_speculative_tokens - (name != "draft_model")
    return int(name == "draft_model")


def kv_lookahead(
    method: str,
    num_speculative_tokens: int,
    parallel_drafting: bool = False,
    sample_from_anchor: bool = True,
) -> int:
    """Returns the KV slots that drafting takes beyond a request's committed tokens.

    Args:
        method: One of `METHODS`, or a deprecated name that ends in `_mtp`.
        num_speculative_tokens: K, at least 1.
        parallel_drafting: Changes nothing: masks lie where drafts will.
        sample_from_anchor: A DSpark checkpoint's key; without it one more slot is needed.
    """
    name = _canonical(method)
    if name == "dflash" or (name == "dspark" and not sample_from_anchor):
        return num_speculative_tokens + 1
    return 0 if name in _NO_DRAFT_KV else num_speculative_tokens


def _canonical(method: str) -> str:
    name = "mtp" if method.endswith("_mtp") else method
    if name not in METHODS:
        raise ValueError(f"{method!r} is not a method: {', '.join(METHODS)}")
    return name
