"""Rows of a draft model lose the tokens that the request's constraint does not let follow."""

from concurrent.futures import Executor, Future

import pytest
import torch
from torch import Tensor

from proposer_svc.draft_grammar import DraftGrammars
from proposer_svc.session_table import Session
from specgw.grammar import GrammarCompiler
from specgw.structured_outputs import StructuredOutputsParams
from tests.doubles import InlineExecutor
from tests.tiny_tokenizers import of_tokens

TOKENS = ["a", "b", "c", "ab"]
EOS = len(TOKENS)
CHOICE = StructuredOutputsParams(choice=["ab", "ac"])


class NeverExecutor(Executor):
    """Takes work and never does it."""

    def submit(self, *args: object, **kwargs: object) -> "Future[object]":  # type: ignore[override]
        return Future()


def grammars(executor: Executor | None = None) -> DraftGrammars:
    compiler = GrammarCompiler(of_tokens(TOKENS).to_str, EOS + 1, [EOS])
    return DraftGrammars(compiler, executor or InlineExecutor())


def session(*output: int, constraint: StructuredOutputsParams | None = CHOICE) -> Session:
    return Session(
        *("verifier", 1, [2, 2, *output], EOS + 1), structured_outputs=constraint, prompt_length=2
    )


def left(logits: Tensor) -> set[str]:
    """Returns the tokens that may be drafted."""
    return {[*TOKENS, "end"][index] for index in logits.isfinite().nonzero().flatten().tolist()}


@pytest.mark.parametrize(
    ("output", "drafts", "expected"),
    [
        ([], [], {"a", "ab"}),
        ([0], [], {"b", "c"}),
        ([], [0], {"b", "c"}),
        ([0], [2], {"end"}),
        ([], [3], {"end"}),
    ],
)
def test_only_what_can_follow_the_context_and_the_drafts_is_left(
    output: list[int], drafts: list[int], expected: set[str]
) -> None:
    one, masks = session(*output), grammars()
    masks.open(one)
    logits = torch.zeros(EOS + 1)

    masks.mask(logits, one, drafts)

    assert left(logits) == expected


def test_a_session_that_went_on_otherwise_than_drafted_is_followed() -> None:
    one, masks = session(), grammars()
    masks.open(one)
    masks.mask(torch.zeros(EOS + 1), one, [0, 1])

    one.token_ids += [0]
    logits = torch.zeros(EOS + 1)
    masks.mask(logits, one, [2])

    assert left(logits) == {"end"}


@pytest.mark.parametrize(
    ("constraint", "drafts", "executor"),
    [
        (None, [], InlineExecutor()),
        (CHOICE, [1], InlineExecutor()),  # follows no text
        (CHOICE, [3, EOS], InlineExecutor()),  # the end is drafted
        (CHOICE, [], NeverExecutor()),  # is being compiled
        (StructuredOutputsParams(regex="(a"), [], InlineExecutor()),
    ],
)
def test_rows_that_nothing_is_known_of_stay_as_they_are(
    constraint: StructuredOutputsParams | None, drafts: list[int], executor: Executor
) -> None:
    one, masks = session(constraint=constraint), grammars(executor)
    masks.open(one)
    logits = torch.zeros(EOS + 1)

    masks.mask(logits, one, drafts)

    assert len(left(logits)) == EOS + 1


def test_a_row_keeps_its_tokens_where_none_that_can_follow_may_be_drafted() -> None:
    one, masks = session(0), grammars()
    masks.open(one)
    logits = torch.zeros(EOS + 1)
    logits[1:3] = -torch.inf

    masks.mask(logits, one, [])

    assert left(logits) == {"a", "ab", "end"}


def test_a_closed_session_is_forgotten() -> None:
    one, masks = session(), grammars()
    masks.open(one)

    masks.close(one)

    assert not masks.applies_to(one)
    masks.close(one)
