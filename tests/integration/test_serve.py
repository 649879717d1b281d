"""The commands as a user runs them: real processes, the bundled models, HTTP from outside."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow

PARD = ("--config", "configs/pard.yaml")
PROMPT = "import os\nimport sys\n\n\ndef main():\n"


class Command:
    """A running `specgw` command and what it logs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._lines: list[str] = []

    @property
    def lines(self) -> Sequence[str]:
        """What was logged and read so far."""
        return self._lines

    async def logged(self, pattern: str) -> str:
        """Returns the first group of the first log line that matches, now or later."""
        assert self.process.stderr is not None
        for line in self._lines:
            if match := re.search(pattern, line):
                return match[1]
        async with asyncio.timeout(120):
            while line := (await self.process.stderr.readline()).decode():
                self._lines.append(line)
                if match := re.search(pattern, line):
                    return match[1]
        raise AssertionError(f"ended without {pattern!r}:\n{''.join(self._lines)}")

    async def end(self) -> int:
        """Drains the command as an init system would; returns its exit code."""
        assert self.process.stderr is not None
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            self._lines += (await self.process.stderr.read()).decode().splitlines()
            return await self.process.wait()


@asynccontextmanager
async def command(*arguments: str, env: Mapping[str, str] | None = None) -> AsyncIterator[Command]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "specgw.cli", *arguments),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **(env or {})},  # noqa: TID251
    )
    running = Command(process)
    try:
        yield running
    finally:
        await running.end()


async def complete(client: httpx.AsyncClient, **changes: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 48, "temperature": 0, "ignore_eos": True, **changes}
    response = await client.post("/v1/completions", json=body)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def engine_priorities(pid: int) -> set[int]:
    """Returns the priorities of the threads in which a service computes."""
    engines = [task for task in Path(f"/proc/{pid}/task").iterdir() if _name(task) == "engine"]
    return {os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in engines}


def own_priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def _name(task: Path) -> str:
    return (task / "comm").read_text().strip()


async def ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(60):
        while (await client.get("/health")).status_code != 200:
            pass


@pytest.mark.parametrize("config", [(), PARD], ids=["default", "pard"])
async def test_serve_answers_and_leaves_nothing_behind(config: Sequence[str]) -> None:
    async with command("serve", "--port", "0", *config) as serve:
        await serve.logged(r"(same: 2048 ids of the target, 2048 of the draft)")
        url = await serve.logged(r"serving HTTP url=(\S+)")
        pids = [
            int(await serve.logged(rf"service ready service={name} pid=(\d+)"))
            for name in ("verifier", "proposer")
        ]
        children = [os.pidfd_open(pid) for pid in pids]
        groups = {os.getpgid(pid) for pid in (serve.process.pid, *pids)}
        sessions = {os.getsid(pid) for pid in (serve.process.pid, *pids)}
        priorities = [engine_priorities(pid) for pid in pids]
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            await ready(client)
            models = (await client.get("/v1/models")).json()
            plain = await complete(client, num_speculative_tokens=0)
            drafted = await complete(client)
            chat = await client.post(
                "/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8},
            )
            metrics = (await client.get("/metrics")).text
        exit_code = await serve.end()

    assert exit_code == 0
    assert len(groups) == 3  # ctrl-C is for the parent alone
    assert len(sessions) == 1  # or priorities would not count between them
    assert priorities == [{own_priority()}, {19}]  # drafts are computed while the target waits
    assert models["data"][0]["id"] == "tiny/target"
    assert drafted["choices"][0]["text"] == plain["choices"][0]["text"] != ""
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert drafted["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    assert chat.status_code == 200
    assert re.search(r"^vllm:spec_decode_num_draft_tokens_total\{.*\} [1-9]", metrics, re.MULTILINE)
    for child in children:  # a pidfd is readable once its process has ended
        async with asyncio.timeout(10):
            await _ended(child)
        os.close(child)


async def test_a_prediction_makes_the_answer_faster_and_not_another() -> None:
    async with command("serve", "--port", "0") as serve:
        url = await serve.logged(r"serving HTTP url=(\S+)")
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            await ready(client)
            plain = await complete(client, num_speculative_tokens=0)
            text = plain["choices"][0]["text"]
            edited = text[:40] + "xyz" + text[43:]
            answers = {
                name: await complete(client, prediction={"type": "content", "content": content})
                for name, content in {"right": text, "edited": edited, "wrong": "}{" * 50}.items()
            }
        await serve.end()

    details = {
        name: answer["usage"]["completion_tokens_details"] for name, answer in answers.items()
    }
    stats = {name: one["metrics"]["speculative_decoding"] for name, one in answers.items()}
    steps = {
        name: one["num_spec_steps"] + sum(one["num_undrafted_steps"].values())
        for name, one in stats.items()
    }
    assert [answer["choices"][0]["text"] for answer in answers.values()] == [text] * 3
    assert details["right"]["accepted_prediction_tokens"] > 40
    assert details["edited"]["accepted_prediction_tokens"] > 20
    assert details["edited"]["rejected_prediction_tokens"] > 0
    assert details["wrong"]["accepted_prediction_tokens"] < 5
    assert steps["right"] <= 12
    assert steps["right"] <= steps["edited"] < steps["wrong"]


@pytest.mark.parametrize("method", ["ngram", "suffix"])
async def test_serve_without_a_draft_model_starts_no_proposer(method: str) -> None:
    async with command("serve", "--config", f"configs/{method}.yaml", "--port", "0") as serve:
        await serve.logged(r"(no proposer is started or asked)")
        url = await serve.logged(r"serving HTTP url=(\S+)")
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            await ready(client)
            plain = await complete(client, num_speculative_tokens=0)
            drafted = await complete(client)
            metrics = (await client.get("/metrics")).text
        started = [line for line in serve.lines if "service ready" in line]
        exit_code = await serve.end()

    assert exit_code == 0
    assert len(started) == 1
    assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]
    assert drafted["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    assert not re.search(r"undrafted_requests_total\{.*\} [1-9]", metrics)


@pytest.mark.parametrize(
    ("config", "other_model"), [((), "tiny/pard"), (PARD, "tiny/draft")], ids=["default", "pard"]
)
async def test_three_services_apart_on_tcp_answer_as_one(
    config: Sequence[str], other_model: str
) -> None:
    async with AsyncExitStack() as stack:
        proposer = await stack.enter_async_context(
            command("proposer", "--listen", "127.0.0.1:0", *config)
        )
        drafts_at = await proposer.logged(r"serving addresses=(\S+)")
        verifier = await stack.enter_async_context(
            command(
                *("verifier", "--listen", "127.0.0.1:0", *config),
                env={"SPECGW_VERIFIER__PROPOSERS": f"['{drafts_at}']"},
            )
        )
        verifies_at = await verifier.logged(r"serving addresses=(\S+)")
        await verifier.logged(r"proposer connected address=(\S+)")
        serve = await stack.enter_async_context(
            command(
                *("serve", "--port", "0", *config),
                env={"SPECGW_GATEWAY__VERIFIERS": f"['{verifies_at}']"},
            )
        )
        url = await serve.logged(r"serving HTTP url=(\S+)")
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            await ready(client)
            plain = await complete(client, num_speculative_tokens=0)
            drafted = await complete(client)
        for address in (drafts_at, verifies_at, url):
            async with command("health", address) as health:
                assert await health.process.wait() == 0
        services = {
            "SPECGW_PORT": url.rpartition(":")[2],
            "SPECGW_GATEWAY__VERIFIERS": f"['{verifies_at}']",
            "SPECGW_VERIFIER__PROPOSERS": f"['{drafts_at}']",
        }
        async with command("check", "--online", *config, env=services) as check:
            assert await check.process.wait() == 0
        other = f"{{model: {other_model}, num_speculative_tokens: 2}}"
        services["SPECGW_SPECULATIVE_CONFIG"] = other
        async with command("check", "--online", *config, env=services) as check:
            await check.logged(rf"(verifier {verifies_at}: num_speculative_tokens: .* with 2,)")
            await check.logged(rf"(proposer {drafts_at}: draft model: .* with {other_model},)")
            assert await check.process.wait() == 2
        exit_codes = [await one.end() for one in (serve, verifier, proposer)]

    assert exit_codes == [0, 0, 0]
    assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]
    assert drafted["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


async def test_a_verifier_that_cannot_start_ends_serve_with_its_reason() -> None:
    async with command("serve", "tiny/absent", "--port", "0") as serve:
        await serve.logged(r"(tiny/absent)")
        assert await asyncio.wait_for(serve.process.wait(), 60) == 2


async def _ended(pidfd: int) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
