"""Drafts that are accepted at given rates: every place that has figures says so."""

import httpx
import pytest

from gateway.__main__ import serving
from gateway.tokenizer import load_tokenizer
from specgw.config import parse_config
from specgw.supervisor import embedded_services

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("is_synthetic", [False, True])
async def test_synthetic_acceptance_is_labelled(is_synthetic: bool) -> None:
    test = "synthetic" if is_synthetic else "standard"
    drafting = {
        "model": "tiny/draft",
        "num_speculative_tokens": 4,
        "rejection_sample_method": test,
        "synthetic_acceptance_length": 3 if is_synthetic else None,
    }
    patient = {"wait_for_slow_drafts": True, "draft_timeout_s": 10}
    config = {"model": "tiny/target", "port": 0, "speculative_config": drafting}
    args = parse_config({**config, "specgw": {"verifier": patient}})
    body = {"prompt": [5, 6, 7], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    async with (
        embedded_services(args) as (verifier, *_),
        serving(args, [verifier.spec.address], load_tokenizer("tiny/target")) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False) as client,
    ):
        await gateway.router.ready()
        answer = (await client.post("/v1/completions", json=body)).json()
        metrics = (await client.get("/metrics")).text

    assert answer["metrics"]["speculative_decoding"]["is_synthetic"] is is_synthetic
    assert ("specgw_gateway_synthetic_acceptance 1.0" in metrics) is is_synthetic
