"""A device that is not there: forward passes take a configured time and need no weights.

For loading the scheduler, the wire and the gateway with far more than this machine could compute.
What it answers is invented, and a function of the context alone: so that losing, mixing up or
changing a token shows. It says everywhere what it is: its device is `simulated`.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specgw.engine.kv_cache import KVCache
from specgw.engine.model_runner import ModelRunner, SequenceChunk
from specgw.precise_timer import PreciseTimer
from specgw.types import SIMULATED_DEVICE, ModelDescription

logger = logging.getLogger(__name__)

_STATE_BITS = 63
_STATE_MASK = np.uint64((1 << _STATE_BITS) - 1)
_MULTIPLIER = np.uint64(6364136223846793005)  # Knuth's, of MMIX
_INCREMENT = np.uint64(1442695040888963407)
_CERTAIN = 100.0  # a logit beside which others have no chance at any temperature
_RUNNER_UP = 50.0  # that of the second choice; each next one's is less by 1

States = npt.NDArray[np.uint64]


class Timer(Protocol):
    """Where the time of a device passes."""

    def now(self) -> float:
        """Returns seconds since some moment."""

    def wait_until(self, deadline: float) -> None:
        """Returns then, or at once if that is past."""


@dataclass(frozen=True, slots=True)
class SimulatedDevice:
    """What a model costs there, and how often it says the same as the target.

    Attributes:
        step_s: Time of a forward pass without rows.
        row_s: What each row adds.
        agreement: Probability that its token is the target's; 1 for the target itself.
        runner_up_rates: Where it is not, the probability that the second choice is, the third, ...
    """

    step_s: float
    row_s: float = 0.0
    agreement: float = 1.0
    runner_up_rates: Sequence[float] = ()


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
        self._token_ids = np.array(token_ids)
        self._states = kv_cache.layers[0][:, 0, 0].numpy().view(np.uint64)  # [num_slots]
        self.timer: Timer = PreciseTimer()
        self._logits = torch.zeros(0, description.vocab_size)
        self._choices = torch.zeros(0, 1, dtype=torch.int64)
        logger.warning("SIMULATION: no model runs, tokens are invented", extra={"device": device})

    def forward(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        began = self.timer.now()
        self.kv_cache.reserve([
            (chunk.cache, chunk.cache.length + len(chunk.token_ids)) for chunk in chunks
        ])  # fmt: skip
        logits = self._as_logits(self._choices_after(self._feed(chunks)))
        num_rows = sum(len(chunk.token_ids) for chunk in chunks)
        self.timer.wait_until(began + self._simulated.step_s + num_rows * self._simulated.row_s)
        return logits

    def argmax(self, logits: Tensor) -> Tensor:
        """Returns what it has chosen, if it is asked for its last logits.

        A device finds a few largest logits in microseconds; this machine would take longer than for
        all the rest of a step.
        """
        if logits.data_ptr() == self._logits.data_ptr() and len(logits) == len(self._choices):
            return self._choices[:, 0].clone()
        return super().argmax(logits)

    def _feed(self, chunks: Sequence[SequenceChunk]) -> States:
        """Stores the states of the chunks' tokens; returns those that logits are wanted for."""
        num_tokens = np.array([len(chunk.token_ids) for chunk in chunks])
        places = np.arange(num_tokens.max())
        is_fed = places < num_tokens[:, None]  # [num_chunks, most tokens of a chunk]
        token_ids = np.zeros(is_fed.shape, dtype=np.int64)
        token_ids[is_fed] = [token_id for chunk in chunks for token_id in chunk.token_ids]
        states, state = np.zeros(is_fed.shape, dtype=np.uint64), self._last_states(chunks)
        for place in places:
            states[:, place] = state = next_state(state, token_ids[:, place])
        slots: list[int] = []
        for chunk in chunks:
            start, end = chunk.cache.length, chunk.cache.length + len(chunk.token_ids)
            slots += chunk.cache.slot_ids(start, end)
            chunk.cache.length = end
        self._states[slots] = states[is_fed]
        first = num_tokens - [chunk.num_logits for chunk in chunks]
        wanted: States = states[is_fed & (places >= first[:, None])]
        return wanted

    def _last_states(self, chunks: Sequence[SequenceChunk]) -> States:
        """Returns the states that chunks begin with: 0 for an empty context."""
        lengths = [chunk.cache.length for chunk in chunks]
        slots = [
            chunk.cache.slot_ids(length - 1, length)[0] if length else 0
            for chunk, length in zip(chunks, lengths, strict=True)
        ]
        return np.where(np.array(lengths) > 0, self._states[slots], np.uint64(0))

    def _choices_after(self, states: States) -> npt.NDArray[np.int64]:
        """Returns this model's choices after contexts, the first one first: [num_contexts, num].

        The target's token is the first one; another, by the rates; or, where all fail, none.
        """
        num_ids, rates = len(self._token_ids), self._simulated.runner_up_rates
        right = (states >> np.uint64(33)).astype(np.int64) % num_ids
        chance = (states & np.uint64(0xFFFFFFFF)).astype(np.float64) / 2**32
        agreement = self._simulated.agreement
        others = (right[:, None] - np.arange(1, len(rates) + 2)) % num_ids
        bounds = agreement + (1 - agreement) * np.cumsum([0.0, *rates])
        rank = np.searchsorted(bounds, chance, side="right")
        at = np.flatnonzero(rank <= len(rates))
        others[at, rank[at]] = right[at]
        choices: npt.NDArray[np.int64] = self._token_ids[others]
        return choices

    def _as_logits(self, choices: npt.NDArray[np.int64]) -> Tensor:
        """Returns logits that leave no doubt; valid until the next call: the memory is used again.

        Filling a vocabulary for each row would cost more than many a step that is simulated.
        """
        if len(choices) > len(self._logits):
            self._logits = torch.zeros(len(choices), self.vocab_size)
        else:
            self._logits[: len(self._choices)].scatter_(1, self._choices, 0.0)
        self._choices = torch.from_numpy(choices)
        logits = self._logits[: len(choices)]
        values = [_CERTAIN, *(_RUNNER_UP - i for i in range(choices.shape[1] - 1))]
        return logits.scatter_(1, self._choices, torch.tensor(values).expand(choices.shape))


def next_state(state: States, token_ids: npt.NDArray[np.int64]) -> States:
    """Returns the states after one more token each."""
    fed = (token_ids + 1).astype(np.uint64)
    mixed: States = ((state ^ fed) * _MULTIPLIER + _INCREMENT) & _STATE_MASK
    return mixed ^ (mixed >> np.uint64(29))


def _no_model(batch: object) -> Tensor:
    raise AssertionError("a simulated device runs no model")
