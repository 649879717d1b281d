"""What `make demo` shows: the embedded services on the tiny models, with and without drafts.

Starts `specgw serve`'s services on free ports, answers a few prompts with speculation on and off in
turn, prints text, acceptance and speed, and stops everything. Exits with 1 if a text differs.
"""

import asyncio
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import httpx

from gateway.__main__ import Gateway, serving
from gateway.tokenizer import load_tokenizer
from specgw.config import EngineArgs, load_config
from specgw.supervisor import embedded_services
from specgw.telemetry import configure_logging

PROMPTS = (
    'def read_config(path):\n    """Read the configuration file and return a dictionary.',
    "class TestParser(unittest.TestCase):\n\n    def setUp(self):\n",
    "import os\nimport sys\n\n\ndef main(argv=None):\n",
)
NUM_TOKENS = 160
NUM_REPETITIONS = 5


@dataclass(frozen=True)
class Run:
    """One answer and how it came about."""

    text: str
    seconds: float
    rounds: int
    accepted: int
    drafted: int


async def main() -> int:
    """Returns the exit code: 1 if speculation changed an answer."""
    args = load_config(None, {"port": 0})
    tokenizer = load_tokenizer(args.tokenizer_path)
    async with (
        embedded_services(args) as (verifier, *_),
        serving(args, [verifier.spec.address], tokenizer) as gateway,
    ):
        await gateway.router.ready()
        return await show(args, gateway)


async def show(args: EngineArgs, gateway: Gateway) -> int:
    """Measures and prints."""
    assert args.speculative_config is not None
    async with httpx.AsyncClient(base_url=gateway.url, timeout=120) as client:
        await complete(client, PROMPTS[0], None)  # warms up both services
        pairs = []
        for prompt in PROMPTS:
            plain, drafted = [], []
            for _ in range(NUM_REPETITIONS):  # in turn, so that both see the same machine
                plain.append(await complete(client, prompt, 0))
                drafted.append(await complete(client, prompt, None))
            pairs.append((prompt, plain, drafted))
    print(f"\n{args.model} with {args.speculative_config.model}, greedy, {NUM_TOKENS} tokens\n")
    print(f"{PROMPTS[0]}\033[1m{pairs[0][2][0].text}\033[0m\n")
    print(f"{'prompt':<34}{'same text':>10}{'accepted/round':>16}{'plain':>11}{'drafted':>11}")
    same = [report(prompt, plain, drafted) for prompt, plain, drafted in pairs]
    ratios = [speed(drafted) / speed(plain) for _, plain, drafted in pairs]
    print(
        f"\nspeculation is {statistics.geometric_mean(ratios):.2f} times as fast as plain decoding"
    )
    return 0 if all(same) else 1


async def complete(
    client: httpx.AsyncClient, prompt: str, num_speculative_tokens: int | None
) -> Run:
    """Asks for one completion; 0 switches speculation off for it."""
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "num_speculative_tokens": num_speculative_tokens,
    }
    began = time.perf_counter()
    response = await client.post("/v1/completions", json=body)
    seconds = time.perf_counter() - began
    response.raise_for_status()
    answer = response.json()
    stats = answer["metrics"]["speculative_decoding"]
    return Run(
        answer["choices"][0]["text"],
        seconds,
        stats["num_spec_steps"],
        stats["num_accepted_draft_tokens"],
        stats["num_draft_tokens"],
    )


def report(prompt: str, plain: list[Run], drafted: list[Run]) -> bool:
    """Prints one line; returns whether every answer was the same."""
    same = len({run.text for run in (*plain, *drafted)}) == 1
    accepted = sum(run.accepted for run in drafted) / max(1, sum(run.rounds for run in drafted))
    title = " ".join(prompt.split())[:30]
    print(
        f"{title:<34}{'yes' if same else 'NO':>10}{accepted:>16.2f}"
        f"{speed(plain):>7.0f} t/s{speed(drafted):>7.0f} t/s"
    )
    return same


def speed(runs: list[Run]) -> float:
    """Returns the median tokens per second."""
    return NUM_TOKENS / statistics.median(run.seconds for run in runs)


if __name__ == "__main__":
    configure_logging()
    sys.exit(asyncio.run(main()))
