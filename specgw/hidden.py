"""Hidden states of the target model on their way to a proposer that drafts from them. No torch.

For methods such as EAGLE-3, MTP or DFlash. A proposer says in its greeting what it needs; a
verifier that can then sends rows with each commit. `specgw/engine/hidden_rows.py` turns tensors
into payloads.
"""

from dataclasses import dataclass

from specgw.errors import InvalidRequest

LAST = -1
"""The layer that the LM head reads: after the last decoder layer and the final norm."""

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Element types on the wire, by torch's name."""

MAX_COMMIT_BYTES = 4 * 2**20
"""Most bytes of hidden states in one commit; of more rows, the newest are sent."""


@dataclass(frozen=True, slots=True)
class HiddenFormat:
    """Which hidden states a verifier can send, or a proposer needs.

    Attributes:
        layers: Decoder layers, whose rows follow one another in a payload's row; `LAST` for the
            last one.
        size: Elements of one layer's row.
        dtype: A verifier's own element type; the one that a proposer wants them in.

    Raises:
        InvalidRequest: naming the field, its value and the rule.
    """

    layers: tuple[int, ...]
    size: int
    dtype: str

    def __post_init__(self) -> None:
        layers = tuple(self.layers)
        object.__setattr__(self, "layers", layers)
        if not layers or len(set(layers)) < len(layers) or min(layers) < LAST:
            raise InvalidRequest("hidden.layers", layers, f"must be unlike numbers from {LAST} on")
        if self.size < 1:
            raise InvalidRequest("hidden.size", self.size, "must be at least 1")

    @property
    def row_size(self) -> int:
        """Elements of a payload's row."""
        return len(self.layers) * self.size


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Hidden states of the context's newest tokens but the last one, which has none yet.

    The last row is the one that the context's last token was drawn from. There are fewer rows than
    the context's tokens less one where the verifier has not computed them since it opened the
    session: rows that came out of its prefix cache, or of before it opened the session anew.

    Attributes:
        values: Elements in little-endian order, row by row.
        dtype: Their type.
        shape: [num_rows, row_size].

    Raises:
        InvalidRequest: naming the field, its value and the rule.
    """

    values: bytes
    dtype: str
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        size = DTYPE_BYTES.get(self.dtype)
        if size is None:
            rule = f"must be one of {', '.join(DTYPE_BYTES)}"
            raise InvalidRequest("hidden.dtype", self.dtype, rule)
        if min(self.shape) < 1:
            raise InvalidRequest("hidden.shape", self.shape, "must be at least [1, 1]")
        if len(self.values) != self.shape[0] * self.shape[1] * size:
            rule = f"must match {len(self.values)} bytes of {self.dtype}"
            raise InvalidRequest("hidden.shape", self.shape, rule)
        if len(self.values) > MAX_COMMIT_BYTES:
            rule = f"must be at most {MAX_COMMIT_BYTES} bytes"
            raise InvalidRequest("hidden.values", f"{len(self.values)} bytes", rule)

    def has_format(self, needed: HiddenFormat) -> bool:
        """Whether the rows are those that were asked for."""
        return (self.dtype, self.shape[1]) == (needed.dtype, needed.row_size)


def hidden_mismatches(offered: HiddenFormat | None, needed: HiddenFormat | None) -> list[str]:
    """Returns why a verifier cannot send what a proposer needs: one readable line for each."""
    if needed is None:
        return []
    if offered is None:
        return ["hidden states: the proposer drafts from those of the target, which are not sent"]
    mismatches = []
    if missing := sorted(set(needed.layers) - set(offered.layers)):
        mismatches.append(
            f"hidden states: the proposer needs those of layers {_listed(missing)}, the verifier "
            f"sends those of {_listed(offered.layers)}"
        )
    if needed.size != offered.size:
        mismatches.append(
            f"hidden states: the proposer needs rows of {needed.size}, the target has "
            f"{offered.size}"
        )
    if needed.dtype not in DTYPE_BYTES:
        mismatches.append(
            f"hidden states: the proposer needs {needed.dtype}, the verifier sends "
            f"{', '.join(DTYPE_BYTES)}"
        )
    return mismatches


def _listed(layers: "list[int] | tuple[int, ...]") -> str:
    return ", ".join("last" if layer == LAST else str(layer) for layer in layers)
