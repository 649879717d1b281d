"""Clients of a verifier itself, in a process of their own: when do its tokens come?

    python -m benchmarks.step_clock unix:/tmp/verifier.sock 1 10

One stream tells when each step's tokens were handed out; many tell what clients without a gateway
would see. Prints `started` with the first token, and at the end the `time.time()` of each, as JSON.
"""

import asyncio
import contextlib
import json
import time

import click

from specgw import wire
from specgw.channel import open_channel
from specgw.types import GenerateRequest, SamplingParams
from specgw.v1 import verifier_pb2_grpc


@click.command()
@click.argument("address")
@click.argument("streams", type=int)
@click.argument("seconds", type=float)
def main(address: str, streams: int, seconds: float) -> None:
    """Reads tokens of the verifier at ADDRESS for some seconds."""
    times: list[float] = []
    with contextlib.suppress(TimeoutError):
        asyncio.run(_follow(address, streams, seconds, times))
    print(json.dumps(times))


async def _follow(address: str, streams: int, seconds: float, times: list[float]) -> None:
    params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
    async with open_channel(address) as channel, asyncio.timeout(seconds):
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)

        async def read(number: int) -> None:
            request = GenerateRequest(f"direct-{number}", [1 + number % 1000, 2, 3], params)
            async for _ in stub.Generate(wire.generate_request_to_pb(request), timeout=seconds):
                times.append(time.time())
                if len(times) == 1:
                    print("started", flush=True)

        await asyncio.gather(*(read(number) for number in range(streams)))


if __name__ == "__main__":
    main()
