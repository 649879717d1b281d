"""Turns text and chats into token ids of the target model. The only module that knows transformers.

Never runs code that comes with a checkpoint. Callers are `openai_api.py` and `service.py`.
"""

import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jinja2
from tokenizers import Tokenizer as Backend

from specgw.errors import ConfigError, InvalidRequest
from specgw.model_files import resolve_model
from specgw.types import SamplingParams
from specgw.vocab import vocab_fingerprint

_SHORT_TEXT = 2_000  # characters that are tokenized, in well under a millisecond, on the event loop


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads at once."""

    def __init__(self, tokenizer: Any, fingerprint: str) -> None:
        self._tokenizer = tokenizer
        self.fingerprint = fingerprint
        # transformers mutates its backend when it tokenizes, which is never asked of it here.
        self.backend: Backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token of the tokenizer; the model may have more."""
        token_id: int | None = self._tokenizer.eos_token_id
        return token_id

    @property
    def vocab_size(self) -> int:
        """Number of ids that have a text."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenizes; long text off the event loop."""
        if len(text) <= _SHORT_TEXT:
            return self._encode(text, add_special_tokens)
        return await asyncio.to_thread(self._encode, text, add_special_tokens)

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> str:
        """Applies the model's chat template.

        Args:
            messages: What was said, with `role` and text `content`.
            options: Variables of the template, such as `add_generation_prompt`.

        Raises:
            InvalidRequest: if the model has no template or the template refuses the messages.
        """
        if not self._tokenizer.chat_template:
            raise InvalidRequest(
                "messages",
                f"{len(messages)} messages",
                "cannot be used: the model has no chat template; send a prompt to /v1/completions",
            )
        try:
            text: str = await asyncio.to_thread(
                self._tokenizer.apply_chat_template, messages, tokenize=False, **options
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            rule = f"were refused by the chat template: {error}"
            raise InvalidRequest("messages", f"{len(messages)} messages", rule) from None
        return text

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of `token_ids`, special tokens included."""
        return self.backend.decode(token_ids, skip_special_tokens=False)

    def text_of(self, token_id: int) -> str:
        """Returns the text of one token alone."""
        return self.decode([token_id])

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the vocabulary's entry for each id; empty for an id without one."""
        return [self.backend.id_to_token(token_id) or "" for token_id in token_ids]

    def with_bad_words(self, params: SamplingParams) -> SamplingParams:
        """Returns the parameters with `bad_words` as token ids too, in the forms vLLM looks for.

        A word has one form at the beginning of a text, and one after a space if that begins with
        another token and is as long.

        Raises:
            InvalidRequest: if a word has no tokens, or if there are too many forms.
        """
        if not params.bad_words:
            return params
        forms: list[list[int]] = []
        for word in params.bad_words:
            bare = self._encode(word.lstrip(), add_special_tokens=False)
            if not bare:
                raise InvalidRequest("bad_words", word, "must have at least one token")
            spaced = self._encode(f" {word.lstrip()}", add_special_tokens=False)
            forms.append(bare)
            if len(spaced) == len(bare) and spaced[0] != bare[0]:
                forms.append(spaced)
        return replace(params, bad_words_token_ids=tuple(map(tuple, forms)))

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids


def forgo_torch() -> None:
    """Keeps transformers from importing torch, for programs that run no model: 230 MB, seconds.

    It would wherever torch is installed, though its tokenizers have no use for it.
    """
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # Python: cannot be imported
        logging.getLogger("transformers").addFilter(_is_not_about_torch)


def _is_not_about_torch(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("PyTorch was not found")


def load_tokenizer(model: str) -> Tokenizer:
    """Loads the tokenizer of a path, hub id or bundled model. Takes seconds.

    Raises:
        ConfigError: if there is none that the `tokenizers` library can run.
    """
    from transformers import AutoTokenizer  # slow to import, and nothing else here needs it

    path = resolve_model(model)
    fingerprint = vocab_fingerprint(path)  # first: what it takes for a moment is used again
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError([f"tokenizer: cannot be loaded from {path}: {error}"]) from None
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            [f"tokenizer: {path} has no tokenizer.json or a form that converts to it"]
        )
    return Tokenizer(tokenizer, fingerprint)
