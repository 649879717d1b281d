"""The target's hidden states: what a pass gives, and what becomes of it until the next commit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from specgw.engine.hidden_rows import HiddenRows, to_tensor
from specgw.engine.model_runner import SequenceChunk
from specgw.hidden import LAST, MAX_COMMIT_BYTES, HiddenFormat
from tests.unit.engine.tiny_checkpoints import (
    OTHER_TOKEN_IDS,
    SIZES,
    TOKEN_IDS,
    VOCAB_SIZE,
    load,
    save_checkpoint,
)

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "phi": PhiConfig(**SIZES),
    "gpt2": GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}
FORMAT = HiddenFormat((LAST,), 2, "float32")


@torch.inference_mode()
def read_by_head(model_dir: Path, token_ids: list[int]) -> Tensor:  # [num_tokens, hidden_size]
    """Returns what transformers hands to the LM head."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    seen: list[Tensor] = []

    def note(module: nn.Module, arguments: tuple[Tensor]) -> None:
        seen.append(arguments[0][0])

    model.get_output_embeddings().register_forward_pre_hook(note)
    model(input_ids=torch.tensor([token_ids]))
    return seen[0]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_rows_are_what_the_lm_head_reads(config: PreTrainedConfig, tmp_path: Path) -> None:
    model_dir = save_checkpoint(config, tmp_path)
    runner = load(model_dir, "float32")
    chunks = [(OTHER_TOKEN_IDS[:30], 2), (TOKEN_IDS[:20], 0), (TOKEN_IDS[20:40], 1)]
    caches = [runner.kv_cache.new_sequence() for _ in range(2)]

    plain = runner.forward([
        SequenceChunk(cache, *chunk) for cache, chunk in zip(caches, chunks[:2], strict=True)
    ])  # fmt: skip
    for cache in caches:
        cache.release()
    logits, hidden = runner.forward_with_hidden([
        SequenceChunk(cache, *chunk) for cache, chunk in zip(caches, chunks[:2], strict=True)
    ])  # fmt: skip
    _, more = runner.forward_with_hidden([SequenceChunk(caches[1], *chunks[2])])

    assert runner.hidden == HiddenFormat((LAST,), 32, "float32")
    torch.testing.assert_close(logits, plain, rtol=0, atol=0)
    expected = (
        read_by_head(model_dir, OTHER_TOKEN_IDS[:30]),
        read_by_head(model_dir, TOKEN_IDS[:40]),
    )
    torch.testing.assert_close(torch.cat((hidden, more)), torch.cat(expected), rtol=1e-4, atol=1e-4)


def rows(first: int, count: int) -> Tensor:
    """Returns rows that tell their position."""
    return torch.arange(first, first + count).float()[:, None].expand(-1, 2)


def positions(hidden: HiddenRows) -> list[int]:
    states = hidden.take(FORMAT)
    return [] if states is None else [int(row[0]) for row in to_tensor(states)]


def test_rows_of_several_passes_are_sent_once() -> None:
    hidden = HiddenRows()
    hidden.append(0, rows(0, 3))
    hidden.append(3, rows(3, 1))

    first = positions(hidden)
    hidden.append(4, rows(4, 2))

    assert (first, positions(hidden), positions(hidden)) == ([0, 1, 2, 3], [4, 5], [])


def test_rows_computed_again_are_not_sent_again() -> None:
    hidden = HiddenRows()
    hidden.append(0, rows(0, 3))
    assert positions(hidden) == [0, 1, 2]

    hidden.append(0, rows(0, 2))
    hidden.append(2, rows(2, 3))

    assert positions(hidden) == [3, 4]


def test_rows_before_a_gap_are_dropped() -> None:
    hidden = HiddenRows()
    hidden.append(0, rows(0, 3))

    hidden.append(16, rows(16, 2))

    assert positions(hidden) == [16, 17]


def test_a_payload_holds_the_newest_rows_within_its_bound() -> None:
    size = MAX_COMMIT_BYTES // 4 // 4  # four float32 rows, eight of float16
    hidden = HiddenRows()
    for position in range(11):
        hidden.append(position, torch.full((1, size), float(position), dtype=torch.float16))

    states = hidden.take(HiddenFormat((LAST,), size, "float32"))

    assert states is not None
    assert len(states.values) == MAX_COMMIT_BYTES
    assert to_tensor(states)[:, 0].tolist() == [7, 8, 9, 10]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_are_sent_in_the_type_asked_for(dtype: str) -> None:
    values = torch.tensor([[1.5, -2.0], [0.25, 3.0]])
    hidden = HiddenRows()
    hidden.append(0, values)

    states = hidden.take(HiddenFormat((LAST,), 2, dtype))

    assert states is not None
    assert (states.dtype, states.shape) == (dtype, (2, 2))
    assert to_tensor(states).dtype == getattr(torch, dtype)
    torch.testing.assert_close(to_tensor(states).float(), values)
