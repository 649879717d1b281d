"""The way a GPU runs a model, on the CPU: batches, padding and recorded shapes.

A recording is replaced by running again; everything else is the code that a GPU runs.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, MistralConfig, PhiConfig

from specgw.engine.attention_kernels import FlashAttention2, PagedKernel
from specgw.engine.block_hashes import BlockHashes
from specgw.engine.graphs import GraphLimits, run_again
from specgw.engine.kv_cache import BLOCK_SIZE, SequenceCache
from specgw.engine.loading import ModelOptions, load_model
from specgw.engine.model_runner import ModelRunner, SequenceChunk
from specgw.engine.paged_runner import PagedRunner
from specgw.errors import ConfigError
from tests.flash_doubles import flash_attn_2
from tests.unit.engine.tiny_checkpoints import (
    MAX_MODEL_LEN,
    SIZES,
    TOKEN_IDS,
    VOCAB_SIZE,
    expected_logits,
    load,
    logits_in_chunks,
    save_checkpoint,
)

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
LIMITS = GraphLimits(max_sequences=5, max_rows_each=6, max_rows=24)
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "window": MistralConfig(**SIZES, sliding_window=7),
    "transformers": PhiConfig(**SIZES),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(CONFIGS["llama"], tmp_path_factory.mktemp("llama"))


def load_paged(model_dir: Path, **options: Any) -> PagedRunner:
    runner = load(model_dir, attention_backend="TORCH_SDPA", **options)
    assert isinstance(runner, PagedRunner)
    return runner


class Pair:
    """One batch after another through two runners, whose sequences stay alike."""

    def __init__(self, expected: ModelRunner, found: ModelRunner, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._runners = expected, found
        self._sequences: list[tuple[SequenceCache, SequenceCache]] = []

    def step(self, sizes: Sequence[int]) -> None:
        """Gives so many rows to as many sequences, and compares all logits that are wanted."""
        self._prepare(len(sizes), max(sizes))
        chosen = self._rng.sample(self._sequences, len(sizes))
        rows = [
            ([self._rng.randrange(VOCAB_SIZE) for _ in range(n)], self._rng.randint(0, n))
            for n in sizes
        ]
        logits = [
            runner.forward([
                SequenceChunk(caches[side], token_ids, num_logits)
                for caches, (token_ids, num_logits) in zip(chosen, rows, strict=True)
            ])
            for side, runner in enumerate(self._runners)
        ]  # fmt: skip
        torch.testing.assert_close(logits[1], logits[0], **CLOSE)

    def _prepare(self, count: int, num_rows: int) -> None:
        """Ends what has no room, rejects some rows of others, and begins new sequences."""
        for caches in list(self._sequences):
            length = caches[0].length - self._rng.choice([0, 0, 1, 3])
            is_over = length + num_rows > MAX_MODEL_LEN or self._rng.random() < 0.05
            for cache in caches:
                cache.truncate(0 if is_over else max(length, 0))
            if is_over:
                self._sequences.remove(caches)
        while len(self._sequences) < count:
            one, other = (runner.kv_cache.new_sequence() for runner in self._runners)
            self._sequences.append((one, other))


@each_config
def test_ragged_batches_of_any_sizes_give_the_same_logits(config: Any, tmp_path: Path) -> None:
    model_dir, rng = save_checkpoint(config, tmp_path), random.Random(1)
    pair = Pair(load(model_dir), load_paged(model_dir))

    for _ in range(40):
        pair.step([rng.choice([1, 1, 1, 2, 3, 5, 17, 40]) for _ in range(rng.randint(1, 6))])


@each_config
@pytest.mark.parametrize("seed", range(3))
def test_replayed_shapes_give_the_same_logits(config: Any, seed: int, tmp_path: Path) -> None:
    model_dir, rng = save_checkpoint(config, tmp_path), random.Random(seed)
    paged = load_paged(model_dir)
    paged.record(LIMITS, run_again)
    pair = Pair(load(model_dir), paged, seed)

    for _ in range(60):
        most = rng.choice([1, 1, 2, 6, 30])
        pair.step([rng.randint(1, most) for _ in range(rng.randint(1, 6))])

    assert paged.graphs is not None
    assert paged.graphs.num_graphs > 5


def paged_with_kernel(model_dir: Path, kernel: PagedKernel, **options: Any) -> PagedRunner:
    """Returns a runner whose kernel reads blocks where they lie."""
    base = load_paged(model_dir)
    pool = type(base.kv_cache)(
        *(2, 2, 8, 6 * 256, torch.float32, torch.device("cpu")),
        block_size=256,
        has_scratch=True,
    )
    return PagedRunner(base.model, base.description, (), pool, kernel)


def test_shapes_are_recorded_at_start_for_a_kernel_that_reads_lengths(model_dir: Path) -> None:
    recorded: list[int] = []

    def count(run: Callable[[], None]) -> Callable[[], None]:
        recorded.append(1)
        return run_again(run)

    paged = paged_with_kernel(model_dir, FlashAttention2(flash_attn_2))
    paged.record(LIMITS, count)
    at_start = len(recorded)
    pair = Pair(load(model_dir), paged)
    for sizes in ([1], [1, 1, 1], [6, 2], [3, 3, 3, 3, 3], [1, 1, 1, 1, 1, 1], [20]):
        pair.step(sizes)

    sequences, rows = (1, 2, 4, 5), (1, 2, 4, 6)
    assert at_start == sum(n * r <= 24 for n, r in itertools.product(sequences, rows))
    assert len(recorded) == at_start


def test_padding_writes_into_no_block_of_a_sequence(model_dir: Path) -> None:
    paged = load_paged(model_dir, max_num_seqs=8)
    paged.record(LIMITS, run_again)
    pool = paged.kv_cache
    others = [pool.new_sequence() for _ in range(3)]
    for other in others:
        paged.forward([SequenceChunk(other, TOKEN_IDS[:30], 1)])
    cache = pool.new_sequence()
    paged.forward([SequenceChunk(cache, TOKEN_IDS[:30], 1)])
    before = [layer.clone() for layer in pool.layers]

    paged.forward([SequenceChunk(cache, TOKEN_IDS[30:33], 3)])  # padded to 4 rows
    paged.forward([  # padded to 4 sequences
        SequenceChunk(cache, TOKEN_IDS[33:34], 1),
        SequenceChunk(others[0], TOKEN_IDS[30:31], 1),
        SequenceChunk(others[1], TOKEN_IDS[30:31], 1),
    ])  # fmt: skip

    written = set(cache.slot_ids(30, 34))
    written |= {slot for other in others[:2] for slot in other.slot_ids(30, 31)}
    assert pool.scratch_block is not None
    scratch = pool.scratch_block * pool.block_size
    for old, new in zip(before, pool.layers, strict=True):
        changed = (old != new).flatten(1).any(1).nonzero().flatten().tolist()
        assert written <= set(changed) <= written | {scratch}


def test_a_recorded_shape_keeps_nothing_of_the_batch_before(model_dir: Path) -> None:
    paged = load_paged(model_dir)
    paged.record(LIMITS, run_again)
    wide = [paged.kv_cache.new_sequence() for _ in range(4)]
    paged.forward([SequenceChunk(one, TOKEN_IDS[:6], 6) for one in wide])
    for one in wide:
        one.release()

    alone = paged.kv_cache.new_sequence()
    logits = [
        paged.forward([SequenceChunk(alone, TOKEN_IDS[i : i + n], n)])
        for i, n in ((0, 5), (5, 6), (11, 1), (12, 5))
    ]

    torch.testing.assert_close(torch.cat(logits), expected_logits(model_dir)[:17], **CLOSE)


def test_logits_of_a_pass_outlive_the_next_one(model_dir: Path) -> None:
    paged = load_paged(model_dir)
    paged.record(LIMITS, run_again)
    cache = paged.kv_cache.new_sequence()
    first = paged.forward([SequenceChunk(cache, TOKEN_IDS[:1], 1)])
    kept = first.clone()

    paged.forward([SequenceChunk(cache, TOKEN_IDS[1:2], 1)])

    assert torch.equal(first, kept)


def test_a_pass_whose_recording_fails_runs_all_the_same(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(run: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    paged = load_paged(model_dir)
    paged.record(LIMITS, fail)

    logits = logits_in_chunks(paged, [1, 5, 44])

    torch.testing.assert_close(logits, expected_logits(model_dir), **CLOSE)
    assert [r.message for r in caplog.records if r.name.endswith("graphs")] == [
        "a CUDA graph could not be recorded: such passes run without from now on"
    ]


def test_hidden_states_come_in_the_order_of_the_batch(model_dir: Path) -> None:
    runners = load(model_dir), load_paged(model_dir)
    outputs = [
        runner.forward_with_hidden([
            SequenceChunk(runner.kv_cache.new_sequence(), TOKEN_IDS[start:end], 1)
            for start, end in ((0, 17), (17, 18), (18, 23), (23, 24))
        ])
        for runner in runners
    ]  # fmt: skip

    torch.testing.assert_close(outputs[1], outputs[0], **CLOSE)


def test_what_others_left_in_a_block_does_no_harm(model_dir: Path) -> None:
    paged = load_paged(model_dir)
    for layer in paged.kv_cache.layers:
        layer.fill_(torch.nan)

    logits = logits_in_chunks(paged, [20, 30])

    torch.testing.assert_close(logits, expected_logits(model_dir), **CLOSE)


def test_large_blocks_share_prefixes_too(model_dir: Path) -> None:
    pool = paged_with_kernel(model_dir, FlashAttention2(flash_attn_2)).kv_cache
    tokens = list(range(600))
    one = pool.new_sequence()
    one.reserve(600)
    one.length = 600
    one.publish(BlockHashes().within(tokens, 600))

    found = pool.begin(BlockHashes().within(tokens, 599), 599)
    other = pool.begin(BlockHashes().within(tokens[: 256 + BLOCK_SIZE], 256 + BLOCK_SIZE), 300)

    assert (found.length, found.blocks[:2]) == (512, one.blocks[:2])
    assert (other.length, other.blocks[:1]) == (256, one.blocks[:1])


def test_a_kernel_that_is_not_there_is_refused_by_name(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="FLASH_ATTN cannot be used: the model runs on cpu"):
        load_model(ModelOptions(str(model_dir), device="cpu", attention_backend="FLASH_ATTN"))


def test_gpt2_positions_of_padding_are_in_range(tmp_path: Path) -> None:
    config = GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, n_positions=MAX_MODEL_LEN
    )
    model_dir = save_checkpoint(config, tmp_path)
    paged = load_paged(model_dir)
    paged.record(LIMITS, run_again)

    logits = logits_in_chunks(paged, [3, 1, 5, 41])

    torch.testing.assert_close(logits, expected_logits(model_dir), **CLOSE)
