"""Runs what `decoder.py` does not know through transformers' own modeling code.

The block cache is plugged into transformers' attention interface: a batch is one row of tokens of
many sequences, and only our attention function knows where each begins. Before a model is used its
logits are compared with those of transformers' own attention, so that a model that needs more than
that (position biases, attention sinks, a state of its own) is refused.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from specgw.engine.attention import Attention, Batch
from specgw.engine.linear import LinearBuilder
from specgw.engine.model_runner import ModelRunner, SequenceChunk
from specgw.errors import ConfigError

_ATTENTION = "specgw"
_NOT_UNDERSTOOD = ("softcap", "s_aux", "position_bias")
_TRIAL_CHUNKS = (5, 1, 3)
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.01}


class TransformersModel:
    """A model of transformers whose attention reads and writes the block cache."""

    def __init__(
        self,
        model_dir: Path,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_int8: bool = False,
    ) -> None:
        self._is_int8 = is_int8
        self._name = str(model_dir)
        self._config = config
        self._model = _load(model_dir, config, dtype, device)
        self._windows: dict[int, int | None] = {}  # that layers asked for; filled by the trial
        self._on_trial = True

    def __call__(self, batch: Batch) -> Tensor:  # [num_logits, vocab_size]
        attend: Callable[..., Tensor] = batch.attention
        if self._on_trial:
            attend = partial(_note_window, self._windows, batch.attention)
        return self._logits(
            batch.token_ids,
            batch.hidden,
            position_ids=batch.positions.unsqueeze(0),
            logits_to_keep=0 if batch.logit_rows is None else batch.logit_rows,
            specgw_attention=attend,
        )

    @torch.inference_mode()
    def end_trial(self, runner: ModelRunner) -> None:
        """Compares the model with itself under transformers' attention, then makes it fast.

        Raises:
            ConfigError: if they disagree.
        """
        token_ids = [(7 * i + 1) % runner.vocab_size for i in range(sum(_TRIAL_CHUNKS))]
        try:
            self._model.set_attn_implementation("eager")
            expected = self._logits(torch.tensor(token_ids, device=runner.device))
            self._model.set_attn_implementation(_ATTENTION)
            found = _logits_in_chunks(runner, token_ids)
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            raise self._refusal(str(error)) from error
        difference = (found - expected).norm() / expected.norm()
        if not difference < _TOLERANCE[expected.dtype]:
            raise self._refusal(f"its logits differ by {difference:.2g} under our attention")
        if self._windows != _windows(self._config):
            raise self._refusal("its sliding window is not applied by its attention function")
        _pack_linears(self._model, self._is_int8)
        self._on_trial = False

    def _logits(
        self, token_ids: Tensor, hidden: list[Tensor] | None = None, **kwargs: Any
    ) -> Tensor:
        if hidden is not None:
            kwargs["output_hidden_states"] = True
        output = self._model(input_ids=token_ids.unsqueeze(0), use_cache=False, **kwargs)
        if hidden is not None:
            hidden.append(output.hidden_states[-1][0])
        return cast(Tensor, output.logits[0])

    def _refusal(self, reason: str) -> ConfigError:
        kind = type(self._model).__name__
        return ConfigError([f"model: {self._name} ({kind}) cannot run on a block cache: {reason}"])


def _load(
    model_dir: Path, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    AttentionInterface.register(_ATTENTION, _attend)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model_dir,
        config=config,
        dtype=dtype,
        attn_implementation="eager",
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
    )
    model, report = loaded
    broken = [*report["missing_keys"], *report["mismatched_keys"], *report["unexpected_keys"]]
    if broken:
        raise ConfigError([f"{model_dir}: tensors missing, unknown or misshapen: {broken[0]}"])
    if not model._supports_attention_backend:
        kind = type(model).__name__
        raise ConfigError([f"model: {model_dir} ({kind}) takes no attention function but its own"])
    return cast(PreTrainedModel, model.to(device).eval())


def _attend(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: Tensor,
    attention_mask: None,
    *,
    specgw_attention: Callable[..., Tensor],
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Is called by transformers' attention modules."""
    for name in _NOT_UNDERSTOOD:
        if kwargs.get(name) is not None:
            raise ValueError(f"its attention uses {name}")
    _, num_heads, num_tokens, head_dim = query.shape
    output = specgw_attention(
        module.layer_idx,
        query[0].transpose(0, 1).contiguous(),
        torch.cat((key[0], value[0])).transpose(0, 1),
        head_dim**-0.5 if scaling is None else scaling,
        sliding_window,
    )
    return output.view(1, num_tokens, num_heads, head_dim), None


def _note_window(
    windows: dict[int, int | None],
    attend: Attention,
    layer: int,
    query: Tensor,
    keys_values: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    windows[layer] = window
    return attend(layer, query, keys_values, scale, window)


def _windows(config: PreTrainedConfig) -> dict[int, int | None]:
    """Returns each layer's sliding window, as the configuration has it."""
    num_layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or num_layers * ["sliding_attention"]
    return {i: window if kind == "sliding_attention" else None for i, kind in enumerate(kinds)}


def _logits_in_chunks(runner: ModelRunner, token_ids: list[int]) -> Tensor:
    cache = runner.kv_cache.new_sequence()
    logits = []
    for size in _TRIAL_CHUNKS:
        chunk = token_ids[cache.length : cache.length + size]
        logits.append(runner.forward([SequenceChunk(cache, chunk, size)]))
    cache.release()
    return torch.cat(logits)


def _pack_linears(model: PreTrainedModel, is_int8: bool) -> None:
    """Replaces the products of plain linear layers, and lets go of their weights."""
    linears = LinearBuilder(is_int8=is_int8)
    for module in model.modules():
        if type(module) is nn.Linear:
            packed = linears(module.weight, module.bias)
            if packed.is_packed:
                module.forward = packed  # type: ignore[assignment]
                module.weight = nn.Parameter(module.weight.new_empty(0))
