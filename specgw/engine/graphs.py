"""Forward passes of few shapes, recorded once and replayed: CUDA graphs for decoding and verifying.

A pass that decodes is hundreds of small kernels, which take longer to launch than to run. A graph
launches them at once, but reads and writes the same memory each time: inputs are copied into
buffers of its shape, padded, and the wanted logits are copied out. What is recorded, and how, is
told apart: a CPU takes `run_again` for a recording, and all the rest is the same code.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specgw.engine.attention import Batch
from specgw.engine.attention_kernels import PagedKernel, RowGroup
from specgw.engine.kv_cache import KVCache
from specgw.engine.model_runner import SequenceChunk
from specgw.engine.paged_attention import BatchGroup, PagedAttention
from specgw.engine.paged_inputs import (
    Shape,
    Upload,
    num_blocks,
    pad_inputs,
    padded_logit_rows,
)

logger = logging.getLogger(__name__)

Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes what to run, runs it at least once, and returns what does so again."""

_MAX_GRAPHS = 128  # bounds their memory; other shapes run without
_WARM_UPS = 2  # libraries allocate in the first pass, and choose algorithms


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """Which shapes are recorded.

    Attributes:
        max_sequences: Most sequences.
        max_rows_each: Most rows of a sequence: one more than draft tokens.
        max_rows: Most rows in all, padding included.
    """

    max_sequences: int
    max_rows_each: int
    max_rows: int

    @property
    def most_rows(self) -> int:
        """Rows of the largest shape, at most."""
        return min(self.max_rows, self.max_sequences * self.max_rows_each)

    def shapes(self, num_blocks: int) -> list[Shape]:
        """Returns all shapes for one number of blocks, the largest first."""
        shapes = [
            Shape(num_sequences, num_rows, num_blocks)
            for num_sequences in _sizes(self.max_sequences)
            for num_rows in _sizes(self.max_rows_each)
        ]
        return sorted((s for s in shapes if s.num_tokens <= self.max_rows), reverse=True)


class CudaRecorder:
    """Records CUDA graphs, all in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            return self._record(run)

    def _record(self, run: Callable[[], None]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            run()
        return graph.replay


def run_again(run: Callable[[], None]) -> Callable[[], None]:
    """Records nothing: replaying is running once more."""
    run()
    return run


class GraphedModel:
    """A model, for batches that fit a recorded shape."""

    def __init__(
        self,
        model: Callable[[Batch], Tensor],
        kv_cache: KVCache,
        kernel: PagedKernel,
        limits: GraphLimits,
        max_model_len: int,
        recorder: Recorder,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._kernel = kernel
        self._limits = limits
        self._max_blocks = -(-max_model_len // kv_cache.block_size)
        self._recorder = recorder
        self._device = kv_cache.layers[0].device
        self._upload = Upload(self._device)
        self._graphs: dict[Shape, _Graph] = {}
        self._logits: Tensor | None = None  # of all graphs: [most rows, vocab_size]
        self._is_full = False

    @property
    def num_graphs(self) -> int:
        """Shapes that are recorded."""
        return len(self._graphs)

    @torch.inference_mode()
    def record_all(self) -> None:
        """Records every shape, where that does not depend on how long contexts are."""
        if not self._kernel.is_bounded_by_lengths:
            return
        for shape in self._limits.shapes(self._max_blocks):
            if not self._is_full:
                self._run([], shape)

    def __call__(self, chunks: Sequence[SequenceChunk]) -> Tensor | None:
        """Runs a batch; None if it fits no shape: then nothing was run.

        The caller has reserved the rows, and is in inference mode.

        Returns:
            Logits in the order of the chunks, [sum of num_logits, vocab_size].
        """
        shape = self.shape_of(chunks)
        return None if shape is None else self._run(chunks, shape)

    def shape_of(self, chunks: Sequence[SequenceChunk]) -> Shape | None:
        """Returns the smallest shape that chunks fit; None if there is none."""
        limits = self._limits
        num_rows = max(len(chunk.token_ids) for chunk in chunks)
        if len(chunks) > limits.max_sequences or num_rows > limits.max_rows_each:
            return None
        width = self._max_blocks
        if not self._kernel.is_bounded_by_lengths:
            needed = max(num_blocks(chunk, self._kv_cache) for chunk in chunks)
            width = _fitting(needed, self._max_blocks)
        shape = Shape(
            _fitting(len(chunks), limits.max_sequences),
            _fitting(num_rows, limits.max_rows_each),
            width,
        )
        if shape.num_tokens > limits.max_rows or (self._is_full and shape not in self._graphs):
            return None
        return shape

    def _run(self, chunks: Sequence[SequenceChunk], shape: Shape) -> Tensor | None:
        graph = self._graphs.get(shape) or _Graph(shape, self._device)
        padded = pad_inputs(chunks, shape, self._kv_cache)
        wanted = padded_logit_rows(chunks, shape.num_rows)
        arrays = [padded.token_ids, padded.positions, padded.slots, padded.lengths, padded.tables]
        self._upload.into(graph.buffer, [*arrays, wanted])
        if graph.replay is not None:
            graph.replay()
        elif not self._record(graph):
            return None
        assert self._logits is not None
        return self._logits.index_select(0, graph.logit_rows[: len(wanted)])

    def _record(self, graph: "_Graph") -> bool:
        """Records a shape, whose inputs are in place, and runs it; returns whether it could."""

        def run() -> None:
            logits = self._model(self._batch(graph))
            if self._logits is None:
                self._logits = logits.new_empty(self._limits.most_rows, logits.shape[1])
            self._logits[: len(logits)].copy_(logits)

        try:
            graph.replay = self._recorder(run)
        except RuntimeError as error:  # out of memory is one too
            logger.warning(
                "a CUDA graph could not be recorded: such passes run without from now on",
                extra={"shape": graph.shape, "recorded": self.num_graphs, "detail": str(error)},
            )
            self._is_full = True
            return False
        graph.replay()
        self._graphs[graph.shape] = graph
        self._is_full = self.num_graphs >= _MAX_GRAPHS
        return True

    def _batch(self, graph: "_Graph") -> Batch:
        """Builds the batch anew for each run, so that all that follows from its inputs is too."""
        shape = graph.shape
        rows = RowGroup(graph.tables, graph.lengths, shape.num_rows)
        groups = [BatchGroup(0, shape.num_tokens, rows)]
        attention = PagedAttention(self._kv_cache, self._kernel, graph.slots, groups)
        return Batch(graph.token_ids, graph.positions, None, attention)


class _Graph:
    """The inputs of one shape, as views of one buffer, and its recording."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        self.replay: Callable[[], None] | None = None
        num_tokens, num_sequences = shape.num_tokens, shape.num_sequences
        sizes = [*3 * [num_tokens], num_sequences, num_sequences * shape.num_blocks, num_tokens]
        self.buffer = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        parts = torch.split(self.buffer, sizes)
        self.token_ids, self.positions, self.slots, self.lengths, tables, self.logit_rows = parts
        self.tables = tables.view(num_sequences, shape.num_blocks)


def _sizes(most: int) -> list[int]:
    """Returns the powers of two below a number, and the number."""
    return [*(1 << i for i in range((most - 1).bit_length())), most]


def _fitting(count: int, most: int) -> int:
    """Returns the first of `_sizes` that is not smaller."""
    return min(1 << (count - 1).bit_length(), most)
