"""A device that is not there: forward passes take a configured time and need no weights.

For loading the scheduler, the wire and the gateway with far more than this machine could compute.
What it answers is invented, and a function of the context alone: so that losing, mixing up or
changing a token shows. It says everywhere what it is: its device is `simulated`.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specgw.engine.kv_cache import KVCache
from specgw.engine.model_runner import ModelRunner, SequenceChunk
from specgw.precise_timer import PreciseTimer
from specgw.types import SIMULATED_DEVICE, ModelDescription

logger = logging.getLogger(__name__)

_STATE_BITS = 63
_STATE_MASK = (1 << _STATE_BITS) - 1
_MULTIPLIER = 6364136223846793005  # Knuth's, of MMIX
_INCREMENT = 1442695040888963407
_CERTAIN = 100.0  # a logit beside which zeros have no chance at any temperature


@dataclass(frozen=True, slots=True)
class SimulatedDevice:
    """What a model costs there, and how often it says the same as the target.

    Attributes:
        step_s: Time of a forward pass without rows.
        row_s: What each row adds.
        agreement: Probability that its token is the target's; 1 for the target itself.
    """

    step_s: float
    row_s: float = 0.0
    agreement: float = 1.0


class SimulatedRunner(ModelRunner):
    """Stands in for a model. A cache row holds the state that all tokens up to it have led to.

    The token after a context follows from its last state, and so does whether a draft model errs.

    Args:
        device: What it simulates.
        description: Of the model that it stands for; its device must be `simulated`.
        token_ids: Tokens that it chooses from.
        eos_token_ids: As of the model.
        kv_cache: With a layer of int64, one KV head and one dimension.
    """

    def __init__(
        self,
        device: SimulatedDevice,
        description: ModelDescription,
        token_ids: Sequence[int],
        eos_token_ids: tuple[int, ...],
        kv_cache: KVCache,
    ) -> None:
        assert description.device == SIMULATED_DEVICE
        super().__init__(_no_model, description, eos_token_ids, kv_cache)
        self._simulated = device
        self._token_ids = token_ids
        self._states = kv_cache.layers[0][:, 0, 0].numpy()  # [num_slots]
        self._timer = PreciseTimer()
        self._logits = torch.zeros(0, description.vocab_size)
        self._chosen: list[int] = []
        logger.warning("SIMULATION: no model runs, tokens are invented", extra={"device": device})

    def forward(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        began = time.perf_counter()
        self.kv_cache.reserve([
            (chunk.cache, chunk.cache.length + len(chunk.token_ids)) for chunk in chunks
        ])  # fmt: skip
        chosen: list[int] = []
        for chunk in chunks:
            chosen += [self._next(state) for state in self._feed(chunk)]
        logits = self._one_hot(chosen)
        num_rows = sum(len(chunk.token_ids) for chunk in chunks)
        self._timer.wait_until(began + self._simulated.step_s + num_rows * self._simulated.row_s)
        return logits

    def argmax(self, logits: Tensor) -> Tensor:
        """Returns what it has chosen, if it is asked for its last logits.

        A device finds a few largest logits in microseconds; this machine would take longer than for
        all the rest of a step.
        """
        if logits.data_ptr() == self._logits.data_ptr() and len(logits) == len(self._chosen):
            return torch.tensor(self._chosen)
        return super().argmax(logits)

    def _feed(self, chunk: SequenceChunk) -> Sequence[int]:
        """Stores the states of a chunk's tokens; returns those that logits are wanted for."""
        cache = chunk.cache
        start, end = cache.length, cache.length + len(chunk.token_ids)
        state = int(self._states[cache.slot_ids(start - 1, start)[0]]) if start else 0
        states = []
        for token_id in chunk.token_ids:
            state = next_state(state, token_id)
            states.append(state)
        self._states[cache.slot_ids(start, end)] = states
        cache.length = end
        return states[len(states) - chunk.num_logits :]

    def _next(self, state: int) -> int:
        """Returns the token after a context, or another one where this model errs."""
        place, chance = (state >> 33) % len(self._token_ids), (state & 0xFFFFFFFF) / 2**32
        return self._token_ids[place if chance < self._simulated.agreement else place - 1]

    def _one_hot(self, chosen: list[int]) -> Tensor:
        """Returns logits that leave no doubt; valid until the next call: the memory is used again.

        Filling a vocabulary for each row would cost more than many a step that is simulated.
        """
        if len(chosen) > len(self._logits):
            self._logits = torch.zeros(len(chosen), self.vocab_size)
        else:
            self._logits[range(len(self._chosen)), self._chosen] = 0.0
        self._chosen = chosen
        self._logits[range(len(chosen)), chosen] = _CERTAIN
        return self._logits[: len(chosen)]


def next_state(state: int, token_id: int) -> int:
    """Returns the state after one more token."""
    mixed = ((state ^ (token_id + 1)) * _MULTIPLIER + _INCREMENT) & _STATE_MASK
    return mixed ^ (mixed >> 29)


def _no_model(batch: object) -> Tensor:
    raise AssertionError("a simulated device runs no model")
