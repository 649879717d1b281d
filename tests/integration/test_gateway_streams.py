"""Several streams at once: the samples of one request, and clients that read or do not."""

import asyncio
import json
import socket
from collections.abc import Mapping
from typing import Any

from gateway.ledger import Demand
from specgw.errors import Overloaded
from tests.running_gateway import COMPLETION, MakeVerifier, RunGateway, events, http, ready

SAMPLES = {**COMPLETION, "temperature": 1, "stream": True}


class TestSamples:
    """The answers of one request are admitted or refused together."""

    async def test_samples_are_refused_together_before_any_of_them_runs(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        verifier = make_verifier()
        settings = {"max_concurrent_requests": 3, "max_queued_requests": 1}
        async with (
            ready(run_gateway, [verifier], settings=settings) as gateway,
            http(gateway) as client,
            gateway.admission.slot(Demand(1, 1)),
            gateway.admission.slot(Demand(1, 1)),
        ):
            answer = await client.post("/v1/completions", json={**SAMPLES, "n": 3})
            counts = gateway.admission.running_count, gateway.admission.waiting_count
            fits = asyncio.create_task(client.post("/v1/completions", json={**SAMPLES, "n": 2}))
            await verifier.opened()
            fitting = await fits

        assert (answer.status_code, counts) == (429, (2, 0))
        assert len(verifier.requests) == 2
        assert (fitting.status_code, fitting.text.count('finish_reason":"length')) == (200, 2)

    async def test_a_sample_that_waits_for_a_slot_is_not_refused_once_another_runs(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        verifier = make_verifier(hold_at=3)
        settings = {"max_concurrent_requests": 2, "queue_timeout_s": 0.1}
        async with (
            ready(run_gateway, [verifier], settings=settings) as gateway,
            http(gateway) as client,
            gateway.admission.slot(Demand(1, 1)),
            client.stream("POST", "/v1/completions", json={**SAMPLES, "n": 2}) as answer,
        ):
            chunks = events(answer)
            await anext(chunks)
            later = await client.post("/v1/completions", json=COMPLETION)
            verifier.released.set()
            ends = [chunk["choices"][0]["finish_reason"] async for chunk in chunks]

        assert later.status_code == 429  # as long as the other sample has waited
        assert ends.count("length") == 2

    async def test_samples_that_wait_together_are_refused_together(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        verifier = make_verifier()
        settings = {"max_concurrent_requests": 2, "queue_timeout_s": 0.05}
        async with (
            ready(run_gateway, [verifier], settings=settings) as gateway,
            http(gateway) as client,
            gateway.admission.slot(Demand(1, 1)),
            gateway.admission.slot(Demand(1, 1)),
        ):
            answer = await client.post("/v1/completions", json={**SAMPLES, "n": 2})

        assert answer.status_code == 429
        assert verifier.requests == []

    async def test_a_sample_that_the_verifier_refuses_waits_for_room_if_another_has_begun(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        verifier = make_verifier(hold_at=3)
        async with (
            ready(run_gateway, [verifier], settings={"max_concurrent_requests": 1}) as gateway,
            http(gateway) as client,
        ):
            body = {**COMPLETION, "prompt": [[1], [2]], "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                chunks = events(answer)
                await anext(chunks)
                verifier.refusals[2,] = Overloaded("another gateway was faster")
                verifier.released.set()
                ends = [chunk["choices"][0]["finish_reason"] async for chunk in chunks]

        assert verifier.refusals == {}
        assert ends.count("length") == 2

    async def test_an_answer_that_has_not_begun_is_refused_as_the_verifier_says(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        verifier = make_verifier(hold_at=0)
        verifier.refusals[2,] = Overloaded("another gateway was faster")
        async with ready(run_gateway, [verifier]) as gateway, http(gateway) as client:
            body = {**COMPLETION, "prompt": [[1], [2]], "stream": True}
            answer = await client.post("/v1/completions", json=body)
            await verifier.cancelled()

        assert answer.status_code == 429


class TestSlowReaders:
    """A client that does not read holds up nobody else."""

    async def test_others_are_answered_while_one_does_not_read_who_still_gets_all(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        verifier = make_verifier([5] * 2000, max_model_len=3000)
        body = {"prompt": "x", "max_tokens": 2000, "stream": True}
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            async with (
                # Longer chunks than sockets have room for.
                ready(run_gateway, [verifier], served_model_name="long" * 5000) as gateway,
                http(gateway) as client,
            ):
                send_request(slow, gateway.url, body)
                await verifier.opened()
                others = await asyncio.gather(
                    *(client.post("/v1/completions", json=body) for _ in range(2))
                )
                running_count = gateway.admission.running_count
                late = await asyncio.to_thread(read_all, slow)

        num_chunks = others[0].text.count("data: {")
        assert running_count == 1  # the one that does not read
        assert others[1].text.count("data: {") == num_chunks
        assert late.count(b"data: {") == num_chunks
        assert b"data: [DONE]" in late


def send_request(client: socket.socket, url: str, body: Mapping[str, Any]) -> None:
    host, port = url.removeprefix("http://").split(":")
    client.connect((host, int(port)))
    content = json.dumps(body).encode()
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content)
    )


def read_all(client: socket.socket) -> bytes:
    client.settimeout(30)
    return b"".join(iter(lambda: client.recv(1 << 16), b""))
