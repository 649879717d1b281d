"""Turns a model directory into a `ModelRunner`: decides what can run, and with how much memory.

Only safetensors are read and no remote code runs. What would be computed wrongly is refused by
name; nothing degrades in silence.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specgw.config import EngineArgs, SimulationSettings, SpeculativeConfig
from specgw.engine import decoder
from specgw.engine.attention import Batch
from specgw.engine.attention_kernels import PagedKernel
from specgw.engine.cache_size import (
    PoolShape,
    device_memory,
    full_contexts,
    measure_workspace,
    pool_shape,
    room_on_device,
    room_on_host,
)
from specgw.engine.checkpoint import Checkpoint
from specgw.engine.graphs import CudaRecorder, GraphLimits
from specgw.engine.kernel_choice import HeadShape, choose_kernel
from specgw.engine.kv_cache import BLOCK_SIZE, KVCache
from specgw.engine.linear import can_be_int8
from specgw.engine.model_runner import ModelRunner
from specgw.engine.paged_runner import PagedRunner
from specgw.engine.simulation import SimulatedDevice, SimulatedRunner
from specgw.engine.transformers_model import TransformersModel
from specgw.errors import ConfigError
from specgw.model_files import resolve_model, weight_files
from specgw.types import SIMULATED_DEVICE, ModelDescription
from specgw.vllm_names import RUNNABLE_ATTENTION
from specgw.vocab import plain_token_ids, vocab_fingerprint

_FULL_HISTORY = ("full_attention", "sliding_attention")  # layer types that keep every row
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What to load and how.

    Attributes:
        model: A path, `tiny/NAME` or a hub id.
        dtype: `auto` for the checkpoint's, else the name of a torch type.
        device: `auto` for a GPU if there is one, else a torch device.
        max_model_len: Longest context; None for all that the model was made for, or less if the
            KV cache is smaller.
        accept_shorter: Whether a model made for less than `max_model_len` will do, as a draft does.
        kv_cache_tokens: Size of the KV cache. None on a GPU for what `memory_fraction` leaves; on a
            CPU for `max_num_seqs` full contexts or what `cpu_memory_fraction` allows, whichever is
            less.
        memory_fraction: Share of a GPU's memory for weights and KV cache together.
        cpu_memory_fraction: Share of the host's memory for the KV cache.
        max_num_seqs: How many sequences will run at once.
        num_threads: Threads for one operator in this process; None for torch's choice.
        quantization: `int8` to round weights and inputs of linear layers; None for none.
        enable_prefix_caching: Whether sequences that begin alike share rows of the KV cache.
        max_num_batched_tokens: Most rows of one pass.
        max_decode_rows: Most rows of one sequence in passes that decode or verify.
        attention_backend: `FLASH_ATTN` or `TORCH_SDPA`; None for the best one on a GPU, and for the
            compiled operators on a CPU.
        enforce_eager: Whether a GPU runs every pass without CUDA graphs.
        max_cudagraph_capture_size: Most rows of a pass that becomes a CUDA graph.
        simulated: What to simulate in place of a device; then no weights are read.
        section: Where in `specgw` the options come from, for messages.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    accept_shorter: bool = False
    kv_cache_tokens: int | None = None
    memory_fraction: float = 0.9
    cpu_memory_fraction: float = 0.25
    max_num_seqs: int = 16
    num_threads: int | None = None
    quantization: str | None = None
    enable_prefix_caching: bool = True
    max_num_batched_tokens: int = 2048
    max_decode_rows: int = 1
    attention_backend: str | None = None
    enforce_eager: bool = False
    max_cudagraph_capture_size: int = 512
    simulated: SimulatedDevice | None = None
    section: str = "verifier"


def target_options(args: EngineArgs) -> ModelOptions:
    """Returns how a verifier loads its model."""
    settings = args.specgw.verifier
    return ModelOptions(
        model=args.model,
        dtype=args.dtype,
        device=args.device,
        max_model_len=args.max_model_len,
        kv_cache_tokens=settings.kv_cache_tokens,
        memory_fraction=args.gpu_memory_utilization,
        cpu_memory_fraction=settings.cpu_memory_fraction,
        max_num_seqs=args.max_num_seqs,
        num_threads=settings.num_threads,
        quantization=args.quantization,
        enable_prefix_caching=args.enable_prefix_caching,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_decode_rows=1 + args.max_draft_tokens,
        attention_backend=args.attention_backend,
        enforce_eager=args.enforce_eager,
        max_cudagraph_capture_size=args.max_cudagraph_capture_size,
        simulated=_simulated_target(args.specgw.simulation),
    )


def draft_options(args: EngineArgs) -> ModelOptions:
    """Returns how a proposer loads its model."""
    assert args.speculative_config is not None, "a proposer needs a speculative_config"
    config, settings = args.speculative_config, args.specgw.proposer
    masks = config.num_speculative_tokens - 1 if config.parallel_drafting else 0
    return ModelOptions(
        model=config.model,
        dtype=args.dtype,
        device=args.device,
        max_model_len=config.max_model_len or args.max_model_len,
        accept_shorter=True,
        kv_cache_tokens=settings.kv_cache_tokens,
        memory_fraction=args.gpu_memory_utilization,
        cpu_memory_fraction=settings.cpu_memory_fraction,
        max_num_seqs=settings.max_sessions,
        num_threads=settings.num_threads,
        quantization=config.quantization,
        enable_prefix_caching=args.enable_prefix_caching,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_decode_rows=1 + config.num_speculative_tokens + masks,
        attention_backend=_draft_backend(config),
        enforce_eager=args.enforce_eager or bool(config.enforce_eager),
        max_cudagraph_capture_size=args.max_cudagraph_capture_size,
        simulated=_simulated_draft(args.specgw.simulation),
        section="proposer",
    )


def _draft_backend(config: SpeculativeConfig) -> str | None:
    backend = config.attention_backend
    return backend if backend in RUNNABLE_ATTENTION else None


def _simulated_target(settings: SimulationSettings | None) -> SimulatedDevice | None:
    if settings is None:
        return None
    return SimulatedDevice(settings.verify_ms / 1e3, settings.verify_row_ms / 1e3)


def _simulated_draft(settings: SimulationSettings | None) -> SimulatedDevice | None:
    if settings is None:
        return None
    step_s, row_s = settings.draft_step_ms / 1e3, settings.draft_row_ms / 1e3
    return SimulatedDevice(step_s, row_s, settings.acceptance_rate, settings.runner_up_rates)


def load_model(options: ModelOptions) -> ModelRunner:
    """Loads a model.

    Raises:
        ConfigError: naming what is wrong with the model or the options.
    """
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    model_dir = resolve_model(options.model)
    config = _read_config(model_dir)
    if options.simulated is not None:
        return _simulate(options, options.simulated, model_dir, config)
    device = _device(options.device)
    dtype = _dtype(options.dtype, config)
    max_model_len = _max_model_len(options, config)
    _refuse_unsupported(options.model, config, max_model_len)
    weight_files(model_dir)  # raises before anything slow
    is_int8 = _is_int8(options, dtype, device)
    kernel = _attention_kernel(options, config, dtype, device)
    model = _load_weights(model_dir, config, dtype, device, max_model_len, is_int8)
    description = ModelDescription(
        name=options.model,
        architecture=(config.architectures or ("",))[0],
        vocab_size=config.vocab_size,
        vocab_fingerprint=vocab_fingerprint(model_dir),
        max_model_len=max_model_len,
        dtype="int8" if is_int8 else str(dtype).removeprefix("torch."),
        device=str(device),
    )
    eos_token_ids = _eos_token_ids(model_dir, config)
    hidden_size = getattr(config, "hidden_size", None)

    def build(kv_cache: KVCache) -> ModelRunner:
        length = min(max_model_len, kv_cache.capacity_tokens)
        parts = model, replace(description, max_model_len=length), eos_token_ids, kv_cache
        if kernel is None:
            return ModelRunner(*parts, hidden_size=hidden_size)
        return PagedRunner(*parts, kernel, hidden_size=hidden_size)

    pool = pool_shape(config, dtype, device, kernel, has_prefix_cache=options.enable_prefix_caching)
    runner = build(_build_kv_cache(options, pool, max_model_len, build))
    if isinstance(model, TransformersModel):
        model.end_trial(runner)
    if isinstance(runner, PagedRunner) and device.type == "cuda" and not options.enforce_eager:
        runner.record(_graph_limits(options), CudaRecorder(device))
    return runner


def _simulate(
    options: ModelOptions, device: SimulatedDevice, model_dir: Path, config: PreTrainedConfig
) -> SimulatedRunner:
    max_model_len = _max_model_len(options, config)
    eos_token_ids = _eos_token_ids(model_dir, config)
    capacity = options.kv_cache_tokens or options.max_num_seqs * (max_model_len + BLOCK_SIZE)
    kv_cache = KVCache(
        *(1, 1, 1, capacity, torch.int64, torch.device("cpu")),
        has_prefix_cache=options.enable_prefix_caching,
    )
    description = ModelDescription(
        name=options.model,
        architecture="Simulated",
        vocab_size=config.vocab_size,
        vocab_fingerprint=vocab_fingerprint(model_dir),
        max_model_len=min(max_model_len, kv_cache.capacity_tokens),
        dtype="none",
        device=SIMULATED_DEVICE,
    )
    token_ids = plain_token_ids(model_dir) or [
        token_id for token_id in range(config.vocab_size) if token_id not in eos_token_ids
    ]
    return SimulatedRunner(device, description, token_ids, eos_token_ids, kv_cache)


def _read_config(model_dir: Path) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise ConfigError([f"{model_dir}: config.json cannot be used: {error}"]) from None
    return config


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError([f"device: {name!r} cannot be used: {error}"]) from None
    return device


def _dtype(name: str, config: PreTrainedConfig) -> torch.dtype:
    dtype = config.dtype or torch.float32 if name == "auto" else getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError([f"dtype: {name!r} is not a floating point type"])
    return dtype


def _is_int8(options: ModelOptions, dtype: torch.dtype, device: torch.device) -> bool:
    if options.quantization is None:
        return False
    if not can_be_int8(torch.empty(0, 4, dtype=dtype, device=device)):
        problem = (
            f"quantization: {options.quantization} needs dtype bfloat16 on a CPU with AVX-512 BF16 "
            f"and VNNI, and specgw built with a C compiler; {options.model} is to run in "
            f"{str(dtype).removeprefix('torch.')} on {device}"
        )
        raise ConfigError([problem])
    return True


def _max_model_len(options: ModelOptions, config: PreTrainedConfig) -> int:
    made_for: int | None = getattr(config, "max_position_embeddings", None)
    wanted = options.max_model_len or made_for
    if wanted is None:
        raise ConfigError([f"max_model_len: {options.model} does not say how much it supports"])
    if made_for is None or wanted <= made_for:
        return wanted
    if options.accept_shorter:
        return made_for
    raise ConfigError([f"max_model_len: {options.model} supports {made_for}, got {wanted}"])


def _refuse_unsupported(name: str, config: PreTrainedConfig, max_model_len: int) -> None:
    layer_types = set(getattr(config, "layer_types", None) or ()).difference(_FULL_HISTORY)
    rope = getattr(config, "rope_parameters", None) or {}
    for nested in rope.values():  # one for each type of layer
        rope = nested if isinstance(nested, dict) else rope
    rope_type = rope.get("rope_type", "default")
    original = rope.get("original_max_position_embeddings") or max_model_len
    problems = {
        "is an encoder-decoder model": getattr(config, "is_encoder_decoder", False),
        "is a multimodal model": config.get_text_config() is not config,
        "is not a causal language model": not config.architectures
        or config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "is quantized": getattr(config, "quantization_config", None) is not None,
        "rotates by multimodal positions (M-RoPE)": "mrope_section" in rope,
        f"has layers of type {', '.join(sorted(layer_types))}": layer_types,
        f"rotates by the length of the context (RoPE type {rope_type}); it can run with "
        f"max_model_len up to {original}": rope_type in _LENGTH_DEPENDENT_ROPE
        and max_model_len > original,
    }
    found = [f"model: {name} {text}" for text, is_so in problems.items() if is_so]
    if found:
        raise ConfigError(found)


def _load_weights(
    model_dir: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    is_int8: bool,
) -> Callable[[Batch], Tensor]:
    if not decoder.is_supported(config):
        return TransformersModel(model_dir, config, dtype, device, is_int8=is_int8)
    weights = Checkpoint(model_dir, dtype, device)
    model = decoder.Decoder(config, weights, max_model_len, is_int8=is_int8)
    unknown = [name for name in weights.remaining if not decoder.is_ignored(name, config)]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ConfigError([f"{model_dir}: the tensor {unknown[0]}{more} is unknown to the model"])
    return model


def _attention_kernel(
    options: ModelOptions, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> PagedKernel | None:
    """Returns what computes attention from block tables; None on a CPU unless asked for."""
    if device.type == "cpu" and options.attention_backend is None:
        return None
    heads = HeadShape(
        config.num_attention_heads,
        decoder.num_kv_heads(config),
        decoder.head_dim(config),
        dtype,
        device,
    )
    return choose_kernel(options.attention_backend, heads)


def _graph_limits(options: ModelOptions) -> GraphLimits:
    return GraphLimits(
        options.max_num_seqs, options.max_decode_rows, options.max_cudagraph_capture_size
    )


def _build_kv_cache(
    options: ModelOptions,
    pool: PoolShape,
    max_model_len: int,
    build_runner: Callable[[KVCache], ModelRunner],
) -> KVCache:
    capacity = options.kv_cache_tokens or _default_capacity(
        options, pool, max_model_len, build_runner
    )
    smallest = max_model_len if options.max_model_len is not None else BLOCK_SIZE
    if capacity < smallest:
        key = _capacity_key(options, pool.device)
        problem = (
            f"{key}: the KV cache holds {max(capacity, 0)} tokens, one request has up to "
            f"{smallest}: raise {key} or lower max_model_len"
        )
        raise ConfigError([problem])
    return pool.build(capacity)


def _default_capacity(
    options: ModelOptions,
    pool: PoolShape,
    max_model_len: int,
    build_runner: Callable[[KVCache], ModelRunner],
) -> int:
    if pool.device.type != "cuda":
        full = full_contexts(options.max_num_seqs, max_model_len)
        return min(full, room_on_host(options.cpu_memory_fraction) // pool.token_bytes)
    num_tokens = options.max_num_batched_tokens
    num_logits = min(num_tokens, options.max_num_seqs * options.max_decode_rows)
    trial = build_runner(pool.build(num_tokens + num_tokens // max_model_len * pool.block_size))
    workspace = measure_workspace(trial, num_tokens, num_logits)
    del trial
    room = room_on_device(device_memory(pool.device), options.memory_fraction, workspace)
    return pool.tokens_in(room)


def _capacity_key(options: ModelOptions, device: torch.device) -> str:
    """Returns the key that decides how many tokens the KV cache holds."""
    if options.kv_cache_tokens is not None:
        return f"specgw.{options.section}.kv_cache_tokens"
    if device.type == "cuda":
        return "gpu_memory_utilization"
    return f"specgw.{options.section}.cpu_memory_fraction"


def load_eos_token_ids(model: str) -> tuple[int, ...]:
    """Returns the tokens that end a model's output, from its files; no weights are needed.

    Raises:
        ConfigError: if there is no such model, or its configuration cannot be used.
    """
    model_dir = resolve_model(model, with_weights=False)
    return _eos_token_ids(model_dir, _read_config(model_dir))


def _eos_token_ids(model_dir: Path, config: PreTrainedConfig) -> tuple[int, ...]:
    file = model_dir / "generation_config.json"
    generation = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    ids = generation.get("eos_token_id")
    if ids is None:
        ids = config.eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (ids,)
