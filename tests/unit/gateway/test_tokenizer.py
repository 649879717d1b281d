import asyncio
from pathlib import Path

import pytest

from gateway.tokenizer import load_tokenizer
from specgw.errors import ConfigError, InvalidRequest
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
