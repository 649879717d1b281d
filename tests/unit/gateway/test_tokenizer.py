import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.tokenizer import load_tokenizer
from specgw.errors import ConfigError, InvalidRequest
from specgw.types import SamplingParams
from tests import tiny_tokenizers


async def test_a_model_without_chat_template_refuses_chats(tmp_path: Path) -> None:
    path = tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path, chat_template=None)
    tokenizer = await asyncio.to_thread(load_tokenizer, str(path))

    with pytest.raises(InvalidRequest, match="no chat template"):
        await tokenizer.render_chat([{"role": "user", "content": "x"}], {})


async def test_long_text_is_tokenized_as_short_text_is(tmp_path: Path) -> None:
    path = tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path)
    tokenizer = await asyncio.to_thread(load_tokenizer, str(path))

    assert await tokenizer.encode("dog " * 2000) == tokenizer.backend.encode("dog " * 2000).ids


def test_a_directory_without_tokenizer_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        load_tokenizer(str(tmp_path))


def test_bad_words_are_looked_for_alone_and_after_a_space() -> None:
    tokenizer = load_tokenizer("tiny/target")
    words = ("import", " self", "==", "xyzzy")

    params = tokenizer.with_bad_words(SamplingParams(bad_words=words))

    ids = [tokenizer.backend.encode(text).ids for text in ("import", " import", "self", " self")]
    assert all(len(one) == 1 for one in ids)
    forms = [list(form) for form in params.bad_words_token_ids]
    assert forms[:4] == ids
    for word in words[2:]:
        bare = tokenizer.backend.encode(word).ids
        assert bare in forms
        spaced = tokenizer.backend.encode(f" {word}").ids
        assert (spaced in forms) == (len(spaced) == len(bare) and spaced[0] != bare[0])


def test_a_bad_word_without_tokens_is_refused() -> None:
    tokenizer = load_tokenizer("tiny/target")

    with pytest.raises(InvalidRequest, match="bad_words: must have at least one token"):
        tokenizer.with_bad_words(SamplingParams(bad_words=("dog", "  ")))


@pytest.mark.slow
def test_a_program_without_models_never_loads_torch() -> None:
    program = (
        "import sys; from gateway.tokenizer import forgo_torch, load_tokenizer; forgo_torch();"
        "print(load_tokenizer('tiny/target').backend.encode('def').ids, sys.modules['torch'])"
    )

    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )

    expected = load_tokenizer("tiny/target").backend.encode("def").ids
    assert (ran.stdout, ran.stderr) == (f"{expected} None\n", "")
