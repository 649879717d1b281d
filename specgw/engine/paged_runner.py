"""Runs a model on a GPU: attention by a kernel that reads blocks, decoding passes as CUDA graphs.

Device-neutral but for the recorder and the pinned memory, so that tests run all of it on a CPU.
"""

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from specgw.engine.attention import Batch
from specgw.engine.attention_kernels import PagedKernel, RowGroup
from specgw.engine.graphs import GraphedModel, GraphLimits, Recorder
from specgw.engine.kv_cache import KVCache
from specgw.engine.model_runner import ModelRunner, SequenceChunk
from specgw.engine.paged_attention import BatchGroup, Padding, PagedAttention
from specgw.engine.paged_inputs import (
    Integers,
    PaddedInputs,
    Shape,
    Upload,
    num_blocks,
    pad_inputs,
)
from specgw.types import ModelDescription


class PagedRunner(ModelRunner):
    """A loaded model whose attention reads block tables on the device.

    Without recorded graphs every pass runs as it comes. A pass with prompts does in any case.
    """

    def __init__(
        self,
        model: Callable[[Batch], Tensor],
        description: ModelDescription,
        eos_token_ids: tuple[int, ...],
        kv_cache: KVCache,
        kernel: PagedKernel,
        hidden_size: int | None = None,
    ) -> None:
        """Takes a pool that has a scratch block, of a size that the kernel reads."""
        assert kv_cache.block_size % kernel.block_size == 0, "the kernel wants other blocks"
        super().__init__(model, description, eos_token_ids, kv_cache, hidden_size)
        self.kernel = kernel
        self.graphs: GraphedModel | None = None
        self._upload = Upload(self.device)

    def record(self, limits: GraphLimits, recorder: Recorder) -> None:
        """Records the passes that decode; later ones of the same shapes are replayed."""
        self.graphs = GraphedModel(
            self.model, self.kv_cache, self.kernel, limits, self.max_model_len, recorder
        )
        self.graphs.record_all()

    def _run(self, chunks: Sequence[SequenceChunk], hidden: list[Tensor] | None) -> Tensor:
        if self.graphs is not None and hidden is None:
            logits = self.graphs(chunks)
            if logits is not None:
                return logits
        rows = _RaggedRows(chunks, self.kv_cache)
        *tensors, order, wanted = self._upload([*rows.arrays, rows.order, rows.logit_rows])
        token_ids, positions, slots, *groups = tensors
        attention = PagedAttention(self.kv_cache, self.kernel, slots, rows.groups(groups))
        logits = self.model(Batch(token_ids, positions, wanted, attention, hidden))
        if hidden is not None:
            hidden[:] = [states.index_select(0, order) for states in hidden]
        return logits


class _RaggedRows:
    """The rows of a batch, without padding, sequences of like numbers of rows side by side.

    Attributes:
        arrays: Token ids, positions and slots, then four for each group: lengths, tables, and both
            parts of the padding, which are empty where there is none.
        order: Where each row of the batch is among these.
        logit_rows: Which of these rows' logits are wanted, in the order of the batch.
    """

    def __init__(self, chunks: Sequence[SequenceChunk], pool: KVCache) -> None:
        self._num_rows: list[int] = []  # of each sequence, for each group
        self._ends = [0]
        self.arrays: list[Integers] = []
        inputs: list[PaddedInputs] = []
        starts = np.zeros(len(chunks), dtype=np.int64)
        for members in _alike(chunks):
            some = [chunks[i] for i in members]
            counts = np.array([len(chunk.token_ids) for chunk in some])
            starts[members] = self._ends[-1] + counts.cumsum() - counts
            self._ends.append(self._ends[-1] + int(counts.sum()))
            self._num_rows.append(int(counts.max()))
            width = max(num_blocks(chunk, pool) for chunk in some)
            padded = pad_inputs(some, Shape(len(some), self._num_rows[-1], width), pool)
            inputs.append(padded)
            self.arrays += [padded.lengths, padded.tables, *_padding(padded.is_real)]
        rows = [
            np.concatenate([values[one.is_real] for one, values in zip(inputs, parts, strict=True)])
            for parts in zip(*((i.token_ids, i.positions, i.slots) for i in inputs), strict=True)
        ]
        self.arrays = [*rows, *self.arrays]
        ends = starts + [len(chunk.token_ids) for chunk in chunks]
        spans = list(zip(starts, ends, chunks, strict=True))
        self.order = np.concatenate([np.arange(start, end) for start, end, _ in spans])
        self.logit_rows = np.concatenate(
            [np.arange(end - chunk.num_logits, end) for _, end, chunk in spans]
        )

    def groups(self, tensors: Sequence[Tensor]) -> list[BatchGroup]:
        """Returns the groups, given their arrays on the device."""
        groups = []
        for i, num_rows in enumerate(self._num_rows):
            lengths, tables, sources, targets = tensors[4 * i : 4 * i + 4]
            padding = Padding(sources, targets) if len(targets) else None
            rows = RowGroup(tables, lengths, num_rows)
            groups.append(BatchGroup(self._ends[i], self._ends[i + 1], rows, padding))
        return groups


def _alike(chunks: Sequence[SequenceChunk]) -> list[list[int]]:
    """Groups chunks whose numbers of rows have one power of two in common: at most half is padding.

    Returns:
        The indices of each group's chunks.
    """
    groups: dict[int, list[int]] = {}
    for i, chunk in enumerate(chunks):
        groups.setdefault((len(chunk.token_ids) - 1).bit_length(), []).append(i)
    return list(groups.values())


def _padding(is_real: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> tuple[Integers, Integers]:
    """Returns a group's `Padding` as arrays; empty if all rows are real."""
    none = np.zeros(0, dtype=np.int64)
    if is_real.all():
        return none, none
    targets = np.flatnonzero(is_real)
    return np.maximum(is_real.cumsum() - 1, 0), targets
