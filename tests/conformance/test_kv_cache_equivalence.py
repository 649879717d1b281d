"""Whatever happened to the sequences before, cached logits equal those recomputed from scratch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import GPTNeoXConfig, LlamaConfig, MistralConfig, PreTrainedConfig

from specgw.engine.block_hashes import BlockHashes
from specgw.engine.kv_cache import BLOCK_SIZE, OutOfBlocks, SequenceCache
from specgw.engine.model_runner import ModelRunner, SequenceChunk
from tests.unit.engine.tiny_checkpoints import (
    MAX_MODEL_LEN,
    SIZES,
    VOCAB_SIZE,
    load,
    save_checkpoint,
)

NUM_SESSIONS = 4
NUM_BLOCKS = 9  # of the 16 that all sessions would fill
CONFIGS: dict[str, PreTrainedConfig] = {
    "native": LlamaConfig(**SIZES),
    "native-window": MistralConfig(**SIZES, sliding_window=11),
    "transformers": GPTNeoXConfig(**SIZES | {"num_key_value_heads": 4}),
}


@dataclass(frozen=True)
class Forward:
    """Runs a batch of that many new tokens for each of some sessions."""

    sizes: Mapping[int, int]


@dataclass(frozen=True)
class Truncate:
    session: int
    length: int


@dataclass(frozen=True)
class Release:
    session: int


@dataclass(frozen=True)
class Publish:
    """Lets others use what a session has stored."""

    session: int


@dataclass(frozen=True)
class Resemble:
    """Begins a session anew with the first tokens of another one, as far as they are published."""

    session: int
    other: int
    length: int


Step = Forward | Truncate | Release | Publish | Resemble


@dataclass
class Session:
    cache: SequenceCache
    token_ids: list[int] = field(default_factory=list)


class Sessions:
    """Sessions that fight over a small cache, each beside the tokens that it should hold."""

    def __init__(self, runner: ModelRunner, fresh: ModelRunner, seed: int) -> None:
        self.runner = runner
        self.fresh = fresh
        self.all = [Session(runner.kv_cache.new_sequence()) for _ in range(NUM_SESSIONS)]
        self._generator = torch.Generator().manual_seed(seed)

    def apply(self, step: Step) -> None:
        match step:
            case Forward(sizes):
                self._forward(sizes)
            case Truncate(i, length):
                self.all[i].cache.truncate(length)
                del self.all[i].token_ids[length:]
            case Release(i):
                self.all[i].cache.release()
                self.all[i].token_ids.clear()
            case Publish(i):
                self.all[i].cache.publish(_hashes(self.all[i].token_ids))
            case Resemble(i, other, length):
                wanted = self.all[other].token_ids[:length]
                self.all[i].cache.release()
                self.all[i].cache.adopt(_hashes(wanted))
                self.all[i].token_ids = wanted[: self.all[i].cache.length]

    def _forward(self, sizes: Mapping[int, int]) -> None:
        chunks = {}
        for i, size in sizes.items():
            room = MAX_MODEL_LEN - len(self.all[i].token_ids)
            if size <= room:
                ids = torch.randint(VOCAB_SIZE, (size,), generator=self._generator).tolist()
                chunks[i] = SequenceChunk(self.all[i].cache, ids, min(size, 3))
        if not chunks:
            return
        before = self._state()
        try:
            logits = self.runner.forward(list(chunks.values()))
        except OutOfBlocks:
            assert self._state() == before
            return
        expected = []
        for i, chunk in chunks.items():
            self.all[i].token_ids.extend(chunk.token_ids)
            expected.append(self._from_scratch(self.all[i].token_ids)[-chunk.num_logits :])
        torch.testing.assert_close(logits, torch.cat(expected), rtol=1e-4, atol=1e-4)

    def _from_scratch(self, token_ids: list[int]) -> torch.Tensor:
        cache = self.fresh.kv_cache.new_sequence()
        logits = self.fresh.forward([SequenceChunk(cache, token_ids, len(token_ids))])
        cache.release()
        return logits

    def _state(self) -> tuple[int, list[tuple[int, list[int]]]]:
        held = [(one.cache.length, list(one.cache.blocks)) for one in self.all]
        return self.runner.kv_cache.used_tokens, held


def _hashes(token_ids: list[int]) -> Sequence[bytes]:
    return BlockHashes().within(token_ids, len(token_ids))


session_numbers = st.integers(0, NUM_SESSIONS - 1)
forwards = st.builds(
    Forward, st.dictionaries(session_numbers, st.integers(1, 40), min_size=1, max_size=NUM_SESSIONS)
)
truncations = st.builds(Truncate, session_numbers, st.integers(0, MAX_MODEL_LEN))
steps = st.one_of(
    forwards,
    forwards,
    truncations,
    st.builds(Release, session_numbers),
    st.builds(Publish, session_numbers),
    st.builds(Resemble, session_numbers, session_numbers, st.integers(0, MAX_MODEL_LEN)),
)


@pytest.fixture(scope="module", params=list(CONFIGS))
def runners(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelRunner, ModelRunner]:
    """The same model with a small cache and with one of its own for recomputing."""
    model_dir = save_checkpoint(CONFIGS[request.param], tmp_path_factory.mktemp("model"))
    return load(model_dir, kv_cache_tokens=NUM_BLOCKS * BLOCK_SIZE), load(model_dir)


SHARED_THEN_WRITTEN = [
    Forward({0: 40}),
    Publish(0),
    Resemble(1, 0, 40),
    Truncate(1, 20),
    Forward({0: 3, 1: 5}),
    Truncate(0, 30),
    Forward({0: 3}),
]


@example(steps=SHARED_THEN_WRITTEN, seed=0)
@settings(max_examples=150, deadline=None)
@given(steps=st.lists(steps, min_size=1, max_size=25), seed=st.integers(0, 1000))
def test_cached_logits_equal_those_recomputed_from_scratch(
    runners: tuple[ModelRunner, ModelRunner],
    steps: list[Step],
    seed: int,
) -> None:
    sessions = Sessions(*runners, seed)

    for step in steps:
        sessions.apply(step)

    for session in sessions.all:
        session.cache.release()
    assert sessions.runner.kv_cache.used_tokens == 0
