"""One session's hidden states of the target, from the pass that made them to the next commit."""

import torch
from torch import Tensor

from specgw.hidden import MAX_COMMIT_BYTES, HiddenFormat, HiddenStates


class HiddenRows:
    """Rows of consecutive positions that a proposer has not been sent, as many as one commit holds.

    Newer ones take the place of older ones.
    """

    def __init__(self) -> None:
        self._parts: list[Tensor] = []  # each [num_rows, hidden_size]
        self._num_rows = 0
        self._end = 0  # position after the last row

    def append(self, first: int, rows: Tensor) -> None:
        """Takes the rows of positions from `first` on.

        Positions that it has had are skipped, as after a preemption. After a gap, as a prefix cache
        leaves one, it begins anew.

        Args:
            first: Position of the first row.
            rows: [num_rows, hidden_size].
        """
        if first > self._end:
            self.clear()
            self._end = first
        rows = rows[self._end - first :]
        if len(rows):
            self._parts.append(rows.clone())  # a view would keep the whole batch
            self._num_rows += len(rows)
            self._end += len(rows)
            self._drop_oldest(MAX_COMMIT_BYTES // (rows.shape[1] * rows.element_size()))

    def take(self, wanted: HiddenFormat) -> HiddenStates | None:
        """Returns the rows and forgets them; None if there are none."""
        if not self._parts:
            return None
        dtype = getattr(torch, wanted.dtype)
        rows = torch.cat(self._parts).to(dtype)  # [num_rows, hidden_size]
        rows = rows[-(MAX_COMMIT_BYTES // (rows.shape[1] * rows.element_size())) :].cpu()
        self._parts, self._num_rows = [], 0
        values = rows.contiguous().view(torch.uint8).numpy().tobytes()
        return HiddenStates(values, wanted.dtype, (rows.shape[0], rows.shape[1]))

    def clear(self) -> None:
        """Forgets the rows and their place."""
        self._parts, self._num_rows, self._end = [], 0, 0

    def _drop_oldest(self, max_rows: int) -> None:
        while self._num_rows - len(self._parts[0]) >= max_rows:
            self._num_rows -= len(self._parts.pop(0))


def to_tensor(states: HiddenStates) -> Tensor:
    """Returns a payload's rows: [num_rows, row_size], in its data type."""
    data = torch.frombuffer(bytearray(states.values), dtype=getattr(torch, states.dtype))
    return data.view(states.shape)
