"""`EngineArgs`: the whole configuration as one value, and the rules between its parts."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from specgw.config_rules import Rule, Ruled
from specgw.lookup.method import LOOKUP_METHODS
from specgw.service_settings import SpecgwSettings
from specgw.slots import extra_slots
from specgw.speculative_config import (
    DRAFT_MODEL_METHODS,
    PositiveInt,
    SpeculativeConfig,
    upper_backend,
)
from specgw.structured_outputs_config import StructuredOutputsConfig
from specgw.vllm_names import ALIASES, DEPRECATED_METHODS

_ApiKey = Annotated[str, Field(min_length=1)]
_MODEL_IS_TARGET = ("mtp", "dspark")  # without a model of their own, they read the target's


def underscored(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a nested mapping with `_` for every `-` in its keys."""
    return {
        str(key).replace("-", "_"): underscored(value) if isinstance(value, Mapping) else value
        for key, value in raw.items()
    }


def _one_or_many(raw: Any) -> Any:
    many = raw if isinstance(raw, list | tuple) else (raw,)
    return tuple(str(one) for one in many if one is not None)


def _full_name(raw: Any) -> Any:
    return {"half": "float16", "float": "float32"}.get(raw, raw) if isinstance(raw, str) else raw


def _json_or_mapping(raw: Any) -> Any:
    if not isinstance(raw, str):
        return raw
    try:
        parsed = json.loads(raw)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from None
    return underscored(parsed) if isinstance(parsed, Mapping) else parsed


def _draft_rows(args: Any) -> int:
    """Input rows that one request takes in a drafting step."""
    c = args.speculative_config
    return 1 + extra_slots(c.method, c.num_speculative_tokens, c.parallel_drafting) if c else 1


def _reads_draft_model(args: Any) -> bool:
    c = args.speculative_config
    return c is not None and c.method in DRAFT_MODEL_METHODS


def _draft_gpus(args: Any) -> int:
    gpus: int = args.speculative_config.draft_tensor_parallel_size or args.tensor_parallel_size
    return gpus


def _alias_rule(alias: str, key: str) -> Rule:
    flag = "--" + alias.replace("_", "-")
    text = f"{flag} and speculative_config.{key} are mutually exclusive"
    return Rule(alias, lambda args: getattr(args, alias) is None, text)


_RULES = (
    Rule(
        "max_num_batched_tokens",
        lambda args: (
            args.speculative_config is None
            or args.max_num_batched_tokens > args.speculative_config.num_speculative_tokens
        ),
        "must be more than num_speculative_tokens = "
        "{c.speculative_config.num_speculative_tokens}, got {c.max_num_batched_tokens}",
    ),
    Rule(
        "max_num_batched_tokens",
        lambda args: args.max_num_batched_tokens >= args.max_num_seqs,
        "must be at least max_num_seqs = {c.max_num_seqs}, got {c.max_num_batched_tokens}",
    ),
    Rule(
        "specgw.proposer.max_num_batched_tokens",
        lambda args: args.specgw.proposer.max_num_batched_tokens >= _draft_rows(args),
        "must hold the rows of one request, one and its extra slots, "
        "got {c.specgw.proposer.max_num_batched_tokens}",
    ),
    Rule(
        "speculative_config.draft_tensor_parallel_size",
        lambda args: (
            not _reads_draft_model(args) or _draft_gpus(args) in (1, args.tensor_parallel_size)
        ),
        "must be 1 or tensor_parallel_size = {c.tensor_parallel_size}, "
        "got {c.speculative_config.draft_tensor_parallel_size}",
    ),
    Rule(
        "speculative_config.draft_tensor_parallel_size",
        lambda args: (
            args.speculative_config is None
            or args.speculative_config.method != "draft_model"
            or _draft_gpus(args) == args.tensor_parallel_size
            or _draft_gpus(args) != 1
        ),
        "must be tensor_parallel_size = {c.tensor_parallel_size} with method draft_model, "
        "got {c.speculative_config.draft_tensor_parallel_size}",
    ),
    Rule(
        "speculative_config.max_model_len",
        lambda args: (
            args.speculative_config is None
            or (args.speculative_config.max_model_len or 0) <= (args.max_model_len or 2**63)
        ),
        "must be at most the target's max_model_len = {c.max_model_len}, "
        "got {c.speculative_config.max_model_len}",
    ),
    Rule(
        "specgw.fallback_proposer",
        lambda args: args.specgw.fallback_proposer is None or args.speculative_config is not None,
        "needs speculative_config, which says what it falls back for and how much is drafted",
    ),
    Rule(
        "specgw.fallback_proposer",
        lambda args: args.specgw.fallback_proposer is None or not args.drafts_locally,
        "needs a proposer to stand in for: without one, the verifier itself runs "
        "{c.speculative_config.method}",
    ),
    *(_alias_rule(alias, key) for alias, key in ALIASES.items()),
)


class EngineArgs(Ruled):
    """The whole configuration. Top-level keys are `vllm serve` flags under the same names."""

    rules: ClassVar[tuple[Rule, ...]] = _RULES

    model: str
    """The target model: a path, a bundled `tiny/NAME`, or a hub id."""
    tokenizer: str | None = None
    """Where the tokenizer is. None means with the model."""
    served_model_name: Annotated[tuple[str, ...], BeforeValidator(_one_or_many)] = ()
    """Names under which clients ask for the model. None means `model`."""
    host: str = "127.0.0.1"
    """Where the OpenAI API listens."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port of the OpenAI API; 0 takes a free one."""
    api_key: Annotated[tuple[_ApiKey, ...], BeforeValidator(_one_or_many)] = ()
    """Keys that clients must show one of. None means that none is needed."""
    seed: int = 0
    """Where the seeds of requests without one come from."""
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"], BeforeValidator(_full_name)
    ] = "auto"
    """Element type of both models' weights. `auto` means the checkpoint's; `half` and `float`
    are other names for `float16` and `float32`."""
    quantization: Literal["int8"] | None = None
    """`int8` rounds the weights of the target's linear layers, and their inputs token by token:
    half the memory and time on a CPU, for some accuracy (docs/benchmarks.md)."""
    device: str = "auto"
    """`cpu`, `cuda` or `cuda:N`. `auto` means a GPU if there is one."""
    max_model_len: PositiveInt | None = None
    """Longest context in tokens. None means the model's."""
    max_num_seqs: PositiveInt = 16
    """Most requests in one step of the verifier."""
    max_num_batched_tokens: PositiveInt = 2048
    """Most input rows in one step of the verifier: longer prompts are prefilled in chunks."""
    max_logprobs: Annotated[int, Field(ge=-1)] = 20
    """Most log probabilities for one token that a request may ask for; -1 allows any number."""
    enable_prefix_caching: bool = True
    """Keeps the KV cache of contexts, so that requests that begin alike skip that part."""
    enable_prompt_tokens_details: bool = False
    """Tells clients in `usage.prompt_tokens_details` how much of a prompt was cached."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory for weights, KV cache and what passes need beside them."""
    attention_backend: Annotated[
        Literal["FLASH_ATTN", "TORCH_SDPA"] | None, BeforeValidator(upper_backend)
    ] = None
    """The target's attention kernels on a GPU: `FLASH_ATTN` is flash-attn 3 or 2 if installed, else
    torch's own; `TORCH_SDPA` copies contexts in every pass. None or `auto` takes the first that
    works. On a CPU, None takes the compiled operators, which are far faster than `TORCH_SDPA`."""
    enforce_eager: bool = False
    """Runs every pass of either model without CUDA graphs."""
    max_cudagraph_capture_size: PositiveInt = 512
    """Most input rows, padding included, of a pass that runs as a CUDA graph."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs for the target model."""
    speculative_config: Annotated[SpeculativeConfig | None, BeforeValidator(_json_or_mapping)] = (
        None
    )
    """How drafts are made and tested: a mapping, or JSON. None means plain decoding."""
    spec_method: str | None = None
    """Another name for `speculative_config.method`."""
    spec_model: str | None = None
    """Another name for `speculative_config.model`."""
    spec_tokens: int | None = None
    """Another name for `speculative_config.num_speculative_tokens`."""
    structured_outputs_config: Annotated[
        StructuredOutputsConfig, BeforeValidator(_json_or_mapping)
    ] = StructuredOutputsConfig()
    """What holds for the constraints of all requests: a mapping, or JSON."""
    specgw: SpecgwSettings = SpecgwSettings()
    """Everything that vLLM has no key for."""

    @classmethod
    def prepared(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        values = dict(raw)
        given = {key: values.pop(alias) for alias, key in ALIASES.items() if _is_set(values, alias)}
        drafting = _parsed(values.get("speculative_config"))
        if drafting is None and given:
            drafting = {}
        if not isinstance(drafting, Mapping):
            return values | _restored(given)
        twice = {key: value for key, value in given.items() if key in drafting}
        drafting = {**drafting, **{k: v for k, v in given.items() if k not in twice}}
        is_for_target = drafting.get("method") in (*_MODEL_IS_TARGET, *DEPRECATED_METHODS)
        if is_for_target and drafting.get("model") is None and "model" in values:
            drafting["model"] = values["model"]
        return values | {"speculative_config": drafting} | _restored(twice)

    @property
    def max_draft_tokens(self) -> int:
        """Most draft tokens in one round; 0 without speculation."""
        config = self.speculative_config
        return config.num_speculative_tokens if config else 0

    @property
    def drafts_locally(self) -> bool:
        """Whether the verifier itself runs the method: one without a model, and no proposer."""
        config = self.speculative_config
        is_lookup = config is not None and config.method in LOOKUP_METHODS
        return is_lookup and not self.specgw.verifier.proposers

    @property
    def is_synthetic(self) -> bool:
        """Whether drafts are accepted at given rates, whatever they are."""
        config = self.speculative_config
        return config is not None and config.rejection_sample_method == "synthetic"

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """The names under which clients ask for the model."""
        return self.served_model_name or (self.model,)

    @property
    def tokenizer_path(self) -> str:
        """Where the tokenizer is: with the model unless told otherwise."""
        return self.tokenizer or self.model


def _is_set(values: Mapping[str, Any], key: str) -> bool:
    return values.get(key) is not None


def _parsed(raw: Any) -> Any:
    try:
        return _json_or_mapping(raw)
    except ValueError:
        return raw  # reported when the key is validated


def _restored(given: Mapping[str, Any]) -> dict[str, Any]:
    return {alias: given[key] for alias, key in ALIASES.items() if key in given}
