"""Sampled output does not depend on the drafts either: the same seed gives the same tokens.

The rule draws y from the target's distribution with noise keyed by (seed, position) and accepts a
draft iff it equals y, so with one law for y (`tests/unit/engine` tests it by chi-square) equality
with plain decoding is all there is to show. In float32.
"""

import pytest

from specgw.engine.model_runner import ModelRunner
from specgw.link import InProcessLink
from specgw.types import SamplingParams
from tests.conformance.test_lossless_greedy import PROPOSERS
from tests.verifier_harness import InlineVerifier, plain_answers

PROMPTS = [[9], [4, 8, 15, 16, 23, 42], [7] * 20, list(range(30))]

SAMPLING = {
    "temperature": SamplingParams(temperature=0.8, seed=1, max_tokens=30, ignore_eos=True),
    "hot": SamplingParams(temperature=2.0, seed=2, max_tokens=30, ignore_eos=True),
    "top-k": SamplingParams(temperature=1.0, top_k=5, seed=3, max_tokens=30, ignore_eos=True),
    "top-p": SamplingParams(temperature=1.0, top_p=0.7, seed=4, max_tokens=30, ignore_eos=True),
    "both": SamplingParams(
        temperature=1.3, top_p=0.9, top_k=20, seed=5, max_tokens=30, ignore_eos=True
    ),
    "until-eos": SamplingParams(temperature=1.0, seed=6, max_tokens=None),
    "negative-seed": SamplingParams(temperature=1.0, seed=-7, max_tokens=30, ignore_eos=True),
}


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 7])
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_any_proposer_leaves_seeded_output_unchanged(
    sampling: str, proposer: str, num_draft_tokens: int, random_runner: ModelRunner
) -> None:
    params = SAMPLING[sampling]
    answers = plain_answers(random_runner, PROMPTS, params)
    link = InProcessLink(PROPOSERS[proposer](answers))
    verifier = InlineVerifier(random_runner, [link], max_draft_tokens=num_draft_tokens)

    together = verifier.generate(PROMPTS, params)

    assert [answer.token_ids for answer in together] == list(answers.values())


def test_sampling_parameters_change_the_output(random_runner: ModelRunner) -> None:
    """Guards the suite: parameters that did nothing would pass the test above."""
    outputs = {
        name: tuple(plain_answers(random_runner, PROMPTS[1:2], params)[tuple(PROMPTS[1])][:30])
        for name, params in SAMPLING.items()
    }

    assert len(set(outputs.values())) == len(outputs)
