"""Changes the target's logits before temperature: penalties, bias and masks, in vLLM's order.

A row of a verify block is judged by its own prefix: prompt, output and the draft tokens before it.
Draft tokens follow hypothetically and are taken back when the block is verified. A session whose
parameters ask for nothing has no processors and pays nothing.
"""

import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from specgw.engine.token_mask import keep_allowed_
from specgw.errors import SpecgwError
from specgw.grammar import GrammarMatcher
from specgw.types import GenerateRequest, SamplingParams
from verifier_svc.custom_processors import CustomLogitsProcessor

logger = logging.getLogger(__name__)


class LogitsProcessor(Protocol):
    """One session's rule on logits, with whatever it remembers of the output.

    `advance` and `take_back` keep it at the row's prefix: tokens come in order, any number at once,
    and only the last ones are ever taken back.
    """

    def apply(
        self,
        logits: Tensor,  # [vocab_size] float32
        output_token_ids: Sequence[int],
    ) -> None:
        """Changes the logits, in place, of the token that follows `output_token_ids`."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes more output tokens, drafted or committed."""

    def take_back(self, token_ids: Sequence[int]) -> None:
        """Forgets the last tokens of the output, which were these."""


class RowProcessors:
    """A session's processors and the output that they have seen."""

    def __init__(
        self, processors: Sequence[LogitsProcessor], output_token_ids: Sequence[int] = ()
    ) -> None:
        self._processors = processors
        # An operator's own rule is not shown outputs that cannot be.
        self._stops_at_forbidden = any(isinstance(one, CustomRule) for one in processors)
        self._output: list[int] = []
        self._num_committed = 0
        self.commit(output_token_ids)

    def rows(
        self,
        logits: Tensor,  # [num_rows, vocab_size] float32, changed in place
        draft_token_ids: Sequence[int],  # [num_rows - 1]
    ) -> Iterator[Tensor]:  # each [vocab_size]
        """Processes one row after the other and yields it, as far as rows are asked for.

        Rows after a forbidden draft token mean nothing. To be followed by `commit`.

        Raises:
            SpecgwError: from the row that cannot be processed.
        """
        for offset, row in enumerate(logits):
            if offset:
                draft = draft_token_ids[offset - 1]
                if self._stops_at_forbidden and logits[offset - 1, draft] == -torch.inf:
                    return
                self._advance([draft])
            for processor in self._processors:
                processor.apply(row, self._output)
            yield row

    def commit(self, token_ids: Sequence[int]) -> None:
        """Takes output tokens for good, and back what was drafted in their place."""
        drafted = self._output[self._num_committed :]
        num_kept = 0
        for token_id, draft in zip(token_ids, drafted, strict=False):
            if token_id != draft:
                break
            num_kept += 1
        if num_kept < len(drafted):
            self._take_back(len(drafted) - num_kept)
        if num_kept < len(token_ids):
            self._advance(token_ids[num_kept:])
        self._num_committed = len(self._output)

    def _advance(self, token_ids: Sequence[int]) -> None:
        self._output.extend(token_ids)
        for processor in self._processors:
            processor.advance(token_ids)

    def _take_back(self, count: int) -> None:
        token_ids = self._output[-count:]
        del self._output[-count:]
        for processor in self._processors:
            processor.take_back(token_ids)


class _Stateless:
    """What processors are that need nothing but the output as it stands."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Remembers nothing."""

    def take_back(self, token_ids: Sequence[int]) -> None:
        """Has nothing to forget."""


class AllowedTokens(_Stateless):
    """Takes all probability from every other token."""

    def __init__(self, masked: Tensor) -> None:  # [vocab_size] bool
        self._masked = masked

    def apply(self, logits: Tensor, output_token_ids: Sequence[int]) -> None:
        logits.masked_fill_(self._masked, -torch.inf)


class BadWords(_Stateless):
    """Takes all probability from a token that would complete a forbidden sequence in the output."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._sequences = [(list(ids[:-1]), ids[-1]) for ids in sequences]

    def apply(self, logits: Tensor, output_token_ids: Sequence[int]) -> None:
        for prefix, last in self._sequences:
            first = len(output_token_ids) - len(prefix)
            if first >= 0 and output_token_ids[first:] == prefix:
                logits[last] = -torch.inf


class MinTokens(_Stateless):
    """Takes all probability from the tokens that end the output until it is long enough."""

    def __init__(self, min_tokens: int, end_token_ids: Tensor) -> None:  # [num_ids]
        self._min_tokens = min_tokens
        self._end_token_ids = end_token_ids

    def apply(self, logits: Tensor, output_token_ids: Sequence[int]) -> None:
        if len(output_token_ids) < self._min_tokens:
            logits[self._end_token_ids] = -torch.inf


class LogitBias(_Stateless):
    """Adds a bias to the logits of some tokens."""

    def __init__(self, token_ids: Tensor, biases: Tensor) -> None:  # [num_ids] each
        self._token_ids = token_ids
        self._biases = biases

    def apply(self, logits: Tensor, output_token_ids: Sequence[int]) -> None:
        logits[self._token_ids] += self._biases


class CustomRule(_Stateless):
    """Lets a processor of the operator's own change the logits."""

    def __init__(self, processor: CustomLogitsProcessor, prompt_token_ids: Sequence[int]) -> None:
        self._processor = processor
        self._prompt_token_ids = prompt_token_ids

    def apply(self, logits: Tensor, output_token_ids: Sequence[int]) -> None:
        try:
            changed = self._processor(self._prompt_token_ids, tuple(output_token_ids), logits)
            if changed.shape != logits.shape:
                raise ValueError(f"returned a tensor of shape {tuple(changed.shape)}")
            logits.copy_(changed)
        except Exception as error:  # whatever the operator's code does ends one session only
            name = type(self._processor).__name__
            logger.exception("logits processor failed", extra={"processor": name})
            raise SpecgwError(f"the logits processor {name} failed") from error


class Penalties:
    """Repetition, frequency and presence penalty, from counts that follow the output.

    With c the count of a token in the output, and r, f, p the penalties: a logit x of a token in
    the prompt or the output becomes x / r if x > 0, else x * r; then f * c + p * [c > 0] is taken
    off. Only tokens that have occurred are looked at, in drafts that were rejected too.
    """

    def __init__(
        self, params: SamplingParams, prompt_token_ids: Sequence[int], device: torch.device
    ) -> None:
        self._repetition = params.repetition_penalty
        self._frequency = params.frequency_penalty
        self._presence = params.presence_penalty
        self._places: dict[int, int] = {}  # of the tokens in the tensors below, [num_tokens]
        self._token_ids = torch.empty(0, dtype=torch.int64, device=device)
        self._counts = torch.empty(0, device=device)  # in the output
        self._in_prompt = torch.empty(0, dtype=torch.bool, device=device)
        if self._repetition != 1:
            self._add(prompt_token_ids, in_prompt=True)

    def apply(self, logits: Tensor, output_token_ids: Sequence[int]) -> None:
        penalized = logits[self._token_ids]
        in_output = self._counts > 0
        if self._repetition != 1:
            divisors = torch.where(self._in_prompt | in_output, self._repetition, 1.0)
            penalized = torch.where(penalized > 0, penalized / divisors, penalized * divisors)
        penalized.sub_(self._counts, alpha=self._frequency)
        penalized.sub_(in_output.float(), alpha=self._presence)
        logits[self._token_ids] = penalized

    def advance(self, token_ids: Sequence[int]) -> None:
        self._add(token_ids, in_prompt=False)
        self._count(token_ids, 1.0)

    def take_back(self, token_ids: Sequence[int]) -> None:
        self._count(token_ids, -1.0)

    def _add(self, token_ids: Sequence[int], *, in_prompt: bool) -> None:
        """Makes places for the tokens that have none."""
        added = [one for one in dict.fromkeys(token_ids) if one not in self._places]
        if not added:
            return
        self._places.update(zip(added, itertools.count(len(self._places)), strict=False))
        ids = torch.tensor(added, device=self._token_ids.device)
        self._token_ids = torch.cat((self._token_ids, ids))
        self._counts = torch.cat((self._counts, torch.zeros_like(ids, dtype=torch.float32)))
        is_in_prompt = torch.full_like(ids, in_prompt, dtype=torch.bool)
        self._in_prompt = torch.cat((self._in_prompt, is_in_prompt))

    def _count(self, token_ids: Sequence[int], change: float) -> None:
        places = [self._places[one] for one in token_ids]
        at = torch.tensor(places, dtype=torch.int64, device=self._counts.device)
        self._counts.index_put_((at,), self._counts.new_tensor(change), accumulate=True)


class GrammarRule:
    """Takes all probability from tokens that cannot come next in a text of the grammar.

    Where other rules leave none of those that can, they are as likely as one another: the text is
    of the grammar whatever else is asked for.
    """

    def __init__(self, matcher: GrammarMatcher) -> None:
        self._matcher = matcher
        self._num_beyond = 0  # drafted tokens from the first that the grammar does not allow

    def apply(self, logits: Tensor, output_token_ids: Sequence[int]) -> None:
        if self._num_beyond:  # a row that cannot be reached
            return
        keep_allowed_(logits, self._matcher.mask())

    def advance(self, token_ids: Sequence[int]) -> None:
        num_within = 0 if self._num_beyond else self._matcher.advance(token_ids)
        self._num_beyond += len(token_ids) - num_within

    def take_back(self, token_ids: Sequence[int]) -> None:
        num_beyond = min(self._num_beyond, len(token_ids))
        self._num_beyond -= num_beyond
        self._matcher.rollback(len(token_ids) - num_beyond)


def build_processors(
    request: GenerateRequest,
    custom: Sequence[CustomLogitsProcessor],
    vocab_size: int,
    eos_token_ids: Sequence[int],
    device: torch.device,
    grammar: GrammarMatcher | None = None,
) -> RowProcessors | None:
    """Returns what a request's parameters ask for, in vLLM's order; None if that is nothing."""
    params = request.sampling_params
    processors: list[LogitsProcessor] = []
    if params.allowed_token_ids is not None:
        masked = torch.ones(vocab_size, dtype=torch.bool, device=device)
        masked[torch.tensor(params.allowed_token_ids, device=device)] = False
        processors.append(AllowedTokens(masked))
    if params.bad_words_token_ids:
        processors.append(BadWords(params.bad_words_token_ids))
    end_token_ids = sorted({*params.stop_token_ids, *eos_token_ids})
    if params.min_tokens and end_token_ids:  # with `ignore_eos` too, as in vLLM
        ids = torch.tensor(end_token_ids, device=device)
        processors.append(MinTokens(params.min_tokens, ids))
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=device)
        biases = torch.tensor(list(params.logit_bias.values()), device=device)
        processors.append(LogitBias(ids, biases))
    processors.extend(CustomRule(one, request.prompt_token_ids) for one in custom)
    if params.has_penalties:
        processors.append(Penalties(params, request.prompt_token_ids, device))
    if grammar is not None:  # last, so that nothing gives back what it takes
        processors.append(GrammarRule(grammar))
    return RowProcessors(processors, request.output_token_ids) if processors else None
