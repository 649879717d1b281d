"""Fixtures that more than one part of the suite uses."""

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specgw.engine.loading import ModelOptions, load_model
from specgw.engine.model_runner import ModelRunner

# A busy machine may take longer for an example than hypothesis would let it.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

VOCAB_SIZE = 97
MAX_MODEL_LEN = 64


def pytest_addoption(parser: pytest.Parser) -> None:
    """Lets a soak and all chi-squares be asked for; by default the suite is short."""
    parser.addoption("--load-rounds", type=int, default=1, help="rounds of test_load.py")
    parser.addoption(
        "--whole-matrix",
        action="store_true",
        help="every cell of test_lossless_distribution.py, all schemas of test_json_schemas.py",
    )


def _save_random_llama(path: Path, max_model_len: int, seed: int = 0) -> Path:
    """Writes a Llama of a few thousand parameters, large enough ones that its output varies."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_model_len,
        initializer_range=0.4,
        eos_token_id=VOCAB_SIZE - 1,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def random_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a short context."""
    return _save_random_llama(tmp_path_factory.mktemp("random_model"), MAX_MODEL_LEN)


@pytest.fixture(scope="session")
def unrelated_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another random model with the same vocabulary and context."""
    return _save_random_llama(tmp_path_factory.mktemp("unrelated"), MAX_MODEL_LEN, seed=1)


@pytest.fixture(scope="session")
def long_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first random model with a long context."""
    return _save_random_llama(tmp_path_factory.mktemp("long_model"), 8192)


@pytest.fixture(scope="session")
def single_thread() -> Iterator[None]:
    """Gives torch one thread: tiny models are fastest so, and tests run beside others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def random_runner(random_model_dir: Path, single_thread: None) -> ModelRunner:
    """The random model in float32, with a cache for a few dozen sessions."""
    options = ModelOptions(str(random_model_dir), dtype="float32", kv_cache_tokens=4096)
    return load_model(options)


@pytest.fixture(scope="session")
def long_runner(long_model_dir: Path, single_thread: None) -> ModelRunner:
    """A random model whose answers take long enough to be interrupted."""
    return load_model(ModelOptions(str(long_model_dir), dtype="float32", kv_cache_tokens=16384))


@pytest.fixture(scope="session")
def long_twin(long_model_dir: Path, single_thread: None) -> ModelRunner:
    """The weights of `long_runner` once more, with a cache of their own."""
    return load_model(ModelOptions(str(long_model_dir), dtype="float32", kv_cache_tokens=16384))
