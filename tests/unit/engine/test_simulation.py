"""The simulated device: what it says depends on the context alone, how long it takes does not."""

import shutil
import time
from pathlib import Path

import pytest
import torch

from specgw.config import EngineArgs, parse_config
from specgw.engine.loading import draft_options, load_model, target_options
from specgw.engine.model_runner import ModelRunner, SequenceChunk
from specgw.model_files import resolve_model
from specgw.precise_timer import PreciseTimer
from tests.verifier_harness import GREEDY, InlineVerifier, plain_answers


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights."""
    path = tmp_path_factory.mktemp("weightless")
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        shutil.copy(resolve_model("tiny/target") / name, path)
    return path


def args(model_dir: Path, **simulation: float) -> EngineArgs:
    return parse_config({
        "model": str(model_dir),
        "speculative_config": {"model": str(model_dir), "num_speculative_tokens": 4},
        "specgw": {"simulation": {"verify_ms": 0, "draft_step_ms": 0, **simulation}},
    })  # fmt: skip


def next_token(runner: ModelRunner, context: list[int]) -> int:
    cache = runner.kv_cache.new_sequence()
    logits = runner.forward([SequenceChunk(cache, context, 1)])
    cache.release()
    return int(logits.argmax())


def test_it_says_what_it_is(model_dir: Path) -> None:
    description = load_model(target_options(args(model_dir))).description

    assert (description.device, description.is_simulated) == ("simulated", True)
    assert (description.name, description.vocab_size) == (str(model_dir), 2048)


def test_tokens_follow_from_the_whole_context_however_it_was_fed(model_dir: Path) -> None:
    runner = load_model(target_options(args(model_dir)))
    context = [(7 * i) % 2048 for i in range(60)]
    one, other = runner.kv_cache.new_sequence(), runner.kv_cache.new_sequence()

    whole = runner.forward([SequenceChunk(one, context, 60)]).argmax(-1).tolist()
    singles = [
        int(runner.forward([SequenceChunk(other, [token_id], 1)]).argmax()) for token_id in context
    ]

    assert whole == singles
    assert len(set(whole)) > 50
    assert next_token(runner, [1, *context[1:]]) != next_token(runner, context)


def test_only_the_chosen_token_has_a_chance(model_dir: Path) -> None:
    runner = load_model(target_options(args(model_dir)))
    for context in ([5, 6], [7, 8, 9]):
        cache = runner.kv_cache.new_sequence()
        logits = runner.forward([SequenceChunk(cache, context, 2)])

        assert torch.softmax(logits / 2, -1).max(-1).values.tolist() == pytest.approx([1, 1])


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
def test_drafts_agree_as_often_as_configured(model_dir: Path, rate: float) -> None:
    """Contexts are fixed; five standard deviations would be one false alarm in a million."""
    both = args(model_dir, acceptance_rate=rate)
    target, draft = load_model(target_options(both)), load_model(draft_options(both))
    contexts = [[i, 3 * i % 2048] for i in range(2000)]

    agreed = sum(next_token(target, one) == next_token(draft, one) for one in contexts)

    assert abs(agreed / 2000 - rate) <= 5 * (rate * (1 - rate) / 2000) ** 0.5


def test_speculation_on_it_is_lossless_and_accepted_as_configured(model_dir: Path) -> None:
    from proposer_svc.proposer import build_proposer
    from specgw.link import InProcessLink

    both = args(model_dir, acceptance_rate=0.8)
    runner = load_model(target_options(both))
    prompts = [[number, 2 * number] for number in range(1, 20)]
    expected = plain_answers(runner, prompts)
    verifier = InlineVerifier(runner, [InProcessLink(build_proposer(both))], max_draft_tokens=4)

    answers = verifier.generate(prompts, GREEDY)

    assert [answer.token_ids for answer in answers] == list(expected.values())
    stats = verifier.scheduler.snapshot.speculation
    first = stats.accepted_per_position[0] / stats.draft_count
    assert 0.65 < first < 0.95


def test_a_pass_takes_its_time_and_no_core(model_dir: Path) -> None:
    runner = load_model(target_options(args(model_dir, verify_ms=20, verify_row_ms=1)))
    cache = runner.kv_cache.new_sequence()
    wall, busy = time.perf_counter(), time.thread_time()

    for _ in range(5):
        runner.forward([SequenceChunk(cache, [1] * 10, 1)])

    wall, busy = time.perf_counter() - wall, time.thread_time() - busy
    assert wall >= 5 * 0.029
    assert busy < wall / 2


def test_a_timer_does_not_return_much_before_its_time() -> None:
    timer = PreciseTimer()
    for _ in range(20):
        deadline = time.perf_counter() + 0.002
        timer.wait_until(deadline)

        assert time.perf_counter() >= deadline - 0.001
