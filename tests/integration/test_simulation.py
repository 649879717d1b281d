"""A whole stack on simulated devices: it works, keeps its word, and says everywhere what it is."""

import httpx
import pytest

from gateway.__main__ import serving
from gateway.tokenizer import load_tokenizer
from specgw.config import parse_config
from specgw.handshake import verifier_mismatches
from specgw.supervisor import embedded_services
from specgw.types import ModelDescription, VerifierInfo

CONFIG = {
    "model": "tiny/target",
    "port": 0,
    "speculative_config": {"model": "tiny/draft", "num_speculative_tokens": 4},
}
SIMULATION = {"verify_ms": 20.0, "draft_step_ms": 0.1, "rtt_ms": 0.3, "acceptance_rate": 0.9}


@pytest.mark.slow
async def test_a_simulated_stack_answers_the_same_with_and_without_drafts_and_is_labelled() -> None:
    patient = {"wait_for_slow_drafts": True, "draft_timeout_s": 10}
    args = parse_config({**CONFIG, "specgw": {"simulation": SIMULATION, "verifier": patient}})
    body = {"prompt": [5, 6, 7], "max_tokens": 60, "temperature": 0, "return_token_ids": True}
    async with (
        embedded_services(args) as (verifier, *_),
        serving(args, [verifier.spec.address], load_tokenizer("tiny/target")) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False) as client,
    ):
        await gateway.router.ready()
        assert gateway.router.target_model is not None
        device = gateway.router.target_model.device
        models = (await client.get("/v1/models")).json()
        drafted, plain = [
            (
                await client.post("/v1/completions", json={**body, "num_speculative_tokens": k})
            ).json()
            for k in (None, 0)
        ]
        metrics = (await client.get("/metrics")).text

    assert drafted["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    assert len(plain["choices"][0]["token_ids"]) == 60
    assert plain["choices"][0]["text"].isascii()
    assert drafted["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    assert (device, models["data"][0]["owned_by"]) == ("simulated", "specgw simulation")
    assert "specgw_gateway_simulation 1.0" in metrics


@pytest.mark.parametrize("is_simulated", [False, True])
def test_a_gateway_uses_no_verifier_of_the_other_kind(is_simulated: bool) -> None:
    specgw = {} if is_simulated else {"simulation": SIMULATION}
    args = parse_config({**CONFIG, "specgw": specgw})
    device = "simulated" if is_simulated else "cpu"
    model = ModelDescription("tiny/target", "", 2048, "print", 1024, "none", device)

    found = verifier_mismatches(args, "print", 2048, VerifierInfo("v", model, 1, 1, 1, 4, 4))

    which = "verifier" if is_simulated else "gateway"
    assert found == [f"simulation: only the {which} is configured with specgw.simulation"]
