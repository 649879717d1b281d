"""Logits processors of the operator's own: the interface, and how the configured ones are loaded.

`specgw.verifier.logits_processors` names them, `package.module:Name`. `logits_processors.py` calls
them for every row.
"""

import importlib
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from specgw.errors import ConfigError


class CustomLogitsProcessor(Protocol):
    """Changes the logits of every request. Built once for each verifier process.

    Called for every row that is verified, with the draft tokens before the row as part of the
    output. It must be a function of its arguments alone: rows of rejected drafts are computed and
    forgotten, and a request that moves to another verifier is judged by that one's instance.
    """

    def __init__(self, vocab_size: int) -> None:
        """Gets ready for a model with that many logits."""

    def __call__(
        self,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        logits: Tensor,  # [vocab_size] float32, on the model's device
    ) -> Tensor:  # [vocab_size]
        """Returns the logits of the token that follows; may change `logits` and return it."""


def load_processors(names: Sequence[str], vocab_size: int) -> list[CustomLogitsProcessor]:
    """Imports and builds the processors named.

    Raises:
        ConfigError: with every name that cannot be loaded.
    """
    processors, problems = [], []
    for name in names:
        try:
            processors.append(_load(name)(vocab_size))
        except Exception as error:  # whatever the operator's module does
            problems.append(f"specgw.verifier.logits_processors: {name}: {error!r}")
    if problems:
        raise ConfigError(problems)
    return processors


def _load(name: str) -> type[CustomLogitsProcessor]:
    module, _, attribute = name.partition(":")
    loaded: type[CustomLogitsProcessor] = getattr(importlib.import_module(module), attribute)
    return loaded
