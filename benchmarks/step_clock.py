"""Clients of a verifier itself, in a process of their own: when do its tokens come?

    python -m benchmarks.step_clock unix:/tmp/verifier.sock 1

One stream tells when each step's tokens were handed out; many tell what clients without a gateway
would see. Prints `started` when each stream has had a token, and on SIGTERM the `time.time()` of
each token since, as JSON.
"""

import asyncio
import json
import signal
import time

import click

from specgw import wire
from specgw.channel import open_channel
from specgw.types import GenerateRequest, SamplingParams
from specgw.v1 import verifier_pb2, verifier_pb2_grpc

_TIMEOUT_S = 300.0


@click.command()
@click.argument("address")
@click.argument("streams", type=int)
def main(address: str, streams: int) -> None:
    """Reads tokens of the verifier at ADDRESS until SIGTERM."""
    print(json.dumps(asyncio.run(_follow(address, streams))))


async def _follow(address: str, streams: int) -> list[float]:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    times: list[float] = []
    waiting = set(range(streams))
    async with open_channel(address) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)

        async def read(number: int) -> None:
            async for _ in stub.Generate(_request(number), timeout=_TIMEOUT_S):
                times.append(time.time())
                if number in waiting:
                    waiting.remove(number)
                    if not waiting:
                        times.clear()
                        print("started", flush=True)

        tasks = [asyncio.create_task(read(number)) for number in range(streams)]
        await ended.wait()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return times


def _request(number: int) -> verifier_pb2.GenerateRequest:
    params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
    prompt = [1 + number % 1000, 2, 3]
    return wire.generate_request_to_pb(GenerateRequest(f"direct-{number}", prompt, params))


if __name__ == "__main__":
    main()
