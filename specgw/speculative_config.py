"""`speculative_config`: every key of vLLM 0.32.0 with its type, default, range and what follows.

What the keys mean is vLLM's; where specgw judges otherwise, `vllm_differences.py` says so and why.
What validates here need not run yet: `supported.py` decides that. No model is looked at here except
for the `config.json` of a draft on this machine, and that only if `method` or K is not given.
"""

import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from specgw.config_rules import Frozen, Rule, Ruled
from specgw.method_detection import detect_method, num_predicted_tokens
from specgw.model_files import read_local_config
from specgw.slots import extra_slots, kv_lookahead
from specgw.speculative_rules import (
    ALWAYS_PARALLEL_METHODS,
    NGRAM_METHODS,
    SPECULATIVE_RULES,
)
from specgw.vllm_names import (
    DEPRECATED_METHODS,
    AttentionBackend,
    CacheDType,
    Method,
    MoEBackend,
)

logger = logging.getLogger(__name__)

MAX_SPEC_LEN = 128  # vLLM asserts this bound while running; here it is checked at load time.
DRAFT_MODEL_METHODS = ("draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark", "medusa",
                       "mlp_speculator")  # fmt: skip
"""Methods that read a draft checkpoint."""

_DEFAULT_NGRAM_WINDOW = 5
_MODEL_IS_METHOD = (*NGRAM_METHODS, "suffix", "extract_hidden_states")
MAX_TREE_DEPTH = 24

PositiveInt = Annotated[int, Field(ge=1)]


def upper_backend(raw: Any) -> Any:
    """Returns a backend's name as vLLM reads it; None for `auto`."""
    if not isinstance(raw, str):
        return raw
    return None if raw.lower() == "auto" else raw.upper()


class DraftLoadConfig(Frozen):
    """How the draft's weights are read, in the keys of vLLM's `LoadConfig`."""

    load_format: str = "auto"
    """Format of the weights."""
    download_dir: str | None = None
    """Where downloads are kept."""
    safetensors_load_strategy: Literal["lazy", "eager", "prefetch", "torchao"] | None = None
    """How safetensors are read."""
    safetensors_prefetch_num_threads: PositiveInt = 8
    """Threads that prefetch."""
    safetensors_prefetch_block_size: PositiveInt = 16 * 2**20
    """Bytes read at once."""
    model_loader_extra_config: dict[str, Any] | None = None
    """Options of the loader."""
    device: str | None = None
    """Where weights are loaded to."""
    ignore_patterns: tuple[str, ...] | str = ("original/**/*",)
    """Files not to read."""
    use_tqdm_on_load: bool = True
    """Whether progress is shown."""
    pt_load_map_location: str | dict[str, str] = "cpu"
    """Where pickles are mapped to."""


class SpeculativeConfig(Ruled):
    """How drafts are made and tested, in the keys and meanings of vLLM's `speculative_config`."""

    rules: ClassVar[tuple[Rule, ...]] = SPECULATIVE_RULES

    method: Method = "draft_model"
    """How drafts are made. Without it, what the draft's `config.json` says, else `draft_model`."""
    model: str
    """The draft model: a path, a bundled `tiny/NAME`, or a hub id. `ngram`, `[ngram]` and dotted
    class paths choose the method. Methods without a draft model need none."""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=MAX_SPEC_LEN)]
    """Most draft tokens in one round: K. Required unless the draft's `config.json` has `n_predict`
    (or DSpark's `block_size`) or the method is `suffix`."""
    draft_tensor_parallel_size: PositiveInt | None = None
    """GPUs for the draft model: 1 or as many as the target has. None means as many."""
    max_model_len: PositiveInt | None = None
    """Longest context that is drafted for. None means the shorter of both models'."""
    parallel_drafting: bool = False
    """Drafts all tokens in one forward pass, with mask tokens (PARD, P-EAGLE). The draft model must
    be made for it."""
    draft_sample_method: Literal["greedy", "probabilistic", "coupled"] = "greedy"
    """How draft tokens are chosen. `coupled` is an addition of specgw: drafts are drawn with the
    target's own random numbers."""
    rejection_sample_method: Literal["standard", "synthetic", "block"] = "standard"
    """How draft tokens are tested. `synthetic` accepts at given rates, for tests."""
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    """Chance that the first 1, 2, ... K draft tokens are all accepted. In [0, 1], not
    increasing."""
    synthetic_acceptance_length: float | None = None
    """Mean output tokens per round instead of rates. In [1, K + 1]."""
    use_heterogeneous_vocab: bool = False
    """Allows a draft model with another vocabulary (TLI)."""
    heterogeneous_vocab_method: Literal["auto", "token", "string"] = "auto"
    """An addition of specgw: whether another vocabulary is mapped token by token or by text."""
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = None
    """K by batch size: entries [start, end, K], both ends included, the first from 1."""
    prompt_lookup_max: PositiveInt | None = None
    """Longest n-gram looked for. None means as `prompt_lookup_min`, else 5."""
    prompt_lookup_min: PositiveInt | None = None
    """Shortest n-gram looked for. None means as `prompt_lookup_max`, else 5."""
    suffix_decoding_max_tree_depth: int = MAX_TREE_DEPTH
    """Most tokens of match and draft together. At least 1."""
    suffix_decoding_max_cached_requests: int = 10000
    """Most answers remembered; 0 remembers none. At least 0."""
    suffix_decoding_max_spec_factor: float = 1.0
    """Most draft tokens for each matched token. At least 0."""
    suffix_decoding_min_token_prob: float = 0.1
    """Least estimated chance of a draft token. In [0, 1]."""
    quantization: str | None = None
    """How the draft's weights are quantized."""
    revision: str | None = None
    """Branch, tag or commit of the draft model on the hub."""
    code_revision: str | None = None
    """The same for its code."""
    draft_load_config: DraftLoadConfig | None = None
    """How the draft's weights are read."""
    kv_cache_dtype: CacheDType | None = None
    """Element type of the draft's KV cache. None means as for the target."""
    attention_backend: Annotated[AttentionBackend | None, BeforeValidator(upper_backend)] = None
    """The draft's attention kernels, as the top-level key's. None or `auto` chooses."""
    moe_backend: MoEBackend | None = None
    """The draft's kernels for experts. None means as for the target."""
    enforce_eager: bool | None = None
    """Whether the draft runs without CUDA graphs. It does too if the top-level key says so."""
    disable_padded_drafter_batch: bool = False
    """Drafts with batches of unequal lengths."""
    disable_eagle_block_drop: bool = False
    """Keeps the last block of the prefix cache with EAGLE-like methods."""
    use_local_argmax_reduction: bool = False
    """Takes the argmax on each GPU before it is compared."""
    index_share_for_mtp_iteration: bool | None = None
    """Whether MTP iterations share the first one's indices."""
    enable_adaptive_verification: bool = False
    """Verifies fewer draft tokens where confidence is low (DSpark)."""
    dspark_draft_topk: PositiveInt | None = None
    """How many candidates DSpark's Markov head looks at."""

    @classmethod
    def prepared(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        absent_if_null = ("method", "model", "tensor_parallel_size")
        values = {k: v for k, v in raw.items() if not (k in absent_if_null and v is None)}
        values["method"] = _method(values)
        for key, value in _implied(values).items():
            if values.get(key) is None:
                values[key] = value
        if values["method"] in ALWAYS_PARALLEL_METHODS:
            values["parallel_drafting"] = True
        return values

    @property
    def has_draft_checkpoint(self) -> bool:
        """Whether the method reads a draft model."""
        return self.method in DRAFT_MODEL_METHODS

    @property
    def extra_slots(self) -> int:
        """Input rows that one request adds to a drafting step."""
        return extra_slots(self.method, self.num_speculative_tokens, self.parallel_drafting)

    @property
    def kv_lookahead(self) -> int:
        """KV slots beyond a request's committed tokens."""
        return kv_lookahead(self.method, self.num_speculative_tokens, self.parallel_drafting)


def _method(values: Mapping[str, Any]) -> Any:
    """Returns the method given, or the one that follows. A path's name never changes it."""
    method, model = values.get("method"), values.get("model")
    if method in DEPRECATED_METHODS:
        logger.warning("this method is deprecated: use mtp", extra={"method": method})
        return "mtp"
    if method is not None:
        return method
    if not isinstance(model, str):
        return "draft_model"
    if _is_class_path(model):
        return "custom_class"
    if model in ("ngram", "[ngram]"):
        return "ngram"
    detected, reason = detect_method(read_local_config(model))
    if detected != "draft_model":
        logger.info("method found", extra={"method": detected, "reason": reason})
    return detected


def _is_class_path(model: str) -> bool:
    parts = model.split(".")
    return "/" not in model and len(parts) > 1 and all(part.isidentifier() for part in parts)


def implied_ngram_window(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what holds for the end of the n-gram window that was not given."""
    window = [values.get(key) for key in ("prompt_lookup_max", "prompt_lookup_min")]
    given = next((one for one in window if one is not None), _DEFAULT_NGRAM_WINDOW)
    return {"prompt_lookup_max": given, "prompt_lookup_min": given}


def _implied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the method says of keys that were not given."""
    method, implied = values["method"], {}
    if method in _MODEL_IS_METHOD:
        implied["model"] = method
    if method in NGRAM_METHODS:
        implied |= implied_ngram_window(values)
    if "num_speculative_tokens" in values:
        return implied
    if method == "suffix":
        depth = values.get("suffix_decoding_max_tree_depth", MAX_TREE_DEPTH)
        implied["num_speculative_tokens"] = depth
    elif method in DRAFT_MODEL_METHODS and isinstance(values.get("model"), str):
        predicted = num_predicted_tokens(method, read_local_config(values["model"]))
        if predicted is not None:
            implied["num_speculative_tokens"] = predicted
    return implied
