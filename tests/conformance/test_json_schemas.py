"""200 random JSON schemas at temperature 1: every whole output is valid, and drafts change none.

On the bundled models in float32, through `specgw.LLM`. The schemas bound the length of what they
allow, whitespace apart: a third of the outputs may have any, and the target is fond of it. Those
that spend all their tokens on it are cut off, which no grammar can prevent.
"""

import json
import random
from typing import Any

import jsonschema
import pytest

from specgw import LLM, SamplingParams, StructuredOutputsParams
from specgw.types import SpeculationStats
from tests.random_schemas import random_schema

NUM_SCHEMAS = 200
PROMPT = 'import json\n\n\nVALUE = json.loads("""'
WHITESPACE: tuple[dict[str, Any], ...] = (
    {"disable_any_whitespace": True},
    {"whitespace_pattern": "[ \n]{1,3}"},
    {},
)
OPTIONS = {"dtype": "float32", "max_num_seqs": 32}
DRAFTING = {"model": "tiny/draft", "num_speculative_tokens": 4}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_schemas_hold_with_and_without_drafts() -> None:
    rng = random.Random(0)
    schemas = [random_schema(rng) for _ in range(NUM_SCHEMAS)]
    params = [_params(index, schema) for index, schema in enumerate(schemas)]
    prompts = [PROMPT] * NUM_SCHEMAS

    plain = LLM("tiny/target", **OPTIONS).generate(prompts, params)
    drafted = LLM("tiny/target", speculative_config=DRAFTING, **OPTIONS).generate(prompts, params)

    outputs = [one.outputs[0] for one in drafted]
    assert [one.token_ids for one in outputs] == [one.outputs[0].token_ids for one in plain]
    whole = [
        (schema, output.text)
        for schema, output in zip(schemas, outputs, strict=True)
        if output.finish_reason == "stop"
    ]
    for schema, text in whole:
        jsonschema.validate(json.loads(text), schema)
    assert len(whole) >= 0.9 * NUM_SCHEMAS
    assert len({text for _, text in whole}) > 0.5 * NUM_SCHEMAS
    assert _accepted_share([one.speculation for one in drafted]) > 0


def _params(index: int, schema: dict[str, object]) -> SamplingParams:
    constraint = StructuredOutputsParams(json=schema, **WHITESPACE[index % len(WHITESPACE)])
    return SamplingParams(
        temperature=1.0, seed=index, max_tokens=200, structured_outputs=constraint
    )


def _accepted_share(stats: list[SpeculationStats]) -> float:
    num_drafted = sum(one.draft_token_count for one in stats)
    return sum(one.accepted_token_count for one in stats) / num_drafted
