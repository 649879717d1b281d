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
        # Of steps without prompt rows, by the bits of the number of their rows.
        self._decode_s: dict[int, float] = {}
        self._wait_s: float | None = None  # for blocks, before any step
        self._row_s: float | None = None  # of one prompt row

    def observe(
        self, num_prompt_rows: int, num_decode_rows: int, seconds: float, wait_s: float
    ) -> None:
        """Takes one step's figures, and how long it waited for blocks."""
        self._wait_s = moving_average(self._wait_s, wait_s)
        if not num_prompt_rows:
            bits = num_decode_rows.bit_length()
            self._decode_s[bits] = moving_average(self._decode_s.get(bits), seconds)
        elif num_prompt_rows >= _MIN_ROWS:
            beside_s = self._decoding_s(num_decode_rows) if num_decode_rows else 0.0
            row_s = max(0.0, seconds - beside_s) / num_prompt_rows
            self._row_s = moving_average(self._row_s, row_s)

    def rows(self, most: int, num_decode_rows: int) -> int:
        """Returns how many prompt rows the next step may take, of `most` that it has room for.

        `num_decode_rows` are what it has besides, those of drafts among them.
        """
        if self._fixed_rows is not None:
            return min(most, self._fixed_rows)
        if not self._decode_s or self._row_s is None:
            return min(most, _UNMEASURED_ROWS)
        extra_s = (_STRETCH - 1) * (self._decoding_s(num_decode_rows) + (self._wait_s or 0.0))
        return most if extra_s >= most * self._row_s else max(_MIN_ROWS, int(extra_s / self._row_s))

    def _decoding_s(self, num_rows: int) -> float:
        """Returns the time of a step with so many rows, or the nearest number known."""
        if not self._decode_s:
            return 0.0
        bits = num_rows.bit_length()
        return self._decode_s[min(self._decode_s, key=lambda known: abs(known - bits))]
