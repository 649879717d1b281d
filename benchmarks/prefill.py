"""What a long prompt costs: its own client when another had the same, and clients beside it.

    python -m benchmarks.prefill [--model DIR] [--prefix 1000]

Two embedded stacks without drafts, one of which does not bound prefill beside decoding sessions; in
every repetition both do the same in turn. Times are a client's, over HTTP.
"""

import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import click
import httpx

from gateway.__main__ import serving
from gateway.tokenizer import load_tokenizer
from specgw.config import EngineArgs, parse_config
from specgw.supervisor import embedded_services
from specgw.telemetry import configure_logging

_WARM_UP_TOKENS = 40
_UNBOUNDED = 1_000_000


@click.command()
@click.option("--model", default="tiny/target", show_default=True)
@click.option("--prefix", default=1000, show_default=True, help="Tokens that two prompts share.")
@click.option("--repetitions", default=7, show_default=True)
@click.option("--threads", default=1, show_default=True)
def main(model: str, prefix: int, repetitions: int, threads: int) -> None:
    """Measures and prints the two ratios."""
    configure_logging()
    asyncio.run(_measure(model, prefix, repetitions, threads))


async def _measure(model: str, prefix: int, repetitions: int, threads: int) -> None:
    async with AsyncExitStack() as stack:
        bounded, unbounded = [
            await stack.enter_async_context(_client(_args(model, threads, limit)))
            for limit in (None, _UNBOUNDED)
        ]
        pairs = []
        stalls: dict[str, list[float]] = {"bounded": [], "not bounded": []}
        for repetition in range(repetitions):
            rng = random.Random(repetition)
            prompt = [rng.randrange(1, 1000) for _ in range(prefix)]
            pairs.append([await _first_token_s(bounded, [*prompt, end, 5]) for end in (7, 8)])
            for name, client in (("bounded", bounded), ("not bounded", unbounded)):
                stalls[name].append(await _stall(client, [1 + repetition, *prompt]))
    ratios = [second / first for first, second in pairs]
    first_s, second_s = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(f"\n{model}, prompts of {prefix} tokens and 2 more, {repetitions} repetitions")
    print(f"time to first token: {first_s * 1e3:.0f} ms, then {second_s * 1e3:.0f} ms for the same")
    print(f"prefix: ratio {statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})")
    print("longest gap between a running stream's tokens during such a prefill, in usual gaps:")
    for name, gaps in stalls.items():
        print(f"  {name}: {statistics.median(gaps):.1f} ({min(gaps):.1f}-{max(gaps):.1f})")


def _args(model: str, threads: int, limit: int | None) -> EngineArgs:
    verifier = {"num_threads": threads, "max_prefill_tokens_beside_decodes": limit}
    config = {"model": model, "port": 0, "served_model_name": "m", "specgw": {"verifier": verifier}}
    return parse_config(config)


@asynccontextmanager
async def _client(args: EngineArgs) -> AsyncIterator[httpx.AsyncClient]:
    """Runs a stack and yields a client of it, warmed up."""
    async with (
        embedded_services(args) as (verifier, *_),
        serving(args, [verifier.spec.address], load_tokenizer(args.tokenizer_path)) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=600, trust_env=False) as client,
    ):
        await gateway.router.ready()
        async for _ in _times(client, [3] * _WARM_UP_TOKENS, _WARM_UP_TOKENS):
            pass
        yield client


async def _times(
    client: httpx.AsyncClient, prompt: Sequence[int], max_tokens: int
) -> AsyncIterator[float]:
    """Yields when each output token came."""
    body = {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["token_ids"]:
                yield time.perf_counter()


async def _first_token_s(client: httpx.AsyncClient, prompt: Sequence[int]) -> float:
    began = time.perf_counter()
    [first] = [at async for at in _times(client, prompt, 1)]
    return first - began


async def _stall(client: httpx.AsyncClient, prompt: Sequence[int]) -> float:
    """Returns the longest gap of a stream that a prefill joins, in gaps of the stream alone."""
    came: list[float] = []
    is_running = asyncio.Event()

    async def read() -> None:
        async for at in _times(client, [2, 3], 900):
            came.append(at)
            if len(came) == _WARM_UP_TOKENS:
                is_running.set()

    reading = asyncio.create_task(read())
    await is_running.wait()
    began = time.perf_counter()
    await _first_token_s(client, prompt)
    ended = time.perf_counter()
    reading.cancel()
    with suppress(asyncio.CancelledError):
        await reading
    gaps = [(after - before, after) for before, after in itertools.pairwise(came)]
    alone = statistics.median(gap for gap, after in gaps if after < began)
    return max(gap for gap, after in gaps if after > began and after - gap < ended) / alone


if __name__ == "__main__":
    main()
