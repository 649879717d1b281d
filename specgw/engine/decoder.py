"""The decoder of the Llama family: Llama, Mistral, Qwen2, Qwen3 and what shares their layout.

The arithmetic of transformers' modeling code in fewer and larger operators: one product for
queries, keys and values, one for gate and up, one rotation for queries and keys; on a CPU with
compiled operators all layers in one call (`compiled_layers.py`). `loading.py` decides which
checkpoints run here; `model_runner.py` calls it.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specgw.engine import cpu_kernels
from specgw.engine.attention import Attention, Batch, BatchAttention
from specgw.engine.checkpoint import Checkpoint
from specgw.engine.compiled_layers import (
    CompiledLayers,
    LayerShape,
    LayerWeights,
    can_compile,
)
from specgw.engine.linear import Linear, LinearBuilder

ROPE_TYPES = ("default", "linear", "llama3", "yarn")

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def is_supported(config: PreTrainedConfig) -> bool:
    """Whether the decoder computes what transformers computes for this configuration."""
    return (
        _ARCHITECTURES.get(config.model_type) in (config.architectures or ())
        and config.hidden_act == "silu"
        and config.rope_parameters["rope_type"] in ROPE_TYPES
        and config.rope_parameters.get("partial_rotary_factor", 1.0) == 1.0
    )


def is_ignored(name: str, config: PreTrainedConfig) -> bool:
    """Whether a checkpoint may hold the tensor although the decoder does not use it."""
    return name.endswith("rotary_emb.inv_freq") or (
        bool(config.tie_word_embeddings) and name == "lm_head.weight"
    )


class Decoder:
    """A model of the family with its weights."""

    def __init__(
        self,
        config: PreTrainedConfig,
        weights: Checkpoint,
        max_model_len: int,
        *,
        is_int8: bool = False,
    ) -> None:
        table = (config.vocab_size, config.hidden_size)
        linears = LinearBuilder(is_int8=is_int8)
        embedding = weights.take("model.embed_tokens.weight", *table)
        self._layers = [
            _Layer(config, weights, i, linears) for i in range(config.num_hidden_layers)
        ]
        self._norm = _norm(config, weights, "model.norm")
        tied = config.tie_word_embeddings
        head = embedding if tied else weights.take("lm_head.weight", *table)
        self._lm_head = linears(head)
        is_shared = tied and self._lm_head.can_look_up
        self._embedding = None if is_shared else embedding
        self._rotations = _rotations(config, max_model_len).to(embedding)
        self._compiled = _compile(config, self._layers, self._rotations)

    def __call__(self, batch: Batch) -> Tensor:  # [num_logits, vocab_size]
        hidden = self._embed(batch.token_ids)  # [num_tokens, hidden_size]
        if self._compiled is not None and isinstance(batch.attention, BatchAttention):
            hidden = self._compiled(hidden, batch.attention.kv_cache, batch.attention.rows)
        else:
            rotation = _Rotation(self._rotations, batch.positions)
            for layer in self._layers:
                hidden = layer(hidden, rotation, batch.attention)
        if batch.hidden is not None:
            batch.hidden.append(self._norm(hidden))
        if batch.logit_rows is not None:
            hidden = hidden.index_select(0, batch.logit_rows)
        return self._lm_head(self._norm(hidden))

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self._embedding is None:
            return self._lm_head.rows(token_ids)
        return self._embedding.index_select(0, token_ids)


class _Layer:
    """Attention, then the gated MLP, each added to the residual."""

    def __init__(
        self, config: PreTrainedConfig, weights: Checkpoint, index: int, linears: LinearBuilder
    ) -> None:
        name = f"model.layers.{index}"
        heads, kv_heads, size = config.num_attention_heads, num_kv_heads(config), head_dim(config)
        hidden, inner = config.hidden_size, config.intermediate_size
        attention_bias = getattr(config, "attention_bias", False)
        mlp_bias = getattr(config, "mlp_bias", False)
        self._index = index
        self._head_dim = size
        self._split = (heads, 2 * kv_heads)
        self._num_rotated = heads + kv_heads
        self._scale = size**-0.5
        self._window = _window(config, index)
        self._attention_norm = _norm(config, weights, f"{name}.input_layernorm")
        self._qkv = _linear(
            weights,
            {
                f"{name}.self_attn.q_proj": (heads * size, hidden),
                f"{name}.self_attn.k_proj": (kv_heads * size, hidden),
                f"{name}.self_attn.v_proj": (kv_heads * size, hidden),
            },
            has_bias=attention_bias or config.model_type == "qwen2",
            linears=linears,
        )
        self._head_norm: _HeadNorm | None = None
        if config.model_type == "qwen3":
            self._head_norm = _HeadNorm(config, weights, f"{name}.self_attn")
        output = {f"{name}.self_attn.o_proj": (hidden, heads * size)}
        self._output = _linear(weights, output, attention_bias, linears)
        self._mlp_norm = _norm(config, weights, f"{name}.post_attention_layernorm")
        gate_up = {f"{name}.mlp.{part}_proj": (inner, hidden) for part in ("gate", "up")}
        self._gate_up = _linear(weights, gate_up, mlp_bias, linears)
        down = {f"{name}.mlp.down_proj": (hidden, inner)}
        self._down = _linear(weights, down, mlp_bias, linears)

    def __call__(self, hidden: Tensor, rotation: "_Rotation", attend: Attention) -> Tensor:
        qkv = self._qkv(self._attention_norm(hidden))
        # Heads of queries, keys and values in this order.
        qkv = qkv.view(len(hidden), -1, self._head_dim)  # [num_tokens, heads, head_dim]
        rotated = qkv[:, : self._num_rotated]
        if self._head_norm is not None:
            rotated.copy_(self._head_norm(rotated))
        rotation.apply_(rotated)
        query, keys_values = qkv.split_with_sizes(self._split, 1)
        attended = attend(self._index, query, keys_values, self._scale, self._window)
        hidden = self._output(attended, residual=hidden)
        gate, up = self._gate_up(self._mlp_norm(hidden)).chunk(2, -1)
        return self._down(F.silu(gate).mul_(up), residual=hidden)

    @property
    def weights(self) -> LayerWeights:
        """What `CompiledLayers` takes."""
        return LayerWeights(
            self._attention_norm.weight,
            None if self._head_norm is None else self._head_norm.weight,
            self._mlp_norm.weight,
            self._qkv,
            self._output,
            self._gate_up,
            self._down,
            self._window,
        )


class _Rotation:
    """Turns the halves of heads against each other by the positions of one batch's rows."""

    def __init__(self, table: Tensor, positions: Tensor) -> None:
        self._cos, self._sin = table.index_select(0, positions).unbind(1)

    def apply_(self, heads: Tensor) -> None:  # [num_tokens, num_heads, head_dim]
        turned = heads.roll(heads.shape[-1] // 2, -1)
        torch.addcmul(heads * self._cos, turned, self._sin, out=heads)


class _RMSNorm:
    """Scales vectors to unit root mean square, then by a weight.

    Without the compiled operator: on a CPU torch composes `rms_norm` from eight operators (12 us)
    but has a kernel for `layer_norm` (3 us), which does the same to (x, -x), whose mean is zero.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._eps = eps
        self.weight = weight  # [size]
        self._is_compiled = cpu_kernels.is_usable(weight)
        self._on_cpu = weight.device.type == "cpu"
        if self._on_cpu and not self._is_compiled:
            self._mirrored = torch.stack((weight, weight))
            self._signs = torch.tensor([[1.0], [-1.0]], dtype=weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:  # [..., size]
        if self._is_compiled:
            return cpu_kernels.rms_norm(x, self.weight, self._eps)
        if self._on_cpu:
            mirrored = x.unsqueeze(-2) * self._signs  # [..., 2, size]
            shape = self._mirrored.shape
            return F.layer_norm(mirrored, shape, self._mirrored, None, self._eps).select(-2, 0)
        return F.rms_norm(x, self.weight.shape, self.weight, self._eps)


class _HeadNorm:
    """An `_RMSNorm` over each query head and one over each key head."""

    def __init__(self, config: PreTrainedConfig, weights: Checkpoint, name: str) -> None:
        query = weights.take(f"{name}.q_norm.weight", head_dim(config))
        key = weights.take(f"{name}.k_norm.weight", head_dim(config))
        self._norm = _RMSNorm(torch.ones_like(query), config.rms_norm_eps)
        self.weight = torch.cat(
            (
                query.expand(config.num_attention_heads, -1),
                key.expand(num_kv_heads(config), -1),
            )
        )

    def __call__(self, x: Tensor) -> Tensor:  # [num_tokens, num_heads + num_kv_heads, head_dim]
        return self._norm(x) * self.weight


def _compile(
    config: PreTrainedConfig, layers: Sequence[_Layer], rotations: Tensor
) -> CompiledLayers | None:
    size = head_dim(config)
    shape = LayerShape(
        heads=config.num_attention_heads,
        kv_heads=num_kv_heads(config),
        head_dim=size,
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        eps=config.rms_norm_eps,
        scale=size**-0.5,
    )
    weights = [layer.weights for layer in layers]
    if not all(can_compile(layer, shape) for layer in weights):
        return None
    return CompiledLayers(weights, shape, rotations)


def _norm(config: PreTrainedConfig, weights: Checkpoint, name: str) -> _RMSNorm:
    return _RMSNorm(weights.take(f"{name}.weight", config.hidden_size), config.rms_norm_eps)


def _linear(
    weights: Checkpoint,
    shapes: Mapping[str, tuple[int, int]],
    has_bias: bool,
    linears: LinearBuilder,
) -> Linear:
    """Fuses projections of the same input into one."""
    weight = torch.cat([weights.take(f"{name}.weight", *shape) for name, shape in shapes.items()])
    if not has_bias:
        return linears(weight)
    biases = [weights.take(f"{name}.bias", shape[0]) for name, shape in shapes.items()]
    return linears(weight, torch.cat(biases))


def head_dim(config: PreTrainedConfig) -> int:
    """Returns the size of one head."""
    explicit = getattr(config, "head_dim", None)
    return int(explicit or config.hidden_size // config.num_attention_heads)


def num_kv_heads(config: PreTrainedConfig) -> int:
    """Returns how many heads keys and values have."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _window(config: PreTrainedConfig, layer: int) -> int | None:
    """Returns how many rows a row of the layer sees, itself included; None for all."""
    if config.model_type == "mistral" or (
        config.model_type != "llama" and config.layer_types[layer] == "sliding_attention"
    ):
        window: int | None = config.sliding_window
        return window
    return None


def _rotations(config: PreTrainedConfig, num_positions: int) -> Tensor:
    """Returns cosines and signed sines in float32: [num_positions, 2, 1, head_dim].

    The sign of the sine is that of `rotate_half`, so that rolling a head does for turning it.
    """
    rope = config.rope_parameters
    factor = 1.0
    if rope["rope_type"] == "default":
        steps = torch.arange(0, head_dim(config), 2, dtype=torch.float32) / head_dim(config)
        frequencies = rope["rope_theta"] ** -steps
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).unsqueeze(2)
