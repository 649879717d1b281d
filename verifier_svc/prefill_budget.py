"""How many prompt rows a step takes beside sessions that decode, so that those hardly feel it.

Pure numbers; the caller measures. See Sarathi-Serve (Agrawal et al., 2024, arXiv:2403.02310): a
prefill in chunks costs running sessions a bounded delay in each step instead of a long stall.
"""

from verifier_svc.drafting import moving_average

_STRETCH = 3.0  # a round with prompt rows may take that many times one without
_MIN_ROWS = 16  # fewer cost nearly a step each, and tell nothing of what a row costs
_UNMEASURED_ROWS = 64


class PrefillBudget:
    """Follows what decoding steps, the waits for their blocks and prompt rows cost.

    A session's round is a step and the wait before it: where drafts make rounds longer, each is
    worth more tokens, and may bear more prompt rows. Else prompts would take the longer the better
    drafts are.

    Args:
        fixed_rows: The answer, if it is not to be measured.
    """

    def __init__(self, fixed_rows: int | None = None) -> None:
        self._fixed_rows = fixed_rows
        self._decode_s: float | None = None  # of a step without prompt rows
        self._wait_s: float | None = None  # for blocks, before any step
        self._row_s: float | None = None  # of one prompt row

    def observe(self, num_prompt_rows: int, seconds: float, wait_s: float) -> None:
        """Takes one step's figures, and how long it waited for blocks."""
        self._wait_s = moving_average(self._wait_s, wait_s)
        if not num_prompt_rows:
            self._decode_s = moving_average(self._decode_s, seconds)
        elif num_prompt_rows >= _MIN_ROWS:
            row_s = max(0.0, seconds - (self._decode_s or 0.0)) / num_prompt_rows
            self._row_s = moving_average(self._row_s, row_s)

    def rows(self, most: int) -> int:
        """Returns how many prompt rows the next step may take, of `most` that it has room for."""
        if self._fixed_rows is not None:
            return min(most, self._fixed_rows)
        if self._decode_s is None or self._row_s is None:
            return min(most, _UNMEASURED_ROWS)
        extra_s = (_STRETCH - 1) * (self._decode_s + (self._wait_s or 0.0))
        return most if extra_s >= most * self._row_s else max(_MIN_ROWS, int(extra_s / self._row_s))
