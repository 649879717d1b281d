"""What two services refuse in one another: one readable line for each mismatch."""

from dataclasses import replace
from typing import Any

import pytest

from specgw.config import parse_config
from specgw.handshake import build_hello, greeting_mismatches, is_same_model, verifier_mismatches
from specgw.hidden import LAST, HiddenFormat
from specgw.types import Hello, HelloAck, ModelDescription, ProposerStatus, VerifierInfo

ARGS = parse_config(
    {
        "model": "models/target",
        "speculative_config": {
            "method": "draft_model",
            "model": "models/draft",
            "num_speculative_tokens": 4,
        },
    }
)
TARGET = ModelDescription("/mnt/target", "L", 100, "f" * 64, 512, "float32", "cpu")
DRAFT = ModelDescription("/data/draft", "L", 100, "f" * 64, 512, "float32", "cpu")
HELLO = build_hello("v", TARGET, ARGS)
ACK = HelloAck("p", "draft_model", DRAFT, 4, 1, 64, 4, 2048, 1000)
VERIFIER = VerifierInfo("v", TARGET, 8, 2048, 1000, 4, 4, [ProposerStatus("p:1", True, 0, "", ACK)])


def keys(mismatches: list[str]) -> list[str]:
    return [line.split(":")[0] for line in mismatches]


def test_services_of_one_configuration_greet_one_another() -> None:
    assert greeting_mismatches(HELLO, ACK) == []
    assert verifier_mismatches(ARGS, "f" * 64, 100, VERIFIER) == []


@pytest.mark.parametrize(
    ("needed", "line"),
    [
        (HiddenFormat((2, 8), 32, "float32"), "needs those of layers 2, 8, the verifier sends"),
        (HiddenFormat((LAST,), 64, "float32"), "needs rows of 64, the target has 32"),
        (HiddenFormat((LAST,), 32, "int8"), "needs int8, the verifier sends float32, float16"),
    ],
)
def test_hidden_states_that_cannot_be_sent_are_named(needed: HiddenFormat, line: str) -> None:
    sends = replace(HELLO, hidden=HiddenFormat((LAST,), 32, "bfloat16"))
    ack = replace(ACK, hidden=needed)

    [mismatch] = greeting_mismatches(sends, ack)
    [without] = greeting_mismatches(HELLO, ack)

    assert line in mismatch
    assert "which are not sent" in without
    assert greeting_mismatches(sends, ACK) == []
    assert greeting_mismatches(sends, replace(ACK, hidden=sends.hidden)) == []


def test_a_verifier_that_reckons_with_nothing_takes_what_is_offered() -> None:
    assert greeting_mismatches(Hello("v", TARGET, 16), ACK) == []


def test_a_proposer_that_drafts_more_than_asked_for_is_welcome() -> None:
    assert greeting_mismatches(HELLO, replace(ACK, max_draft_tokens=9)) == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"protocol_version": 2}, "protocol_version: the verifier speaks 1, the proposer 2"),
        (
            {"max_draft_tokens": 3},
            "num_speculative_tokens: the verifier asks for up to 4, the proposer drafts 3",
        ),
        ({"method": "ngram"}, "method: the verifier is configured with draft_model"),
        (
            {"extra_slots_per_session": 4},
            "slots: the verifier reckons with 1 extra rows per session, the proposer with 4",
        ),
        (
            {"draft_sample_method": "coupled"},
            "draft_sample_method: the verifier is configured with greedy, the proposer with "
            "coupled",
        ),
        (
            {"draft_model": replace(DRAFT, name="models/other")},
            "draft model: the verifier is configured with models/draft, the proposer has loaded "
            "models/other",
        ),
    ],
)
def test_a_greeting_is_refused_with_a_line(change: dict[str, Any], line: str) -> None:
    [mismatch] = greeting_mismatches(HELLO, replace(ACK, **change))

    assert mismatch.startswith(line)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"protocol_version": 2}, "protocol_version: the verifier speaks 2, the gateway 1"),
        (
            {"target_model": replace(TARGET, name="models/other")},
            "model: the gateway is configured with models/target, the verifier has loaded "
            "models/other",
        ),
        (
            {"target_model": replace(TARGET, vocab_fingerprint="0" * 64)},
            "vocabulary: the verifier's /mnt/target has vocabulary 000000000000, the gateway's "
            "tokenizer ffffffffffff",
        ),
        (
            {"target_model": replace(TARGET, vocab_fingerprint="", vocab_size=99)},
            "vocabulary: the verifier's /mnt/target has 99 ids, the gateway's tokenizer 100",
        ),
        (
            {"max_draft_tokens": 8},
            "num_speculative_tokens: the gateway is configured with 4, the verifier with 8",
        ),
        (
            {"kv_lookahead_per_session": 5},
            "slots: the gateway reckons with 4 KV slots of lookahead, the verifier with 5",
        ),
        (
            {
                "proposers": [
                    ProposerStatus("p:1", True, 0, "", replace(ACK, extra_slots_per_session=4))
                ]
            },
            "slots: the gateway reckons with 1 extra rows per session, the proposer p:1 with 4",
        ),
    ],
)
def test_a_verifier_is_refused_with_a_line(change: dict[str, Any], line: str) -> None:
    assert verifier_mismatches(ARGS, "f" * 64, 100, replace(VERIFIER, **change)) == [line]


def test_every_mismatch_is_a_line() -> None:
    other = replace(TARGET, name="other", vocab_fingerprint="0" * 64)
    verifier = replace(VERIFIER, target_model=other, max_draft_tokens=8, protocol_version=3)

    assert keys(verifier_mismatches(ARGS, "f" * 64, 100, verifier)) == [
        "protocol_version",
        "model",
        "vocabulary",
        "num_speculative_tokens",
    ]


def test_one_checkpoint_may_lie_under_different_directories() -> None:
    assert is_same_model("tiny/target", "/models/target/")
    assert not is_same_model("tiny/target", "tiny/draft")
