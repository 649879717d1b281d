"""`python -m tools.pard_adapt` on micro models: it learns, resumes, and what it writes runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from specgw.llm import LLM
from specgw.types import SamplingParams
from tools.pard.adaptation import Lessons, adapt, load_draft
from tools.pard.layout import PardLayout, Places, pard_loss
from tools.pard.mask_token import add_mask_token, num_embeddings
from tools.pard.rollouts import as_written
from tools.pard_adapt import main
from tools.training import Schedule

pytestmark = pytest.mark.usefixtures("single_thread")

WORDS = [f"w{number}" for number in range(30)]
TEXT = " ".join(WORDS[3 * number % 29] for number in range(3000))


def save_model(path: Path, vocab_size: int, seed: int) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token=WORDS[0])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return save_model(tmp_path / "draft", len(WORDS), seed=0)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return save_model(tmp_path / "target", len(WORDS), seed=1)


def run(tmp_path: Path, draft: Path, out: str, *options: str) -> Result:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    arguments = {
        "--draft": draft,
        "--text": text,
        "--out": tmp_path / out,
        "--num-tokens": 3,
        "--steps": 4,
        "--batch-size": 4,
        "--micro-batch-size": 2,
        "--window": 24,
        "--num-rollouts": 8,
        "--prompt-length": 12,
        "--continuation-length": 16,
        "--num-held-out": 2,
        "--device": "cpu",
    }
    flags = [f"{name}={value}" for name, value in arguments.items()]
    result = CliRunner().invoke(main, [*flags, *options])
    assert result.exit_code == 0, result.output
    return result


def test_what_it_writes_drafts_in_specgw(tmp_path: Path, draft: Path, target: Path) -> None:
    result = run(tmp_path, draft, "pard", "--target", str(target))

    config = json.loads((tmp_path / "pard" / "config.json").read_text())
    drafting = {
        "model": str(tmp_path / "pard"),
        "parallel_drafting": True,
        "num_speculative_tokens": 3,
    }
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    [plain] = LLM(str(target)).generate([[1, 2, 3]], params)
    [drafted] = LLM(str(target), speculative_config=drafting).generate([[1, 2, 3]], params)

    assert "mask token 30: a new row of the embedding" in result.output
    assert "| parallel | 3 |" in result.output
    assert (config["pard_token"], config["pard_num_tokens"]) == (30, 3)
    assert config["vocab_size"] == 31
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafted.speculation.draft_count > 0


def test_a_run_in_two_parts_gives_the_same_weights(tmp_path: Path, draft: Path) -> None:
    run(tmp_path, draft, "whole")
    checkpoint = tmp_path / "whole.work" / "pard.pt"
    finished = checkpoint.read_bytes()

    run(tmp_path, draft, "again", "--work", str(tmp_path / "whole.work"))

    assert checkpoint.read_bytes() == finished  # nothing was left to do
    whole, again = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "again"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def lessons(steps: int) -> Lessons:
    return Lessons(
        Schedule(steps, muon_rate=5e-3, adam_rate=5e-3), window=24, batch_size=8, micro_batch_size=4
    )


def test_interrupted_training_resumes_where_it_was(
    tmp_path: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.training.SAVE_EVERY", 2)
    stream = torch.tensor([3 * number % 29 for number in range(33 * 8)])
    rollouts, places = as_written(stream.view(8, 33)), Places(29, num_tokens=3)
    whole, halves = load_draft(draft), load_draft(draft)
    losses = adapt(whole, rollouts, places, lessons(6), tmp_path / "whole.pt")
    checkpoint = tmp_path / "halves.pt"

    class Interrupted(Exception):
        pass

    real_batches = Lessons.batches

    def interrupt(self: Lessons, *arguments: object) -> object:
        if arguments[1] == 4:
            raise Interrupted
        return real_batches(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Lessons, "batches", interrupt)
    with pytest.raises(Interrupted):
        adapt(halves, rollouts, places, lessons(6), checkpoint)
    monkeypatch.setattr(Lessons, "batches", real_batches)
    resumed = load_draft(draft)
    rest = adapt(resumed, rollouts, places, lessons(6), checkpoint)

    assert rest == losses[4:]
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_masks_are_learnt(tmp_path: Path, draft: Path) -> None:
    stream = torch.tensor([3 * number % 29 for number in range(33 * 8)])
    rollouts, places = as_written(stream.view(8, 33)), Places(29, num_tokens=3)

    losses = adapt(load_draft(draft), rollouts, places, lessons(40), tmp_path / "pard.pt")

    assert losses[-1] < losses[0] / 2


def test_a_row_of_the_layout_sees_what_it_would_see_when_drafting(draft: Path) -> None:
    """The loss of one packed pass is that of every context with its masks, one by one."""
    places = Places(29, num_tokens=3, retention=1.0)
    model = load_draft(draft)
    rollouts = as_written(torch.tensor([[3 * number % 29 for number in range(13)]]))
    real = rollouts.token_ids
    layout = PardLayout(places, real.shape[1], torch.Generator().manual_seed(0))

    with torch.inference_mode():
        packed = model(
            input_ids=layout.token_ids(real),
            position_ids=layout.position[None],
            attention_mask=layout.sees[None, None],
        ).logits[0]
        for row, (anchor, depth) in enumerate(zip(layout.anchor, layout.depth, strict=True)):
            masks = torch.full((1, int(depth) - 1), places.mask_token_id)
            alone = model(input_ids=torch.cat((real[:, : anchor + 1], masks), 1)).logits[0, -1]
            torch.testing.assert_close(packed[row], alone, rtol=1e-4, atol=1e-4)
        seeds = torch.zeros(1, dtype=torch.long)
        loss = pard_loss(places, model, (real, rollouts.top_ids, rollouts.top_logprobs, seeds))

    assert set(layout.depth.tolist()) == {1, 2, 3}
    assert loss.isfinite()


def test_conditional_drop_keeps_the_masks_that_a_row_sees() -> None:
    layout = PardLayout(Places(29, num_tokens=4), 40, torch.Generator().manual_seed(0))

    kept = [set(layout.anchor[layout.depth == depth].tolist()) for depth in (1, 2, 3, 4)]

    assert kept[0] > kept[1] > kept[2] > kept[3]
    assert len(kept[3]) == int(36 * 0.7**3)


def test_where_the_mask_token_comes_from(tmp_path: Path, draft: Path) -> None:
    padded: Any = load_draft(save_model(tmp_path / "padded", 40, seed=0))
    before = padded.get_input_embeddings().weight[:30].mean(0)

    token_id, origin = add_mask_token(padded, len(WORDS))

    assert (token_id, origin, num_embeddings(padded)) == (30, "an unused row of the embedding", 40)
    torch.testing.assert_close(padded.get_input_embeddings().weight[30], before)
    padded.config.pard_token = 35
    assert add_mask_token(padded, len(WORDS)) == (35, "pard_token of config.json")
    assert add_mask_token(padded, len(WORDS), 7) == (7, "as asked for")
    with pytest.raises(ValueError, match="mask token 40: must be in"):
        add_mask_token(padded, len(WORDS), 40)
