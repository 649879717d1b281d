"""A constraint on the text holds whatever is drafted, and what is drafted changes nothing of it.

Greedy and seeded, under an oracle, a liar and one that is right for two tokens, with 1, 3 and 7
draft tokens, on a random model whose tokens are the printable characters. In float32.
"""

import functools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from proposer_svc.draft_chooser import DraftChooser
from proposer_svc.draft_grammar import DraftGrammars
from proposer_svc.draft_model import DraftModelDrafter
from proposer_svc.proposer import ProposerCore
from specgw.engine.loading import ModelOptions, load_model
from specgw.engine.model_runner import ModelRunner
from specgw.errors import InvalidRequest
from specgw.grammar import GrammarCompiler
from specgw.link import InProcessLink
from specgw.structured_outputs import StructuredOutputsParams
from specgw.types import FinishReason, SamplingParams
from tests.conftest import VOCAB_SIZE
from tests.doubles import InlineExecutor
from tests.scripted_proposers import Answers, ScriptedProposer, half, liar, oracle, script
from tests.tiny_tokenizers import of_tokens
from tests.unit.test_grammar import TOO_COMPLEX
from tests.verifier_harness import GREEDY, Answer, InlineVerifier, plain_answers

TOKENS = [*map(chr, range(32, 127)), "},"]
EOS = VOCAB_SIZE - 1
PROMPTS = [[9], [4, 8, 15, 16, 23, 42], [7] * 20, list(range(30))]
PROPOSERS = {
    "oracle": lambda answers: ScriptedProposer(oracle(answers)),
    "half": lambda answers: ScriptedProposer(half(answers, 2, VOCAB_SIZE)),
    "liar": lambda answers: ScriptedProposer(liar(answers, VOCAB_SIZE)),
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 3}, "b": {"enum": [1, 12, None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
# Free text, then a mark, then JSON: the mode changes wherever the model says so.
MODES = 'start: /[a-z]{0,9}/ ":" obj\nobj: "{\\"k\\":" ("true" | "null") "}" | "[1,2]"'


def _is_of_schema(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["a", "b"] and len(value["a"]) <= 3 and value["b"] in (1, 12, None)


Check = Callable[[str], bool]
CONSTRAINTS: dict[str, tuple[StructuredOutputsParams, Check]] = {
    "json": (StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True), _is_of_schema),
    "regex": (
        StructuredOutputsParams(regex="([a-f]{2,4}-){1,3}x?"),
        lambda text: re.fullmatch("([a-f]{2,4}-){1,3}x?", text) is not None,
    ),
    "choice": (
        StructuredOutputsParams(choice=["yes", "yes, please", "no"]),
        lambda text: text in ("yes", "yes, please", "no"),
    ),
    "grammar": (
        StructuredOutputsParams(grammar='root ::= "(" body ")"\nbody ::= "" | [ab] | "[" [cd] "]"'),
        lambda text: text in ("()", "(a)", "(b)", "([c])", "([d])"),
    ),
    "modes": (
        StructuredOutputsParams(grammar=MODES),
        lambda text: json.loads(text.partition(":")[2]) in ({"k": True}, {"k": None}, [1, 2]),
    ),
}
BASES = {
    "greedy": replace(GREEDY, max_tokens=30),
    "seeded": SamplingParams(temperature=1.0, seed=3, max_tokens=30),
}


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(of_tokens(TOKENS).to_str, VOCAB_SIZE, [EOS])


@functools.cache
def _answers(runner: ModelRunner, grammars: GrammarCompiler, base: str, name: str) -> Answers:
    return plain_answers(runner, PROMPTS, _params(base, name), grammars)


def _params(base: str, name: str) -> SamplingParams:
    return replace(BASES[base], structured_outputs=CONSTRAINTS[name][0])


def _text(answer: Answer) -> str:
    assert answer.error is None
    assert answer.finish_reason is FinishReason.STOP
    assert answer.token_ids[-1] == answer.stop_token_id == EOS
    return "".join(TOKENS[token_id] for token_id in answer.token_ids[:-1])


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 7])
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_any_proposer_leaves_a_constrained_output_unchanged(
    name: str,
    base: str,
    proposer: str,
    num_draft_tokens: int,
    random_runner: ModelRunner,
    grammars: GrammarCompiler,
) -> None:
    answers = _answers(random_runner, grammars, base, name)
    link = InProcessLink(PROPOSERS[proposer](answers))
    verifier = InlineVerifier(
        random_runner, [link], max_draft_tokens=num_draft_tokens, grammars=grammars
    )

    together = verifier.generate(PROMPTS, _params(base, name))

    assert [answer.token_ids for answer in together] == list(answers.values())
    assert all(CONSTRAINTS[name][1](_text(answer)) for answer in together)
    stats = together[1].speculation
    assert stats is not None
    assert stats.draft_count > 0
    assert (stats.accepted_token_count > 0) == (proposer != "liar")


def test_without_a_constraint_the_output_is_another(
    random_runner: ModelRunner, grammars: GrammarCompiler
) -> None:
    """Guards the suite: a model that kept to the constraints by itself would show nothing."""
    free = plain_answers(random_runner, PROMPTS, BASES["greedy"])

    for name in CONSTRAINTS:
        constrained = _answers(random_runner, grammars, "greedy", name)
        assert all(free[key] != answer for key, answer in constrained.items())


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 7])
def test_nothing_follows_the_end_of_a_grammar(
    num_draft_tokens: int, random_runner: ModelRunner, grammars: GrammarCompiler
) -> None:
    """The proposer drafts the whole text and goes on after it."""
    answers = _answers(random_runner, grammars, "greedy", "json")
    longer = {prompt: [*answer, 5, 6, 7, 8, 9] for prompt, answer in answers.items()}
    verifier = InlineVerifier(
        random_runner,
        [InProcessLink(ScriptedProposer(oracle(longer)))],
        max_draft_tokens=num_draft_tokens,
        grammars=grammars,
    )

    together = verifier.generate(PROMPTS, _params("greedy", "json"))

    assert [answer.token_ids for answer in together] == list(answers.values())
    assert all(_is_of_schema(_text(answer)) for answer in together)


def test_thirty_constrained_requests_under_a_liar_all_keep_to_the_schema(
    random_runner: ModelRunner, grammars: GrammarCompiler
) -> None:
    prompts = [[seed, 3 * seed] for seed in range(30)]
    params = _params("seeded", "json")
    answers = plain_answers(random_runner, prompts, params, grammars)
    verifier = InlineVerifier(
        random_runner,
        [InProcessLink(ScriptedProposer(liar(answers, VOCAB_SIZE)))],
        max_num_seqs=30,
        grammars=grammars,
    )

    together = verifier.generate(prompts, params)

    assert [answer.token_ids for answer in together] == list(answers.values())
    assert all(_is_of_schema(_text(answer)) for answer in together)


def test_a_request_that_moves_goes_on_in_its_grammar(
    random_runner: ModelRunner, grammars: GrammarCompiler
) -> None:
    for prompt, whole in _answers(random_runner, grammars, "seeded", "json").items():
        verifier = InlineVerifier(random_runner, grammars=grammars)

        session_id = verifier.submit(prompt, _params("seeded", "json"), output=whole[:7])
        verifier.run()

        assert verifier.answers[session_id].token_ids == whole[7:]


def test_an_earlier_output_that_is_not_of_the_grammar_is_refused(
    random_runner: ModelRunner, grammars: GrammarCompiler
) -> None:
    verifier = InlineVerifier(random_runner, grammars=grammars)

    with pytest.raises(InvalidRequest, match="output_token_ids: must follow json"):
        verifier.submit([1], _params("greedy", "json"), output=[TOKENS.index("x")])


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_the_constraint_holds_against_every_other_parameter(
    proposer: str, random_runner: ModelRunner, grammars: GrammarCompiler
) -> None:
    params = replace(
        _params("seeded", "json"),
        logit_bias={EOS: 100.0, TOKENS.index("x"): 100.0},
        allowed_token_ids=(TOKENS.index("x"), TOKENS.index("y")),
        repetition_penalty=1.5,
        min_tokens=25,
        top_k=1,
        ignore_eos=True,
    )
    answers = plain_answers(random_runner, PROMPTS, params, grammars)
    link = InProcessLink(PROPOSERS[proposer](answers))

    together = InlineVerifier(random_runner, [link], grammars=grammars).generate(PROMPTS, params)

    assert [answer.token_ids for answer in together] == list(answers.values())
    assert all(_is_of_schema(_text(answer)) for answer in together)


def test_a_grammar_too_complex_to_follow_ends_its_own_request_alone(
    random_runner: ModelRunner, grammars: GrammarCompiler
) -> None:
    expected = _answers(random_runner, grammars, "greedy", "json")
    verifier = InlineVerifier(random_runner, grammars=grammars)
    hard = StructuredOutputsParams(json=TOO_COMPLEX)

    hopeless = verifier.submit([5], replace(BASES["greedy"], structured_outputs=hard))
    fine = [verifier.submit(prompt, _params("greedy", "json")) for prompt in PROMPTS]
    verifier.run()

    error = verifier.answers[hopeless].error
    assert isinstance(error, InvalidRequest)
    assert error.field == "structured_outputs.json"
    assert "is too complex" in str(error)
    assert [verifier.answers[one].token_ids for one in fine] == list(expected.values())
    assert random_runner.kv_cache.used_tokens == 0


def test_a_draft_into_what_is_too_complex_ends_no_request(
    random_runner: ModelRunner, grammars: GrammarCompiler
) -> None:
    """After "[" the grammar allows "{", behind which it cannot be followed; the target says "1"."""
    items = {"anyOf": [TOO_COMPLEX, {"const": 1}]}
    schema = {"type": "array", "items": items, "minItems": 2, "maxItems": 2}
    params = replace(
        BASES["greedy"],
        structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=True),
        logit_bias={TOKENS.index("1"): 100.0},
    )
    drafts = [TOKENS.index(one) for one in '{"p']
    link = InProcessLink(ScriptedProposer(script(*drafts)))
    verifier = InlineVerifier(random_runner, [link], grammars=grammars)

    together = verifier.generate(PROMPTS, params)

    expected = plain_answers(random_runner, PROMPTS, params, grammars)
    assert [answer.error for answer in together] == [None] * len(PROMPTS)
    assert [answer.token_ids for answer in together] == list(expected.values())
    assert {_text(answer) for answer in together} == {"[1,1]"}


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 7])
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_draft_that_is_the_target_is_always_accepted_under_a_constraint(
    name: str,
    num_draft_tokens: int,
    random_runner: ModelRunner,
    random_model_dir: Path,
    grammars: GrammarCompiler,
) -> None:
    twin = load_model(ModelOptions(str(random_model_dir), dtype="float32", kv_cache_tokens=4096))
    chooser = DraftChooser(grammars=DraftGrammars(grammars, InlineExecutor()))
    drafter = DraftModelDrafter(twin, 512, chooser=chooser)
    verifier = InlineVerifier(
        random_runner,
        [InProcessLink(ProposerCore(drafter, num_draft_tokens, max_sessions=64))],
        max_draft_tokens=num_draft_tokens,
        grammars=grammars,
    )

    together = verifier.generate(PROMPTS, _params("greedy", name))

    assert [one.token_ids for one in together] == list(
        _answers(random_runner, grammars, "greedy", name).values()
    )
    for answer in together:
        rounds = answer.blocks[1:]  # the first token has no draft
        assert all(len(block) == num_draft_tokens + 1 for block in rounds[:-1])
