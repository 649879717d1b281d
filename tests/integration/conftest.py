"""A whole gateway in front of verifiers that play scripts; the loop that each service runs on."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gateway.__main__ import Gateway, serving
from gateway.tokenizer import Tokenizer, load_tokenizer
from specgw.config import parse_config
from tests import tiny_tokenizers
from tests.running_gateway import TEXT, MakeVerifier, RunGateway
from tests.scripted_verifier import ScriptedVerifier

_ON_UVLOOP = ("test_gateway_service", "test_gateway_streams", "test_load")


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Runs the gateway's tests on its loop, and those of gRPC servers on both."""
    both = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    if item.path.stem == "test_server":
        return both
    name = "uvloop" if item.path.stem in _ON_UVLOOP else "asyncio"
    return {name: both[name]}


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("model")
    tiny_tokenizers.save(tiny_tokenizers.byte_level(), path)
    return load_tokenizer(str(path))


@pytest.fixture
def token_ids(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.backend.encode(TEXT).ids


@pytest.fixture
def make_verifier(tokenizer: Tokenizer, token_ids: list[int]) -> MakeVerifier:
    def make(output_token_ids: Sequence[int] = token_ids, **options: Any) -> ScriptedVerifier:
        defaults = {
            "vocab_size": tokenizer.vocab_size,
            "vocab_fingerprint": tokenizer.fingerprint,
            "eos_token_id": tokenizer.eos_token_id,
        }
        return ScriptedVerifier(output_token_ids, **{**defaults, **options})

    return make


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """The gateway's model, of the name that scripted verifiers report."""
    path = tmp_path / "scripted"
    path.mkdir()
    return path


@pytest.fixture
def run_gateway(tokenizer: Tokenizer, model_dir: Path) -> RunGateway:
    """Runs a gateway for addresses, with `specgw.gateway` settings and top-level keys."""

    @asynccontextmanager
    async def run(
        *addresses: str, settings: dict[str, Any] | None = None, **keys: Any
    ) -> AsyncIterator[Gateway]:
        gateway_settings = {
            "grpc_listen": "127.0.0.1:0",
            "reopen_timeout_s": 5,
            "drain_grace_s": 1,
            **(settings or {}),
        }
        config = {
            "model": str(model_dir),
            "served_model_name": "scripted",
            "port": 0,
            "speculative_config": {"model": "draft", "num_speculative_tokens": 4},
            "specgw": {"gateway": gateway_settings},
            **keys,
        }
        async with serving(parse_config(config), addresses, tokenizer) as gateway:
            yield gateway
        # Whatever a test did: every slot has come back, exactly once.
        assert (gateway.admission.running_count, gateway.admission.ledger.claims) == (0, ())

    return run
