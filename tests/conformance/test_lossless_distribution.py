"""The output law is the target's: by chi-square, for every rule and kind of proposer.

A toy target and draft over 5 tokens, whose laws depend on the token before, go through the very
functions that the services call, 200 000 requests at once, until each has three tokens. Those come
from two rounds at least. Drafts are cut to 4 tokens before they are drawn from. By default 35
cells, in which every two of rule, kind and sampling meet; `--whole-matrix` tests all 140.

False-alarm rates: each chi-square is compared with a quantile that a right law exceeds with
probability 1e-7, by the Wilson-Hilferty approximation.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from proposer_svc.draft_sampling import draw_from_largest
from specgw.engine.laws import Laws
from specgw.engine.rng import Keys, Stream
from specgw.engine.sampling import RowSampling, build_laws
from verifier_svc import draft_laws
from verifier_svc.draft_laws import Accept, DraftLaws, Rounds, verify_by_laws
from verifier_svc.rejection_sampler import accept_block, accept_tokens, count_matching, residual

pytestmark = pytest.mark.slow

COUNT = 200_000
CHUNK = 20_000
VOCAB = 5
NUM_DRAFTS = 2
SUPPORT = 4
START = 10  # context length
Z_OF_RATE = 5.2  # a normal variable exceeds it with probability 1e-7

PLAIN = RowSampling(1.0, 1.0, 0, seed=0, position=0)
SAMPLING = {
    "plain": PLAIN,
    "temperature": replace(PLAIN, temperature=0.6),
    "top-k": replace(PLAIN, top_k=3),
    "top-p": replace(PLAIN, top_p=0.8),
    "min-p": replace(PLAIN, min_p=0.2),
    "penalties": PLAIN,
    "bias": PLAIN,
}


@dataclass(frozen=True)
class Toy:
    """Laws that depend on the token before: row by row, [VOCAB, VOCAB]."""

    target: Laws
    draft: Laws


def toy(sampling: str, kind: str = "serial") -> Toy:
    generator = torch.Generator().manual_seed(1)
    p = torch.randn(VOCAB, VOCAB, generator=generator)
    q = p + 0.8 * torch.randn(VOCAB, VOCAB, generator=generator)
    if kind == "liar":
        q = -p
    if sampling == "penalties":
        p = p - 1.5 * torch.eye(VOCAB)  # the token before is penalized
    if sampling == "bias":
        p = p + torch.tensor([0.0, 2.0, 0.0, -1.0, -torch.inf])
    rows = [SAMPLING[sampling]] * VOCAB
    return Toy(build_laws(p, rows), build_laws(q, rows))


@dataclass(frozen=True)
class Contexts:
    """What some requests have: their seeds, the tokens before and the lengths of their contexts."""

    seeds: Tensor  # all [num_requests]
    before: Tensor
    lengths: Tensor


def drafts_of(one: Toy, kind: str, contexts: Contexts, stream: Stream) -> DraftLaws:
    """Drafts a block for each request."""
    ids, support, probs = [], [], []
    before, lengths = contexts.before, contexts.lengths
    last = before
    rounds = lengths if stream is Stream.DRAFT else torch.zeros_like(lengths)
    for offset in range(NUM_DRAFTS):
        if kind == "strings":
            drawn = (last + 1) % VOCAB
            held, weights = drawn.unsqueeze(1), torch.ones(len(last), 1)
        else:
            draw = Keys(stream, contexts.seeds, lengths + offset, rounds)
            laws = one.draft[last]
            held, weights, drawn = draw_from_largest(laws, SUPPORT, draw)
            if stream is Stream.NOISE:
                drawn = laws.draw(draw)
        ids.append(drawn)
        support.append(held)
        probs.append(weights.double())
        last = before if kind == "parallel" else drawn
    sizes = torch.full_like(before, NUM_DRAFTS)
    if kind == "late":  # no block, one cut at an id that is none, or a whole one
        sizes = (contexts.seeds + lengths) % 3
    within = torch.arange(NUM_DRAFTS) < sizes.unsqueeze(1)
    return DraftLaws(
        sizes,
        torch.stack(ids, 1),
        torch.stack(support, 1),
        torch.stack(probs, 1) * within.unsqueeze(2),
    )


def by_draws(laws: Laws, drafts: DraftLaws, contexts: Contexts) -> tuple[Tensor, Tensor]:
    """The one-hot rule, as `BlockTest` applies it."""
    size = NUM_DRAFTS + 1
    positions = (contexts.lengths.unsqueeze(1) + torch.arange(size)).flatten()
    seeds = contexts.seeds.repeat_interleave(size)
    draws = laws.draw(Keys(Stream.NOISE, seeds, positions, torch.zeros_like(seeds)))
    drawn = draws.view(-1, size)
    rows = torch.cat((drafts.lengths.unsqueeze(1), drafts.token_ids, drawn), 1)
    powers = 8 ** torch.arange(rows.shape[1])
    codes = (rows * powers).sum(1)
    cases, at = torch.unique(codes, return_inverse=True)  # few: each is tested once
    counts = [
        count_matching(row[1 : 1 + row[0]], row[1 + NUM_DRAFTS :])
        for row in (cases.unsqueeze(1) // powers % 8).tolist()
    ]
    accepted = torch.tensor(counts)[at]
    return accepted, drawn.gather(1, accepted.unsqueeze(1)).squeeze(1)


@dataclass
class Run:
    """Three tokens of each request, and what the first round did."""

    tokens: Tensor  # [COUNT, 3]
    accepted: Tensor  # [COUNT], of the first round
    drafted: Tensor  # [COUNT]


def run(one: Toy, rule: str, kind: str) -> Run:
    """Answers all requests, some at a time: larger tensors leave the processor's cache."""
    chunks = torch.arange(COUNT).view(-1, CHUNK)
    parts = [run_some(one, rule, kind, seeds) for seeds in chunks]
    return Run(
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.accepted for part in parts]),
        torch.cat([part.drafted for part in parts]),
    )


def run_some(one: Toy, rule: str, kind: str, seeds: Tensor) -> Run:
    accept: Accept = accept_block if rule == "block" else accept_tokens
    tokens = torch.zeros(len(seeds), 3 + NUM_DRAFTS + 1, dtype=torch.int64)
    done = torch.zeros_like(seeds)
    first: tuple[Tensor, Tensor] | None = None
    stream = Stream.NOISE if rule == "coupled" else Stream.DRAFT
    for _ in range(3):
        before = torch.where(
            done > 0, tokens.gather(1, (done - 1).clamp(min=0).unsqueeze(1)).squeeze(1), 0
        )
        contexts = Contexts(seeds, before, START + done)
        drafts = drafts_of(one, kind, contexts, stream)
        row_tokens = torch.cat((before.unsqueeze(1), drafts.token_ids), 1).flatten()
        laws = one.target[row_tokens]
        if rule in ("one-hot", "coupled"):
            accepted, last = by_draws(laws, drafts, contexts)
        else:
            rows = torch.arange(len(seeds)) * (NUM_DRAFTS + 1)
            rounds = Rounds(seeds, contexts.lengths)
            accepted, last = verify_by_laws(laws, rows, drafts, rounds, accept)
        first = first or (accepted, drafts.lengths)
        for offset in range(NUM_DRAFTS + 1):
            value = last
            if offset < NUM_DRAFTS:
                value = torch.where(accepted == offset, last, drafts.token_ids[:, offset])
            at = (done + offset).clamp(max=tokens.shape[1] - 1).unsqueeze(1)
            kept = torch.where(offset <= accepted, value, tokens.gather(1, at).squeeze(1))
            tokens.scatter_(1, at, kept.unsqueeze(1))
        done = (done + accepted + 1).clamp(max=3)
    assert first is not None
    return Run(tokens[:, :3], *first)


def excess(counts: Tensor, expected: Tensor) -> float:
    """Returns the chi-square of some counts as a normal variable (Wilson and Hilferty, 1931)."""
    possible = expected > 1e-9
    assert counts[~possible].sum() == 0, "an impossible token came"
    squares = (counts[possible] - expected[possible]) ** 2 / expected[possible]
    freedom = int(possible.sum()) - 1
    if freedom == 0:
        return 0.0
    spread = 2 / (9 * freedom)
    return float(((squares.sum() / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)


def overall(one: Toy, found: Run) -> float:
    """Compares the joint law of three tokens with the target's."""
    p = one.target.probs().double()
    joint = p[0].view(-1, 1, 1) * p.view(VOCAB, VOCAB, 1) * p.view(1, VOCAB, VOCAB)
    cells = (found.tokens * torch.tensor([VOCAB**2, VOCAB, 1])).sum(1)
    counts = torch.bincount(cells, minlength=VOCAB**3).double()
    return excess(counts, joint.flatten() * len(found.tokens))


def on_rejection(one: Toy, found: Run, rule: str, kind: str) -> float:
    """Compares the first token, where the first draft token was rejected, with its law."""
    rejected = (found.accepted == 0) & (found.drafted > 0)
    counts = torch.bincount(found.tokens[rejected, 0], minlength=VOCAB).double()
    p = one.target.probs()[0].double()
    ids, weights = one.draft[torch.tensor([0])].largest(SUPPORT)
    q = torch.zeros(VOCAB, dtype=torch.float64).scatter(0, ids[0], weights[0].double())
    if kind == "strings":
        q = torch.nn.functional.one_hot(torch.tensor(1), VOCAB).double()
    law = p * (1 - q) if rule == "one-hot" else (p - q).clamp(min=0)
    if law.sum() == 0:
        return 0.0
    return excess(counts, law / law.sum() * counts.sum())


RULES = "one-hot", "coupled", "standard", "block"
KINDS = "serial", "parallel", "strings", "liar", "late"


def cells(is_whole: bool) -> list[tuple[str, str, str]]:
    """Returns rule, kind and sampling of the cells to test: all, or one for each of the last two.

    Those 35 have every rule with every kind and with every sampling too.
    """
    return [
        (rule, kind, sampling)
        for r, rule in enumerate(RULES)
        for k, kind in enumerate(KINDS)
        for s, sampling in enumerate(SAMPLING)
        if is_whole or (k + s) % len(RULES) == r
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "rule" in metafunc.fixturenames and "kind" in metafunc.fixturenames:
        is_whole = metafunc.config.getoption("--whole-matrix")
        metafunc.parametrize(("rule", "kind", "sampling"), cells(is_whole))


def test_the_output_has_the_law_of_the_target(rule: str, kind: str, sampling: str) -> None:
    """Two chi-squares, of 124 and 4 degrees of freedom at most: false-alarm rate 2e-7."""
    one = toy(sampling, kind)
    found = run(one, rule, kind)

    assert overall(one, found) < Z_OF_RATE
    if rule != "coupled":  # there, draft and token have their noise in common
        assert on_rejection(one, found, rule, kind) < Z_OF_RATE


Plant = Callable[[pytest.MonkeyPatch, Toy], None]


def shared_noise(patch: pytest.MonkeyPatch, one: Toy) -> None:
    """The residual is drawn with the noise of the draft."""
    original = Rounds.keys

    def keys_of(self: Rounds, stream: Stream, offsets: Tensor, of: object = slice(None)) -> Keys:
        found = original(self, stream, offsets, of)  # type: ignore[arg-type]
        return replace(found, stream=Stream.DRAFT) if stream is Stream.RECOVER else found

    patch.setattr(Rounds, "keys", keys_of)


def untruncated_q(patch: pytest.MonkeyPatch, one: Toy) -> None:
    """The laws sent are those before they were cut."""
    original = draw_from_largest

    def whole(laws: Laws, count: int, draw: Keys) -> tuple[Tensor, Tensor, Tensor]:
        _, _, drawn = original(laws, count, draw)
        ids, probs = laws.largest(VOCAB)
        return ids, probs, drawn

    patch.setattr(f"{__name__}.draw_from_largest", whole)


def residual_is_the_target(patch: pytest.MonkeyPatch, one: Toy) -> None:
    """A rejected token is drawn again from the target, as if it had told nothing."""
    patch.setattr(draft_laws, "residual", lambda target, scale, support, draft: target)


def residual_not_normalized(patch: pytest.MonkeyPatch, one: Toy) -> None:
    """What the residual lacks to 1 falls to the last token, as when a uniform runs off its end."""
    original = residual

    def short(target: Tensor, scale: Tensor, support: Tensor, draft: Tensor) -> Tensor:
        weights = original(target, scale, support, draft)
        lacking = (1 - weights.sum(1)).clamp(min=0)
        weights[:, -1] += lacking
        return weights

    patch.setattr(draft_laws, "residual", short)


def residual_argmax(patch: pytest.MonkeyPatch, one: Toy) -> None:
    """The most probable token of the residual is taken."""
    original = residual

    def sharp(target: Tensor, scale: Tensor, support: Tensor, draft: Tensor) -> Tensor:
        weights = original(target, scale, support, draft)
        return torch.nn.functional.one_hot(weights.argmax(1), VOCAB).float()

    patch.setattr(draft_laws, "residual", sharp)


def bonus_of_the_draft(patch: pytest.MonkeyPatch, one: Toy) -> None:
    """The bonus token is drawn from the draft's law."""
    original = Laws.draw

    def draw(self: Laws, of: Keys) -> Tensor:
        if of.stream is not Stream.BONUS:
            return original(self, of)
        same = (self.logits.unsqueeze(1) == one.target.logits).all(2)
        return original(one.draft[same.int().argmax(1)], of)

    patch.setattr(Laws, "draw", draw)


def uniforms_by_position(patch: pytest.MonkeyPatch, one: Toy) -> None:
    """Whether a token is accepted depends on numbers that an earlier round has looked at."""
    original = Rounds.keys

    def keys_of(self: Rounds, stream: Stream, offsets: Tensor, of: object = slice(None)) -> Keys:
        found = original(self, stream, offsets, of)  # type: ignore[arg-type]
        is_accept = stream is Stream.ACCEPT
        return replace(found, rounds=torch.zeros_like(found.rounds)) if is_accept else found

    patch.setattr(Rounds, "keys", keys_of)


@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize(
    "plant",
    [
        bonus_of_the_draft,
        shared_noise,
        untruncated_q,
        residual_is_the_target,
        residual_not_normalized,
        residual_argmax,
    ],
)
def test_the_suite_finds_a_planted_fault(
    plant: Plant, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = toy("plain")
    plant(monkeypatch, one)

    assert overall(one, run(one, rule, "serial")) > Z_OF_RATE


def test_every_two_of_rule_kind_and_sampling_meet() -> None:
    some, every = cells(is_whole=False), cells(is_whole=True)

    assert (len(some), len(every)) == (35, 140)
    for left, right in ((0, 1), (0, 2), (1, 2)):
        pairs = [{(cell[left], cell[right]) for cell in which} for which in (some, every)]
        assert pairs[0] == pairs[1]


def test_the_suite_finds_uniforms_that_do_not_know_the_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fault under block verification only: the ratio test looks at no number twice."""
    one = toy("plain")
    uniforms_by_position(monkeypatch, one)

    assert overall(one, run(one, "block", "serial")) > Z_OF_RATE
