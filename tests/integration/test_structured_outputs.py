"""Constraints on the text through all the services: HTTP in, the bundled models behind it."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import jsonschema
import pytest

from gateway.__main__ import Gateway, serving
from gateway.tokenizer import load_tokenizer
from proposer_svc.proposer import build_proposer
from specgw import wire
from specgw.channel import status_to_error
from specgw.config import EngineArgs, parse_config
from specgw.engine.loading import load_model, target_options
from specgw.errors import InvalidRequest
from specgw.link import InProcessLink
from specgw.structured_outputs import StructuredOutputsParams
from specgw.types import GenerateRequest, SamplingParams
from tests.running_services import RunningVerifier, running_verifier
from tests.unit.test_grammar import TOO_COMPLEX

pytestmark = pytest.mark.slow

PROMPT = "import os\n\n\ndef main():\n    return "
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "sizes": {"type": "array", "items": {"enum": [1, 2.5, None]}, "maxItems": 3},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
FORMATS: list[dict[str, Any]] = [
    {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
    {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
]


@pytest.fixture
def args() -> EngineArgs:
    return parse_config({
        "model": "tiny/target",
        "port": 0,
        "dtype": "float32",
        "speculative_config": {"model": "tiny/draft", "num_speculative_tokens": 4},
        "specgw": {
            "gateway": {"drain_grace_s": 1},
            "verifier": {"wait_for_slow_drafts": True, "draft_timeout_s": 60},
        },
    })  # fmt: skip


@pytest.fixture
async def verifier(args: EngineArgs, single_thread: None) -> AsyncIterator[RunningVerifier]:
    link = InProcessLink(build_proposer(args))
    async with running_verifier(load_model(target_options(args)), args, [link]) as running:
        yield running


@pytest.fixture
async def client(args: EngineArgs, verifier: RunningVerifier) -> AsyncIterator[httpx.AsyncClient]:
    gateway: Gateway
    async with serving(args, [verifier.address], load_tokenizer("tiny/target")) as gateway:
        async with asyncio.timeout(30):
            while not gateway.router.is_ready:
                await gateway.router.changed()
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False) as http:
            yield http


def completion(**changes: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 300, "temperature": 1.0, "seed": 3, **changes}


async def complete(client: httpx.AsyncClient, **changes: Any) -> dict[str, Any]:
    answer = await client.post("/v1/completions", json=completion(**changes))
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def stream(client: httpx.AsyncClient, **changes: Any) -> tuple[str, str]:
    """Returns the text of all chunks, and the finish reason."""
    text, finish_reason = "", ""
    body = completion(**changes, stream=True)
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line.removeprefix("data: "))["choices"]
                text += choice["text"]
                finish_reason = choice["finish_reason"] or finish_reason
    return text, finish_reason


async def test_text_is_of_the_schema_streamed_or_not_drafted_or_not(
    client: httpx.AsyncClient,
) -> None:
    for constraint in FORMATS:
        drafted = await complete(client, **constraint)
        plain = await complete(client, **constraint, num_speculative_tokens=0)

        [choice] = drafted["choices"]
        assert choice["text"] == plain["choices"][0]["text"]
        assert await stream(client, **constraint) == (choice["text"], choice["finish_reason"])
        if constraint is not FORMATS[-1]:  # any whitespace may go on for ever
            assert choice["finish_reason"] == "stop"
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["text"]), SCHEMA)
        assert drafted["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


async def test_what_is_wrong_harms_nothing_beside_it(client: httpx.AsyncClient) -> None:
    bad = {"structured_outputs": {"json": {"type": "objct"}}}
    hard = {"structured_outputs": {"json": TOO_COMPLEX}}
    expected = await complete(client, **FORMATS[0])

    refused, broken, *answers = await asyncio.gather(
        client.post("/v1/completions", json=completion(**bad)),
        client.post("/v1/completions", json=completion(**hard)),
        *(complete(client, **FORMATS[0]) for _ in range(4)),
    )

    for answer, reason in ((refused, "Invalid type: objct"), (broken, "is too complex")):
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "BadRequestError")
        assert "structured_outputs.json" in error["message"]
        assert reason in error["message"]
    assert [one["choices"] for one in answers] == [expected["choices"]] * 4


async def test_a_verifier_refuses_by_itself_what_it_cannot_follow(
    verifier: RunningVerifier,
) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(a"))
    request = wire.generate_request_to_pb(GenerateRequest("test", (1, 2), params))

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await verifier.stub.Generate(request, timeout=30).read()

    error = status_to_error(refused.value)
    assert isinstance(error, InvalidRequest)
    assert error.field == "structured_outputs.regex"
