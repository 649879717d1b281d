"""Doubles: small, exact stand-ins that implement the real interfaces."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import torch
from torch import Tensor

from specgw.engine.kv_cache import KVCache
from specgw.engine.model_runner import ModelRunner, SequenceChunk
from specgw.types import ModelDescription


class ToyRunner(ModelRunner):
    """A model whose next token follows from the last two: `toy_next`. Rows are real, weights none.

    It predicts from the rows in its KV cache, not from what the caller thinks it was fed, and it
    keeps each forward pass's row counts in `passes`. `fault` is called before each pass and may
    raise.
    """

    def __init__(
        self,
        vocab_size: int = 50,
        *,
        max_model_len: int = 512,
        kv_cache_tokens: int = 4096,
        vocab_fingerprint: str = "toy",
        poison: Iterable[int] = (),
        has_prefix_cache: bool = True,
    ) -> None:
        description = ModelDescription(
            "toy", "ToyForCausalLM", vocab_size, vocab_fingerprint, max_model_len, "float32", "cpu"
        )
        kv_cache = KVCache(
            *(1, 1, 1, kv_cache_tokens, torch.float32, torch.device("cpu")),
            has_prefix_cache=has_prefix_cache,
        )
        super().__init__(lambda batch: torch.empty(0), description, (1,), kv_cache)
        self.passes: list[list[int]] = []
        self.fault: Callable[[Sequence[SequenceChunk]], None] = lambda chunks: None
        self._poison = frozenset(poison)  # after these ids the logits are not numbers

    def forward(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        self.fault(chunks)
        lengths = [(chunk.cache, chunk.cache.length + len(chunk.token_ids)) for chunk in chunks]
        self.kv_cache.reserve(lengths)
        self.passes.append([len(chunk.token_ids) for chunk in chunks])
        rows: list[Tensor] = []
        for chunk in chunks:
            fed = self._feed(chunk)
            rows += [
                self._logits(fed[: len(fed) - back]) for back in reversed(range(chunk.num_logits))
            ]
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    def _feed(self, chunk: SequenceChunk) -> list[int]:
        """Stores token ids as rows and returns all rows of the sequence."""
        start, end = chunk.cache.length, chunk.cache.length + len(chunk.token_ids)
        assert end <= self.max_model_len
        assert all(0 <= token_id < self.vocab_size for token_id in chunk.token_ids)
        rows = self.kv_cache.layers[0][:, 0, 0]
        rows[chunk.cache.slot_ids(start, end)] = torch.tensor(chunk.token_ids, dtype=rows.dtype)
        chunk.cache.length = end
        return [int(row) for row in rows[chunk.cache.slot_ids(0, end)]]

    def _logits(self, context: Sequence[int]) -> Tensor:
        logits = torch.zeros(self.vocab_size)
        logits[toy_next(context, self.vocab_size)] = 1.0
        return logits * torch.nan if context[-1] in self._poison else logits


def toy_next(context: Sequence[int], vocab_size: int = 50) -> int:
    """Returns the toy model's next token."""
    before = context[-2] if len(context) > 1 else 0
    return (3 * before + 5 * context[-1] + 7) % vocab_size


def toy_continuation(context: Sequence[int], length: int, vocab_size: int = 50) -> list[int]:
    """Returns the toy model's next tokens."""
    tokens = list(context)
    for _ in range(length):
        tokens.append(toy_next(tokens, vocab_size))
    return tokens[len(context) :]


class InlineExecutor(Executor):
    """Does the work where it is submitted."""

    def submit(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> "Future[Any]":  # type: ignore[override]
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done
