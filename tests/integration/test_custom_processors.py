"""An operator's own logits processors through all the services: HTTP in, the bundled models behind.

They are named in the configuration and loaded by the verifier, as in a deployment.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from gateway.__main__ import serving
from gateway.tokenizer import load_tokenizer
from proposer_svc.proposer import build_proposer
from specgw.config import parse_config
from specgw.engine.loading import load_model, target_options
from specgw.link import InProcessLink
from tests.running_services import running_verifier

pytestmark = pytest.mark.slow

PROMPT = "import os\n\n\nNUMBERS = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,"
CURSED = "raise"  # the first word of prompts that `FailsOnCursed` fails on, after a few tokens
NUM_TOKENS = 40
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 1.0, "seed": 11}


class NoReturn:
    """Forbids a token that is among the last four: any row's mask depends on the rows before."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __call__(
        self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int], logits: Tensor
    ) -> Tensor:
        assert logits.shape == (self.vocab_size,)
        logits[list(output_token_ids[-4:])] = -torch.inf
        return logits


class FailsOnCursed:
    """Fails on some prompts, in the middle of the output."""

    def __init__(self, vocab_size: int) -> None:
        self._cursed = load_tokenizer("tiny/target").backend.encode(CURSED).ids

    def __call__(
        self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int], logits: Tensor
    ) -> Tensor:
        is_cursed = list(prompt_token_ids[: len(self._cursed)]) == self._cursed
        if is_cursed and len(output_token_ids) > 6:
            raise RuntimeError("by script")
        return logits


@asynccontextmanager
async def stack(draft_sample_method: str, *processors: type) -> AsyncIterator[httpx.AsyncClient]:
    """Runs the services; yields a client of them."""
    args = parse_config({
        "model": "tiny/target",
        "port": 0,
        "dtype": "float32",
        "speculative_config": {
            "model": "tiny/draft",
            "num_speculative_tokens": 4,
            "draft_sample_method": draft_sample_method,
        },
        "specgw": {
            "gateway": {"drain_grace_s": 1},
            "verifier": {
                "wait_for_slow_drafts": True,
                "draft_timeout_s": 60,
                "draft_length": "fixed",
                "logits_processors": [f"{__name__}:{one.__name__}" for one in processors],
            },
        },
    })  # fmt: skip
    link = InProcessLink(build_proposer(args))
    async with (
        running_verifier(load_model(target_options(args)), args, [link]) as verifier,
        serving(args, [verifier.address], load_tokenizer("tiny/target")) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False) as client,
    ):
        async with asyncio.timeout(30):
            await gateway.router.ready()
        yield client


async def post(client: httpx.AsyncClient, prompt: str = PROMPT, **changes: Any) -> httpx.Response:
    body = {
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        **changes,
    }
    return await client.post("/v1/completions", json=body)


async def token_ids(client: httpx.AsyncClient, **changes: Any) -> list[int]:
    answer = await post(client, **changes)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def repeats(tokens: Sequence[int]) -> int:
    """Returns how many tokens are among the four before."""
    return sum(one in tokens[max(0, at - 4) : at] for at, one in enumerate(tokens))


@pytest.mark.parametrize(("method", "how"), [("greedy", GREEDY), ("coupled", SEEDED)])
async def test_a_processor_acts_on_every_row_and_drafts_change_nothing(
    method: str, how: dict[str, Any], single_thread: None
) -> None:
    async with stack(method) as client:
        free = await token_ids(client, **how)
    async with stack(method, NoReturn) as client:
        drafted = await post(client, **how)
        plain = await token_ids(client, **how, num_speculative_tokens=0)
        together = await asyncio.gather(*(token_ids(client, **how) for _ in range(3)))

    tokens = drafted.json()["choices"][0]["token_ids"]
    assert tokens == plain
    assert together == [plain] * 3
    assert repeats(plain) == 0 < repeats(free)
    counts = drafted.json()["metrics"]["speculative_decoding"]
    assert 0 < counts["num_accepted_draft_tokens"] < counts["num_draft_tokens"]


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
async def test_a_processor_that_raises_ends_its_own_request_only(
    num_draft_tokens: int, single_thread: None
) -> None:
    prompts = [PROMPT, f"{CURSED} ValueError(", PROMPT[:30], f"{CURSED} KeyError("]
    async with stack("greedy") as client:
        expected = [
            await token_ids(client, prompt=prompt, **GREEDY) for prompt in (prompts[0], prompts[2])
        ]
    async with stack("greedy", FailsOnCursed) as client:
        how = {**GREEDY, "num_speculative_tokens": num_draft_tokens}
        answers = await asyncio.gather(*(post(client, prompt, **how) for prompt in prompts))
        again = await token_ids(client, **how)

    assert [one.status_code for one in answers] == [200, 500, 200, 500]
    messages = [one.json()["error"]["message"] for one in answers[1::2]]
    assert all("the logits processor FailsOnCursed failed" in message for message in messages)
    found = [one.json()["choices"][0]["token_ids"] for one in answers[::2]]
    assert [*found, again] == [*expected, expected[0]]


def test_repeats_are_counted() -> None:
    assert [repeats(one) for one in itertools.permutations([1, 1, 2], 3)] == [1] * 6
