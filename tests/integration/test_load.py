"""Two hundred requests against eight slots: real processes on the bundled models, real HTTP.

The ledger is watched at every change, the services' own counts are sampled all the time. A longer
soak: `pytest tests/integration/test_load.py --load-rounds 20`.
"""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import pytest

import gateway.__main__
from gateway.__main__ import Gateway, serving
from gateway.ledger import Claim, Demand, Ledger
from gateway.tokenizer import load_tokenizer
from specgw.budget import NOTHING
from specgw.channel import open_channel
from specgw.config import parse_config
from specgw.supervisor import Child, embedded_services
from specgw.v1 import proposer_pb2, proposer_pb2_grpc, verifier_pb2, verifier_pb2_grpc

pytestmark = pytest.mark.slow

NUM_REQUESTS = 200
NUM_SLOTS = 8
NUM_DRAFT_SLOTS = 6  # fewer than slots, so that some requests are admitted undrafted
MAX_TOKENS = 16
_SAMPLE_INTERVAL_S = 0.01
KILL_AT = 60  # claims after which the proposer is killed


class WatchedLedger(Ledger):
    """A ledger that keeps what was claimed in order, and looks for over-admission each time."""

    def __init__(self) -> None:
        super().__init__()
        self.demands: list[Demand] = []
        self.reached_kill = asyncio.Event()
        self.highest = 0
        self.leaving: dict[int, list[asyncio.Task[Any]]] = {}  # by the claim at which they leave

    def claim(self, demand: Demand, avoid: str = "") -> Claim | None:
        claim = super().claim(demand, avoid)
        if claim is not None:
            self.demands.append(demand)
            self.highest = max(self.highest, len(self.claims))
            for _, _, one in self.accounts():
                assert one.used.fits(one.capacity)
            if len(self.demands) >= KILL_AT:
                self.reached_kill.set()
            for task in self.leaving.pop(len(self.demands), []):
                task.cancel()
        return claim

    def forget(self) -> None:
        """Begins to watch anew."""
        self.leaving.clear()
        self.demands.clear()
        self.reached_kill.clear()
        self.highest = 0


@dataclass
class Running:
    """A gateway over embedded services, and what their own counts have reached."""

    gateway: Gateway
    ledger: WatchedLedger
    children: Sequence[Child]
    client: httpx.AsyncClient
    verifier: "verifier_pb2_grpc.VerifierServiceAsyncStub"
    proposer: "proposer_pb2_grpc.ProposerServiceAsyncStub"
    highest: dict[str, int] = field(default_factory=dict)
    num_samples: int = 0

    async def sample(self) -> None:
        """Asks the services what they hold, until cancelled."""
        while True:
            info = await self.info()
            self._note("verifier running", info.running_count)
            with contextlib.suppress(grpc.aio.AioRpcError):  # it may have been killed
                request = proposer_pb2.GetProposerInfoRequest()
                drafts = await self.proposer.GetProposerInfo(request, timeout=10)
                self._note("proposer sessions", drafts.session_count)
            self.num_samples += 1
            await asyncio.sleep(_SAMPLE_INTERVAL_S)

    async def info(self) -> verifier_pb2.GetVerifierInfoResponse:
        return await self.verifier.GetVerifierInfo(verifier_pb2.GetVerifierInfoRequest())

    async def complete(self, number: int) -> httpx.Response:
        """Sends one request; its prompt's length tells which one it is."""
        prompt = [300 + place % 50 for place in range(number + 1)]
        body = {
            "prompt": prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return await self.client.post("/v1/completions", json=body)

    async def drafting(self) -> None:
        """Returns when the gateway knows of a connected proposer's room."""
        async with asyncio.timeout(60):
            while not (await self.info()).proposers[0].connected:
                pass
            proposer_id = (await self.info()).proposers[0].proposer_id
            while proposer_id not in {name for _, name, _ in self.ledger.accounts()}:
                await self.gateway.router.changed()

    async def idle(self) -> None:
        """Returns when nothing is held anywhere; fails if something stays."""
        async with asyncio.timeout(120):  # a busy machine
            while True:
                info = await self.info()
                held = info.running_count, info.waiting_count, info.kv_used_tokens
                if held == (0, 0, 0) and info.proposers[0].session_count == 0:
                    break
        assert self.ledger.claims == ()
        assert all(one.used == NOTHING for _, _, one in self.ledger.accounts())
        admission = self.gateway.admission
        assert (admission.running_count, admission.waiting_count) == (0, 0)

    def _note(self, name: str, count: int) -> None:
        self.highest[name] = max(self.highest.get(name, 0), count)


@contextlib.asynccontextmanager
async def run(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> AsyncIterator[Running]:
    args = parse_config({
        "model": "tiny/target",
        "dtype": "float32",
        "port": 0,
        "max_num_seqs": NUM_SLOTS,
        "speculative_config": {"model": "tiny/draft", "num_speculative_tokens": 4},
        "specgw": {
            "gateway": {"max_queued_requests": NUM_REQUESTS, "queue_timeout_s": 300, **settings},
            "verifier": {"num_threads": 1},
            "proposer": {"num_threads": 1, "max_sessions": NUM_DRAFT_SLOTS},
        },
    })  # fmt: skip
    ledger = WatchedLedger()
    monkeypatch.setattr(gateway.__main__, "Ledger", lambda: ledger)
    limits = httpx.Limits(max_connections=None)
    tokenizer = load_tokenizer(args.tokenizer_path)
    async with (
        embedded_services(args) as children,
        serving(args, [children[0].spec.address], tokenizer) as served,
        httpx.AsyncClient(
            base_url=served.url, timeout=300, limits=limits, trust_env=False
        ) as client,
        open_channel(children[0].spec.address) as to_verifier,
        open_channel(children[1].spec.address) as to_proposer,
    ):
        running = Running(
            served,
            ledger,
            children,
            client,
            verifier_pb2_grpc.VerifierServiceStub(to_verifier),
            proposer_pb2_grpc.ProposerServiceStub(to_proposer),
        )
        await running.drafting()
        sampling = asyncio.create_task(running.sample())
        try:
            yield running
            assert not sampling.done()
        finally:
            sampling.cancel()
            await asyncio.wait([sampling])


def is_served(response: httpx.Response) -> bool:
    return response.status_code == 200 and (
        response.json()["usage"]["completion_tokens"] == MAX_TOKENS
    )


def token_ids(response: httpx.Response) -> list[int]:
    [choice] = response.json()["choices"]
    ids: list[int] = choice["token_ids"]
    return ids


def check_no_over_admission(running: Running) -> None:
    assert running.num_samples > 20
    assert running.ledger.highest == NUM_SLOTS
    assert 0 < running.highest["verifier running"] <= NUM_SLOTS
    assert 0 < running.highest["proposer sessions"] <= NUM_DRAFT_SLOTS


async def test_all_requests_are_served_in_order_and_none_is_admitted_beyond_the_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with run(monkeypatch, max_concurrent_requests=NUM_REQUESTS) as running:
        order = random.Random(0).sample(range(NUM_REQUESTS), NUM_REQUESTS)
        tasks = []
        admission = running.gateway.admission
        for position, number in enumerate(order, start=1):
            tasks.append(asyncio.create_task(running.complete(number)))
            while (  # noqa: ASYNC110  no event tells of a request in the queue
                len(running.ledger.demands) + admission.waiting_count < position
            ):
                await asyncio.sleep(0)
        responses = await asyncio.gather(*tasks)
        await running.idle()
        metrics = (await running.client.get("/metrics")).text

    assert all(is_served(response) for response in responses)
    assert [demand.prompt_token_count - 1 for demand in running.ledger.demands] == order
    check_no_over_admission(running)
    assert 'specgw_gateway_undrafted_requests_total{engine="0"' in metrics


async def test_what_does_not_fit_the_queue_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with run(monkeypatch, max_queued_requests=50) as running:
        responses = await asyncio.gather(*(running.complete(n) for n in range(NUM_REQUESTS)))
        await running.idle()

    served = [response for response in responses if is_served(response)]
    refused = [response for response in responses if response.status_code == 429]
    assert len(served) + len(refused) == NUM_REQUESTS
    assert len(served) >= NUM_SLOTS + 50
    assert refused
    for response in refused:
        assert int(response.headers["retry-after"]) >= 1
        assert f"{NUM_SLOTS} of {NUM_SLOTS} sequences" in response.json()["error"]["message"]
    check_no_over_admission(running)


async def test_slots_come_back_when_clients_leave_and_the_proposer_is_killed(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    async with run(monkeypatch, max_concurrent_requests=NUM_REQUESTS) as running:
        expected = await asyncio.gather(*(running.complete(n) for n in range(NUM_REQUESTS)))
        for round_number in range(pytestconfig.getoption("--load-rounds")):
            await running.drafting()
            running.ledger.forget()
            rng = random.Random(round_number)
            tasks = [asyncio.create_task(running.complete(n)) for n in range(NUM_REQUESTS)]
            leaving = set(rng.sample(range(NUM_REQUESTS), NUM_REQUESTS // 4))
            for number in leaving:
                # Half of them about when they run, half at any time: most of those while queued.
                first, last = rng.choice([(number, number + NUM_SLOTS), (1, NUM_REQUESTS)])
                at = rng.randint(first, last)
                running.ledger.leaving.setdefault(at, []).append(tasks[number])
            await asyncio.wait_for(running.ledger.reached_kill.wait(), 120)
            os.kill(running.children[1].pid, signal.SIGKILL)
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            await running.idle()

            assert any(isinstance(answer, asyncio.CancelledError) for answer in answers)
            for number, answer in enumerate(answers):
                if isinstance(answer, asyncio.CancelledError):
                    assert number in leaving
                    continue
                assert isinstance(answer, httpx.Response), answer
                assert is_served(answer)
                assert token_ids(answer) == token_ids(expected[number])
    check_no_over_admission(running)
