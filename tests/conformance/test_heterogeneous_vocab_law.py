"""`probabilistic` drafts from another vocabulary: the output law is the target's (case V9).

Two vocabularies of 8 tokens with 5 in common, under other ids. Known laws go through what the
services call: the mapping, the draft's choice, the laws it sends, and the verifier's test.

False-alarm rates: each comparison is one that right code fails with probability 1e-7, chi-squares
by the Wilson-Hilferty approximation, shares by the normal one (twice that, as it has two sides).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from proposer_svc.draft_sampling import DraftSampler, DraftToken
from proposer_svc.foreign_vocabulary import TokenVocabulary
from specgw.engine.sampling import RowSampling
from specgw.spelling import Spelling
from specgw.types import TokenProbs
from specgw.vocab_mapping import VocabMapping, map_vocabs
from tests.conformance.test_lossless_distribution import Z_OF_RATE, excess
from tests.tiny_tokenizers import EOS, of_tokens
from verifier_svc.acceptance import Acceptance
from verifier_svc.block_test import Block, BlockTest

pytestmark = pytest.mark.timeout(900)  # a minute or two each on idle cores

COUNT = 200_000
AT_ONCE = 10_000
NUM_DRAFTS = 2
VOCAB = 8
START = 10  # context length
BEFORE = 0  # the target's id of the token before the block
TARGET_TOKENS = ["a", "b", "c", "d", "e", "ab", "cd"]
DRAFT_TOKENS = ["x", "c", "ab", "y", "a", "d", "z"]


@dataclass(frozen=True)
class Found:
    """What became of all blocks."""

    num_accepted: Tensor  # [COUNT]
    tokens: Tensor  # [COUNT, 2], the first two tokens of the output; -1 if there is no second

    @property
    def first(self) -> Tensor:
        return self.tokens[:, 0].bincount(minlength=VOCAB)

    def second(self, first: int) -> Tensor:
        """Counts what follows a first token."""
        after = self.tokens[self.tokens[:, 0] == first, 1]
        return after[after >= 0].bincount(minlength=VOCAB)


def small_mapping() -> VocabMapping:
    target, draft = (
        Spelling(of_tokens(tokens).to_str(), {"eos": (EOS,)})
        for tokens in (TARGET_TOKENS, DRAFT_TOKENS)
    )
    return map_vocabs(target, draft, VOCAB, VOCAB)


def logits_of(mapping: VocabMapping) -> tuple[Tensor, Tensor]:
    """Returns logits given the target's token before, [VOCAB, VOCAB]: the target's, the draft's.

    Both models agree to a degree on what they both can write.
    """
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(VOCAB, VOCAB, generator=generator)
    draft = 0.7 * torch.randn(VOCAB, VOCAB, generator=generator)
    to_target = torch.from_numpy(mapping.draft_to_target)
    [common] = (to_target >= 0).nonzero(as_tuple=True)
    draft[:, common] += target[:, to_target[common]]
    return target, draft


def rows_of(requests: range, offset: int) -> list[RowSampling]:
    return [
        RowSampling(1.0, 1.0, 0, seed=request, position=START + offset, round=START)
        for request in requests
    ]


def draft_blocks(
    vocabulary: TokenVocabulary, draft_logits: Tensor, requests: range, sampler: DraftSampler
) -> list[list[DraftToken]]:
    """Chooses a block for each request, in the target's ids."""
    blocks: list[list[DraftToken]] = [[] for _ in requests]
    last = torch.full((len(requests),), BEFORE)
    for offset in range(NUM_DRAFTS):
        choices = vocabulary.choices(draft_logits[last])
        chosen = sampler.choose(choices, rows_of(requests, offset))
        for block, token in zip(blocks, chosen, strict=True):
            assert token is not None
            block.append(token)
        last = torch.tensor([block[-1].token_id for block in blocks])
    return blocks


def laws_in(block: Sequence[DraftToken]) -> Iterator[TokenProbs]:
    return (token.probs for token in block if token.probs is not None)


def run(
    mapping: VocabMapping, by_block: bool, count: int = COUNT, with_text: bool = False
) -> Found:
    """Drafts and tests.

    Args:
        mapping: Between the two vocabularies.
        by_block: Whether laws are tested for a whole block.
        count: Requests.
        with_text: Whether every second block is greedy and has no laws, as drafted text is.
    """
    target_logits, draft_logits = logits_of(mapping)
    vocabulary = TokenVocabulary(mapping)
    test = BlockTest(Acceptance(uses_draft_probs=True, by_block=by_block))
    num_accepted, tokens = [], []
    for begin in range(0, count, AT_ONCE):
        requests = range(begin, begin + AT_ONCE)
        drafted = draft_blocks(vocabulary, draft_logits, requests, DraftSampler("probabilistic"))
        if with_text:
            text = draft_blocks(vocabulary, draft_logits, requests, DraftSampler())
            drafted[1::2] = text[1::2]
        rows = zip(*(rows_of(requests, offset) for offset in range(NUM_DRAFTS + 1)), strict=True)
        blocks = [
            Block([token.token_id for token in block], list(laws_in(block)), sampling)
            for block, sampling in zip(drafted, rows, strict=True)
        ]
        before = torch.tensor([[BEFORE, *block.token_ids] for block in blocks]).flatten()
        for block, one in zip(blocks, test.verify(blocks, target_logits[before]), strict=True):
            output = [*block.token_ids[: one.num_accepted], one.token_id, -1]
            num_accepted.append(one.num_accepted)
            tokens.append(output[:2])
    return Found(torch.tensor(num_accepted), torch.tensor(tokens))


def draft_law(mapping: VocabMapping, logits: Tensor) -> Tensor:
    """Returns q': the draft's law of what is in common, renormalized, by the target's ids."""
    q = logits.double().softmax(-1)
    law = torch.zeros(VOCAB, dtype=torch.float64)
    for draft_id, target_id in enumerate(mapping.draft_to_target.tolist()):
        if target_id >= 0:
            law[target_id] = q[draft_id]
    return law / law.sum()


def test_the_vocabularies_overlap_in_part_and_under_other_ids() -> None:
    mapping = small_mapping()

    common = mapping.draft_to_target[mapping.draft_to_target >= 0]

    assert sorted(common) == [0, 2, 3, 5, 7]
    assert mapping.draft_to_target.tolist() == [-1, 2, 5, -1, 0, 3, -1, 7]


@pytest.fixture(scope="module")
def found() -> Found:
    return run(small_mapping(), by_block=False)


@pytest.mark.slow
def test_the_output_has_the_law_of_the_target(found: Found) -> None:
    """Chi-squares of the first token, and of the second after each first: false-alarm rate 9e-7.

    The tokens that only the target has come by rejection alone.
    """
    p = logits_of(small_mapping())[0].double().softmax(-1)
    after = {first: found.second(first).double() for first in range(VOCAB)}
    frequent = {first: counts for first, counts in after.items() if counts.sum() > 1000}

    assert excess(found.first.double(), p[BEFORE] * COUNT) < Z_OF_RATE
    assert len(frequent) >= 4
    for first, counts in frequent.items():
        assert excess(counts, p[first] * counts.sum()) < Z_OF_RATE


@pytest.mark.slow
def test_as_much_is_accepted_as_both_laws_share(found: Found) -> None:
    """The first token with probability sum(min(p, q')): false-alarm rate 2e-7."""
    mapping = small_mapping()
    target_logits, draft_logits = logits_of(mapping)
    p, law = target_logits[BEFORE].double().softmax(-1), draft_law(mapping, draft_logits[BEFORE])
    shared = float(torch.minimum(p, law).sum())

    accepted = float((found.num_accepted > 0).double().mean())

    assert 0.2 < shared < 0.9
    assert abs(accepted - shared) < Z_OF_RATE * (shared * (1 - shared) / COUNT) ** 0.5


@pytest.mark.slow
def test_a_block_tested_as_a_whole_begins_by_the_law_of_the_target() -> None:
    """Chi-square of the first token: false-alarm rate 1e-7.

    Here, whether a round has a second token depends on what that is.
    """
    p = logits_of(small_mapping())[0].double().softmax(-1)

    found = run(small_mapping(), by_block=True)

    assert excess(found.first.double(), p[BEFORE] * COUNT) < Z_OF_RATE


@pytest.mark.slow
def test_laws_and_text_side_by_side_keep_the_law_of_the_target() -> None:
    """Chi-squares of all first tokens and of each half's: false-alarm rate 3e-7.

    So it is where `auto` drafts some sessions by token and others by string.
    """
    p = logits_of(small_mapping())[0].double().softmax(-1)[BEFORE]

    found = run(small_mapping(), by_block=False, with_text=True)

    for half in (found.tokens[:, 0], found.tokens[::2, 0], found.tokens[1::2, 0]):
        counts = half.bincount(minlength=VOCAB).double()
        assert excess(counts, p * len(half)) < Z_OF_RATE
    assert (found.num_accepted[::2] > 0).double().mean() != pytest.approx(
        float((found.num_accepted[1::2] > 0).double().mean()), abs=0.01
    )


def test_laws_by_the_drafts_own_ids_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What went wrong elsewhere: tokens are mapped and their probabilities are not."""
    mapping = small_mapping()
    draft_id_of = {ours: theirs for theirs, ours in enumerate(mapping.draft_to_target.tolist())}
    choose = DraftSampler.choose

    def with_own_ids(
        sampler: DraftSampler, logits: Tensor, rows: Sequence[RowSampling]
    ) -> list[DraftToken | None]:
        return [
            token and token._replace(probs=own(token)) for token in choose(sampler, logits, rows)
        ]

    def own(token: DraftToken) -> TokenProbs:
        [law] = laws_in([token])
        ids = [draft_id_of[i] for i in law.token_ids.tolist()]
        return TokenProbs(np.array(ids), law.probs)

    monkeypatch.setattr(DraftSampler, "choose", with_own_ids)
    p = logits_of(mapping)[0].double().softmax(-1)

    found = run(mapping, by_block=False, count=AT_ONCE)

    assert excess(found.first.double(), p[BEFORE] * AT_ONCE) > Z_OF_RATE
