"""Drafts from another vocabulary behind both links: lossless, and worth something.

The bundled target is byte-level BPE, the bundled foreign draft SentencePiece with a BOS; each
drafts for the other.
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config

from proposer_svc.foreign_vocabulary import SESSION_VOCABULARIES
from proposer_svc.proposer import ProposerCore, build_proposer
from specgw.config import parse_config
from specgw.engine.loading import ModelOptions, load_model
from specgw.engine.model_runner import ModelRunner, SequenceChunk
from specgw.link import InProcessLink
from specgw.types import SamplingParams, SpeculationStats, UndraftedReason
from specgw.vocab_mapping import VocabMapping, load_mapping
from tests.conformance.test_draft_model import served
from tests.running_services import running_verifier, speculation, token_ids, verifier_args
from tests.unit.engine.tiny_checkpoints import save_checkpoint
from tests.verifier_harness import GREEDY, InlineVerifier, plain_answers
from verifier_svc.acceptance import Acceptance

TINY = Path(__file__).parents[2] / "specgw" / "tiny_models"
TEXTS = [
    "def main() -> None:\n    parser = argparse.ArgumentParser()\n",
    "  two  spaces,\ttabs\r\nand 你好世界 😀 naïve ▁ '",
    "import os\nimport sys\n\n\nclass Session:\n    def __init__(self, name: str) -> None:\n",
    "x",
]
both_methods = pytest.mark.parametrize("method", ["token", "string"])
both_ways = pytest.mark.parametrize(
    ("target", "draft"), [("target", "foreign"), ("foreign", "target")]
)


class CountingRunner(ModelRunner):
    """Notes the rows of each pass."""

    @classmethod
    def wrap(cls, runner: ModelRunner) -> "CountingRunner":
        runner.__class__ = cls
        assert isinstance(runner, cls)
        runner.rows = []
        return runner

    rows: list[int]

    def forward(self, chunks: Sequence[SequenceChunk]) -> torch.Tensor:
        self.rows.append(sum(len(chunk.token_ids) for chunk in chunks))
        return super().forward(chunks)


@pytest.fixture(scope="module", params=["target", "foreign"])
def any_target(request: pytest.FixtureRequest, single_thread: None) -> ModelRunner:
    return load_target(request.param)


def load_target(name: str) -> ModelRunner:
    return load_model(ModelOptions(path_of(name), dtype="float32", kv_cache_tokens=8192))


def path_of(name: str) -> str:
    """Returns a model's name: a path as it is, or that of a bundled one."""
    return name if "/" in name else f"tiny/{name}"


def proposer(
    target: str, draft: str, method: str, k: int = 4, run_ahead: str = "off", **drafting: Any
) -> ProposerCore:
    return build_proposer(
        parse_config(
            {
                "model": path_of(target),
                "dtype": "float32",
                "speculative_config": {
                    "model": path_of(draft),
                    "num_speculative_tokens": k,
                    "use_heterogeneous_vocab": True,
                    "heterogeneous_vocab_method": method,
                    **drafting,
                },
                "specgw": {"proposer": {"kv_cache_tokens": 8192, "run_ahead": run_ahead}},
            }
        )
    )


def prompts(runner: ModelRunner) -> list[list[int]]:
    mapping = mapping_of(runner, runner)
    return [mapping.target.leading_ids + mapping.target.encode(t.encode()).ids for t in TEXTS]


def mapping_of(target: ModelRunner, draft: ModelRunner) -> VocabMapping:
    names = [TINY / one.description.name.removeprefix("tiny/") for one in (target, draft)]
    return load_mapping(names[0], target.vocab_size, names[1], draft.vocab_size)


def other(runner: ModelRunner) -> str:
    return "foreign" if runner.description.name == "tiny/target" else "target"


def name_of(runner: ModelRunner) -> str:
    return runner.description.name.removeprefix("tiny/")


def accepted_per_round(stats: Sequence[SpeculationStats | None]) -> float:
    rounds = [one for one in stats if one is not None]
    return sum(s.accepted_token_count for s in rounds) / sum(s.draft_count for s in rounds)


@both_methods
@pytest.mark.parametrize("num_draft_tokens", [1, 4, 8])
def test_greedy_output_is_the_targets_own(
    method: str, num_draft_tokens: int, any_target: ModelRunner
) -> None:
    answers = plain_answers(any_target, prompts(any_target))
    core = proposer(name_of(any_target), other(any_target), method, num_draft_tokens)
    verifier = InlineVerifier(any_target, [InProcessLink(core)], max_draft_tokens=num_draft_tokens)

    together = verifier.generate(prompts(any_target))
    alone = verifier.generate(prompts(any_target)[:1])

    assert [answer.token_ids for answer in together] == list(answers.values())
    assert alone[0].token_ids == together[0].token_ids
    assert accepted_per_round([answer.speculation for answer in together]) > 0.2
    assert core.load().kv_used_tokens == 0


@both_methods
async def test_greedy_output_is_the_targets_own_over_grpc(
    method: str, any_target: ModelRunner
) -> None:
    asked = prompts(any_target)
    answers = plain_answers(any_target, asked)
    core = proposer(name_of(any_target), other(any_target), method)

    async with served(core) as address:
        args = verifier_args([address], draft_model=f"tiny/{other(any_target)}")
        async with running_verifier(any_target, args) as verifier:
            await verifier.connected()
            outputs = await asyncio.gather(*(verifier.generate(one, GREEDY) for one in asked))

    assert [token_ids(one) for one in outputs] == list(answers.values())
    assert accepted_per_round([speculation(one) for one in outputs]) > 0.2


@both_methods
def test_a_parallel_draft_may_have_another_vocabulary(method: str, single_thread: None) -> None:
    runner = load_target("foreign")
    answers = plain_answers(runner, prompts(runner))
    core = proposer("foreign", "pard", method, parallel_drafting=True)
    verifier = InlineVerifier(runner, [InProcessLink(core)], max_draft_tokens=4)

    together = verifier.generate(prompts(runner))

    assert [answer.token_ids for answer in together] == list(answers.values())
    assert accepted_per_round([answer.speculation for answer in together]) > 0.2
    assert core.rounds.pass_count == core.rounds.round_count


@both_methods
@both_ways
def test_a_round_feeds_what_is_new_however_long_the_context(
    target: str, draft: str, method: str, single_thread: None
) -> None:
    runner = load_target(target)
    core = proposer(target, draft, method)
    counting = CountingRunner.wrap(core._drafter._runner)  # type: ignore[attr-defined]
    context = mapping_of(runner, runner).target.encode((TEXTS[0] * 9 + TEXTS[2]).encode()).ids
    verifier = InlineVerifier(runner, [InProcessLink(core)], max_draft_tokens=4)

    [answer] = verifier.generate([context], SamplingParams(temperature=0, max_tokens=64))

    assert answer.speculation is not None
    first_pass_of_rounds = [rows for rows in counting.rows if rows > 1]
    assert max(counting.rows) > 150  # the prefill
    assert sum(first_pass_of_rounds) - max(counting.rows) < 6 * answer.speculation.draft_count


@both_methods
def test_no_id_that_means_nothing_is_drafted(method: str) -> None:
    runner = load_target("target")
    mapping = mapping_of(runner, load_target("foreign"))
    vocabulary = SESSION_VOCABULARIES[method](mapping)
    means_text = {*mapping.draft.token_bytes, *mapping.markers.values()}

    choices = vocabulary.choices(torch.zeros(1, 1792))[0].isfinite().nonzero().squeeze(1)

    drafted = {vocabulary.draft_token_id(choice) for choice in choices.tolist()}
    assert drafted <= means_text < {*range(1792)}
    assert len(drafted) == (mapping.coverage.num_common if method == "token" else len(means_text))


@both_methods
@both_ways
def test_a_draft_with_learned_positions_takes_contexts_of_another_length(
    target: str, draft: str, method: str, tmp_path: Path, single_thread: None
) -> None:
    config = GPT2Config(vocab_size=2048, n_positions=96, n_embd=32, n_layer=2, n_head=4)
    directory = save_checkpoint(config, tmp_path / "gpt2")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((TINY / draft / name).read_bytes())
    runner = load_target(target)
    core = proposer(target, str(directory), method)
    asked = [*prompts(runner), prompts(runner)[0] * 4]
    answers = plain_answers(runner, asked)

    together = InlineVerifier(runner, [InProcessLink(core)]).generate(asked)

    assert [answer.token_ids for answer in together] == list(answers.values())
    assert all(one.speculation and one.speculation.draft_count for one in together[:-1])
    assert together[-1].speculation is not None
    assert UndraftedReason.CONTEXT_LIMIT in together[-1].speculation.undrafted


@pytest.mark.parametrize(("target", "draft"), [("target", "draft"), ("target", "pard")])
def test_the_same_tokens_take_the_plain_path(target: str, draft: str) -> None:
    core = proposer(target, draft, "auto")

    assert core.offer.vocab_mapping is None


def test_the_mapping_is_told_in_the_handshake() -> None:
    runner = load_target("target")
    core = proposer("target", "foreign", "token")
    mapping = mapping_of(runner, load_target("foreign"))

    told = core.offer.vocab_mapping

    assert told is not None
    assert (told.method, told.fingerprint) == ("token", mapping.fingerprint)
    assert told.target_coverage == mapping.coverage.of_target > 0.5
    assert told.draft_coverage == mapping.coverage.of_draft > 0.5


SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("method", ["token", "string", "auto"])
def test_coupled_drafts_leave_the_sampled_text_unchanged(
    method: str, any_target: ModelRunner
) -> None:
    asked = prompts(any_target)
    answers = plain_answers(any_target, asked, SAMPLED)
    core = proposer(name_of(any_target), other(any_target), method, draft_sample_method="coupled")

    together = InlineVerifier(any_target, [InProcessLink(core)]).generate(asked, SAMPLED)

    assert [answer.token_ids for answer in together] == list(answers.values())
    assert accepted_per_round([answer.speculation for answer in together]) > 0.1


def test_the_same_text_by_the_same_noise_is_accepted_whatever_its_ids(
    tmp_path: Path, single_thread: None
) -> None:
    """The noise is that of the target's ids: a twin under other ids agrees.

    Not always: what is sampled is not always what a tokenizer makes of its text.
    """
    runner = load_target("target")
    twin = permuted_twin(tmp_path / "twin", "target")
    core = proposer("target", str(twin), "token", draft_sample_method="coupled")
    asked = prompts(runner)[:1]

    [answer] = InlineVerifier(runner, [InProcessLink(core)]).generate(asked, SAMPLED)

    assert answer.token_ids == plain_answers(runner, asked, SAMPLED)[tuple(asked[0])]
    assert answer.speculation is not None
    assert answer.speculation.accepted_token_count > 0.6 * answer.speculation.draft_token_count


@pytest.mark.parametrize("method", ["token", "auto"])
def test_drafts_drawn_from_a_law_carry_it_in_the_targets_ids(
    method: str, tmp_path: Path, single_thread: None
) -> None:
    """A twin under other ids has the target's law, so nearly all that it draws is accepted."""
    runner = load_target("target")
    twin = permuted_twin(tmp_path / "twin", "target")
    core = proposer("target", str(twin), method, draft_sample_method="probabilistic")
    verifier = InlineVerifier(
        runner, [InProcessLink(core)], acceptance=Acceptance(uses_draft_probs=True)
    )

    [answer] = verifier.generate(prompts(runner)[:1], SAMPLED)

    assert answer.speculation is not None
    assert answer.speculation.accepted_token_count > 0.6 * answer.speculation.draft_token_count
    assert core.offer.vocab_mapping is not None
    assert core.offer.vocab_mapping.method == "token"


def permuted_twin(folder: Path, name: str) -> Path:
    """Saves a bundled model whose tokens have other ids: the rows of its embedding move along."""
    folder.mkdir()
    for file in (TINY / name).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    spec = json.loads((folder / "tokenizer.json").read_text())
    vocab = spec["model"]["vocab"]
    fixed = {added["id"] for added in spec["added_tokens"]}
    movable = [i for i in range(len(vocab)) if i not in fixed]
    new_id = dict(zip(movable, movable[1:] + movable[:1], strict=True))
    spec["model"]["vocab"] = {token: new_id.get(i, i) for token, i in vocab.items()}
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    weights = load_file(folder / "model.safetensors")
    old_ids = sorted(range(len(vocab)), key=lambda i: new_id.get(i, i))
    moved = {
        key: tensor[old_ids] if "embed_tokens" in key or "lm_head" in key else tensor
        for key, tensor in weights.items()
    }
    save_file(moved, folder / "model.safetensors", {"format": "pt"})
    return folder
