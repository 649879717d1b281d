"""compose.yaml says what the documents promise, and is valid by the Compose specification's schema.

`tests/data/compose_spec.json` is that schema (compose-spec, Apache-2.0).
"""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
FILES = ["compose.yaml", "deploy/compose.gpu.yaml"]


def load(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
    return document


@pytest.mark.parametrize("name", FILES)
def test_the_file_is_valid(name: str) -> None:
    schema = json.loads((ROOT / "tests/data/compose_spec.json").read_text(encoding="utf-8"))

    jsonschema.Draft7Validator(schema).validate(load(name))


def test_each_service_waits_until_the_one_before_is_healthy() -> None:
    services = load("compose.yaml")["services"]

    assert services["verifier"]["depends_on"] == {"proposer": {"condition": "service_healthy"}}
    assert services["gateway"]["depends_on"] == {"verifier": {"condition": "service_healthy"}}
    for service in services.values():
        check = service["healthcheck"]["test"]
        assert check[:5] == ["CMD", "specgw", "health", "--config", "/etc/specgw/config.yaml"]


def test_only_the_gateway_is_reachable_and_only_from_this_host() -> None:
    services = load("compose.yaml")["services"]

    assert all(port.startswith("127.0.0.1:") for port in services["gateway"]["ports"])
    assert "ports" not in services["verifier"]
    assert "ports" not in services["proposer"]


def test_services_run_without_privileges() -> None:
    for service in load("compose.yaml")["services"].values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]


def test_on_the_targets_cores_the_proposer_has_what_the_target_leaves() -> None:
    """Priorities of threads count within a container only."""
    proposer, verifier, _ = load("compose.yaml")["services"].values()

    assert proposer["cpu_shares"] < 100
    assert "cpu_shares" not in verifier
    assert load("deploy/compose.gpu.yaml")["services"]["proposer"]["cpu_shares"] == 1024


def test_verifier_and_proposer_reserve_a_gpu_each() -> None:
    services = load("deploy/compose.gpu.yaml")["services"]

    devices = {
        name: service["deploy"]["resources"]["reservations"]["devices"][0]
        for name, service in services.items()
    }
    assert devices["verifier"]["device_ids"] != devices["proposer"]["device_ids"]
    assert all(device["capabilities"] == ["gpu"] for device in devices.values())


def test_the_gateway_image_is_built_without_torch() -> None:
    dockerfile = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")
    gateway = dockerfile.partition("FROM base AS gateway")[2].partition("FROM base AS engine")[0]

    assert load("compose.yaml")["services"]["gateway"]["build"]["target"] == "gateway"
    assert "pip install ." in gateway
    assert "torch" not in gateway
    assert "[engine]" not in gateway
