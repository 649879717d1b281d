"""The same passes through several runners: are their logits the same?

Teacher-forced: the tokens are given, so that one wrong token does not change the next ones.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specgw.engine.model_runner import ModelRunner, SequenceChunk

Script = list[list[tuple[int, list[int]]]]
"""For each pass, the sequences that take part and their tokens."""

_FLOAT32_ERROR = 1e-3  # relative, of all logits of a kind of pass
_FLOAT32_GAP = 1e-3  # of logits, under which two tokens count as equally likely
_BFLOAT16_ERROR = 0.05
_BFLOAT16_GAP = 0.03  # times the largest logit: eight steps of bfloat16


@dataclass(frozen=True)
class Agreement:
    """How one kind of pass compares with the reference.

    `error` is relative: of the norm of all logits. `worst_gap` is how far, in logits of the
    reference, the worst of the tokens chosen lies below the reference's own.
    """

    kind: str
    num_rows: int
    error: float
    num_other_tokens: int
    worst_gap: float
    is_good: bool


def build_scripts(
    vocab_size: int, max_model_len: int, draft_tokens: int, num_sequences: int
) -> dict[str, Script]:
    """Returns passes that prefill, decode and verify, to be run in this order."""
    rng = random.Random(0)
    room = max_model_len - 8 * (draft_tokens + 1) - 16
    lengths = [min(room, 1 + rng.randrange(1, 400)) for _ in range(num_sequences)]

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    everyone = range(num_sequences)
    prefill: Script = [
        [(i, tokens(length - length // 3)) for i, length in enumerate(lengths)],
        [(i, tokens(length // 3)) for i, length in enumerate(lengths) if length // 3],
    ]
    decode: Script = [
        [(i, tokens(1)) for i in everyone[: rng.randint(1, num_sequences)]] for _ in range(16)
    ]
    verify: Script = [
        [(i, tokens(rng.randint(1, draft_tokens + 1))) for i in everyone] for _ in range(8)
    ]
    mixed: Script = [[(0, tokens(16)), *((i, tokens(1)) for i in everyone[1:])]]
    return {"prefill": prefill, "decode": decode, "verify": verify, "mixed": mixed}


def run_scripts(runner: ModelRunner, scripts: dict[str, Script]) -> dict[str, Tensor]:
    """Returns the logits of all rows of each kind of pass, float32 on the CPU."""
    sequences = [runner.kv_cache.new_sequence() for _ in range(1 + _last_sequence(scripts))]
    logits = {
        kind: torch.cat([
            runner.forward([SequenceChunk(sequences[i], ids, len(ids)) for i, ids in one])
            .float()
            .cpu()
            for one in script
        ])
        for kind, script in scripts.items()
    }  # fmt: skip
    for cache in sequences:
        cache.release()
    return logits


def compare(
    expected: dict[str, Tensor], found: dict[str, Tensor], dtype: torch.dtype
) -> list[Agreement]:
    """Compares with the reference, which ran in float32."""
    return [_compare(kind, logits, found[kind], dtype) for kind, logits in expected.items()]


def _compare(kind: str, expected: Tensor, found: Tensor, dtype: torch.dtype) -> Agreement:
    error = float((found - expected).norm() / expected.norm())
    theirs, ours = expected.argmax(1, keepdim=True), found.argmax(1, keepdim=True)
    gaps = expected.gather(1, theirs) - expected.gather(1, ours)
    is_exact = dtype == torch.float32
    limit = _FLOAT32_GAP if is_exact else _BFLOAT16_GAP * float(expected.abs().max())
    worst = float(gaps.max())
    return Agreement(
        kind,
        len(expected),
        error,
        int((theirs != ours).sum()),
        worst,
        error < (_FLOAT32_ERROR if is_exact else _BFLOAT16_ERROR) and worst <= limit,
    )


def _last_sequence(scripts: dict[str, Script]) -> int:
    return max(i for script in scripts.values() for one in script for i, _ in one)


def are_good(agreements: Sequence[Agreement]) -> bool:
    """Whether all kinds of passes agree."""
    return all(one.is_good for one in agreements)
