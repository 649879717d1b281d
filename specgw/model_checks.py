"""Checks a configuration against the files of its models: no weights are read, no torch is needed.

Everything comes from `config.json`, the tokenizer's files and the names of the others. The engine
checks again what it needs when it loads; here all problems of both models are told before that.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from specgw.config import EngineArgs, SpeculativeConfig
from specgw.errors import ConfigError
from specgw.method_detection import num_predicted_tokens
from specgw.model_files import is_on_hub, read_config, resolve_model, weight_files
from specgw.vocab import VocabKinship, VocabRelation, relate_vocabs
from specgw.vocab_mapping import VocabMapping, choose_methods, coverage_problems, load_mapping

MASK_TOKEN_FIELDS = ("dflash_config.mask_token_id", "mask_token_id", "dspark_noise_token_id",
                     "pard_token", "ptd_token_id")  # fmt: skip
"""Where a draft's `config.json` may name its mask token; the first one found counts."""

TRAINED_TOKENS_FIELD = "pard_num_tokens"
"""Where `tools/pard_adapt.py` writes how many tokens a pass a PARD draft was trained for."""

_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length")
_DTYPES = ("float16", "bfloat16", "float32", "float64")
_DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_FULL_HISTORY = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a model's files say of it.

    Attributes:
        key: The configuration key that names the model.
        name: The name as configured.
        directory: Where the files are.
        config: `config.json`.
    """

    key: str
    name: str
    directory: Path
    config: Mapping[str, Any]

    @property
    def text(self) -> Mapping[str, Any]:
        """The part of `config.json` that is about text."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, Mapping) else self.config

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; 0 if not said."""
        return int(self.text.get("vocab_size") or 0)

    @property
    def max_model_len(self) -> int | None:
        """Longest context in tokens that the model was made for, if it says so."""
        found = (self.text.get(key) for key in _LENGTH_KEYS)
        return next((value for value in found if isinstance(value, int)), None)

    @property
    def num_heads(self) -> int:
        """Attention heads; 0 if not said."""
        return int(self.text.get("num_attention_heads") or self.text.get("n_head") or 0)

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return int(self.text.get("num_key_value_heads") or self.num_heads)

    @property
    def dtype(self) -> str:
        """Element type of the weights."""
        found = self.text.get("dtype") or self.text.get("torch_dtype") or "float32"
        return str(found).removeprefix("torch.")

    def kv_bytes_per_token(self, dtype: str) -> int | None:
        """Returns the bytes of one token's keys and values, if the sizes are known."""
        element = _DTYPE_BYTES.get(self.dtype if dtype == "auto" else dtype)
        layers = self.text.get("num_hidden_layers") or self.text.get("n_layer")
        head_dim = self.text.get("head_dim")
        if head_dim is None and self.num_heads:
            hidden = self.text.get("hidden_size") or self.text.get("n_embd") or 0
            head_dim = hidden // self.num_heads
        if not (element and layers and head_dim and self.num_kv_heads):
            return None
        return int(layers * 2 * self.num_kv_heads * head_dim * element)


@dataclass(frozen=True)  # without slots, for what is computed once
class ModelPair:
    """A configuration and its models; `draft` is None for methods without a draft model."""

    args: EngineArgs
    target: ModelFiles
    draft: ModelFiles | None

    @property
    def drafting(self) -> SpeculativeConfig | None:
        """How drafts are made, if at all."""
        return self.args.speculative_config

    @property
    def models(self) -> Sequence[ModelFiles]:
        """The models there are."""
        return [self.target] if self.draft is None else [self.target, self.draft]

    @property
    def max_model_len(self) -> int | None:
        """Longest context of a request in tokens, if known."""
        return self.args.max_model_len or self.target.max_model_len

    @cached_property
    def vocab_relation(self) -> VocabRelation | None:
        """How the draft's vocabulary relates to the target's."""
        if self.draft is None:
            return None
        return relate_vocabs(
            self.target.directory,
            self.target.vocab_size,
            self.draft.directory,
            self.draft.vocab_size,
        )

    @cached_property
    def vocab_mapping(self) -> VocabMapping | None:
        """How another vocabulary is mapped; None if the draft has the target's.

        Raises:
            ConfigError: if it cannot be.
        """
        if self.draft is None or self.drafting is None or not self.drafting.use_heterogeneous_vocab:
            return None
        if self.vocab_relation is not None and self.vocab_relation.has_same_tokens:
            return None
        return load_mapping(
            resolve_model(self.args.tokenizer_path, with_weights=False),
            self.target.vocab_size,
            self.draft.directory,
            self.draft.vocab_size,
        )


def read_models(args: EngineArgs) -> ModelPair:
    """Finds both models' files.

    Raises:
        ConfigError: naming each model that cannot be found or read.
    """
    problems: list[str] = []
    target = _read_model("model", args.model, problems)
    draft, drafting = None, args.speculative_config
    if drafting is not None and drafting.has_draft_checkpoint:
        draft = _read_model("speculative_config.model", drafting.model, problems)
    if problems or target is None:
        raise ConfigError(problems)
    return ModelPair(args, target, draft)


def check_models(pair: ModelPair) -> list[str]:
    """Returns one message for each problem, naming the key that it belongs to."""
    return [problem for check in _CHECKS for problem in check(pair)]


def notice_models(pair: ModelPair) -> list[str]:
    """Returns one message for each thing that is allowed and not what was asked for."""
    if pair.draft is None or pair.drafting is None or not pair.drafting.parallel_drafting:
        return []
    trained, wanted = pair.draft.config.get(TRAINED_TOKENS_FIELD), pair.args.max_draft_tokens
    if not isinstance(trained, int) or trained >= wanted:
        return []
    return [
        f"speculative_config.num_speculative_tokens: {pair.draft.name} was trained for {trained} "
        f"tokens a pass ({TRAINED_TOKENS_FIELD}): drafts of {wanted} are cut to that"
    ]


def mask_token(config: Mapping[str, Any]) -> tuple[str, object] | None:
    """Returns the field of a draft's `config.json` that names the mask token, and its value."""
    for field in MASK_TOKEN_FIELDS:
        value: Any = config
        for part in field.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            return field, value
    return None


def resolve_mask_token(name: str, config: Mapping[str, Any], vocab_size: int) -> int:
    """Returns the id of a parallel draft's mask token.

    Args:
        name: The draft model, for messages.
        config: Its `config.json`.
        vocab_size: Rows of its embedding.

    Raises:
        ConfigError: if the model names none, or one that it does not have.
    """
    key = "speculative_config.parallel_drafting"
    found = mask_token(config)
    if found is None:
        problem = (
            f"{key}: the config.json of {name} names no mask token; it needs one of "
            f"{', '.join(MASK_TOKEN_FIELDS)}"
        )
        raise ConfigError([problem])
    field, value = found
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
        problem = (
            f"{key}: {field} of {name} must be a token id in [0, {vocab_size - 1}], got {value!r}"
        )
        raise ConfigError([problem])
    return value


def trained_draft_tokens(config: Mapping[str, Any]) -> int | None:
    """Returns how many tokens a pass a parallel draft was trained for, if it says so.

    Raises:
        ConfigError: if it does not say it in numbers.
    """
    value = config.get(TRAINED_TOKENS_FIELD)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ConfigError([f"{TRAINED_TOKENS_FIELD}: must be at least 1, got {value!r}"])


def _read_model(key: str, name: str, problems: list[str]) -> ModelFiles | None:
    try:
        directory = resolve_model(name, with_weights=False)
        return ModelFiles(key, name, directory, read_config(directory))
    except ConfigError as error:
        problems += [f"{key}: {problem}" for problem in error.problems]
        return None


def _weights(pair: ModelPair) -> Iterator[str]:
    if pair.args.specgw.simulation is not None:
        return
    for model in pair.models:
        if is_on_hub(model.name):
            continue  # its weights are fetched, and looked at, when it is loaded
        try:
            weight_files(model.directory)
        except ConfigError as error:
            yield from (f"{model.key}: {problem}" for problem in error.problems)


def _is_mrope(config: Mapping[str, Any]) -> bool:
    ropes = [config.get(key) for key in ("rope_parameters", "rope_scaling")]
    nested = [part for rope in ropes if isinstance(rope, Mapping) for part in rope.values()]
    return any(isinstance(rope, Mapping) and "mrope_section" in rope for rope in [*ropes, *nested])


def _other_layers(config: Mapping[str, Any]) -> list[str]:
    return sorted(set(config.get("layer_types") or ()).difference(_FULL_HISTORY))


# What the engine cannot run, by what `config.json` says. The first parameter is the whole of it.
_REFUSED_ARCHITECTURES: tuple[tuple[Callable[[Mapping[str, Any]], object], str], ...] = (
    (lambda config: config.get("is_encoder_decoder"), "is an encoder-decoder model"),
    (lambda config: config.get("text_config"), "is a multimodal model"),
    (lambda config: not config.get("architectures"), "names no architecture"),
    (lambda config: config.get("quantization_config"), "is quantized"),
    (
        lambda config: config.get("speculators_config"),
        "is a draft in the speculators format: set model to the target that it was made for, and "
        "speculative_config.model and method to the draft",
    ),
    (_other_layers, "has layers of a type that the engine does not know"),
)


def _architectures(pair: ModelPair) -> Iterator[str]:
    for model in pair.models:
        if _is_mrope(model.text) or _is_mrope(model.config):
            yield f"{model.key}: {model.name} rotates by multimodal positions (M-RoPE)"
        if model is pair.draft and pair.drafting and pair.drafting.method != "draft_model":
            continue  # heads of other methods are no language models of their own
        for is_so, text in _REFUSED_ARCHITECTURES:
            if is_so(model.config):
                yield f"{model.key}: {model.name} {text}"


def _dtypes(pair: ModelPair) -> Iterator[str]:
    for model in pair.models:
        if pair.args.dtype == "auto" and model.dtype not in _DTYPES:
            yield (
                f"{model.key}: {model.name} has weights of type {model.dtype}, which is none of "
                f"{', '.join(_DTYPES)}; set dtype"
            )


def _heads(pair: ModelPair) -> Iterator[str]:
    for model in pair.models:
        gpus = pair.args.tensor_parallel_size
        if model is pair.draft and pair.drafting is not None:
            gpus = pair.drafting.draft_tensor_parallel_size or gpus
        if model.num_heads % gpus:
            yield (
                f"{model.key}: the {model.num_heads} attention heads of {model.name} cannot be "
                f"divided among {gpus} GPUs"
            )
        elif model.num_kv_heads % gpus and gpus % model.num_kv_heads:
            yield (
                f"{model.key}: the {model.num_kv_heads} key-value heads of {model.name} cannot be "
                f"divided among {gpus} GPUs"
            )


def _lengths(pair: ModelPair) -> Iterator[str]:
    made_for = pair.target.max_model_len
    if pair.max_model_len is None:
        yield f"max_model_len: {pair.target.name} does not say how much it supports"
    elif made_for is not None and pair.max_model_len > made_for:
        yield f"max_model_len: {pair.target.name} supports {made_for}, got {pair.max_model_len}"
    wanted = pair.drafting.max_model_len if pair.drafting else None
    if pair.draft is None:
        return
    if wanted is None:
        if pair.draft.max_model_len is None and pair.args.max_model_len is None:
            yield (
                f"speculative_config.max_model_len: {pair.draft.name} does not say how much it "
                "supports"
            )
        return
    for limit, name in ((pair.draft.max_model_len, pair.draft.name), (made_for, pair.target.name)):
        if limit is not None and wanted > limit:
            yield f"speculative_config.max_model_len: {name} supports {limit}, got {wanted}"


def _ropes(pair: ModelPair) -> Iterator[str]:
    for model in pair.models:
        rope = model.text.get("rope_parameters") or model.text.get("rope_scaling") or {}
        kind = rope.get("rope_type") or rope.get("type")
        original = rope.get("original_max_position_embeddings") or model.text.get(
            "original_max_position_embeddings"
        )
        if kind in _LENGTH_DEPENDENT_ROPE and original and (pair.max_model_len or 0) > original:
            yield (
                f"{model.key}: {model.name} rotates by the length of the context (RoPE type "
                f"{kind}); it can run with max_model_len up to {original}"
            )


def _num_predicted(pair: ModelPair) -> Iterator[str]:
    if pair.draft is None or pair.drafting is None or pair.drafting.method == "dspark":
        return
    predicted = num_predicted_tokens(pair.drafting.method, pair.draft.config)
    wanted = pair.drafting.num_speculative_tokens
    if predicted and wanted > predicted and wanted % predicted:
        yield (
            f"speculative_config.num_speculative_tokens: must be a multiple of the {predicted} "
            f"tokens that {pair.draft.name} predicts at once (n_predict), got {wanted}"
        )


def _mask_tokens(pair: ModelPair) -> Iterator[str]:
    if pair.draft is None or pair.drafting is None or not pair.drafting.parallel_drafting:
        return
    try:
        resolve_mask_token(pair.draft.name, pair.draft.config, pair.draft.vocab_size)
        trained_draft_tokens(pair.draft.config)
    except ConfigError as error:
        yield from error.problems


def _candidates(pair: ModelPair) -> Iterator[str]:
    if pair.draft is None or pair.drafting is None or pair.drafting.dspark_draft_topk is None:
        return
    size = int(pair.draft.config.get("draft_vocab_size") or pair.draft.vocab_size)
    if pair.drafting.dspark_draft_topk > size:
        yield (
            f"speculative_config.dspark_draft_topk: must be at most the {size} ids of "
            f"{pair.draft.name}, got {pair.drafting.dspark_draft_topk}"
        )


def _vocabs(pair: ModelPair) -> Iterator[str]:
    drafting = pair.drafting
    relation = pair.vocab_relation
    if drafting is None or drafting.method != "draft_model" or relation is None:
        return
    assert pair.draft is not None  # or there were no relation
    if drafting.use_heterogeneous_vocab:
        yield from _mapping_problems(pair, drafting)
        return
    names = f"{pair.draft.name} drafts for {pair.target.name}"
    sizes = f"{relation.draft_size} and {relation.target_size} ids"
    if relation.kinship is VocabKinship.FOREIGN:
        yield (
            f"speculative_config.model: {names} with other tokens under "
            f"{relation.num_differences} ids: {'; '.join(relation.differences)} ({sizes}); "
            "use_heterogeneous_vocab allows it"
        )
    elif relation.kinship is VocabKinship.UNKNOWN and relation.draft_size != relation.target_size:
        yield (
            f"speculative_config.model: {names} with {sizes}, and without both tokenizers "
            "nothing shows that the rest is padding"
        )


def _mapping_problems(pair: ModelPair, drafting: SpeculativeConfig) -> Sequence[str]:
    try:
        mapping = pair.vocab_mapping
    except ConfigError as error:
        return [f"speculative_config.use_heterogeneous_vocab: {one}" for one in error.problems]
    if mapping is None:
        return []
    return coverage_problems(mapping.coverage, choose_methods(drafting, mapping.coverage))


_CHECKS: tuple[Callable[[ModelPair], Iterator[str]], ...] = (
    _weights,
    _architectures,
    _dtypes,
    _heads,
    _lengths,
    _ropes,
    _num_predicted,
    _mask_tokens,
    _candidates,
    _vocabs,
)
