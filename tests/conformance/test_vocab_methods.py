"""What a draft of another vocabulary does for each session: its method, run-ahead, its grammar.

The output is the target's own whatever is chosen, and every block says how it was.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from proposer_svc.proposer import ProposerCore
from specgw.engine.model_runner import ModelRunner
from specgw.grammar import GrammarCompiler, compiler_for
from specgw.handshake import greeting_mismatches
from specgw.link import InProcessLink
from specgw.structured_outputs import StructuredOutputsParams
from specgw.types import (
    AcceptanceRule,
    AnyBlock,
    DraftBlock,
    Hello,
    ProposeStep,
    SamplingParams,
    SpeculationStats,
)
from tests.conformance.test_heterogeneous_vocab import (
    load_target,
    permuted_twin,
    prompts,
    proposer,
)
from tests.doubles import InlineExecutor
from tests.verifier_harness import InlineVerifier, plain_answers
from verifier_svc.acceptance import Acceptance

EOS = 0  # of the bundled target
ONE_HOT, COUPLED, PROBS = AcceptanceRule.ONE_HOT, AcceptanceRule.COUPLED, AcceptanceRule.PROBS
COLD, WARM, HOT = (
    SamplingParams(temperature=temperature, seed=5, max_tokens=24, ignore_eos=True)
    for temperature in (0.0, 0.3, 1.0)
)


@pytest.fixture(scope="module")
def target(single_thread: None) -> ModelRunner:
    return load_target("target")


class NotingLink(InProcessLink):
    """Notes every block with the context it continues, and runs ahead as far as it goes."""

    def __init__(self, core: ProposerCore) -> None:
        super().__init__(core)
        self.core = core
        self.blocks: list[tuple[Sequence[int], DraftBlock]] = []

    def _propose(self, verifier_id: str, step: ProposeStep) -> Sequence[AnyBlock]:
        blocks = super()._propose(verifier_id, step)
        for block in blocks:
            assert isinstance(block, DraftBlock)
            if session := self.core._table.get(verifier_id, block.session_id):
                self.blocks.append((tuple(session.token_ids), block))
        while self.core.can_run_ahead():
            self.core.run_ahead()
        return blocks

    def rules(self, session_id: int) -> set[AcceptanceRule]:
        return {
            block.rule
            for _, block in self.blocks
            if block.session_id == session_id and block.token_ids
        }


@pytest.mark.parametrize(
    ("draft_sample_method", "hot_rule"),
    [("greedy", ONE_HOT), ("coupled", COUPLED), ("probabilistic", PROBS)],
)
def test_auto_chooses_by_the_session_and_each_block_says_how_it_was_drafted(
    draft_sample_method: str, hot_rule: AcceptanceRule, target: ModelRunner
) -> None:
    """Sessions of all temperatures share batches; text is one-hot, tokens are what is configured.

    The text of requests that are tested against a law is another; all others are the target's own.
    """
    context = prompts(target)[0]
    link = NotingLink(
        proposer("target", "foreign", "auto", draft_sample_method=draft_sample_method)
    )
    has_laws = draft_sample_method == "probabilistic"
    verifier = InlineVerifier(target, [link], acceptance=Acceptance(uses_draft_probs=has_laws))
    session_ids = [verifier.submit(context, params) for params in (COLD, WARM, HOT)]

    verifier.run()

    told = link.core.offer.vocab_mapping
    assert told is not None
    assert told.method == ("string" if draft_sample_method == "greedy" else "auto")
    assert link.core.offer.draft_sample_method == draft_sample_method
    assert [link.rules(one) for one in session_ids] == [{ONE_HOT}, {ONE_HOT}, {hot_rule}]
    same = (COLD, WARM) if has_laws else (COLD, WARM, HOT)
    for session_id, params in zip(session_ids, same, strict=False):
        expected = plain_answers(target, [context], params)[tuple(context)]
        assert verifier.answers[session_id].token_ids == expected


@pytest.mark.parametrize("draft_sample_method", ["greedy", "coupled"])
def test_text_is_greedy_and_the_handshake_says_so(
    draft_sample_method: str, target: ModelRunner
) -> None:
    core = proposer("target", "foreign", "string", draft_sample_method=draft_sample_method)
    hello = Hello(
        *("v", target.description, 4), draft_sample_method=draft_sample_method, method="draft_model"
    )

    assert core.offer.draft_sample_method == "greedy"
    assert greeting_mismatches(hello, core.connect(hello)) == []


def test_another_way_to_choose_tokens_is_still_refused(target: ModelRunner) -> None:
    offer = proposer("target", "foreign", "token", draft_sample_method="coupled").offer
    hello = Hello("v", target.description, 4, draft_sample_method="greedy")

    [mismatch] = greeting_mismatches(hello, offer)

    assert "configured with greedy, the proposer with coupled" in mismatch


def test_a_vocabulary_that_lacks_nothing_is_drafted_by_token(
    tmp_path_factory: pytest.TempPathFactory, target: ModelRunner
) -> None:
    twin = permuted_twin(tmp_path_factory.mktemp("twins") / "twin", "draft")

    told = proposer("target", str(twin), "auto").offer.vocab_mapping

    assert told is not None
    assert told.method == "token"
    assert (told.target_coverage, told.draft_coverage) == (1, 1)


def counted(stats: Sequence[SpeculationStats | None]) -> tuple[int, int]:
    rounds = [one for one in stats if one is not None]
    return sum(one.accepted_token_count for one in rounds), sum(one.draft_count for one in rounds)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The target under other ids: what it drafts is accepted mostly."""
    return str(permuted_twin(tmp_path_factory.mktemp("twins") / "twin", "target"))


@pytest.mark.parametrize(
    ("draft", "params"),
    [("foreign", COLD), ("twin", HOT)],
    ids=["greedy", "coupled"],
)
def test_running_ahead_changes_no_output_and_saves_passes(
    draft: str, params: SamplingParams, target: ModelRunner, twin: str
) -> None:
    params, draft = replace(params, max_tokens=48), twin if draft == "twin" else draft
    asked = prompts(target)[:3]
    links = [
        NotingLink(
            proposer("target", draft, "token", k=2, run_ahead=on, draft_sample_method="coupled")
        )
        for on in ("on", "off")
    ]

    ahead, behind = (InlineVerifier(target, [one], max_draft_tokens=2) for one in links)
    found = [ahead.generate([one], params)[0] for one in asked]
    without = [behind.generate([one], params)[0] for one in asked]

    expected = list(plain_answers(target, asked, params).values())
    assert [answer.token_ids for answer in found] == expected
    assert [answer.token_ids for answer in without] == expected
    assert links[0].core.ahead.hit_count > 0
    assert links[0].core.rounds.pass_count < links[1].core.rounds.pass_count
    assert links[1].core.ahead.token_count == 0
    accepted, num_rounds = counted([answer.speculation for answer in found])
    assert accepted / num_rounds > 0.1


def test_text_is_not_drafted_ahead(target: ModelRunner) -> None:
    link = NotingLink(proposer("target", "foreign", "string", k=2, run_ahead="on"))

    [answer] = InlineVerifier(target, [link], max_draft_tokens=2).generate(prompts(target)[:1])

    assert answer.token_ids == plain_answers(target, prompts(target)[:1])[tuple(prompts(target)[0])]
    assert link.core.ahead.token_count == 0


def test_laws_that_were_drawn_ahead_are_good_laws(target: ModelRunner, twin: str) -> None:
    link = NotingLink(
        proposer("target", twin, "token", draft_sample_method="probabilistic", run_ahead="on")
    )
    acceptance = Acceptance(uses_draft_probs=True)
    verifier = InlineVerifier(target, [link], acceptance=acceptance)

    [answer] = verifier.generate(prompts(target)[:1], replace(HOT, max_tokens=64))

    accepted, num_rounds = counted([answer.speculation])
    assert link.rules(1) == {PROBS}
    assert link.core.ahead.hit_count > 0
    assert accepted / num_rounds > 2


CONSTRAINED = SamplingParams(
    temperature=0,
    max_tokens=24,
    structured_outputs=StructuredOutputsParams(regex=r"(def [a-z_]+\([a-z, ]*\):\n    pass\n)+"),
)


@pytest.fixture(scope="module")
def grammars(target: ModelRunner) -> GrammarCompiler:
    return compiler_for("tiny/target", target.vocab_size, target.eos_token_ids)


@pytest.mark.parametrize("draft", ["foreign", "pard"])
def test_tokens_keep_to_the_grammar_of_the_target(
    draft: str,
    target: ModelRunner,
    grammars: GrammarCompiler,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    parallel = draft == "pard"
    if parallel:
        draft = str(permuted_twin(tmp_path_factory.mktemp("twins") / "twin", "pard"))
    core = proposer("target", draft, "token", parallel_drafting=parallel)
    masks = core._drafter._chooser._grammars  # type: ignore[attr-defined]
    masks._executor = InlineExecutor()
    link = NotingLink(core)
    asked = prompts(target)
    assert CONSTRAINED.structured_outputs is not None

    together = InlineVerifier(target, [link], grammars=grammars).generate(asked, CONSTRAINED)

    expected = plain_answers(target, asked, CONSTRAINED, grammars)
    assert [answer.token_ids for answer in together] == list(expected.values())
    num_drafted = 0
    for context, block in link.blocks:
        drafted = block.token_ids
        if EOS in drafted:  # nothing follows it, so what was drafted there means nothing
            drafted = drafted[: drafted.index(EOS) + 1]
        output = [*context[len(asked[block.session_id - 1]) :], *drafted]
        matcher = grammars.compile(CONSTRAINED.structured_outputs)
        assert matcher.follow(output), output
        num_drafted += len(block.token_ids)
    assert num_drafted > 40


def test_text_is_drafted_without_a_grammar_and_the_output_keeps_to_it(
    target: ModelRunner, grammars: GrammarCompiler
) -> None:
    link = NotingLink(proposer("target", "foreign", "string"))

    together = InlineVerifier(target, [link], grammars=grammars).generate(
        prompts(target), CONSTRAINED
    )

    expected = plain_answers(target, prompts(target), CONSTRAINED, grammars)
    assert [answer.token_ids for answer in together] == list(expected.values())
    assert not link.core._drafter._chooser._grammars._matchers  # type: ignore[attr-defined]
