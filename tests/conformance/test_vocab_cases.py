"""What users of other servers met with vocabularies that differ: cases V1 to V11, as they go here.

V6, V4 and V9 are in `test_heterogeneous_vocab.py` too, V10 among the scripts of
`test_lossless_greedy.py`. The numbers are those of the project's list of public bug reports.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from proposer_svc.foreign_vocabulary import SESSION_VOCABULARIES
from proposer_svc.proposer import ProposerCore
from proposer_svc.session_table import Session
from specgw.check import Report, check
from specgw.check_report import as_text
from specgw.engine.model_runner import ModelRunner, SequenceChunk
from specgw.errors import IncompatibleModels
from specgw.handshake import build_hello
from specgw.link import InProcessLink
from specgw.types import DraftBlock, SamplingParams, SpeculationStats, UndraftedReason
from tests.conformance.test_heterogeneous_vocab import (
    TEXTS,
    TINY,
    both_methods,
    load_target,
    mapping_of,
    prompts,
    proposer,
)
from tests.running_services import verifier_args
from tests.verifier_harness import Answer, InlineVerifier, plain_answers

pytestmark = pytest.mark.usefixtures("single_thread")
LONG = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


class ConsumingRunner(ModelRunner):
    """Keeps the ids whose rows one session has now."""

    consumed: list[int]

    @classmethod
    def of(cls, core: ProposerCore) -> "ConsumingRunner":
        runner: ModelRunner = core._drafter._runner  # type: ignore[attr-defined]
        runner.__class__ = cls
        assert isinstance(runner, cls)
        runner.consumed = []
        return runner

    def forward(self, chunks: Sequence[SequenceChunk]) -> torch.Tensor:
        (chunk,) = chunks
        self.consumed[chunk.cache.length :] = chunk.token_ids
        return super().forward(chunks)


def draft_variant(folder: Path, rename: Callable[[dict[str, int]], dict[str, int]]) -> str:
    """Saves `tiny/draft` with other tokens under its ids."""
    folder.mkdir()
    for file in (TINY / "draft").iterdir():
        if file.name != "tokenizer.json":
            (folder / file.name).symlink_to(file)
    spec = json.loads((TINY / "draft" / "tokenizer.json").read_text())
    spec["model"]["vocab"] = vocab = rename(spec["model"]["vocab"])
    spec["model"]["merges"] = [
        (one, other)
        for one, other in spec["model"]["merges"]
        if {one, other, one + other} <= vocab.keys()
    ]
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return str(folder)


def padded_variant(folder: Path, name: str, vocab_size: int) -> str:
    """Saves a bundled model with more rows in its embedding: a draft's would win if they counted.

    A target's are its own business: here they never win.
    """
    fill = 0.0 if name == "target" else 9.0
    folder.mkdir()
    for file in (TINY / name).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    for key, tensor in weights.items():
        if "embed_tokens" in key or "lm_head" in key:
            shape = vocab_size - len(tensor), tensor.shape[1]
            more = torch.full(shape, fill, dtype=tensor.dtype)
            weights[key] = torch.cat([tensor, more])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size}))
    return str(folder)


def swap(one: int, other: int) -> Callable[[dict[str, int]], dict[str, int]]:
    def rename(vocab: dict[str, int]) -> dict[str, int]:
        swapped = {one: other, other: one}
        return {token: swapped.get(i, i) for token, i in vocab.items()}

    return rename


def answer(runner: ModelRunner, core: ProposerCore, context: list[int]) -> Answer:
    [answer] = InlineVerifier(runner, [InProcessLink(core)]).generate([context], LONG)
    return answer


def plain(runner: ModelRunner, context: list[int]) -> list[int]:
    return plain_answers(runner, [context], LONG)[tuple(context)]


def drafted_ids(core: ProposerCore, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Returns a set that every id gets into that the proposer sends."""
    sent: set[int] = set()
    step = core.step

    def noting() -> list[tuple[str, DraftBlock]]:
        blocks = step()
        sent.update(i for _, block in blocks for i in block.token_ids)
        return blocks

    monkeypatch.setattr(core, "step", noting)
    return sent


def stats(one: Answer) -> SpeculationStats:
    assert one.speculation is not None
    return one.speculation


def raw_config(draft: str, **drafting: Any) -> dict[str, Any]:
    drafting = {"model": draft, "num_speculative_tokens": 4, **drafting}
    return {"model": "tiny/target", "dtype": "float32", "speculative_config": drafting}


@pytest.mark.parametrize("use_heterogeneous_vocab", [False, True])
@pytest.mark.parametrize(("target_size", "draft_size"), [(2048, 2304), (2176, 2304), (2304, 2048)])
def test_v1_padding_of_either_embedding_changes_nothing(
    target_size: int, draft_size: int, use_heterogeneous_vocab: bool, tmp_path: Path
) -> None:
    unpadded_target = load_target("target")
    context = prompts(unpadded_target)[0]
    target_name, draft_name = (
        name if size == 2048 else padded_variant(tmp_path / name, name, size)
        for name, size in (("target", target_size), ("draft", draft_size))
    )
    target = load_target(target_name)
    unpadded = answer(unpadded_target, proposer("target", "draft", "auto"), context)
    core = proposer(
        target_name, draft_name, "auto", use_heterogeneous_vocab=use_heterogeneous_vocab
    )

    padded = answer(target, core, context)

    assert core.offer.vocab_mapping is None
    assert padded.token_ids == unpadded.token_ids
    assert stats(padded).accepted_per_position == stats(unpadded).accepted_per_position


def test_v2_other_ids_of_the_same_tokens_are_refused_or_mapped(tmp_path: Path) -> None:
    draft = draft_variant(tmp_path / "draft", swap(300, 301))
    target = load_target("target")
    core = proposer("target", draft, "auto", use_heterogeneous_vocab=False)
    hello = build_hello("v", target.description, verifier_args([], draft_model=draft))

    [problem] = check(raw_config(draft)).problems
    with pytest.raises(IncompatibleModels, match="vocabulary"):
        core.connect(hello)

    assert "with other tokens under 2 ids: id 300 is" in problem
    assert "use_heterogeneous_vocab allows it" in problem
    mapped = answer(target, proposer("target", draft, "token"), prompts(target)[0])
    assert mapped.token_ids == plain(target, prompts(target)[0])
    assert stats(mapped).accepted_token_count > 0


@both_methods
def test_v3_one_odd_token_is_kept_out_of_drafts(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_target("target")
    context = prompts(target)[0]
    newline = mapping_of(target, target).target.encode(b"\n").ids[0]

    def rename(vocab: dict[str, int]) -> dict[str, int]:
        return {("Ŋodd" if i == newline else token): i for token, i in vocab.items()}

    core = proposer("target", draft_variant(tmp_path / "draft", rename), method)
    sent = drafted_ids(core, monkeypatch)

    found = answer(target, core, context)

    assert found.token_ids == plain(target, context)
    assert stats(found).accepted_token_count > 0
    assert newline in found.token_ids
    assert method == "string" or newline not in sent
    assert len(sent) > 10


def test_v3_a_pair_that_differs_in_half_is_refused_with_the_count(tmp_path: Path) -> None:
    def rename(vocab: dict[str, int]) -> dict[str, int]:
        return {(f"{token}Ŋ" if i >= 1024 else token): i for token, i in vocab.items()}

    [problem] = check(raw_config(draft_variant(tmp_path / "draft", rename))).problems

    assert "with other tokens under 1024 ids" in problem


def test_v4_a_pair_that_does_not_work_together_is_served_without_drafts() -> None:
    """SentencePiece target, byte-level draft; mapped, they work: `test_heterogeneous_vocab.py`."""
    target = load_target("foreign")
    core = proposer("foreign", "draft", "auto", use_heterogeneous_vocab=False)

    found = answer(target, core, prompts(target)[0])

    assert found.token_ids == plain(target, prompts(target)[0])
    assert stats(found).draft_count == 0
    assert stats(found).undrafted[UndraftedReason.UNAVAILABLE] > 60


def test_v5_two_identical_tokenizers_behave_as_without_the_key() -> None:
    target = load_target("target")
    context = prompts(target)[0]

    mapped = answer(target, proposer("target", "draft", "auto"), context)
    unmapped = answer(
        target, proposer("target", "draft", "auto", use_heterogeneous_vocab=False), context
    )

    assert (mapped.token_ids, mapped.blocks) == (unmapped.token_ids, unmapped.blocks)


@both_methods
def test_v7_the_draft_consumes_the_text_byte_for_byte_after_one_bos(method: str) -> None:
    target = load_target("target")
    core = proposer("target", "foreign", method, k=2)
    draft = ConsumingRunner.of(core)
    mapping = mapping_of(target, load_target("foreign"))
    text = "  two  spaces,\ttabs\n\n and\r\n  naïve 你好\n"
    context = mapping.target.encode(text.encode()).ids

    found = answer(target, core, context)

    assert stats(found).draft_count >= 20
    bos = mapping.draft.leading_ids[0]
    assert [i for i, token in enumerate(draft.consumed) if token == bos] == [0]
    consumed = mapping.draft.spell(draft.consumed)
    whole = mapping.target.spell([*context, *found.token_ids])
    assert len(consumed) > len(text.encode()) + 20
    # The last rows may be those of drafts that were not accepted.
    assert consumed.startswith(whole[: len(consumed) - 40])


@both_methods
def test_v8_text_that_only_the_target_has_tokens_for_is_retokenized(method: str) -> None:
    target = load_target("foreign")
    core = proposer("foreign", "target", method)
    draft = ConsumingRunner.of(core)
    mapping = mapping_of(target, load_target("target"))
    text = "你好世界 😀 ▁ привет \x07 ☃ naïve".encode() + TEXTS[0].encode()
    context = [*mapping.target.leading_ids, *mapping.target.encode(text).ids]

    [found] = InlineVerifier(target, [InProcessLink(core)]).generate(
        [context], SamplingParams(temperature=0, max_tokens=4)
    )

    assert stats(found).draft_count > 0
    native = mapping.draft.encode(text).ids
    assert draft.consumed[: len(native) - 4] == native[:-4]
    assert not mapping.draft.special_ids & set(draft.consumed)


@both_methods
def test_v10_a_drafted_id_is_the_targets_or_is_not_sent(method: str) -> None:
    target, draft = load_target("target"), load_target("foreign")
    mapping = mapping_of(target, draft)
    vocabulary = SESSION_VOCABULARIES[method](mapping)
    context = vocabulary.open_context(Session("v", 1, prompts(target)[0], target.vocab_size))
    choices = vocabulary.choices(torch.zeros(1, draft.vocab_size))

    for choice in choices[0].isfinite().nonzero().squeeze(1).tolist():
        token_id = vocabulary.draft_token_id(choice)
        assert method == "string" or list(context.to_target([token_id], 4)) == [choice]
        for sent in context.to_target([token_id], 4):
            assert 0 <= sent < target.vocab_size
            assert sent in mapping.target.token_bytes or sent in mapping.markers


def test_v11_a_verdict_is_that_of_the_files_as_they_are(tmp_path: Path) -> None:
    """Five drafts are asked about, one of them changes, and all are asked about again."""
    drafts = [
        draft_variant(tmp_path / "draft", lambda vocab: vocab),
        draft_variant(tmp_path / "swapped", swap(300, 301)),
        draft_variant(tmp_path / "other", lambda v: {f"{t}Ŋ": i for t, i in v.items()}),
        "tiny/foreign",
        "tiny/draft",
    ]

    def ask() -> list[Report]:
        drafting = {"use_heterogeneous_vocab": True, "heterogeneous_vocab_method": "token"}
        return [check(raw_config(draft, **drafting)) for draft in drafts]

    before = ask()
    other = Path(drafts[2]) / "tokenizer.json"
    (Path(drafts[0]) / "tokenizer.json").write_text(other.read_text())
    after = ask()

    assert [bool(one.problems) for one in before] == [False, False, True, False, False]
    assert [bool(one.problems) for one in after] == [True, False, True, False, False]
    assert list(map(as_text, after[1:])) == list(map(as_text, before[1:]))
    assert "same: 2048 ids of the target" in as_text(before[0])
    assert "foreign: 2048 ids of the target" in as_text(after[0])
    assert "sessions are drafted for by token" in as_text(after[1])
    for report in (before[1], *before[2:4], after[0]):
        assert report.coverage is not None
        assert f"{report.coverage.num_common} tokens stand for the same" in as_text(report)
    assert after[0].coverage is not None
    assert any(str(after[0].coverage.num_common) in problem for problem in after[0].problems)
