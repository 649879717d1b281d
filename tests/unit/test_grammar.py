"""Masks against brute force: a token may come next iff some text of the language goes on so."""

import itertools
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from specgw.errors import InvalidRequest
from specgw.grammar import GrammarCompiler, GrammarMatcher
from specgw.structured_outputs import StructuredOutputsParams
from specgw.structured_outputs_config import StructuredOutputsConfig
from tests.tiny_tokenizers import EOS, byte_level, metaspace, of_tokens, token_id

TOKENS = [
    "2",
    "a",
    "b",
    "ab",
    "ba",
    "abb",
    "c",
    "{",
    "}",
    '"',
    '"a',
    '":',
    ":",
    "1",
    "12",
    "1}",
    ",",
    " ",
]
EOS_ID = len(TOKENS)
VOCAB_SIZE = 40  # more rows than tokens, and not a whole number of words


LONGEST_TEXT = 14

TOO_LARGE = {
    "allOf": [
        {"anyOf": [{"properties": {f"{i},{j}": {"type": "null"}}} for i in range(4)]}
        for j in range(8)
    ]
}
TOO_COMPLEX = {  # once the object has begun, there is too much to keep in mind
    "type": "object",
    "properties": {f"p{index}": {"type": "null"} for index in range(700)},
    "required": ["p699"],
}

# Constraints with all the texts that they allow.
LANGUAGES = {
    "choice": (
        StructuredOutputsParams(choice=["a", "ab", "abba", "1,c"]),
        ["a", "ab", "abba", "1,c"],
    ),
    "regex": (
        StructuredOutputsParams(regex="(ab|ba){1,2}c?"),
        [f"{x}{y}{c}" for x in ("ab", "ba") for y in ("", "ab", "ba") for c in ("", "c")],
    ),
    "ebnf": (
        StructuredOutputsParams(grammar='root ::= "a" x | "b"\nx ::= "b" | "c" root'),
        ["ac" * n + end for n in range(LONGEST_TEXT) for end in ("ab", "b")],
    ),
    "lark": (
        StructuredOutputsParams(grammar='start: x ("," x)?\nx: "1" | "12"'),
        ["1", "12", "1,1", "1,12", "12,1", "12,12"],
    ),
    "json": (
        StructuredOutputsParams(
            json={
                "type": "object",
                "properties": {"a": {"enum": [1, 12]}},
                "required": ["a"],
                "additionalProperties": False,
            },
            whitespace_pattern=" ?",
        ),
        [
            f'{{{w[0]}"a"{w[1]}:{w[2]}{n}{w[3]}}}'
            for n in (1, 12)
            for w in itertools.product(("", " "), repeat=4)
        ],
    ),
    "compact": (
        StructuredOutputsParams(
            json={"const": {"a": 1, "b": 12}},
            disable_any_whitespace=True,
        ),
        ['{"a":1,"b":12}'],
    ),
    "compact by its schema": (
        StructuredOutputsParams(
            json={"const": {"a": 1, "b": 12}, "x-guidance": {"whitespace_flexible": False}},
        ),
        ['{"a":1,"b":12}'],
    ),
    "empty": (StructuredOutputsParams(regex="a{0,2}"), ["", "a", "aa"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(of_tokens(TOKENS).to_str, VOCAB_SIZE, [EOS_ID])


def allowed(matcher: GrammarMatcher) -> set[int]:
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def allowed_by_brute_force(text: str, language: Sequence[str]) -> set[int]:
    goes_on = {
        index
        for index, token in enumerate(TOKENS)
        if any(whole.startswith(text + token) for whole in language)
    }
    return goes_on | ({EOS_ID} if text in language else set())


def is_forced(text: str, language: Sequence[str]) -> bool:
    """Whether every text of the language goes on with the same character."""
    return len({whole[len(text) :][:1] for whole in language if whole.startswith(text)}) == 1


@pytest.mark.parametrize("name", LANGUAGES)
def test_masks_allow_what_some_text_of_the_language_goes_on_with(
    name: str, compiler: GrammarCompiler
) -> None:
    """Where characters are forced, llguidance lets the tokenizer's own token for them through."""
    params, language = LANGUAGES[name]
    found_texts = set()
    unseen: list[tuple[int, ...]] = [()]
    while unseen:
        token_ids = unseen.pop()
        text = "".join(TOKENS[token_id] for token_id in token_ids)
        if len(text) > LONGEST_TEXT:
            continue
        matcher = compiler.compile(params)
        assert matcher.advance(token_ids) == len(token_ids)

        found = allowed(matcher)

        expected = allowed_by_brute_force(text, language)
        assert found == expected or (is_forced(text, language) and set() < found < expected)
        if EOS_ID in found:
            found_texts.add(text)
        unseen += [(*token_ids, token_id) for token_id in found - {EOS_ID}]
    assert found_texts == {text for text in language if len(text) <= LONGEST_TEXT}


@given(data=st.data(), name=st.sampled_from(sorted(LANGUAGES)))
def test_a_matcher_that_went_back_is_as_one_that_never_went(
    data: st.DataObject, name: str, compiler: GrammarCompiler
) -> None:
    params, _ = LANGUAGES[name]
    matcher = compiler.compile(params)
    token_ids: list[int] = []
    for _ in range(data.draw(st.integers(1, 12))):
        goes_back: bool = data.draw(st.booleans())
        if token_ids and goes_back:
            count = data.draw(st.integers(1, len(token_ids)))
            matcher.rollback(count)
            del token_ids[-count:]
        else:
            tokens = data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4))
            token_ids += tokens[: matcher.advance(tokens)]
            if data.draw(st.booleans()) and (choice := sorted(allowed(matcher))):
                token_id = data.draw(st.sampled_from(choice))
                token_ids += [token_id] * matcher.advance([token_id])

        fresh = compiler.compile(params)
        assert fresh.advance(token_ids) == len(token_ids)
        assert allowed(matcher) == allowed(fresh)


@given(
    walks=st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=5), max_size=5),
    name=st.sampled_from(sorted(LANGUAGES)),
)
def test_a_matcher_that_follows_is_as_one_that_began_anew(
    walks: list[list[int]], name: str, compiler: GrammarCompiler
) -> None:
    matcher = compiler.compile(LANGUAGES[name][0])
    for token_ids in walks:
        fresh = compiler.compile(LANGUAGES[name][0])

        assert matcher.follow(token_ids) == (fresh.advance(token_ids) == len(token_ids))
        assert allowed(matcher) == allowed(fresh)


def test_only_the_end_follows_a_text_that_cannot_go_on(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(StructuredOutputsParams(choice=["ab"]))

    matcher.advance([TOKENS.index("ab")])

    assert allowed(matcher) == {EOS_ID}


def test_every_end_of_sequence_token_ends() -> None:
    compiler = GrammarCompiler(
        of_tokens(TOKENS).to_str, VOCAB_SIZE, [EOS_ID, TOKENS.index("c"), 35]
    )
    matcher = compiler.compile(StructuredOutputsParams(regex="(ab)?"))

    assert allowed(matcher) == {TOKENS.index(token) for token in ("a", "ab", "c")} | {EOS_ID}


def test_several_outputs_of_one_constraint_are_independent(compiler: GrammarCompiler) -> None:
    params = StructuredOutputsParams(choice=["ab", "ba"])
    first, second = compiler.compile(params), compiler.compile(params)

    first.advance([TOKENS.index("a")])

    assert allowed(first) == {TOKENS.index("b")}
    assert allowed(second) == {TOKENS.index(token) for token in ("a", "ab", "b", "ba")}


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (
            StructuredOutputsParams(json={"type": "strin"}),
            "json: is not valid: Invalid type: strin",
        ),
        (StructuredOutputsParams(json={"not": {}}), "json: is not valid: Unimplemented keys"),
        (StructuredOutputsParams(json={"$ref": "#/x"}), "json: is not valid: Pointer '/x' does"),
        (StructuredOutputsParams(json="{"), "json: must be a JSON schema"),
        (StructuredOutputsParams(regex="(ab"), 'regex: is not valid: at 1(8): invalid regex "(ab"'),
        (StructuredOutputsParams(grammar='root ::= "a" x'), "grammar: is not valid: Failed to"),
        (StructuredOutputsParams(grammar="start: x"), "grammar: is not valid: "),
        (StructuredOutputsParams(grammar="root ::= " + "(" * 5000), "grammar: is not valid: "),
        (StructuredOutputsParams(json=TOO_LARGE), "json: is not valid: schema too large"),
    ],
)
def test_a_constraint_that_does_not_compile_is_refused_by_name(
    params: StructuredOutputsParams, named: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        compiler.compile(params)

    assert str(refused.value).startswith(f"structured_outputs.{named}")


def test_an_output_too_complex_to_follow_is_refused_by_name(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(StructuredOutputsParams(json=TOO_COMPLEX))
    before = allowed(matcher)

    assert matcher.advance([TOKENS.index("{")]) == 1
    assert matcher.advance([0, 0]) == 2
    with pytest.raises(InvalidRequest, match=r"^structured_outputs\.json: is too complex: Parser"):
        matcher.mask()

    matcher.rollback(3)
    assert allowed(matcher) == before


def test_a_model_without_a_tokenizer_takes_no_constraint() -> None:
    compiler = GrammarCompiler(str, VOCAB_SIZE, [EOS_ID])

    with pytest.raises(InvalidRequest, match=r"^structured_outputs: is not available: the model"):
        compiler.compile(StructuredOutputsParams(regex="a"))


def test_the_tokenizer_is_read_once_and_a_constraint_compiled_once() -> None:
    reads = []

    def read() -> str:
        reads.append(threading.get_ident())
        return str(of_tokens(TOKENS).to_str())

    compiler = GrammarCompiler(read, VOCAB_SIZE, [EOS_ID])
    threads = [
        threading.Thread(target=compiler.compile, args=[StructuredOutputsParams(regex="a")])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(reads) == 1
    assert compiler.num_compiled == 1


def test_the_constraints_used_last_are_kept(compiler: GrammarCompiler) -> None:
    compiler = GrammarCompiler(of_tokens(TOKENS).to_str, VOCAB_SIZE, [EOS_ID])

    for count in range(1, 200):
        compiler.compile(StructuredOutputsParams(regex=f"a{{{count}}}"))
        compiler.compile(StructuredOutputsParams(regex="b"))

    assert compiler.num_compiled == 200
    assert compiler.num_kept == 128


@pytest.mark.parametrize("tokenizer", [byte_level(), metaspace()], ids=["byte-level", "metaspace"])
@pytest.mark.parametrize("text", ["naïve café", "你好世界", 'say "stop"', "😀", "a\\b\n\tc"])
def test_a_text_of_any_script_is_followed_token_by_token(text: str, tokenizer: Tokenizer) -> None:
    eos = token_id(tokenizer, EOS)
    compiler = GrammarCompiler(tokenizer.to_str, tokenizer.get_vocab_size(), [eos])
    matcher = compiler.compile(StructuredOutputsParams(choice=[text]))
    token_ids: list[int] = []
    for _ in range(64):
        choice = sorted(allowed(matcher))
        if choice == [eos]:
            break
        token_ids.append(choice[-1])
        assert matcher.advance(token_ids[-1:]) == 1

    assert tokenizer.decode(token_ids) == text


def test_what_is_configured_holds_for_every_constraint() -> None:
    schema = {"properties": {"a": {"const": 1}}, "required": ["a"], "maxProperties": 2}
    config = StructuredOutputsConfig(
        backend="guidance", disable_any_whitespace=True, disable_additional_properties=True
    )
    free, limited = (
        GrammarCompiler(of_tokens(TOKENS).to_str, VOCAB_SIZE, [EOS_ID], one)
        for one in (StructuredOutputsConfig(), config)
    )
    for params in (StructuredOutputsParams(json=schema), StructuredOutputsParams(json_object=True)):
        start = TOKENS.index("{")
        matchers = [one.compile(params) for one in (free, limited)]
        assert [one.advance([start]) for one in matchers] == [1, 1]
        assert [TOKENS.index(" ") in allowed(one) for one in matchers] == [True, False]

    closed = [one.compile(StructuredOutputsParams(json=schema)) for one in (free, limited)]
    whole = [TOKENS.index(one) for one in '{"a":1']
    assert [one.advance(whole) for one in closed] == [len(whole)] * 2
    assert [TOKENS.index(",") in allowed(one) for one in closed] == [True, False]
    limited.compile(StructuredOutputsParams(regex="a b"))  # a constraint that it says nothing of


def test_a_whitespace_pattern_is_refused_where_json_may_have_no_whitespace() -> None:
    config = StructuredOutputsConfig(backend="guidance", disable_any_whitespace=True)
    compiler = GrammarCompiler(of_tokens(TOKENS).to_str, VOCAB_SIZE, [EOS_ID], config)
    params = StructuredOutputsParams(json={}, whitespace_pattern=" ")

    with pytest.raises(InvalidRequest, match="whitespace_pattern: cannot be set with disable_any"):
        compiler.compile(params)
