"""`python -m proposer_svc` as a process: it serves the bundled draft model, drains and exits."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from specgw import wire
from specgw.channel import open_channel
from specgw.health import wait_until_serving
from specgw.types import Commit, Hello, HelloAck, ModelDescription, OpenSession, ProposeStep
from specgw.v1 import proposer_pb2_grpc

pytestmark = pytest.mark.slow

_DEADLINE_S = 60.0
_CONFIG = """
model: tiny/target
speculative_config: {model: tiny/draft, num_speculative_tokens: 4}
specgw: {proposer: {num_threads: 1, kv_cache_tokens: 4096}}
"""


@contextlib.asynccontextmanager
async def started(
    config: str, directory: Path, *options: str, pass_fds: Sequence[int] = ()
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Starts a proposer; yields the process and the address it will serve."""
    file, address = directory / "config.yaml", f"unix:{directory}/proposer.sock"
    file.write_text(config)
    arguments = ("--config", str(file), "--listen", address, *options)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proposer_svc", *arguments),
        stderr=asyncio.subprocess.PIPE,
        pass_fds=pass_fds,
    )
    try:
        async with asyncio.timeout(_DEADLINE_S):
            yield process, address
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_it_drafts_until_it_is_told_to_stop(tmp_path: Path) -> None:
    async with started(_CONFIG, tmp_path) as (process, address):
        await wait_until_serving(address)
        async with open_channel(address) as channel:
            call = proposer_pb2_grpc.ProposerServiceStub(channel).Propose()
            target = ModelDescription("tiny/target", "", 10**6, "", 1024, "float32", "cpu")
            await call.write(wire.propose_request_to_pb(Hello("v", target, 8)))
            ack = wire.propose_response_from_pb(await call.read())  # type: ignore[arg-type]
            step = ProposeStep([OpenSession(1, [5, 6, 7])], [Commit(1, 3, [8], 4)])
            await call.write(wire.propose_request_to_pb(step))
            answer = wire.propose_response_from_pb(await call.read())  # type: ignore[arg-type]

        process.send_signal(signal.SIGTERM)
        _, log = await process.communicate()

    assert isinstance(ack, HelloAck)
    assert (ack.draft_model.name, ack.max_draft_tokens) == ("tiny/draft", 4)
    assert not isinstance(answer, HelloAck)
    assert [(block.base_length, len(block.token_ids)) for block in answer[0]] == [(4, 4)]
    assert (process.returncode, b"draining" in log) == (0, True)


async def test_a_lookup_proposer_drafts_without_torch(tmp_path: Path) -> None:
    config = "{model: tiny/target, speculative_config: {method: ngram, num_speculative_tokens: 4}}"
    async with started(config, tmp_path) as (process, address):
        await wait_until_serving(address)
        async with open_channel(address) as channel:
            call = proposer_pb2_grpc.ProposerServiceStub(channel).Propose()
            target = ModelDescription("any", "", 100, "any", 1024, "float32", "cpu")
            await call.write(wire.propose_request_to_pb(Hello("v", target, 4, method="ngram")))
            ack = wire.propose_response_from_pb(await call.read())  # type: ignore[arg-type]
            context = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4]
            step = ProposeStep([OpenSession(1, context)], [Commit(1, 13, [5], 4)])
            await call.write(wire.propose_request_to_pb(step))
            answer = wire.propose_response_from_pb(await call.read())  # type: ignore[arg-type]
        memory_map = await asyncio.to_thread(Path(f"/proc/{process.pid}/maps").read_text)

    assert isinstance(ack, HelloAck)
    assert (ack.draft_model.name, ack.extra_slots_per_session) == ("ngram", 0)
    assert not isinstance(answer, HelloAck)
    assert [list(block.token_ids) for block in answer[0]] == [[6, 7, 8, 9]]
    assert "torch" not in memory_map


async def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    options = ("--parent-pipe", str(read_end))
    async with started(_CONFIG, tmp_path, *options, pass_fds=(read_end,)) as (process, address):
        await wait_until_serving(address)

        os.close(write_end)
        _, log = await process.communicate()

    os.close(read_end)
    assert (process.returncode, b"parent exited" in log) == (0, True)
