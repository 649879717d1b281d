"""The bundled PARD draft in specgw against the same checkpoint in plain transformers, in float32.

Plain means: the whole context and K - 1 masks through `LlamaForCausalLM`, no cache, one context at
a time. It drafts as a scripted proposer, so both see the same verifier.
"""

from collections.abc import Sequence

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from proposer_svc.proposer import build_proposer
from specgw.config import EngineArgs, parse_config
from specgw.engine.loading import load_model, target_options
from specgw.engine.model_runner import ModelRunner
from specgw.link import InProcessLink, Proposer
from specgw.llm import LLM
from specgw.model_files import resolve_model
from specgw.types import DraftBlock, Hello, HelloAck, ProposeStep, SamplingParams
from tests.scripted_proposers import Draft, ScriptedProposer
from tests.verifier_harness import Answer, InlineVerifier, plain_answers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("single_thread")]

MASK = 1
TEXTS = (
    'def read_config(path):\n    """Read the configuration file and return a dictionary.',
    "class TestParser(unittest.TestCase):\n\n    def setUp(self):\n",
    "import os\nimport sys\n\n\ndef main(argv=None):\n",
)
PARAMS = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


class Recorded:
    """Passes everything on to a proposer and keeps what it drafted for which context."""

    def __init__(self, inner: Proposer) -> None:
        self.drafts: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._inner = inner
        self._contexts: dict[int, list[int]] = {}

    def connect(self, hello: Hello) -> HelloAck:
        return self._inner.connect(hello)

    def disconnect(self, verifier_id: str) -> None:
        self._inner.disconnect(verifier_id)

    def apply(self, verifier_id: str, step: ProposeStep) -> Sequence[DraftBlock]:
        for opened in step.open:
            self._contexts[opened.session_id] = list(opened.token_ids)
        for commit in step.commit:
            self._contexts[commit.session_id] += commit.token_ids
        return self._inner.apply(verifier_id, step)

    def step(self) -> Sequence[tuple[str, DraftBlock]]:
        blocks = self._inner.step()
        for _, block in blocks:
            context = tuple(self._contexts[block.session_id])
            self.drafts[context] = tuple(block.token_ids)
        return blocks

    def has_work(self) -> bool:
        return self._inner.has_work()


def plain_pard(model: LlamaForCausalLM) -> Draft:
    """Returns drafting by definition."""

    @torch.inference_mode()
    def draft(context: Sequence[int], count: int) -> Sequence[int]:
        token_ids = torch.tensor([[*context, *[MASK] * (count - 1)]])
        logits = model(input_ids=token_ids).logits[0, -count:]  # [count, vocab_size]
        logits[:, MASK] = -torch.inf
        drafted: list[int] = logits.argmax(-1).tolist()
        return drafted

    return draft


def pard_args(num_draft_tokens: int) -> EngineArgs:
    return parse_config({
        "model": "tiny/target",
        "dtype": "float32",
        "speculative_config": {
            "model": "tiny/pard",
            "parallel_drafting": True,
            "num_speculative_tokens": num_draft_tokens,
        },
        "specgw": {"proposer": {"kv_cache_tokens": 4096}, "verifier": {"kv_cache_tokens": 4096}},
    })  # fmt: skip


@pytest.fixture(scope="module")
def target(single_thread: None) -> ModelRunner:
    return load_model(target_options(pard_args(4)))


@pytest.fixture(scope="module")
def checkpoint() -> LlamaForCausalLM:
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(
        resolve_model("tiny/pard"), dtype=torch.float32
    )
    return model


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(resolve_model("tiny/target") / "tokenizer.json"))
    return [encoding.ids for encoding in tokenizer.encode_batch(list(TEXTS))]


def accepted_per_position(answers: Sequence[Answer], num_draft_tokens: int) -> list[int]:
    counts = [0] * num_draft_tokens
    for answer in answers:
        assert answer.speculation is not None
        for position, count in enumerate(answer.speculation.accepted_per_position):
            counts[position] += count
    return counts


@pytest.mark.parametrize("num_draft_tokens", [4, 8])
def test_drafts_and_acceptance_are_those_of_plain_transformers(
    num_draft_tokens: int,
    target: ModelRunner,
    checkpoint: LlamaForCausalLM,
    prompts: list[list[int]],
) -> None:
    expected = list(plain_answers(target, prompts, PARAMS).values())
    core = build_proposer(pard_args(num_draft_tokens))
    runs = []
    for proposer in (core, ScriptedProposer(plain_pard(checkpoint))):
        recorded = Recorded(proposer)
        verifier = InlineVerifier(
            target, [InProcessLink(recorded)], max_draft_tokens=num_draft_tokens
        )
        answers = verifier.generate(prompts, PARAMS)
        assert [answer.token_ids for answer in answers] == expected
        runs.append((recorded.drafts, accepted_per_position(answers, num_draft_tokens)))

    (drafts, accepted), (plain_drafts, plain_accepted) = runs
    assert drafts == plain_drafts
    assert accepted == plain_accepted
    assert accepted[0] > accepted[1] > 0
    assert len(drafts) > 20
    assert core.rounds.pass_count == core.rounds.round_count > 5


def test_llm_says_the_same_with_and_without_it() -> None:
    options = {"dtype": "float32", "max_num_seqs": 4}
    drafting = {"model": "tiny/pard", "parallel_drafting": True, "num_speculative_tokens": 4}

    plain = LLM("tiny/target", **options).generate(list(TEXTS), PARAMS)
    drafted = LLM("tiny/target", speculative_config=drafting, **options).generate(
        list(TEXTS), PARAMS
    )

    assert [one.outputs[0].token_ids for one in drafted] == [
        one.outputs[0].token_ids for one in plain
    ]
    assert sum(one.speculation.accepted_token_count for one in drafted) > len(TEXTS)
