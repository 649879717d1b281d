"""Real processes that die: no client notices anything but speed.

`specgw serve`'s children on the bundled tiny models in float32, so that texts are equal to the last
token.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from gateway.verifier_stream import VerifierStream
from specgw.channel import open_channel
from specgw.config import EngineArgs, load_config
from specgw.supervisor import Child, embedded_services
from specgw.types import GenerateOutput, GenerateRequest, SamplingParams
from specgw.v1 import verifier_pb2, verifier_pb2_grpc
from tests.running_services import speculation, token_ids

pytestmark = pytest.mark.slow

NUM_STREAMS = 16
PARAMS = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
PROMPTS = [[300 + 7 * number + place for place in range(5)] for number in range(NUM_STREAMS)]


class Client:
    """Talks to the embedded verifier."""

    def __init__(self, stub: "verifier_pb2_grpc.VerifierServiceAsyncStub") -> None:
        self._stub = stub
        self._stream = VerifierStream(stub, "embedded")
        self.num_responses = 0
        self.progress = asyncio.Event()

    async def generate(
        self, prompt: Sequence[int], max_draft_tokens: int | None = None
    ) -> list[GenerateOutput]:
        request = GenerateRequest("test", prompt, PARAMS, max_draft_tokens=max_draft_tokens)
        outputs = []
        async for output in self._stream.generate(request, time.monotonic() + 120):
            outputs.append(output)
            self.num_responses += 1
            if self.num_responses > 2 * NUM_STREAMS:
                self.progress.set()
        return outputs

    async def info(self) -> verifier_pb2.GetVerifierInfoResponse:
        return await self._stub.GetVerifierInfo(verifier_pb2.GetVerifierInfoRequest(), timeout=10)

    async def connected(self) -> None:
        async with asyncio.timeout(60):
            while not all(proposer.connected for proposer in (await self.info()).proposers):
                pass


@asynccontextmanager
async def embedded(args: EngineArgs) -> AsyncIterator[tuple[Client, Sequence[Child]]]:
    async with (
        embedded_services(args) as children,
        open_channel(children[0].spec.address) as channel,
    ):
        client = Client(verifier_pb2_grpc.VerifierServiceStub(channel))
        await client.connected()
        yield client, children


async def test_killing_the_proposer_changes_no_answer_and_its_successor_drafts_again() -> None:
    async with embedded(load_config(None)) as (client, (_, proposer)):
        plain = await asyncio.gather(*(client.generate(p, 0) for p in PROMPTS))
        client.num_responses = 0
        client.progress.clear()
        streams = [asyncio.create_task(client.generate(prompt)) for prompt in PROMPTS]
        await asyncio.wait_for(client.progress.wait(), 60)
        killed = proposer.pid
        os.kill(killed, signal.SIGKILL)
        outputs = await asyncio.gather(*streams)
        before = (await client.info()).speculation.draft_count

        await client.connected()  # the supervisor has started another
        again = await asyncio.gather(*(client.generate(prompt) for prompt in PROMPTS))
        after = (await client.info()).speculation.draft_count

        assert proposer.pid != killed

    expected = [token_ids(answer) for answer in plain]
    assert [token_ids(answer) for answer in outputs] == expected
    assert [token_ids(answer) for answer in again] == expected
    assert after > before


async def test_a_fallback_drafts_while_the_proposer_stands_still() -> None:
    fallback = {"specgw.fallback_proposer": {"method": "suffix", "min_match_length": 100}}
    async with embedded(load_config(None, fallback)) as (client, (_, proposer)):
        plain = await client.generate(PROMPTS[0], 0)
        os.kill(proposer.pid, signal.SIGSTOP)
        try:
            outputs = await client.generate(PROMPTS[0])
        finally:
            os.kill(proposer.pid, signal.SIGCONT)

    stats = speculation(outputs)
    assert token_ids(outputs) == token_ids(plain)
    assert stats.accepted_token_count > 0
    assert stats.draft_count > 3


async def test_a_proposer_that_stands_still_is_left_alone_until_it_moves_again() -> None:
    async with embedded(load_config(None)) as (client, (_, proposer)):
        plain = await client.generate(PROMPTS[0], 0)
        os.kill(proposer.pid, signal.SIGSTOP)
        try:
            outputs = await client.generate(PROMPTS[0])
            during = (await client.info()).speculation.draft_count
        finally:
            os.kill(proposer.pid, signal.SIGCONT)
        async with asyncio.timeout(60):
            while (await client.info()).speculation.draft_count == during:
                again = await client.generate(PROMPTS[0])

    assert token_ids(outputs) == token_ids(again) == token_ids(plain)


async def test_children_end_with_their_parent_even_when_it_is_killed() -> None:
    code = (
        "import asyncio\n"
        "from specgw.config import load_config\n"
        "from specgw.supervisor import embedded_services\n"
        "async def main():\n"
        "    async with embedded_services(load_config(None)) as children:\n"
        "        print(*(child.pid for child in children), flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    line = await asyncio.wait_for(parent.stdout.readline(), 60)
    children = [os.pidfd_open(int(pid)) for pid in line.split()]
    assert len(children) == 2

    parent.kill()
    await parent.wait()

    for child in children:
        await _readable(child)  # a pidfd is readable once its process has ended
        os.close(child)


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(fd, ended.set)
    try:
        await asyncio.wait_for(ended.wait(), 30)
    finally:
        loop.remove_reader(fd)
