"""Drafts with laws of their own, under a constraint: the output keeps to it and to its law.

A random target and an unrelated random draft over printable characters answer many requests, each
with its own seed, under an expression of 8 texts. What they write is compared with
the target's law, masked and normalized row by row, as plain decoding draws it.
"""

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch

from proposer_svc.draft_chooser import DraftChooser
from proposer_svc.draft_grammar import DraftGrammars
from proposer_svc.draft_model import DraftModelDrafter
from proposer_svc.draft_sampling import DraftSampler
from proposer_svc.proposer import ProposerCore
from specgw.engine.loading import ModelOptions, load_model
from specgw.engine.model_runner import ModelRunner, SequenceChunk
from specgw.grammar import GrammarCompiler
from specgw.link import InProcessLink
from specgw.structured_outputs import StructuredOutputsParams
from specgw.types import FinishReason, SamplingParams
from tests.conformance.test_lossless_distribution import Z_OF_RATE, excess
from tests.conftest import VOCAB_SIZE
from tests.doubles import InlineExecutor
from tests.tiny_tokenizers import of_tokens
from tests.verifier_harness import Answer, InlineVerifier
from verifier_svc.acceptance import Acceptance

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOKENS = [*map(chr, range(32, 127)), "},"]
EOS = VOCAB_SIZE - 1
COUNT = 1_200
PROMPT = [4, 8, 15, 16, 23, 42]
REGEX = "[ab]{2}d?"
TEXTS = ["".join(text) + end for text in itertools.product("ab", repeat=2) for end in ("", "d")]
TEMPERATURE = 2.0  # so that no text is rare


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(of_tokens(TOKENS).to_str, VOCAB_SIZE, [EOS])


def answers(
    runner: ModelRunner, draft: ModelRunner, grammars: GrammarCompiler, rule: str, is_masked: bool
) -> list[Answer]:
    masks = DraftGrammars(grammars, InlineExecutor()) if is_masked else None
    drafter = DraftModelDrafter(
        draft, 512, chooser=DraftChooser(DraftSampler("probabilistic"), masks)
    )
    verifier = InlineVerifier(
        runner,
        [InProcessLink(ProposerCore(drafter, 2, max_sessions=64))],
        max_draft_tokens=2,
        max_num_seqs=64,
        max_waiting_requests=COUNT,
        acceptance=Acceptance(uses_draft_probs=True, by_block=rule == "block"),
        grammars=grammars,
    )
    params = SamplingParams(
        temperature=TEMPERATURE,
        max_tokens=8,
        structured_outputs=StructuredOutputsParams(regex=REGEX),
    )
    return verifier.generate([PROMPT] * COUNT, params)


def text(answer: Answer) -> str:
    assert answer.error is None
    assert answer.finish_reason is FinishReason.STOP
    return "".join(TOKENS[one] for one in answer.token_ids[:-1])


def law(runner: ModelRunner) -> torch.Tensor:  # [len(TEXTS)] float64
    """Returns the chance of each text, by the target alone."""

    def after(prefix: str) -> torch.Tensor:
        cache = runner.kv_cache.new_sequence()
        context = [*PROMPT, *map(TOKENS.index, prefix)]
        cache.reserve(len(context))
        logits = runner.forward([SequenceChunk(cache, context, 1)])[0].double()
        cache.release()
        options = list(map(TOKENS.index, "ab")) if len(prefix) < 2 else [EOS, TOKENS.index("d")]
        return (logits[options] / TEMPERATURE).softmax(dim=0)

    chances = [
        after("")["ab".index(one[0])]
        * after(one[0])["ab".index(one[1])]
        * after(one[:2])[len(one) - 2]
        for one in TEXTS
    ]
    return torch.stack(chances)


@pytest.mark.parametrize(
    ("rule", "is_masked"), [("standard", True), ("block", True), ("block", False)]
)
def test_texts_are_of_the_grammar_and_as_likely_as_without_drafts(
    rule: str,
    is_masked: bool,
    random_runner: ModelRunner,
    unrelated_model_dir: Path,
    grammars: GrammarCompiler,
) -> None:
    """One chi-square of 7 degrees of freedom: false-alarm rate 1e-7.

    Drafts that know the constraint are nearly all possible, those that do not are nearly all
    forbidden.
    """
    draft = load_model(
        ModelOptions(str(unrelated_model_dir), dtype="float32", kv_cache_tokens=4096)
    )
    expected = law(random_runner) * COUNT

    together = answers(random_runner, draft, grammars, rule, is_masked)

    counts = Counter(map(text, together))
    assert set(counts) <= set(TEXTS)
    assert expected.min() > 5  # or chi-square would be no good approximation
    observed = torch.tensor([counts[one] for one in TEXTS], dtype=torch.float64)
    assert excess(observed, expected) < Z_OF_RATE
    stats = [one.speculation for one in together if one.speculation is not None]
    accepted = sum(one.accepted_token_count for one in stats)
    assert 0 < accepted < sum(one.draft_token_count for one in stats)


def test_the_chi_square_finds_a_law_that_is_slightly_wrong(random_runner: ModelRunner) -> None:
    right = law(random_runner)
    wrong = (right**1.3) / (right**1.3).sum()

    assert excess((wrong * COUNT).round(), right * COUNT) > Z_OF_RATE
