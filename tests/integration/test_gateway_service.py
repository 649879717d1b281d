"""The whole gateway over HTTP and gRPC, in front of verifiers that play scripts."""

import asyncio
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from gateway.__main__ import Gateway
from gateway.ledger import Demand
from gateway.tokenizer import Tokenizer
from specgw import wire
from specgw.channel import open_channel, status_to_error
from specgw.errors import DeadlineExceeded, InvalidRequest, NotReady, Overloaded
from specgw.lookup.prediction import num_agreed
from specgw.server import HealthService
from specgw.structured_outputs import StructuredOutputsParams
from specgw.types import HelloAck, ModelDescription, ProposerStatus
from specgw.v1 import gateway_pb2, gateway_pb2_grpc, types_pb2, verifier_pb2_grpc
from tests import scripted_verifier
from tests.running_gateway import (
    COMPLETION,
    TEXT,
    MakeVerifier,
    RunGateway,
    all_serving,
    events,
    http,
    ready,
)
from tests.scripted_verifier import ScriptedVerifier


@pytest.fixture
def counting_threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that have counted what predictions were worth."""
    threads = []

    def count(prediction: Sequence[int], *answers: Sequence[int]) -> int:
        threads.append(threading.current_thread())
        return num_agreed(prediction, *answers)

    monkeypatch.setattr("gateway.agreement.num_agreed", count)
    return threads


class TestOpenAI:
    """What OpenAI clients see."""

    async def test_unary_and_stream_have_the_same_text_and_usage(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway, token_ids: list[int]
    ) -> None:
        async with ready(run_gateway, [make_verifier()]) as gateway:
            client = AsyncOpenAI(
                api_key="EMPTY",
                base_url=f"{gateway.url}/v1",
                http_client=DefaultAsyncHttpxClient(trust_env=False),
            )
            async with client:
                model = (await client.models.list()).data[0].id
                unary = await client.completions.create(
                    model=model, prompt="the dog", max_tokens=60
                )
                stream = await client.completions.create(
                    model=model,
                    prompt="the dog",
                    max_tokens=60,
                    stream=True,
                    stream_options={"include_usage": True},
                )
                chunks = [chunk async for chunk in stream]

        assert unary.choices[0].text == TEXT
        assert unary.choices[0].finish_reason == "length"
        assert unary.usage is not None
        assert unary.usage.completion_tokens == len(token_ids)
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == TEXT
        assert chunks[-1].choices == []
        assert chunks[-1].usage == unary.usage

    async def test_chats_are_rendered_by_the_model_and_streamed(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway, tokenizer: Tokenizer
    ) -> None:
        verifier = make_verifier()
        messages: list[Any] = [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "go"}]},
        ]
        async with ready(run_gateway, [verifier]) as gateway:
            client = AsyncOpenAI(
                api_key="EMPTY",
                base_url=f"{gateway.url}/v1",
                http_client=DefaultAsyncHttpxClient(trust_env=False),
            )
            async with client:
                unary = await client.chat.completions.create(model="scripted", messages=messages)
                stream = await client.chat.completions.create(
                    model="scripted", messages=messages, stream=True
                )
                chunks = [chunk async for chunk in stream]

        rendered = "system: be brief\nuser: go\nassistant:"
        assert list(verifier.requests[0].prompt_token_ids) == tokenizer.backend.encode(rendered).ids
        assert verifier.requests[0].sampling_params.max_tokens == 256 - len(
            verifier.requests[0].prompt_token_ids
        )
        assert unary.choices[0].message.content == TEXT
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
        assert chunks[-1].choices[0].finish_reason == "length"

    @pytest.mark.parametrize("block_size", [1, 2, 5, 9])
    async def test_streamed_chunks_hold_whole_characters_whatever_the_block(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway, block_size: int
    ) -> None:
        async with (
            ready(run_gateway, [make_verifier(block_size=block_size)]) as gateway,
            http(gateway) as client,
            client.stream("POST", "/v1/completions", json={**COMPLETION, "stream": True}) as answer,
        ):
            texts = [event["choices"][0]["text"] async for event in events(answer)]

        assert "".join(texts) == TEXT
        assert not any("\ufffd" in text for text in texts)

    @pytest.mark.parametrize("stream", [False, True])
    async def test_text_ids_and_usage_end_together_at_a_stop_string(
        self,
        make_verifier: MakeVerifier,
        run_gateway: RunGateway,
        tokenizer: Tokenizer,
        stream: bool,
    ) -> None:
        verifier = make_verifier(block_size=9)
        body = {**COMPLETION, "stop": "said", "return_token_ids": True, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        async with ready(run_gateway, [verifier]) as gateway, http(gateway) as client:
            answer = await client.post("/v1/completions", json=body)
            await verifier.closed()

        bodies = [event async for event in events(answer)] if stream else [answer.json()]
        choices = [choice for body in bodies for choice in body["choices"]]
        ids = [token_id for choice in choices for token_id in choice["token_ids"]]
        assert "".join(choice["text"] for choice in choices) == " and the quick fox "
        assert tokenizer.decode(ids).endswith("said")
        assert bodies[-1]["usage"]["completion_tokens"] == len(ids)
        assert choices[-1]["finish_reason"] == "stop"
        assert choices[-1]["stop_reason"] == "said"

    @pytest.mark.parametrize("stream", [False, True])
    async def test_usage_tells_how_much_of_the_prompt_was_cached_if_configured(
        self, stream: bool, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        details = []
        for is_on in (True, False):
            verifier = make_verifier(cached_token_count=2)
            body: dict[str, Any] = {"prompt": [5, 6, 7], "stream": stream}
            if stream:
                body["stream_options"] = {"include_usage": True}
            async with (
                ready(run_gateway, [verifier], enable_prompt_tokens_details=is_on) as gateway,
                http(gateway) as client,
            ):
                answer = await client.post("/v1/completions", json=body)
                metrics = (await client.get("/metrics")).text
            last = [event async for event in events(answer)][-1] if stream else answer.json()
            details.append(last["usage"].get("prompt_tokens_details"))
            for name, value in (("queries", 3), ("hits", 2)):
                line = f'vllm:prefix_cache_{name}_total{{engine="0",model_name="scripted"}} {value}'
                assert line in metrics

        assert details == [{"cached_tokens": 2}, None]

    async def test_a_cache_salt_reaches_the_verifier(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        verifier = make_verifier()
        async with ready(run_gateway, [verifier]) as gateway, http(gateway) as client:
            for salt in ({"cache_salt": "tenant"}, {}):
                await client.post("/v1/completions", json={"prompt": [5], **salt})
            refused = await client.post(
                "/v1/completions", json={"prompt": [5], "cache_salt": "a/b"}
            )

        assert [one.cache_salt for one in verifier.requests] == ["tenant", ""]
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    @pytest.mark.parametrize("in_parts", [False, True])
    async def test_a_prediction_reaches_the_verifier_and_is_told_in_usage(
        self,
        path: str,
        stream: bool,
        in_parts: bool,
        make_verifier: MakeVerifier,
        run_gateway: RunGateway,
        tokenizer: Tokenizer,
        token_ids: list[int],
        counting_threads: list[threading.Thread],
    ) -> None:
        verifier = make_verifier()
        words = TEXT.split()
        text = f"{TEXT} {words[0]}" if not in_parts else TEXT
        parts = [{"type": "text", "text": one} for one in (TEXT[:4], TEXT[4:])]
        body: dict[str, Any] = {
            "prompt": [5],
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 60,
            "prediction": {"type": "content", "content": parts if in_parts else text},
            "stream": stream,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        predicted = await tokenizer.encode(text, add_special_tokens=False)
        async with ready(run_gateway, [verifier]) as gateway, http(gateway) as client:
            answer = await client.post(path, json=body)

        last = [event async for event in events(answer)][-1] if stream else answer.json()
        details = last["usage"]["completion_tokens_details"]
        accepted = num_agreed(predicted, token_ids)
        assert list(verifier.requests[0].prediction) == predicted
        assert accepted > len(token_ids) / 2
        assert details == {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": len(predicted) - accepted,
        }
        assert len(counting_threads) == 1
        assert threading.main_thread() not in counting_threads

    @pytest.mark.parametrize(
        ("prediction", "field"),
        [
            ("text", "prediction"),
            ({"type": "file", "content": "a"}, "prediction.type"),
            ({"type": "content"}, "prediction.content"),
            (
                {"type": "content", "content": [{"type": "image", "text": "a"}]},
                "prediction.content.0.type",
            ),
            ({"type": "content", "content": "the dog " * 300}, "prediction"),
        ],
    )
    async def test_a_wrong_prediction_is_refused_by_field(
        self, prediction: Any, field: str, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        async with ready(run_gateway, [make_verifier()]) as gateway, http(gateway) as client:
            body = {"prompt": [5], "prediction": prediction}
            answer = await client.post("/v1/completions", json=body)
            without = await client.post("/v1/completions", json={"prompt": [5]})

        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert "completion_tokens_details" not in without.json()["usage"]

    async def test_several_prompts_give_several_choices_in_order(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway, tokenizer: Tokenizer
    ) -> None:
        encode = tokenizer.backend.encode
        outputs = {(5, 6): encode(" one").ids, (7,): encode(" two").ids}
        verifier = make_verifier(outputs=outputs)
        body = {"prompt": [[5, 6], [7]]}
        async with ready(run_gateway, [verifier]) as gateway, http(gateway) as client:
            unary = (await client.post("/v1/completions", json=body)).json()
            answer = await client.post("/v1/completions", json={**body, "stream": True})

        assert [choice["text"] for choice in unary["choices"]] == [" one", " two"]
        assert unary["usage"]["prompt_tokens"] == 3
        assert unary["metrics"] is None
        streamed = ["", ""]
        async for event in events(answer):
            streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert streamed == [" one", " two"]

    async def test_every_kind_of_prompt_is_taken(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        verifier = make_verifier()
        prompts = ["the dog", ["the dog"], [1, 2], [[1, 2], [3]]]
        async with ready(run_gateway, [verifier]) as gateway, http(gateway) as client:
            for prompt in prompts:
                answer = await client.post("/v1/completions", json={"prompt": prompt})
                assert answer.status_code == 200

        # Prompts of one request go side by side and may arrive in any order.
        assert sorted(list(one.prompt_token_ids) for one in verifier.requests[2:]) == [
            [1, 2],
            [1, 2],
            [3],
        ]

    @pytest.mark.parametrize("generates_many", [True, False])
    async def test_speculation_statistics_come_with_the_answer(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway, generates_many: bool
    ) -> None:
        body = {**COMPLETION, "max_tokens": 5}
        verifier = make_verifier(generates_many=generates_many)
        async with ready(run_gateway, [verifier]) as gateway, http(gateway) as client:
            plain_body = {**body, "num_speculative_tokens": 0}
            plain = (await client.post("/v1/completions", json=plain_body)).json()
            unary = (await client.post("/v1/completions", json=body)).json()
            answer = await client.post("/v1/completions", json={**body, "stream": True})

        statistics = unary["metrics"]["speculative_decoding"]
        assert statistics == {
            "mean_acceptance_length": 3.0,
            "draft_acceptance_rate": 4 / 6,
            "acceptance_histogram": [0, 0, 2, 0, 0],
            "num_spec_steps": 2,
            "num_accepted_draft_tokens": 4,
            "num_draft_tokens": 6,
            "num_spec_tokens": 4,
            "num_accepted_draft_tokens_per_position": [2, 2, 0, 0],
            "num_undrafted_steps": {},
            "is_synthetic": False,
        }
        undrafted = plain["metrics"]["speculative_decoding"]["num_undrafted_steps"]
        assert undrafted == {"disabled": 2}
        assert [event async for event in events(answer)][-1]["metrics"] == unary["metrics"]

    async def test_sampling_parameters_reach_the_verifier(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway, tokenizer: Tokenizer
    ) -> None:
        verifier = make_verifier()
        chosen = {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "min_p": 0.25,
            "seed": 3,
            "stop_token_ids": [9],
            "ignore_eos": True,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "allowed_token_ids": [3, 4, 9],
            "prompt_logprobs": 1,
            "logprobs": 2,
        }
        others = {"logit_bias": {"3": 7, "4": -1000}, "bad_words": ["dog"]}
        body = {
            **COMPLETION,
            **chosen,
            **others,
            "num_speculative_tokens": 0,
            "user": "me",
            "store": True,
        }
        async with ready(run_gateway, [verifier]) as gateway, http(gateway) as client:
            assert (await client.post("/v1/completions", json=body)).status_code == 200

        (request,) = verifier.requests
        params = request.sampling_params
        assert {name: getattr(params, name) for name in chosen} == {
            **chosen,
            "stop_token_ids": (9,),
            "allowed_token_ids": (3, 4, 9),
        }
        assert params.logit_bias == {3: 7.0, 4: -100.0}
        forms = [tokenizer.backend.encode(text).ids for text in ("dog", " dog")]
        assert list(map(list, params.bad_words_token_ids)) in (forms, forms[:1])
        assert request.max_draft_tokens == 0
        assert 0 < verifier.deadlines_s[0] < 602

    async def test_constraints_on_the_text_reach_the_verifier(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        verifier = make_verifier()
        schema = {"type": "object", "properties": {"b": {"type": "null"}, "a": {}}}
        json_schema = {"name": "s", "schema": schema, "strict": True}
        asked: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
            ({"response_format": {"type": "text"}}, None),
            ({"response_format": None, "structured_outputs": None}, None),
            ({"response_format": {"type": "json_object"}}, {"json_object": True}),
            (
                {"response_format": {"type": "json_schema", "json_schema": json_schema}},
                {"json": schema},
            ),
            *(
                ({"structured_outputs": fields}, fields)
                for fields in (
                    {"json": schema, "disable_any_whitespace": True},
                    {"json": schema, "disable_additional_properties": True},
                    {"json_object": True, "whitespace_pattern": " "},
                    {"regex": "[ab]+"},
                    {"choice": ["größer", "less"], "regex": None},
                    {"grammar": 'root ::= "a" root | "b"'},
                )
            ),
        ]
        async with ready(run_gateway, [verifier]) as gateway, http(gateway) as client:
            for body, _ in asked:
                answer = await client.post("/v1/completions", json={**COMPLETION, **body})
                assert answer.status_code == 200, answer.text

        reached = [one.sampling_params.structured_outputs for one in verifier.requests]
        assert reached == [fields and StructuredOutputsParams(**fields) for _, fields in asked]

    async def test_the_models_recommended_sampling_holds_where_the_request_is_silent(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway, model_dir: Path
    ) -> None:
        recommended = {"temperature": 0.6, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
        (model_dir / "generation_config.json").write_text(json.dumps(recommended))
        verifier = make_verifier()
        async with ready(run_gateway, [verifier]) as gateway, http(gateway) as client:
            await client.post("/v1/completions", json={**COMPLETION, "top_k": 5})

        params = verifier.requests[0].sampling_params
        assert (params.temperature, params.top_k, params.top_p) == (0.6, 5, 1.0)
        assert (params.min_p, params.repetition_penalty) == (0.1, 1.1)

    async def test_utility_routes(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway, tokenizer: Tokenizer
    ) -> None:
        async with ready(run_gateway, [make_verifier()]) as gateway, http(gateway) as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.post("/ping")).status_code == 200
            assert "version" in (await client.get("/version")).json()
            card = (await client.get("/v1/models")).json()["data"][0]
            tokens = (
                await client.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True})
            ).json()
            chat = (
                await client.post(
                    "/tokenize", json={"messages": [{"role": "user", "content": "x"}]}
                )
            ).json()
            text = (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
            unknown = await client.post("/detokenize", json={"tokens": [10**12]})

        assert (card["id"], card["max_model_len"]) == ("scripted", 256)
        assert tokens["count"] == len(tokens["token_strs"])
        assert tokenizer.decode(chat["tokens"]) == "user: x\nassistant:"
        assert text == {"prompt": TEXT}
        assert unknown.status_code == 400

    async def test_metrics_count_requests_tokens_and_drafts(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        async with ready(run_gateway, [make_verifier()]) as gateway, http(gateway) as client:
            await client.post("/v1/completions", json={**COMPLETION, "max_tokens": 5})
            text = (await client.get("/metrics")).text

        labels = 'engine="0",model_name="scripted"'
        for line in (
            f"vllm:generation_tokens_total{{{labels}}} 5.0",
            f'vllm:request_success_total{{engine="0",finished_reason="length",{labels[11:]}}} 1.0',
            f"vllm:spec_decode_num_drafts_total{{{labels}}} 2.0",
            f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} 6.0",
            f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} 4.0",
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="1"}} 2.0',
            f"vllm:time_to_first_token_seconds_count{{{labels}}} 1.0",
            f"vllm:inter_token_latency_seconds_count{{{labels}}} 2.0",
            f"vllm:e2e_request_latency_seconds_count{{{labels}}} 1.0",
            f"vllm:num_requests_running{{{labels}}} 0.0",
            f"vllm:num_requests_waiting{{{labels}}} 0.0",
        ):
            assert line in text


BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": 2.5}, "temperature", "2.5"),
    ({"temperature": "hot"}, "temperature", "'hot'"),
    ({"top_p": 0}, "top_p", "0"),
    ({"top_k": -2}, "top_k", "-2"),
    ({"max_tokens": 0}, "max_tokens", "0"),
    ({"max_tokens": 1000}, "max_tokens", "1000"),
    ({"stop": [""]}, "stop", "('',)"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "-1"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids", "1000000"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "at most 1024"),
    ({"prompt": [[1], [10**6]]}, "prompt", "1000000"),
    ({"prompt": [-1]}, "prompt.0", "-1"),
    ({"prompt": None}, "prompt", "None"),
    ({"prompt": []}, "prompt", "0"),
    ({"prompt": [1] * 256}, "prompt", "256"),
    ({"num_speculative_tokens": 5}, "num_speculative_tokens", "5"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "True"),
    ({"request_id": "a\r\nb: c"}, "request_id", "b: c"),
    ({"n": 0}, "n", "0"),
    ({"n": 2, "temperature": 0}, "n", "2"),
    ({"n": 1000}, "n", "1000"),
    ({"best_of": 2}, "best_of", "2"),
    ({"min_p": 1.1}, "min_p", "1.1"),
    ({"logit_bias": {"1000000": 5}}, "logit_bias", "1000000"),
    ({"logit_bias": {"x": 5}}, "logit_bias.x", "'x'"),
    ({"logprobs": 21}, "logprobs", "21"),
    ({"logprobs": -2}, "logprobs", "-2"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "21"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "1"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", "2.5"),
    ({"presence_penalty": -2.5}, "presence_penalty", "-2.5"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0"),
    ({"logprob_token_ids": [1], "logprobs": 1}, "logprob_token_ids", "[1]"),
    ({"logits_processors": ["a.b"]}, "logits_processors", "a.b"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs", "'a'"),
    ({"suffix": "x"}, "suffix", "'x'"),
    ({"bad_words": ["x", ""]}, "bad_words", "('x', '')"),
    ({"bad_words": [" "]}, "bad_words", "' '"),
    ({"min_tokens": 61}, "min_tokens", "61"),
    ({"min_tokens": -1}, "min_tokens", "-1"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "()"),
    ({"allowed_token_ids": [10**6]}, "allowed_token_ids", "1000000"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "None"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
        "response_format.json_schema.schema",
        "Invalid type: x",
    ),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "response_format",
        "json_object",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "5"),
    ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json", "Unimplemented"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "must be a JSON schema"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one"),
    ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar", "'x' not"),
    (
        {"structured_outputs": {"structural_tag": "{}"}},
        "structured_outputs.structural_tag",
        "not implemented",
    ),
    ({"guided_json": {}}, "guided_json", "structured_outputs.json"),
    ({"guided_choice": ["a"]}, "guided_choice", "structured_outputs.choice"),
    ({"use_beam_search": True}, "use_beam_search", "True"),
]


class TestSampling:
    """What comes back for parameters that change the shape of an answer."""

    @pytest.mark.parametrize("stream", [False, True])
    async def test_samples_are_choices_with_seeds_that_follow_one_another(
        self,
        stream: bool,
        make_verifier: MakeVerifier,
        run_gateway: RunGateway,
        tokenizer: Tokenizer,
        token_ids: list[int],
    ) -> None:
        verifier = make_verifier()
        body: dict[str, Any] = {"prompt": [[5, 6], [7]], "n": 3, "max_tokens": 9}
        body["seed"] = 2**63 - 2
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with ready(run_gateway, [verifier]) as gateway, http(gateway) as client:
            answer = await client.post("/v1/completions", json=body)

        bodies = [event async for event in events(answer)] if stream else [answer.json()]
        texts: dict[int, str] = {}
        for choice in [choice for body in bodies for choice in body["choices"]]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        assert texts == dict.fromkeys(range(6), tokenizer.decode(token_ids[:9]))
        assert bodies[-1]["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 6 * 9,
            "total_tokens": 3 + 6 * 9,
            **({} if stream else {"prompt_tokens_details": None}),
        }
        assert bodies[-1].get("metrics") is None
        seeds = {
            (tuple(one.prompt_token_ids), one.sampling_params.seed) for one in verifier.requests
        }
        expected = (2**63 - 2, 2**63 - 1, -(2**63))
        assert seeds == {(prompt, seed) for prompt in ((5, 6), (7,)) for seed in expected}
        told = [one.get("seed") for body in bodies for one in body["choices"]]
        assert sorted(filter(None, told)) == sorted(2 * expected)

    @pytest.mark.parametrize("path", ["completions", "chat/completions"])
    async def test_a_seed_that_was_drawn_is_told_and_gives_the_answer_again(
        self, path: str, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        verifier = make_verifier()
        body = (
            {"prompt": [5, 6]}
            if path == "completions"
            else {"messages": [{"role": "user", "content": "x"}]}
        )
        async with ready(run_gateway, [verifier]) as gateway, http(gateway) as client:
            first = (await client.post(f"/v1/{path}", json=body)).json()
            [seed] = [choice["seed"] for choice in first["choices"]]
            await client.post(f"/v1/{path}", json={**body, "seed": seed})

        assert [one.sampling_params.seed for one in verifier.requests] == [seed, seed]

    async def test_samples_of_a_chat_share_its_prompt(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        verifier = make_verifier()
        body = {"messages": [{"role": "user", "content": "x"}], "n": 2, "max_tokens": 4}
        async with ready(run_gateway, [verifier]) as gateway, http(gateway) as client:
            unary = (await client.post("/v1/chat/completions", json=body)).json()
            answer = await client.post("/v1/chat/completions", json={**body, "stream": True})

        assert [choice["index"] for choice in unary["choices"]] == [0, 1]
        usage = unary["usage"]
        assert usage["prompt_tokens"] == len(verifier.requests[0].prompt_token_ids)
        assert usage["completion_tokens"] == 8
        deltas = [event["choices"][0] async for event in events(answer)]
        openings = [one["index"] for one in deltas if one["delta"].get("role") == "assistant"]
        assert sorted(openings) == [0, 1]
        assert len({one.sampling_params.seed for one in verifier.requests}) == 4

    @pytest.mark.parametrize("stream", [False, True])
    async def test_completion_logprobs_end_with_text_ids_and_usage(
        self,
        stream: bool,
        make_verifier: MakeVerifier,
        run_gateway: RunGateway,
        tokenizer: Tokenizer,
    ) -> None:
        body = {**COMPLETION, "logprobs": 2, "stop": "said", "return_token_ids": True}
        body["stream"] = stream
        async with (
            ready(run_gateway, [make_verifier(block_size=9)]) as gateway,
            http(gateway) as client,
        ):
            answer = await client.post("/v1/completions", json=body)

        bodies = [event async for event in events(answer)] if stream else [answer.json()]
        choices = [body["choices"][0] for body in bodies]
        ids = [token_id for choice in choices for token_id in choice["token_ids"]]
        joined = {
            name: [value for choice in choices for value in choice["logprobs"][name]]
            for name in choices[0]["logprobs"]
        }
        assert joined["tokens"] == [tokenizer.decode([token_id]) for token_id in ids]
        assert joined["token_logprobs"] == [-token_id / 8 for token_id in ids]
        lengths = [len(token) for token in joined["tokens"]]
        assert joined["text_offset"] == [sum(lengths[:i]) for i in range(len(ids))]
        beside = {tokenizer.decode([0]): -1.0, tokenizer.decode([1]): -2.0}
        assert joined["top_logprobs"][0] == {joined["tokens"][0]: -ids[0] / 8, **beside}

    @pytest.mark.parametrize("stream", [False, True])
    async def test_chat_logprobs_are_openais(
        self,
        stream: bool,
        make_verifier: MakeVerifier,
        run_gateway: RunGateway,
        tokenizer: Tokenizer,
        token_ids: list[int],
    ) -> None:
        options: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "max_tokens": 7}
        messages: list[Any] = [{"role": "user", "content": "x"}]
        async with ready(run_gateway, [make_verifier()]) as gateway:
            client = AsyncOpenAI(
                api_key="EMPTY",
                base_url=f"{gateway.url}/v1",
                http_client=DefaultAsyncHttpxClient(trust_env=False),
            )
            async with client:
                create = client.chat.completions.create
                if stream:
                    chunks = await create(
                        model="scripted", messages=messages, stream=True, **options
                    )
                    parts = [chunk.choices[0].logprobs async for chunk in chunks]
                else:
                    unary = await create(model="scripted", messages=messages, **options)
                    parts = [unary.choices[0].logprobs]

        entries = [entry for part in parts if part for entry in part.content or ()]
        texts = [tokenizer.decode([token_id]) for token_id in token_ids[:7]]
        assert [entry.token for entry in entries] == texts
        assert [entry.logprob for entry in entries] == [-i / 8 for i in token_ids[:7]]
        assert [bytes(entry.bytes or ()).decode() for entry in entries] == texts
        assert [[top.logprob for top in entry.top_logprobs] for entry in entries] == [[-1, -2]] * 7

    async def test_tokens_may_be_named_by_their_ids(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway, token_ids: list[int]
    ) -> None:
        body = {**COMPLETION, "logprobs": 0, "return_tokens_as_token_ids": True, "max_tokens": 3}
        async with ready(run_gateway, [make_verifier()]) as gateway, http(gateway) as client:
            answer = (await client.post("/v1/completions", json=body)).json()

        logprobs = answer["choices"][0]["logprobs"]
        assert logprobs["tokens"] == [f"token_id:{token_id}" for token_id in token_ids[:3]]

    async def test_prompt_logprobs_are_told_by_id(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway, tokenizer: Tokenizer
    ) -> None:
        body = {"prompt": [5, 6, 7], "prompt_logprobs": 1, "max_tokens": 4}
        chat = {"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 0}
        async with ready(run_gateway, [make_verifier()]) as gateway, http(gateway) as client:
            answer = (await client.post("/v1/completions", json=body)).json()
            chatted = (await client.post("/v1/chat/completions", json=chat)).json()

        top = {"0": {"logprob": -1.0, "rank": 1, "decoded_token": tokenizer.decode([0])}}
        assert answer["choices"][0]["prompt_logprobs"] == [
            None,
            *(
                {str(i): {"logprob": -i / 8, "rank": i + 1, "decoded_token": text}, **top}
                for i, text in ((i, tokenizer.decode([i])) for i in (6, 7))
            ),
        ]
        assert len(chatted["prompt_logprobs"]) == chatted["usage"]["prompt_tokens"]

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("max_tokens", [0, 4])
    async def test_an_echo_is_the_prompt_before_the_answer(
        self,
        max_tokens: int,
        stream: bool,
        make_verifier: MakeVerifier,
        run_gateway: RunGateway,
        tokenizer: Tokenizer,
        token_ids: list[int],
    ) -> None:
        prompt = tokenizer.backend.encode("the dog").ids
        body = {"prompt": prompt, "echo": True, "max_tokens": max_tokens, "logprobs": 0}
        body["stream"] = stream
        async with ready(run_gateway, [make_verifier()]) as gateway, http(gateway) as client:
            answer = await client.post("/v1/completions", json=body)

        bodies = [event async for event in events(answer)] if stream else [answer.json()]
        choices = [body["choices"][0] for body in bodies]
        shown = [*prompt, *token_ids[:max_tokens]]
        assert "".join(one["text"] for one in choices) == tokenizer.decode(shown)
        assert choices[-1]["finish_reason"] == "length"
        values = [value for one in choices for value in one["logprobs"]["token_logprobs"]]
        assert values == [None, *(-token_id / 8 for token_id in shown[1:])]
        if not stream:
            assert bodies[0]["usage"]["completion_tokens"] == max_tokens

    async def test_a_chat_echoes_the_message_that_it_goes_on(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        begun = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "well,"}]
        continued = {"add_generation_prompt": False, "continue_final_message": True}
        async with ready(run_gateway, [make_verifier()]) as gateway, http(gateway) as client:
            url = "/v1/chat/completions"
            answer = await client.post(url, json={"messages": begun, "echo": True, **continued})
            other = await client.post(url, json={"messages": begun[:1], "echo": True})

        assert answer.json()["choices"][0]["message"]["content"] == f"well,{TEXT}"
        assert other.json()["choices"][0]["message"]["content"] == TEXT

    @pytest.mark.parametrize("block_size", [1, 4, 9])
    async def test_a_stop_string_stays_in_the_text_if_asked_for(
        self, block_size: int, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        body = {**COMPLETION, "stop": "said", "include_stop_str_in_output": True}
        verifier = make_verifier(block_size=block_size)
        async with ready(run_gateway, [verifier]) as gateway, http(gateway) as client:
            answer = (await client.post("/v1/completions", json=body)).json()

        assert answer["choices"][0]["text"] == " and the quick fox said"
        assert answer["choices"][0]["stop_reason"] == "said"

    async def test_grpc_clients_get_the_same(
        self,
        make_verifier: MakeVerifier,
        run_gateway: RunGateway,
        tokenizer: Tokenizer,
        token_ids: list[int],
    ) -> None:
        verifier = make_verifier()
        request = gateway_pb2.GatewayServiceGenerateRequest(
            prompt="the dog",
            sampling_params=types_pb2.SamplingParams(
                max_tokens=60, logprobs=1, prompt_logprobs=0, logit_bias={3: 2.0}
            ),
            stop=["said"],
            bad_words=["dog"],
            include_stop_str_in_output=True,
        )
        async with (
            ready(run_gateway, [verifier]) as gateway,
            open_channel(gateway.grpc_addresses[0]) as channel,
        ):
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            responses = [response async for response in stub.Generate(request, timeout=10)]

        params = verifier.requests[0].sampling_params
        assert params.logit_bias == {3: 2.0}
        assert params.bad_words_token_ids
        assert "".join(one.text for one in responses) == " and the quick fox said"
        count = responses[-1].output_token_count
        scored = [
            entry
            for one in responses
            for entry in wire.token_logprobs_from_pb(one.logprobs, "logprobs")
        ]
        assert [entry.token_ids[0] for entry in scored] == token_ids[:count]
        prompt = wire.token_logprobs_from_pb(responses[0].prompt_logprobs, "prompt_logprobs")
        assert [entry.token_ids[0] for entry in prompt] == tokenizer.backend.encode("the dog").ids[
            1:
        ]


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages.content.type",
    ),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
]


class TestRefusals:
    """What cannot be served is refused by name, before any work."""

    async def test_bad_fields_are_named_with_their_values(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        verifier = make_verifier()
        async with ready(run_gateway, [verifier]) as gateway, http(gateway) as client:
            for fields, param, value in BAD_FIELDS:
                answer = await client.post("/v1/completions", json={**COMPLETION, **fields})
                error = answer.json().get("error", {})
                assert (answer.status_code, error.get("param")) == (400, param), fields
                assert (error["code"], error["type"]) == (400, "BadRequestError")
                assert value in error["message"]

        assert verifier.requests == []

    async def test_values_that_change_nothing_are_taken(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        neutral = {
            "n": 1,
            "best_of": 1,
            "echo": False,
            "logprobs": None,
            "min_p": 0.0,
            "presence_penalty": 0,
            "repetition_penalty": 1.0,
            "logit_bias": {},
            "response_format": {"type": "text"},
            "seed": -1,
            "top_k": -1,
            "stop": None,
            "metadata": {"a": "b"},
        }
        async with ready(run_gateway, [make_verifier()]) as gateway, http(gateway) as client:
            answer = await client.post("/v1/completions", json={**COMPLETION, **neutral})

        assert answer.status_code == 200

    async def test_bad_chats_are_refused_by_field(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        chat = {"messages": [{"role": "user", "content": "x"}]}
        async with ready(run_gateway, [make_verifier()]) as gateway, http(gateway) as client:
            for fields, param in BAD_CHATS:
                answer = await client.post("/v1/chat/completions", json={**chat, **fields})
                error = answer.json().get("error", {})
                assert (answer.status_code, error.get("param")) == (400, param), fields

    async def test_an_unknown_model_is_not_found(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        async with ready(run_gateway, [make_verifier()]) as gateway, http(gateway) as client:
            answer = await client.post("/v1/completions", json={**COMPLETION, "model": "other"})

        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "model"
        assert "scripted" in answer.json()["error"]["message"]

    async def test_a_body_that_is_not_json_is_refused(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        json_type = {"content-type": "application/json"}
        async with ready(run_gateway, [make_verifier()]) as gateway, http(gateway) as client:
            broken = await client.post("/v1/completions", content="{", headers=json_type)
            other = await client.post("/v1/completions", content="a=b")
            surrogate = await client.post(
                "/v1/completions", content=b'{"model": "\\ud800"}', headers=json_type
            )
            missing = await client.post("/v1/nothing", json={})

        assert [one.status_code for one in (broken, other, surrogate)] == [400, 400, 400]
        assert missing.status_code == 404
        assert all("message" in one.json()["error"] for one in (broken, other, surrogate, missing))

    async def test_a_body_that_is_too_long_is_refused_unread(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        async with ready(run_gateway, [make_verifier()]) as gateway:
            host, port = gateway.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
                b"content-type: application/json\r\ncontent-length: 99999999\r\n\r\n"
            )
            answer = await reader.readuntil(b"}}")
            writer.close()
            await writer.wait_closed()

        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b'"type":"BadRequestError"' in answer

    async def test_the_api_key_guards_the_model_and_nothing_else(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        keys = ["first", "second"]
        async with (
            ready(run_gateway, [make_verifier()], api_key=keys) as gateway,
            http(gateway) as client,
        ):
            without = await client.post("/v1/completions", json=COMPLETION)
            wrong = await client.get("/v1/models", headers={"authorization": "Bearer third"})
            tokenize = await client.post("/tokenize", json={"prompt": "x"})
            right = await client.get("/v1/models", headers={"authorization": "Bearer second"})
            health = await client.get("/health")

        assert [one.status_code for one in (without, wrong, tokenize)] == [401, 401, 401]
        assert without.json()["error"]["type"] == "AuthenticationError"
        assert (right.status_code, health.status_code) == (200, 200)


class TestLoad:
    """Queueing, refusing, draining."""

    async def test_a_full_queue_is_429_with_retry_after(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        verifier = make_verifier(hold_at=0)
        limits = {"max_concurrent_requests": 1, "max_queued_requests": 0}
        async with (
            ready(run_gateway, [verifier], settings=limits) as gateway,
            http(gateway) as client,
        ):
            running = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
            await verifier.opened()
            refused = await client.post("/v1/completions", json={**COMPLETION, "stream": True})
            verifier.released.set()
            first = await running

        assert first.status_code == 200
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert "at most 1" in refused.json()["error"]["message"]

    async def test_queued_requests_run_when_a_slot_is_free(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        verifier = make_verifier()
        limits = {"max_concurrent_requests": 2}
        async with (
            ready(run_gateway, [verifier], settings=limits) as gateway,
            http(gateway) as client,
        ):
            answers = await asyncio.gather(
                *(client.post("/v1/completions", json=COMPLETION) for _ in range(12))
            )

        assert {one.json()["choices"][0]["text"] for one in answers} == {TEXT}
        assert (gateway.admission.running_count, gateway.admission.waiting_count) == (0, 0)

    async def test_more_prompts_than_slots_leave_the_queue_to_others(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        verifier = make_verifier(hold_at=0)
        limits = {"max_concurrent_requests": 2, "max_queued_requests": 2}
        async with (
            ready(run_gateway, [verifier], settings=limits) as gateway,
            http(gateway) as client,
        ):
            body = {"prompt": [[1]] * 4}
            running = asyncio.create_task(client.post("/v1/completions", json=body))
            await verifier.opened(2)
            waiting_count = gateway.admission.waiting_count
            verifier.released.set()
            answer = await running

        assert waiting_count == 0
        assert len(answer.json()["choices"]) == 4

    async def test_more_prompts_than_slots_and_queue_are_refused(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        limits = {"max_concurrent_requests": 2, "max_queued_requests": 2}
        async with (
            ready(run_gateway, [make_verifier()], settings=limits) as gateway,
            http(gateway) as client,
        ):
            answer = await client.post("/v1/completions", json={"prompt": [[1]] * 5})

        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "prompt")
        assert "at most 4 answers (2 running, 2 queued), got 5" in error["message"]

    async def test_a_client_that_leaves_the_queue_takes_no_slot(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        verifier = make_verifier(hold_at=0)
        limits = {"max_concurrent_requests": 1}
        async with (
            ready(run_gateway, [verifier], settings=limits) as gateway,
            http(gateway) as client,
        ):
            running = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
            await verifier.opened()
            waiting = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
            await until(lambda: gateway.admission.waiting_count == 1)
            waiting.cancel()
            await until(lambda: gateway.admission.waiting_count == 0)
            verifier.released.set()
            await running

        assert len(verifier.requests) == 1

    async def test_slots_are_those_that_the_verifiers_report(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        verifier = make_verifier(hold_at=0, max_num_seqs=2)
        limits = {"max_queued_requests": 1}
        async with (
            ready(run_gateway, [verifier], settings=limits) as gateway,
            http(gateway) as client,
        ):
            running = [
                asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
                for _ in range(3)
            ]
            await verifier.opened(2)
            await until(lambda: gateway.admission.waiting_count == 1)
            refused = await client.post("/v1/completions", json=COMPLETION)
            metrics = (await client.get("/metrics")).text
            verifier.released.set()
            answers = await asyncio.gather(*running)

        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert refused.status_code == 429
        assert "2 of 2 sequences" in refused.json()["error"]["message"]
        assert 'slots_used{kind="sequences"' in metrics
        assert gateway.admission.ledger.claims == ()

    async def test_what_no_verifier_could_ever_hold_is_400_with_the_numbers(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        verifier = make_verifier(kv_capacity_tokens=32)
        async with ready(run_gateway, [verifier]) as gateway, http(gateway) as client:
            answer = await client.post("/v1/completions", json=COMPLETION)

        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "max_tokens")
        assert "of at most 32 KV tokens" in error["message"]
        assert verifier.requests == []

    async def test_a_request_that_fits_no_proposer_is_admitted_undrafted_and_counted(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        verifier = make_verifier(hold_at=0, proposers=[proposer_status(max_sessions=1)])
        async with ready(run_gateway, [verifier]) as gateway, http(gateway) as client:
            running = [
                asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
                for _ in range(2)
            ]
            await verifier.opened(2)
            verifier.released.set()
            await asyncio.gather(*running)
            metrics = (await client.get("/metrics")).text

        first, second = verifier.requests
        assert (first.proposer_address, first.max_draft_tokens) == ("p:1", None)
        assert (second.proposer_address, second.max_draft_tokens) == ("", 0)
        assert re.search(r'undrafted_requests_total{.*reason="no_slot"} 1.0', metrics)

    async def test_a_key_waits_for_its_own_requests_and_not_for_others(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        verifier = make_verifier(hold_at=0)
        settings = {"max_concurrent_requests_per_key": 1}
        keys = ["one", "two"]
        async with (
            ready(run_gateway, [verifier], settings=settings, api_key=keys) as gateway,
            http(gateway) as client,
            open_channel(gateway.grpc_addresses[0]) as channel,
        ):

            def post(key: str, **changes: Any) -> "asyncio.Task[httpx.Response]":
                headers = {"authorization": f"Bearer {key}"}
                body = {**COMPLETION, **changes}
                return asyncio.create_task(
                    client.post("/v1/completions", json=body, headers=headers)
                )

            running = [post("one")]
            await verifier.opened()
            running.append(post("one"))
            await until(lambda: gateway.admission.waiting_count == 1)
            running.append(post("two"))
            await verifier.opened(2)
            refused = await post("one")
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            metadata = (("authorization", "Bearer one"),)
            request = gateway_pb2.GatewayServiceGenerateRequest(prompt="x")
            with pytest.raises(grpc.aio.AioRpcError) as over_grpc:
                await stub.Generate(request, timeout=5, metadata=metadata).read()
            verifier.released.set()
            answers = await asyncio.gather(*running)
            many = await post("two", prompt=["a", "b", "c"])

        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert refused.status_code == 429
        assert "1 requests running and 1 waiting" in refused.json()["error"]["message"]
        assert over_grpc.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(many.json()["choices"]) == 3

    async def test_drain_lets_a_running_stream_finish(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        verifier = make_verifier(hold_at=6)
        settings = {"drain_grace_s": 5}
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(scripted_verifier.serving(verifier))
            context = run_gateway(server.addresses[0], settings=settings)
            gateway = await context.__aenter__()
            await gateway.router.ready()
            client = await stack.enter_async_context(http(gateway))
            running = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
            await verifier.opened()

            draining = asyncio.create_task(context.__aexit__(None, None, None))
            await until(lambda: not accepts(gateway))
            verifier.released.set()
            answer = await running
            await draining

        assert answer.json()["choices"][0]["text"] == TEXT

    @pytest.mark.parametrize("stream", [False, True])
    async def test_the_deadline_ends_the_work(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway, stream: bool
    ) -> None:
        verifier = make_verifier(hold_at=0)
        settings = {"request_timeout_s": 0.2}
        async with (
            ready(run_gateway, [verifier], settings=settings) as gateway,
            http(gateway) as client,
        ):
            answer = await client.post("/v1/completions", json={**COMPLETION, "stream": stream})
            await verifier.closed()
            metrics = (await client.get("/metrics")).text

        assert answer.status_code == 504
        assert answer.json()["error"]["type"] == "TimeoutError"
        assert 'error="DeadlineExceeded"' in metrics

    async def test_the_deadline_counts_the_wait_for_a_slot(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        settings = {"max_concurrent_requests": 1, "request_timeout_s": 0.2}
        async with (
            ready(run_gateway, [make_verifier()], settings=settings) as gateway,
            http(gateway) as client,
            gateway.admission.slot(Demand(1, 1)),
        ):
            answer = await client.post("/v1/completions", json=COMPLETION)
            waiting_count = gateway.admission.waiting_count

        assert answer.status_code == 504
        assert waiting_count == 0

    async def test_the_deadline_frees_the_slot_of_an_http_client_that_does_not_read(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        body = json.dumps({"prompt": "x", "max_tokens": 2000, "stream": True}).encode()
        verifier = make_verifier([5] * 2000, max_model_len=3000)
        options = {"settings": {"request_timeout_s": 1}, "served_model_name": "long" * 5000}
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            async with ready(run_gateway, [verifier], **options) as gateway:
                host, port = gateway.url.removeprefix("http://").split(":")
                client.connect((host, int(port)))
                client.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
                    b"content-type: application/json\r\n"
                    b"content-length: %d\r\n\r\n%b" % (len(body), body)
                )
                await until(lambda: gateway.admission.running_count == 1)
                await until(lambda: gateway.admission.running_count == 0)
                metrics = gateway.metrics.exposition().decode()

        assert 'error="DeadlineExceeded"' in metrics

    async def test_the_deadline_frees_the_slot_of_a_grpc_client_that_does_not_read(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        verifier = make_verifier([5] * 20_000, max_model_len=30_000, block_size=10)
        request = gateway_pb2.GatewayServiceGenerateRequest(
            prompt="x", sampling_params=types_pb2.SamplingParams(max_tokens=20_000)
        )
        settings = {"request_timeout_s": 1}
        window = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
        async with (
            ready(run_gateway, [verifier], settings=settings) as gateway,
            grpc.aio.insecure_channel(gateway.grpc_addresses[0], options=window) as channel,
        ):
            call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request)
            await until(lambda: gateway.admission.running_count == 1)
            await until(lambda: gateway.admission.running_count == 0)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                async for _ in call:
                    pass

        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    async def test_what_came_before_the_deadline_is_delivered(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        verifier = make_verifier(fail_at=6, failure=DeadlineExceeded("too late"))
        async with ready(run_gateway, [verifier]) as gateway, http(gateway) as client:
            answer = await client.post("/v1/completions", json=COMPLETION)

        body = answer.json()
        assert answer.status_code == 504
        assert body["error"]["type"] == "TimeoutError"
        assert TEXT.startswith(body["choices"][0]["text"])
        assert body["usage"]["completion_tokens"] == 6


async def delivered(gateway: Gateway, num_tokens: int) -> None:
    """Returns when the gateway has had so many tokens of all requests together."""
    line = f'vllm:generation_tokens_total{{engine="0",model_name="scripted"}} {num_tokens}.0\n'
    await until(lambda: line in gateway.metrics.exposition().decode())


async def until(is_true: Callable[[], bool]) -> None:
    """Lets the loop run until something holds that no event tells of."""
    async with asyncio.timeout(5):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0)


def accepts(gateway: Gateway) -> bool:
    """Whether the gateway still takes connections."""
    host, port = gateway.url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port)), 1).close()
    except OSError:
        return False
    return True


class TestFailures:
    """Clients and verifiers that go away."""

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    async def test_a_client_that_leaves_a_stream_ends_the_work(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway, path: str
    ) -> None:
        verifier = make_verifier(hold_at=6)
        body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "stream": True}
        async with ready(run_gateway, [verifier]) as gateway, http(gateway) as client:
            async with client.stream("POST", path, json=body) as answer:
                async for _ in events(answer):
                    break
            await verifier.cancelled()
            assert verifier.open_count == 0
            assert gateway.admission.running_count == 0

    async def test_a_client_that_does_not_wait_for_the_answer_ends_the_work(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        verifier = make_verifier(hold_at=6)
        body = {**COMPLETION, "prompt": ["a", "b"]}
        async with ready(run_gateway, [verifier]) as gateway, http(gateway) as client:
            running = asyncio.create_task(client.post("/v1/completions", json=body))
            await verifier.opened(2)
            running.cancel()
            await verifier.cancelled(2)
            assert gateway.admission.running_count == 0

    @pytest.mark.parametrize("fail_at", [0, 3, 12])
    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_failing_verifier_is_replaced_and_nothing_is_lost_or_doubled(
        self,
        make_verifier: MakeVerifier,
        run_gateway: RunGateway,
        token_ids: list[int],
        fail_at: int,
        stream: bool,
    ) -> None:
        failure = NotReady("draining")
        pair = [make_verifier(fail_at=fail_at, failure=failure) for _ in range(2)]
        body = {**COMPLETION, "stream": stream}
        async with ready(run_gateway, pair) as gateway, http(gateway) as client:
            answer = await client.post("/v1/completions", json=body)
            metrics = (await client.get("/metrics")).text

        bodies = [event async for event in events(answer)] if stream else [answer.json()]
        assert "".join(one["choices"][0]["text"] for one in bodies) == TEXT
        attempts = [*pair[0].requests, *pair[1].requests]
        assert len({request.sampling_params.seed for request in attempts}) == 1
        assert attempts[0].sampling_params.seed is not None
        assert sorted(len(request.output_token_ids) for request in attempts)[-1] == fail_at
        assert "specgw_gateway_reopened_requests_total 2.0" in metrics

    async def test_a_killed_verifier_is_replaced_by_one_that_lives(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        pair = [make_verifier(hold_at=6) for _ in range(2)]
        async with AsyncExitStack() as stack:
            servers = [
                await stack.enter_async_context(scripted_verifier.serving(one)) for one in pair
            ]
            gateway = await stack.enter_async_context(
                run_gateway(*(server.addresses[0] for server in servers))
            )
            client = await stack.enter_async_context(http(gateway))
            await all_serving(gateway, 2)
            running = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
            first = await one_opened(pair)
            await delivered(gateway, 6)
            await servers[pair.index(first)].stop(0)
            other = pair[1 - pair.index(first)]
            await other.opened()
            other.released.set()
            answer = await running

        assert answer.json()["choices"][0]["text"] == TEXT
        assert len(other.requests[0].output_token_ids) == 6

    async def test_a_restarted_verifier_takes_its_request_up_again(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        before, after = make_verifier(hold_at=6), make_verifier()
        async with AsyncExitStack() as stack:
            async with scripted_verifier.serving(before) as server:
                address = server.addresses[0]
                gateway = await stack.enter_async_context(run_gateway(address))
                client = await stack.enter_async_context(http(gateway))
                await gateway.router.ready()
                running = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
                await delivered(gateway, 6)
            await stack.enter_async_context(scripted_verifier.serving(after, address))
            async with asyncio.timeout(10):
                answer = await running

        assert answer.json()["choices"][0]["text"] == TEXT
        assert len(after.requests[0].output_token_ids) == 6

    @pytest.mark.parametrize("stream", [False, True])
    async def test_without_any_verifier_left_the_client_gets_what_was_generated(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway, stream: bool
    ) -> None:
        verifier = make_verifier(hold_at=6)
        settings = {"reopen_timeout_s": 0.2}
        async with AsyncExitStack() as stack:
            async with scripted_verifier.serving(verifier) as server:
                gateway = await stack.enter_async_context(
                    run_gateway(server.addresses[0], settings=settings)
                )
                client = await stack.enter_async_context(http(gateway))
                await gateway.router.ready()
                body = {**COMPLETION, "stream": stream}
                running = asyncio.create_task(client.post("/v1/completions", json=body))
                await delivered(gateway, 6)
            answer = await running
            refused = await client.post("/v1/completions", json=COMPLETION)
            health = await client.get("/health")

        bodies = [event async for event in events(answer)] if stream else [answer.json()]
        assert bodies[-1]["error"]["code"] == 503
        text = "".join(choice["text"] for one in bodies for choice in one.get("choices", []))
        assert text
        assert TEXT.startswith(text)
        assert answer.status_code == (200 if stream else 503)
        assert (refused.status_code, health.status_code) == (503, 503)
        assert "no verifier is serving" in refused.json()["error"]["message"]

    async def test_before_the_first_verifier_everything_is_503(
        self, run_gateway: RunGateway
    ) -> None:
        async with run_gateway("127.0.0.1:1") as gateway, http(gateway) as client:
            health = await client.get("/health")
            answer = await client.post("/v1/completions", json=COMPLETION)

        assert (health.status_code, answer.status_code) == (503, 503)
        assert "127.0.0.1:1" in answer.json()["error"]["message"]

    async def test_a_verifier_with_another_vocabulary_is_not_used(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        other = make_verifier(vocab_fingerprint="0" * 64)
        async with (
            scripted_verifier.serving(other) as server,
            run_gateway(server.addresses[0]) as gateway,
            http(gateway) as client,
        ):
            await until(lambda: "vocabulary" in gateway.router.states)
            answer = await client.post("/v1/completions", json=COMPLETION)

        assert answer.status_code == 503
        assert "vocabulary 000000000000" in answer.json()["error"]["message"]

    async def test_a_verifier_with_other_settings_is_refused_with_a_list(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        other = make_verifier(max_draft_tokens=8, kv_lookahead_per_session=8, protocol_version=2)
        async with (
            scripted_verifier.serving(other) as server,
            run_gateway(server.addresses[0]) as gateway,
            http(gateway) as client,
        ):
            await until(lambda: "protocol" in gateway.router.states)
            answer = await client.post("/v1/completions", json=COMPLETION)

        message = answer.json()["error"]["message"]
        assert answer.status_code == 503
        assert "protocol_version: the verifier speaks 2, the gateway 1" in message
        assert "the gateway is configured with 4, the verifier with 8" in message
        assert "slots: the gateway reckons with 4" in message

    async def test_a_verifier_restarted_with_another_model_is_refused_until_it_is_right_again(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        right, wrong = make_verifier(), make_verifier()
        model = replace(wrong.info.target_model, name="models/another")
        wrong.info = replace(wrong.info, target_model=model)
        async with AsyncExitStack() as stack:
            async with scripted_verifier.serving(right) as server:
                address = server.addresses[0]
                gateway = await stack.enter_async_context(run_gateway(address))
                client = await stack.enter_async_context(http(gateway))
                await gateway.router.ready()
            async with scripted_verifier.serving(wrong, address), asyncio.timeout(10):
                await until_states(gateway, "another")
                refused = await client.post("/v1/completions", json=COMPLETION)
            async with scripted_verifier.serving(right, address), asyncio.timeout(10):
                await gateway.router.ready()
                answer = await client.post("/v1/completions", json=COMPLETION)

        assert refused.status_code == 503
        assert "the verifier has loaded models/another" in refused.json()["error"]["message"]
        assert wrong.requests == []
        assert answer.status_code == 200

    async def test_another_process_behind_the_same_connection_is_noticed(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        verifier = make_verifier()
        async with ready(run_gateway, [verifier]) as gateway:
            verifier.info = replace(verifier.info, max_draft_tokens=2)
            await until_states(gateway, "the verifier with 2")

            assert not gateway.router.is_ready

    async def test_a_refusal_by_the_verifier_keeps_its_field(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        failure = InvalidRequest("sampling_params.top_k", 5, "is not liked here")
        verifier = make_verifier(fail_at=0, failure=failure)
        async with ready(run_gateway, [verifier]) as gateway, http(gateway) as client:
            answer = await client.post("/v1/completions", json=COMPLETION)

        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "sampling_params.top_k"

    async def test_an_overloaded_verifier_is_429(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        verifier = make_verifier(fail_at=0, failure=Overloaded("full", retry_after_s=7))
        async with ready(run_gateway, [verifier]) as gateway, http(gateway) as client:
            answer = await client.post("/v1/completions", json=COMPLETION)

        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "7"

    async def test_requests_spread_over_verifiers(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        pair = [make_verifier(hold_at=0) for _ in range(2)]
        async with ready(run_gateway, pair) as gateway, http(gateway) as client:
            running = [
                asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
                for _ in range(4)
            ]
            await asyncio.gather(*(verifier.opened(2) for verifier in pair))
            for verifier in pair:
                verifier.released.set()
            await asyncio.gather(*running)

        assert [len(verifier.requests) for verifier in pair] == [2, 2]

    @pytest.mark.parametrize(
        "method",
        [
            "/grpc.health.v1.Health/Watch",
            "/specgw.v1.VerifierService/Generate",
            "/specgw.v1.VerifierService/GenerateMany",
        ],
    )
    async def test_a_message_that_does_not_parse_is_a_verifier_lost_for_a_moment(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway, method: str
    ) -> None:
        garble = GarbleOnce(method)
        async with (
            garbling(
                make_verifier(generates_many=not method.endswith("/Generate")), garble
            ) as address,
            run_gateway(address) as gateway,
            http(gateway) as client,
        ):
            async with asyncio.timeout(5):
                await gateway.router.ready()
            answer = await client.post("/v1/completions", json=COMPLETION)

        assert garble.is_done
        assert answer.json()["choices"][0]["text"] == TEXT


class GarbleOnce(grpc.aio.ServerInterceptor):
    """Answers the first call of a method with bytes that are no message."""

    def __init__(self, method: str) -> None:
        self.is_done = False
        self._method = method

    async def intercept_service(
        self, continuation: Any, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        if self.is_done or handler_call_details.method != self._method:
            return await continuation(handler_call_details)
        self.is_done = True
        if self._method.endswith("Many"):
            return grpc.stream_stream_rpc_method_handler(self._answer)
        return grpc.unary_stream_rpc_method_handler(self._answer)

    async def _answer(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"\xff"


@asynccontextmanager
async def garbling(verifier: ScriptedVerifier, garble: GarbleOnce) -> AsyncIterator[str]:
    """Serves a scripted verifier with one garbled answer; yields its address."""
    server = grpc.aio.server(interceptors=[garble])
    health = HealthService([])
    health.set_serving(True)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(verifier, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def until_states(gateway: Gateway, text: str) -> None:
    """Waits until the gateway says something of its verifiers."""
    async with asyncio.timeout(10):
        while text not in gateway.router.states:
            await gateway.router.changed()


def proposer_status(**offer: Any) -> ProposerStatus:
    """Returns a connected proposer with a lot of room, but for what is given."""
    model = ModelDescription("draft", "D", 0, "", 256, "none", "cpu")
    plenty = HelloAck("p", "draft_model", model, 4, 1, 100, 4, 10_000, 100_000)
    return ProposerStatus("p:1", True, 0, "", replace(plenty, **offer))


async def one_opened(verifiers: Sequence[ScriptedVerifier]) -> ScriptedVerifier:
    """Returns the first verifier that gets a call."""
    waits = [asyncio.create_task(verifier.opened()) for verifier in verifiers]
    done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in pending:
        wait.cancel()
    return verifiers[waits.index(done.pop())]


class TestGrpc:
    """The gRPC twin."""

    async def test_generate_streams_what_http_answers(
        self,
        make_verifier: MakeVerifier,
        run_gateway: RunGateway,
        token_ids: list[int],
        counting_threads: list[threading.Thread],
    ) -> None:
        request = gateway_pb2.GatewayServiceGenerateRequest(
            prompt="the dog",
            sampling_params=types_pb2.SamplingParams(seed=5, max_tokens=60),
            prediction=TEXT,
        )
        verifier = make_verifier()
        async with (
            ready(run_gateway, [verifier]) as gateway,
            open_channel(gateway.grpc_addresses[0]) as channel,
        ):
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            responses = [response async for response in stub.Generate(request, timeout=5)]
            health = await health_pb2_grpc.HealthStub(channel).Check(  # type: ignore[attr-defined]
                health_pb2.HealthCheckRequest(), timeout=5
            )
            facts = await stub.GetGatewayInfo(gateway_pb2.GetGatewayInfoRequest(), timeout=5)

        ids = [
            token_id
            for response in responses
            for token_id in wire.token_ids_from_pb(response.token_ids, "token_ids")
        ]
        last = responses[-1]
        assert "".join(response.text for response in responses) == TEXT
        assert ids == token_ids
        assert responses[0].seed == 5
        assert (last.finish_reason, last.output_token_count) == ("length", len(ids))
        assert last.speculation.accepted_token_count > 0
        accepted, rejected = (
            last.accepted_prediction_token_count,
            last.rejected_prediction_token_count,
        )
        assert accepted == num_agreed(verifier.requests[0].prediction, ids) > 0
        assert accepted + rejected == len(verifier.requests[0].prediction)
        assert len(counting_threads) == 1
        assert threading.main_thread() not in counting_threads
        assert list(facts.served_model_names) == ["scripted"]
        assert facts.target_model.name == "scripted"
        assert health.status == health_pb2.HealthCheckResponse.SERVING

    async def test_the_target_model_is_told_from_the_first_verifier_on_even_if_it_is_lost(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        request = gateway_pb2.GetGatewayInfoRequest()
        async with AsyncExitStack() as stack:
            async with scripted_verifier.serving(make_verifier()) as server:
                address = server.addresses[0]
                gateway = await stack.enter_async_context(run_gateway(address))
                await all_serving(gateway, 1)
            await until(lambda: not gateway.router.is_ready)
            nowhere = await stack.enter_async_context(run_gateway(address))
            infos = []
            for one in (gateway, nowhere):
                async with open_channel(one.grpc_addresses[0]) as channel:
                    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
                    infos.append(await stub.GetGatewayInfo(request, timeout=5))

        assert infos[0].target_model.name == "scripted"
        assert not infos[1].HasField("target_model")

    async def test_a_bad_request_names_its_field(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        requests = [
            gateway_pb2.GatewayServiceGenerateRequest(),
            gateway_pb2.GatewayServiceGenerateRequest(
                prompt="x", sampling_params=types_pb2.SamplingParams(temperature=9)
            ),
            gateway_pb2.GatewayServiceGenerateRequest(
                prompt="x", structured_outputs=types_pb2.StructuredOutputs(regex="(a")
            ),
        ]
        async with (
            ready(run_gateway, [make_verifier()]) as gateway,
            open_channel(gateway.grpc_addresses[0]) as channel,
        ):
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            errors = []
            for request in requests:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await stub.Generate(request, timeout=5).read()
                errors.append(status_to_error(raised.value))

        assert [error.field for error in errors if isinstance(error, InvalidRequest)] == [
            "input",
            "temperature",
            "structured_outputs.regex",
        ]

    async def test_cancelling_a_call_ends_the_work(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        verifier = make_verifier(hold_at=6)
        request = gateway_pb2.GatewayServiceGenerateRequest(prompt="x", stop=["dog"])
        async with (
            ready(run_gateway, [verifier]) as gateway,
            open_channel(gateway.grpc_addresses[0]) as channel,
        ):
            call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request, timeout=5)
            await call.read()
            call.cancel()
            await verifier.cancelled()

        assert 0 < verifier.deadlines_s[0] < 10

    async def test_keys_and_model_names_hold_as_over_http(
        self, make_verifier: MakeVerifier, run_gateway: RunGateway
    ) -> None:
        request = gateway_pb2.GatewayServiceGenerateRequest(prompt="x", model="other")
        async with (
            ready(run_gateway, [make_verifier()], api_key="key") as gateway,
            open_channel(gateway.grpc_addresses[0]) as channel,
        ):
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as without:
                await stub.Generate(request, timeout=5).read()
            metadata = (("authorization", "Bearer key"),)
            with pytest.raises(grpc.aio.AioRpcError) as with_key:
                await stub.Generate(request, timeout=5, metadata=metadata).read()

        assert without.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert with_key.value.code() is grpc.StatusCode.NOT_FOUND
