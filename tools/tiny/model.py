"""A small Llama, fast to train on CPU, with the parameter names of `LlamaForCausalLM`."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

NORM_EPS = 1e-5
ROPE_THETA = 10_000.0
MAX_LENGTH = 1024
HIDDEN_FROM_VIEW = -1e4  # added to a score in bfloat16; exp() of it is exactly 0


@dataclass(frozen=True)
class Shape:
    """The sizes of one model."""

    vocab_size: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight, NORM_EPS)


class Attention(nn.Module):
    """Grouped-query attention; the query heads of a group are folded into rows."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=False)

    def forward(self, hidden: Tensor, rope: Tensor, mask: Tensor) -> Tensor:
        shape = self.shape
        batch, rows, _ = hidden.shape
        group = shape.heads // shape.kv_heads
        queries = self.q_proj(hidden).view(batch, rows, shape.heads, shape.head_dim).transpose(1, 2)
        keys = self.k_proj(hidden).view(batch, rows, shape.kv_heads, shape.head_dim).transpose(1, 2)
        values = self.v_proj(hidden).view(batch, rows, shape.kv_heads, shape.head_dim)
        values = values.transpose(1, 2)
        queries, keys = rotate(queries * shape.head_dim**-0.5, rope), rotate(keys, rope)
        folded = queries.reshape(batch * shape.kv_heads, group * rows, shape.head_dim)
        scores = folded @ keys.flatten(0, 1).transpose(1, 2)  # [.., group * rows, rows]
        scores = scores + mask.repeat(group, 1)
        mixed = scores.softmax(-1) @ values.flatten(0, 1)  # [.., group * rows, head_dim]
        mixed = mixed.view(batch, shape.heads, rows, shape.head_dim).transpose(1, 2)
        output: Tensor = self.o_proj(mixed.reshape(batch, rows, -1))
        return output


def rotate(vectors: Tensor, rope: Tensor) -> Tensor:
    """Applies rotary positions; `rope` is [2, rows, head_dim / 2], cosines then sines."""
    cosine, sine = rope[0], rope[1]
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden)
        self.mlp = FeedForward(shape)

    def forward(self, hidden: Tensor, rope: Tensor, mask: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rope, mask)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Body(nn.Module):
    """Everything under the `model.` prefix of a Llama checkpoint."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden)


class TinyLlama(nn.Module):
    """A decoder with tied embeddings."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                is_residual_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / (2 * shape.layers) ** 0.5 if is_residual_output else 0.02
                nn.init.normal_(parameter, std=std, generator=generator)

    def forward(self, token_ids: Tensor) -> Tensor:  # [batch, rows] -> [batch, rows, vocab_size]
        rows = token_ids.shape[1]
        mask = causal_mask(rows)
        body = self.model
        hidden = body.embed_tokens(token_ids)
        rope = rope_table(torch.arange(rows), self.shape.head_dim).to(hidden.dtype)
        for layer in body.layers:
            hidden = layer(hidden, rope, mask)
        return F.linear(body.norm(hidden), body.embed_tokens.weight)


def deepen(shallow: TinyLlama, shape: Shape) -> TinyLlama:
    """Returns a model of `shape`, twice as deep, whose layer i starts as layer i // 2."""
    model = TinyLlama(shape, seed=0)
    model.model.embed_tokens.load_state_dict(shallow.model.embed_tokens.state_dict())
    model.model.norm.load_state_dict(shallow.model.norm.state_dict())
    for index, layer in enumerate(model.model.layers):
        assert isinstance(layer, Layer)
        layer.load_state_dict(shallow.model.layers[index // 2].state_dict())
        # Two copies in a row would write twice as much as one.
        for writer in (layer.self_attn.o_proj, layer.mlp.down_proj):
            writer.weight.data.mul_(0.5)
    return model


def causal_mask(rows: int) -> Tensor:  # [rows, rows]
    return torch.full((rows, rows), HIDDEN_FROM_VIEW, dtype=torch.bfloat16).triu(1)


def rope_table(positions: Tensor, head_dim: int) -> Tensor:  # [2, rows, head_dim / 2]
    frequencies = ROPE_THETA ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = positions[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()))


@dataclass(frozen=True)
class Vocabulary:
    """What a checkpoint says about its tokens."""

    tokenizer_file: Path
    tokenizer_config: dict[str, object]
    end_id: int
    bos_id: int | None = None


def export(model: TinyLlama, vocabulary: Vocabulary, folder: Path) -> None:
    """Writes a checkpoint in Hugging Face layout, weights in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.detach().to(torch.bfloat16, copy=True)
        for name, value in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ends: dict[str, object] = {"bos_token_id": vocabulary.bos_id, "eos_token_id": vocabulary.end_id}
    _write_json(folder / "config.json", _llama_config(model.shape) | ends)
    _write_json(folder / "generation_config.json", ends | {"do_sample": False})
    _write_json(folder / "tokenizer_config.json", vocabulary.tokenizer_config)
    shutil.copyfile(vocabulary.tokenizer_file, folder / "tokenizer.json")


def _llama_config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "max_position_embeddings": MAX_LENGTH,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
