"""Random JSON schemas at temperature 1: every output is whole and valid, and drafts change none.

On the bundled models in float32, through `specgw.LLM`, coupled drafts. The schemas bound the length
of what they allow, and whitespace between parts is disabled: a model that is fond of it could go on
with it for ever. By default 50 schemas; `--whole-matrix` takes 200.
"""

import json
import random

import jsonschema
import pytest

from specgw import LLM, SamplingParams, StructuredOutputsParams
from specgw.types import SpeculationStats
from tests.random_schemas import random_schema

PROMPT = 'import json\n\n\nVALUE = json.loads("""'
OPTIONS = {
    "dtype": "float32",
    "max_num_seqs": 32,
    "structured_outputs_config": {"backend": "guidance", "disable_any_whitespace": True},
}
DRAFTING = {
    "model": "tiny/draft",
    "num_speculative_tokens": 4,
    "draft_sample_method": "coupled",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_schemas_hold_with_and_without_drafts(pytestconfig: pytest.Config) -> None:
    num_schemas = 200 if pytestconfig.getoption("--whole-matrix") else 50
    rng = random.Random(0)
    schemas = [random_schema(rng) for _ in range(num_schemas)]
    params = [
        SamplingParams(
            temperature=1.0,
            seed=index,
            max_tokens=400,
            structured_outputs=StructuredOutputsParams(json=schema),
        )
        for index, schema in enumerate(schemas)
    ]
    prompts = [PROMPT] * num_schemas

    plain = LLM("tiny/target", **OPTIONS).generate(prompts, params)
    drafted = LLM("tiny/target", speculative_config=DRAFTING, **OPTIONS).generate(prompts, params)

    outputs = [one.outputs[0] for one in drafted]
    assert [one.token_ids for one in outputs] == [one.outputs[0].token_ids for one in plain]
    assert {one.finish_reason for one in outputs} == {"stop"}
    for schema, output in zip(schemas, outputs, strict=True):
        value = json.loads(output.text)
        jsonschema.validate(value, schema)
        assert output.text.count("\n") == 0
    assert len({output.text for output in outputs}) > 0.5 * num_schemas
    assert _accepted_share([one.speculation for one in drafted]) > 0


def _accepted_share(stats: list[SpeculationStats]) -> float:
    num_drafted = sum(one.draft_token_count for one in stats)
    return sum(one.accepted_token_count for one in stats) / num_drafted
