"""Runs a model on ragged batches of sequences over the block cache.

Where tokens become logits. Knows nothing of requests or speculation; the schedulers of
the verifier and the proposer call `forward`, one at a time, from one thread.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specgw.engine.attention import Batch, BatchAttention, CausalMasks, SequenceRows
from specgw.engine.kv_cache import KVCache, SequenceCache
from specgw.engine.sampling import argmax
from specgw.hidden import LAST, HiddenFormat
from specgw.types import ModelDescription


class SequenceChunk(NamedTuple):
    """One sequence's part of a batch: a chunk of its prompt, or rows to decode or verify."""

    cache: SequenceCache
    token_ids: Sequence[int]  # at least one; they continue at position `cache.length`
    num_logits: int  # logits are wanted for that many last rows


class ModelRunner:
    """A loaded model and its KV cache."""

    def __init__(
        self,
        model: Callable[[Batch], Tensor],
        description: ModelDescription,
        eos_token_ids: tuple[int, ...],
        kv_cache: KVCache,
        hidden_size: int | None = None,
    ) -> None:
        """Takes a model; with a `hidden_size` it fills `Batch.hidden` when asked to."""
        self.description = description
        self.eos_token_ids = eos_token_ids
        self.kv_cache = kv_cache
        self.vocab_size = description.vocab_size
        self.max_model_len = description.max_model_len
        self.device = kv_cache.layers[0].device
        self.hidden: HiddenFormat | None = None  # hidden states that it can give
        if hidden_size is not None:
            self.hidden = HiddenFormat((LAST,), hidden_size, description.dtype)
        self.model = model
        self._masks = CausalMasks(kv_cache.layers[0].dtype, self.device)

    @torch.inference_mode()
    def forward(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        """Appends the chunks' tokens to their sequences, each of which occurs once.

        Returns:
            Logits in the order of the chunks, [sum of num_logits, vocab_size], in the data type of
            the model.

        Raises:
            OutOfBlocks: and then nothing has changed.
        """
        return self._forward(chunks, None)

    @torch.inference_mode()
    def forward_with_hidden(self, chunks: Sequence[SequenceChunk]) -> tuple[Tensor, Tensor]:
        """Does what `forward` does, and returns the last hidden states of all rows as well.

        Returns:
            Logits, [sum of num_logits, vocab_size], and what the LM head reads of every row,
            [num_tokens, hidden_size].

        Raises:
            OutOfBlocks: and then nothing has changed.
        """
        hidden: list[Tensor] = []
        logits = self._forward(chunks, hidden)
        return logits, hidden[0]

    def argmax(self, logits: Tensor) -> Tensor:
        """Returns the first index of the largest of each row's logits, int64 [num_rows]."""
        return argmax(logits)

    def _forward(self, chunks: Sequence[SequenceChunk], hidden: list[Tensor] | None) -> Tensor:
        lengths = [(chunk.cache, chunk.cache.length + len(chunk.token_ids)) for chunk in chunks]
        assert max(length for _, length in lengths) <= self.max_model_len, "a sequence is too long"
        self.kv_cache.reserve(lengths)
        logits = self._run(chunks, hidden)
        for cache, length in lengths:
            cache.length = length
        return logits

    def _run(self, chunks: Sequence[SequenceChunk], hidden: list[Tensor] | None) -> Tensor:
        """Computes the logits of chunks whose rows are reserved. Their lengths are set later."""
        return self.model(self._batch(chunks, hidden))

    def _batch(self, chunks: Sequence[SequenceChunk], hidden: list[Tensor] | None) -> Batch:
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logit_rows: list[int] = []
        for chunk in chunks:
            start, end = chunk.cache.length, chunk.cache.length + len(chunk.token_ids)
            token_ids.extend(chunk.token_ids)
            positions.extend(range(start, end))
            slots.extend(chunk.cache.slot_ids(start, end))
            logit_rows.extend(range(len(token_ids) - chunk.num_logits, len(token_ids)))
        ids, at, into = torch.tensor((token_ids, positions, slots)).to(self.device).unbind()
        parts = [SequenceRows(chunk.cache, len(chunk.token_ids)) for chunk in chunks]
        rows = None
        if len(logit_rows) < len(token_ids):
            rows = torch.tensor(logit_rows, dtype=torch.int64, device=self.device)
        attention = BatchAttention(self.kv_cache, self._masks, at, into, parts)
        return Batch(ids, at, rows, attention, hidden)
