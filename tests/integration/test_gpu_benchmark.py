"""`benchmarks.gpu` as far as it goes without a GPU, and that it would notice what differs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from benchmarks.gpu import main
from benchmarks.gpu_passes import are_good, compare
from benchmarks.gpu_speed import weight_bytes
from specgw.model_files import resolve_model

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_the_gpus_code_agrees_with_the_cpus_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    arguments = ["--device", "cpu", "--model", "tiny/draft", "--copy-mib", "1", "--steps", "2"]

    result = CliRunner().invoke(main, [*arguments, "--batch", "2", "--out", str(out)])

    assert (result.exit_code, result.output.splitlines()[-1]) == (0, "everything agrees")
    [report] = json.loads(out.read_text())
    kinds = {(one["dtype"], one["how"].split(", ")[1][:6], one["kind"]) for one in report["checks"]}
    assert kinds == {
        (dtype, how, kind)
        for dtype in ("float32", "bfloat16")
        for how in ("eager", "graphs")
        for kind in ("prefill", "decode", "verify", "mixed")
    }
    assert {(one["batch"], one["rows_each"]) for one in report["steps"]} == {(2, 1), (2, 5)}


@pytest.mark.gpu
@needs_gpu
def test_the_gpu_agrees_with_the_cpu() -> None:
    result = CliRunner().invoke(main, ["--steps", "3", "--copy-mib", "64"])

    assert (result.exit_code, result.output.splitlines()[-1]) == (0, "everything agrees")


@needs_no_gpu
def test_without_a_gpu_it_says_so_and_fails() -> None:
    result = CliRunner().invoke(main, [])

    assert result.exit_code == 1
    assert result.output == f"Error: torch {torch.__version__} sees no GPU: nothing was checked\n"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("damage", ["noise", "row", "nan", "order"])
def test_logits_that_differ_are_noticed(dtype: torch.dtype, damage: str) -> None:
    generator = torch.Generator().manual_seed(0)
    expected = 5 * torch.randn(40, 100, generator=generator)
    found = expected.to(dtype).float().clone()
    assert are_good(compare({"decode": expected}, {"decode": found}, dtype))

    if damage == "noise":
        found += torch.randn(40, 100, generator=generator)
    elif damage == "row":
        found[7, expected[7].argmin()] = 30.0
    elif damage == "nan":
        found[7, 3] = torch.nan
    else:
        found[[3, 4]] = found[[4, 3]]

    assert not are_good(compare({"decode": expected}, {"decode": found}, dtype))


def test_the_weights_of_a_step_are_all_but_an_embedding_of_its_own() -> None:
    model_dir = resolve_model("tiny/draft")
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir)
    own = sum(one.numel() for one in model.parameters())
    if not model.config.tie_word_embeddings:
        own -= model.get_input_embeddings().weight.numel()

    assert weight_bytes(model_dir, torch.bfloat16) == 2 * own
