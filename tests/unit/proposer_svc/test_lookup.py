"""A proposer without a model: its sessions, its bounds, and what it offers."""

from collections.abc import Sequence

import pytest

from proposer_svc.proposer import ProposerCore, build_proposer
from specgw.config import parse_config
from specgw.errors import IncompatibleModels
from specgw.types import (
    Commit,
    DraftBlock,
    Hello,
    ModelDescription,
    OpenSession,
    ProposeStep,
    UndraftedReason,
)

TARGET = ModelDescription("target", "", 100, "fingerprint", 64, "float32", "cpu")


def build(method: str = "ngram", **options: object) -> ProposerCore:
    config = {"method": method, "num_speculative_tokens": 4, "prompt_lookup_min": 2, **options}
    args = parse_config(
        {
            "model": "target",
            "speculative_config": config,
            "specgw": {"proposer": {"max_sessions": 2}},
        }
    )
    proposer = build_proposer(args)
    proposer.connect(Hello("v", TARGET, 4, method=method, extra_slots_per_session=0))
    return proposer


def drafted(proposer: ProposerCore, *commits: Commit) -> dict[int, DraftBlock]:
    blocks = proposer.apply("v", ProposeStep(commit=commits))
    while proposer.has_work():
        blocks += [block for _, block in proposer.step()]
    return {block.session_id: block for block in blocks}


def open_session(proposer: ProposerCore, session_id: int, context: Sequence[int]) -> None:
    proposer.apply("v", ProposeStep(open=[OpenSession(session_id, context)]))


def test_it_offers_no_model_and_no_extra_slots() -> None:
    offer = build().offer

    assert (offer.method, offer.draft_model.name) == ("ngram", "ngram")
    assert (offer.extra_slots_per_session, offer.kv_lookahead_per_session) == (0, 0)
    assert offer.draft_model.max_model_len == 2**17
    assert offer.kv_capacity_tokens == 2 * 2**17


@pytest.mark.parametrize("vocab", ["fingerprint", "another", ""])
def test_any_vocabulary_will_do(vocab: str) -> None:
    target = ModelDescription("target", "", 10, vocab, 64, "float32", "cpu")

    assert build().connect(Hello("w", target, 4)).max_draft_tokens == 4


def test_a_target_without_a_vocabulary_is_refused() -> None:
    target = ModelDescription("target", "", 0, "", 64, "float32", "cpu")

    with pytest.raises(IncompatibleModels, match="vocab_size"):
        build().connect(Hello("w", target, 4))


def test_blocks_follow_the_context() -> None:
    proposer = build()
    open_session(proposer, 1, [1, 2, 3, 4, 9])

    [first] = drafted(proposer, Commit(1, 5, [1, 2], 3)).values()
    [second] = drafted(proposer, Commit(1, 7, [3, 5], 3)).values()
    [third] = drafted(proposer, Commit(1, 9, [9, 1, 2, 3], 1)).values()

    assert (first.base_length, list(first.token_ids)) == (7, [3, 4, 9])
    assert (second.token_ids, second.reason) == ((), UndraftedReason.EMPTY)
    assert (third.base_length, list(third.token_ids)) == (13, [5])


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_wrong_base_is_resynced_and_opened_again(method: str) -> None:
    proposer = build(method)
    open_session(proposer, 1, [1, 2, 3])

    [lost] = drafted(proposer, Commit(1, 9, [4], 4)).values()
    open_session(proposer, 1, [5, 6, 7, 8, 5])
    [block] = drafted(proposer, Commit(1, 5, [6], 1)).values()

    assert lost.reason is UndraftedReason.RESYNC
    assert list(block.token_ids) == [7]


def test_sessions_are_bounded_in_number_and_length() -> None:
    proposer = build(max_model_len=8)
    for session_id in (1, 2, 3):
        open_session(proposer, session_id, [1, 2, 3, 1, 2])

    blocks = drafted(
        proposer, Commit(1, 5, [3], 4), Commit(2, 5, [3, 1, 2], 4), Commit(3, 5, [3], 4)
    )

    assert list(blocks[1].token_ids) == [1, 2]
    assert blocks[2].reason is UndraftedReason.CONTEXT_LIMIT
    assert blocks[3].reason is UndraftedReason.NO_SLOT
    assert proposer.load().kv_used_tokens == 6 + 8


def test_answers_of_another_target_give_no_foreign_ids() -> None:
    proposer = build("suffix")
    small = ModelDescription("small", "", 10, "", 64, "float32", "cpu")
    proposer.connect(Hello("w", small, 4))
    open_session(proposer, 1, [5])
    drafted(proposer, Commit(1, 1, [1, 2, 3, 4, 50, 6], 0))
    proposer.apply("v", ProposeStep(close=[1]))

    proposer.apply("w", ProposeStep([OpenSession(1, [1])], [Commit(1, 1, [2, 3], 4)]))
    [(_, block)] = proposer.step()

    assert list(block.token_ids) == [4]


def test_a_session_with_a_salt_shares_nothing() -> None:
    proposer = build("suffix")
    proposer.apply("v", ProposeStep(open=[OpenSession(1, [9], "secret")]))
    drafted(proposer, Commit(1, 1, [1, 2, 3, 4, 5], 0))
    proposer.apply("v", ProposeStep(close=[1]))
    open_session(proposer, 2, [1])

    [block] = drafted(proposer, Commit(2, 1, [2, 3], 4)).values()

    assert block.reason is UndraftedReason.EMPTY


def test_what_follows_the_prompt_is_remembered_however_often_a_session_is_opened() -> None:
    """Opened anew, a session has a part of its answer already: no second answer, and no prompt."""
    proposer = build("suffix")
    proposer.apply("v", ProposeStep(open=[OpenSession(1, [1, 2, 3], prompt_length=3)]))
    drafted(proposer, Commit(1, 3, [10, 11], 4))
    drafted(proposer, Commit(1, 9, [12], 4))  # another base: it is dropped
    proposer.apply("v", ProposeStep(open=[OpenSession(1, [1, 2, 3, 10, 11, 12], prompt_length=3)]))
    drafted(proposer, Commit(1, 6, [13, 14], 4))
    proposer.apply("v", ProposeStep(close=[1]))

    open_session(proposer, 2, [7, 10])
    [answer] = drafted(proposer, Commit(2, 2, [11], 4)).values()
    proposer.apply("v", ProposeStep(close=[2]))
    open_session(proposer, 3, [7, 1])
    [prompt] = drafted(proposer, Commit(3, 2, [2], 4)).values()

    assert list(answer.token_ids) == [12, 13]
    assert prompt.reason is UndraftedReason.EMPTY
    [*remembered] = proposer._drafter._lookup._answers.index.token_ids  # type: ignore[attr-defined]
    assert remembered == [10, 11, 12, 13, 14, -1, 11, -1]


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_tokens_that_were_rejected_are_never_looked_up(method: str) -> None:
    """Of a block, the context and what is remembered of it have what was committed, no more."""
    proposer = build(method)
    open_session(proposer, 1, [1, 2, 3, 4, 1])
    [block] = drafted(proposer, Commit(1, 5, [2], 2)).values()
    [after] = drafted(proposer, Commit(1, 6, [9, 1, 2], 1)).values()  # none was accepted

    assert list(block.token_ids) == [3, 4]
    assert list(after.token_ids) == [9]
