"""Answers of the engine as a GPU runs it, with drafts and recorded shapes, on a CPU."""

from collections.abc import Sequence
from typing import Any

import pytest

from specgw import LLM, SamplingParams
from specgw.engine.graphs import GraphLimits, run_again
from specgw.engine.paged_runner import PagedRunner

PROMPTS: list[Any] = [
    {"prompt_token_ids": [(7 * i * n + 3) % 900 for i in range(n)]} for n in (5, 40, 90, 17, 3)
]
DRAFTING = {"model": "tiny/draft", "num_speculative_tokens": 4}


def answers(llm: LLM, temperature: float) -> list[Sequence[int]]:
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=40, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_engine_of_a_gpu_answers_as_the_cpus(temperature: float) -> None:
    shared: dict[str, Any] = {"dtype": "float32", "max_model_len": 256}
    expected = answers(LLM("tiny/target", **shared), temperature)

    llm = LLM(
        "tiny/target",
        attention_backend="TORCH_SDPA",
        speculative_config={**DRAFTING, "attention_backend": "TORCH_SDPA"},
        **shared,
    )
    runner = llm._runner
    assert isinstance(runner, PagedRunner)
    runner.record(GraphLimits(max_sequences=8, max_rows_each=5, max_rows=64), run_again)

    assert answers(llm, temperature) == expected
    assert runner.graphs is not None
    assert runner.graphs.num_graphs > 2
