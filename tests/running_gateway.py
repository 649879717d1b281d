"""Helpers for tests of a running gateway; its fixtures are in `integration/conftest.py`."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import httpx

from gateway.__main__ import Gateway
from tests import scripted_verifier
from tests.scripted_verifier import ScriptedVerifier

TEXT = " and the quick fox said \"go\" — 😀 你好, then naïve dogs sleep"  # fmt: skip
COMPLETION = {"model": "scripted", "prompt": "the dog", "max_tokens": 60}

MakeVerifier = Callable[..., ScriptedVerifier]
RunGateway = Callable[..., AbstractAsyncContextManager[Gateway]]


@asynccontextmanager
async def ready(
    run_gateway: RunGateway, verifiers: Sequence[ScriptedVerifier], **options: Any
) -> AsyncIterator[Gateway]:
    """Runs a gateway in front of running verifiers."""
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(scripted_verifier.serving(one)) for one in verifiers
        ]
        addresses = [server.addresses[0] for server in servers]
        gateway = await stack.enter_async_context(run_gateway(*addresses, **options))
        await all_serving(gateway, len(verifiers))
        yield gateway


async def all_serving(gateway: Gateway, count: int) -> None:
    """Waits until the gateway knows of `count` verifiers that serve."""
    async with asyncio.timeout(5):
        while gateway.router.states.count(": serving") < count:
            await gateway.router.changed()


def http(gateway: Gateway, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=gateway.url, timeout=10, trust_env=False, **options)


async def events(response: httpx.Response) -> AsyncIterator[Any]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
