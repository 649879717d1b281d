"""`specgw.LLM` with the bundled models: every parameter, with a draft model and without."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from specgw.errors import ConfigError, InvalidRequest
from specgw.llm import LLM
from specgw.request_output import Logprobs
from specgw.types import SamplingParams

PROMPTS = ["import os\nimport sys\n\n\ndef main():\n", "class Node:\n    def __init__(self"]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SEEDED = SamplingParams(temperature=0.8, seed=11, max_tokens=24)
PARAMETERS: dict[str, dict[str, Any]] = {
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "logit_bias": {"logit_bias": {276: 3.0, 291: -100.0}},
    "bad_words": {"bad_words": ("self", "import", "return", "=")},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(60, 700))},
    "min_tokens": {"min_tokens": 20, "stop_token_ids": tuple(range(100)), "stop": ("\n",)},
    "stop": {"stop": ("self", "):")},
    "include_stop_str_in_output": {"stop": ("self", "):"), "include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": (276, 291, 10, 13)},
    "ignore_eos": {"ignore_eos": True},
    "max_tokens": {"max_tokens": 5},
    "logprobs": {"logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "detokenize": {"detokenize": False},
    "skip_special_tokens": {"skip_special_tokens": False},
}


class NoNewlines:
    """A custom processor."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __call__(
        self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int], logits: Tensor
    ) -> Tensor:
        logits[list(range(len(output_token_ids) % 2, self.vocab_size, 2))] -= 5
        return logits


@pytest.fixture(scope="module")
def plain(single_thread: None) -> LLM:
    return LLM("tiny/target", dtype="float32")


@pytest.fixture(scope="module")
def drafted(single_thread: None) -> LLM:
    config = {"model": "tiny/draft", "num_speculative_tokens": 4}
    always = {"verifier": {"draft_length": "fixed"}}  # else only where the clock says it pays
    return LLM("tiny/target", dtype="float32", speculative_config=config, specgw=always)


def assert_close(
    one: Sequence[Logprobs | None] | None, other: Sequence[Logprobs | None] | None
) -> None:
    for here, there in zip(one or (), other or (), strict=True):
        if here is None or there is None:
            assert here is there
        else:
            assert here.keys() == there.keys()
            assert all(abs(here[i].logprob - there[i].logprob) < 1e-4 for i in here)


@pytest.mark.parametrize("base", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", PARAMETERS)
def test_drafts_change_nothing(name: str, base: SamplingParams, plain: LLM, drafted: LLM) -> None:
    params = replace(base, **PARAMETERS[name])

    expected = plain.generate(PROMPTS, params)
    answers = drafted.generate(PROMPTS, params)

    for answer, one in zip(answers, expected, strict=True):
        [output], [other] = answer.outputs, one.outputs
        assert output.text == other.text
        assert output.token_ids == other.token_ids
        assert (output.finish_reason, output.stop_reason) == (
            other.finish_reason,
            other.stop_reason,
        )
        assert (output.logprobs is None) == (other.logprobs is None) == (name != "logprobs")
        assert_close(output.logprobs, other.logprobs)
        assert_close(answer.prompt_logprobs, one.prompt_logprobs)
        stats = answer.speculation
        assert stats.accepted_token_count <= len(output.token_ids)
        assert stats.accepted_token_count == sum(stats.accepted_per_position)
    assert any(answer.speculation.draft_count for answer in answers)


def test_stop_strings_end_the_output_wherever_in_a_block_they_are(plain: LLM, drafted: LLM) -> None:
    """Text, tokens, log probabilities and accepted counts end with the completing token."""
    [whole] = plain.generate(PROMPTS[0], replace(GREEDY, max_tokens=20))[0].outputs
    stops = sorted({whole.text[end - 5 : end] for end in range(5, len(whole.text) + 1)})
    params = [replace(GREEDY, max_tokens=20, stop=(stop,), logprobs=0) for stop in stops]

    answers = drafted.generate([PROMPTS[0]] * len(stops), params)

    for stop, answer in zip(stops, answers, strict=True):
        [output] = answer.outputs
        count = len(output.token_ids)
        assert output.text == whole.text[: whole.text.index(stop)]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert output.token_ids == whole.token_ids[:count]
        assert output.logprobs is not None
        assert len(output.logprobs) == count
        [before] = plain.generate(PROMPTS[0], replace(GREEDY, max_tokens=count - 1))[0].outputs
        assert stop not in before.text
        stats = answer.speculation
        assert stats.accepted_token_count == sum(stats.accepted_per_position) < count


def test_logprobs_are_told_by_token(drafted: LLM) -> None:
    params = replace(SEEDED, logprobs=2, prompt_logprobs=0)

    [answer] = drafted.generate(PROMPTS[0], params)

    [output] = answer.outputs
    assert output.logprobs is not None
    assert output.cumulative_logprob is not None
    own = [entry[i].logprob for i, entry in zip(output.token_ids, output.logprobs, strict=True)]
    assert output.cumulative_logprob == pytest.approx(sum(own))
    assert all(2 <= len(entry) <= 3 for entry in output.logprobs)
    assert all(sum(math.exp(e.logprob) for e in entry.values()) <= 1 for entry in output.logprobs)
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[0] is None
    assert [list(one or ()) for one in answer.prompt_logprobs[1:]] == [
        [i] for i in answer.prompt_token_ids[1:]
    ]


def test_samples_are_those_of_the_seeds_that_follow(drafted: LLM) -> None:
    [answer] = drafted.generate(PROMPTS[0], replace(SEEDED, n=3))
    alone = [drafted.generate(PROMPTS[0], replace(SEEDED, seed=11 + i))[0] for i in range(3)]

    assert [output.index for output in answer.outputs] == [0, 1, 2]
    texts = [output.text for output in answer.outputs]
    assert texts == [one.outputs[0].text for one in alone]
    assert len(set(texts)) == 3
    assert answer.speculation.draft_count > max(one.speculation.draft_count for one in alone)


def test_unseeded_samples_differ(drafted: LLM) -> None:
    answers = drafted.generate([PROMPTS[0]] * 4, SamplingParams(temperature=1.5, n=2))

    assert len({output.token_ids for answer in answers for output in answer.outputs}) == 8


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"allowed_token_ids": (10**6,)}, "allowed_token_ids"),
        ({"logit_bias": {10**6: 1.0}}, "logit_bias"),
        ({"bad_words": (" ",)}, "bad_words"),
    ],
)
def test_what_cannot_be_is_refused_by_name(params: dict[str, Any], field: str, plain: LLM) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{field}: "):
        plain.generate(PROMPTS[0], SamplingParams(**params))


def test_custom_processors_are_loaded_by_name(plain: LLM) -> None:
    names = [f"{__name__}:NoNewlines"]
    options: dict[str, Any] = {"specgw": {"verifier": {"logits_processors": names}}}
    config = {"model": "tiny/draft", "num_speculative_tokens": 4}
    changed = LLM("tiny/target", dtype="float32", **options)
    both = LLM("tiny/target", dtype="float32", speculative_config=config, **options)

    outputs = [llm.generate(PROMPTS[0], GREEDY)[0].outputs[0] for llm in (plain, changed, both)]

    assert outputs[1].token_ids == outputs[2].token_ids != outputs[0].token_ids


@pytest.mark.parametrize("name", ["nowhere:Thing", f"{__name__}:nothing", "json"])
def test_a_custom_processor_that_cannot_be_loaded_is_a_configuration_error(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"logits_processors: {name}: "):
        LLM("tiny/target", specgw={"verifier": {"logits_processors": [name]}})
