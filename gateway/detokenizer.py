"""Turns output tokens into text as they come: whole characters, up to the first stop string.

Pure state, no I/O. One instance serves one request; a block of any size gives the same text as its
tokens one by one, so a streamed answer joined together is the unary answer. The caller is
`generation.py`, and `specgw.LLM` for offline use.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from specgw.types import (
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    SpeculationStats,
    TokenLogprobs,
)

_REPLACEMENT = "\ufffd"  # what decoders put in place of bytes that are not, or not yet, a character
_MAX_HELD_TOKENS = 32  # a character takes at most four byte tokens: a longer run never gets whole
_PROMPT_TAIL = 6  # context that tells a decoder whether the first output token begins a word


class Decoder(Protocol):
    """The one method used of `tokenizers.Tokenizer`."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids`, decoded together."""


@dataclass(frozen=True, slots=True)
class TextOutput:
    """What became certain since the previous one; the last one of a request has a finish reason.

    `stop_reason` is as in vLLM: the stop string, the id of a stop token, or None. `speculation` is
    the request's total so far, and counts on. `cached_token_count`, in the first one if there is a
    prefix cache, is how many tokens of the prompt it had.
    """

    text: str
    token_ids: Sequence[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    cached_token_count: int | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()


class CharacterDecoder:
    """Decodes token by token, in the context of the tokens before.

    `tokenizers.DecodeStream` does the same, but cannot give back what it holds at the end of the
    output, and fails for good on a byte that makes the bytes before it invalid.
    """

    def __init__(
        self, decoder: Decoder, context: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._context = list(context)
        self._context_text = self._decode(self._context)
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """Returns the text that `token_id` completes; empty while a character is not whole."""
        self._held.append(token_id)
        text = self._decode(self._context + self._held)
        if text.endswith(_REPLACEMENT) and len(self._held) < _MAX_HELD_TOKENS:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """Returns the text still held; a character that stayed incomplete shows as U+FFFD."""
        return self._emit(self._decode(self._context + self._held)) if self._held else ""

    def _emit(self, text: str) -> str:
        if text == self._context_text:  # special or empty tokens: the context stays what it was
            self._held = []
            return ""
        if text.startswith(self._context_text):
            new_text = text[len(self._context_text) :]
        else:  # an invalid byte changed how the byte tokens before it decode
            new_text = self._decode(self._held)
        self._context, self._held = self._held, []
        self._context_text = self._decode(self._context)
        return new_text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


class StopScanner:
    """Lets text through up to the first stop string, keeping back what may still become one."""

    def __init__(self, stop: Sequence[str], *, keeps_stop: bool = False) -> None:
        self._stop = stop
        self._keeps_stop = keeps_stop
        self._held = ""
        self._num_passed = 0  # characters of the held text in which no stop string may end

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Returns the text that is certain now, and the stop string that was found.

        The one that ends first counts, of several the longest: what a reader of single characters
        would find, however the text is cut into tokens. None may end in text that may not stop.
        """
        if not self._stop:
            return text, None
        self._held += text
        if not may_stop:
            self._num_passed = len(self._held)
        found = [(end, -len(stop), stop) for stop in self._stop if (end := self._end_of(stop))]
        if found:
            end, _, stop_string = min(found)
            certain = self._held[: end if self._keeps_stop else end - len(stop_string)]
            self._held = ""
            return certain, stop_string
        num_certain = len(self._held) - self._num_undecided()
        certain, self._held = self._held[:num_certain], self._held[num_certain:]
        self._num_passed = max(0, self._num_passed - num_certain)
        return certain, None

    def flush(self) -> str:
        """Returns the text kept back, which no more text can make a stop string."""
        text, self._held = self._held, ""
        return text

    def _end_of(self, stop: str) -> int:
        """Returns where the first occurrence that counts ends in the held text; 0 without one."""
        start = self._held.find(stop, max(0, self._num_passed - len(stop) + 1))
        return start + len(stop) if start >= 0 else 0

    def _num_undecided(self) -> int:
        longest = min(max(map(len, self._stop)) - 1, len(self._held))
        for length in range(longest, 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0


class Detokenizer:
    """The text of one request's output, and its end.

    Args:
        decoder: The tokenizer.
        request: What is answered. Output tokens of an earlier attempt are not its business.
        eos_token_id: Ends the output without being a stop reason, as in vLLM.
    """

    def __init__(
        self, decoder: Decoder, request: GenerateRequest, eos_token_id: int | None = None
    ) -> None:
        self._params = request.sampling_params
        self._eos_token_id = eos_token_id
        self._characters = CharacterDecoder(
            decoder,
            request.prompt_token_ids[-_PROMPT_TAIL:],
            skip_special_tokens=self._params.skip_special_tokens,
        )
        self._scanner = StopScanner(
            self._params.stop, keeps_stop=self._params.include_stop_str_in_output
        )
        self._num_tokens = 0
        self._speculation = SpeculationStats()

    def push(self, output: GenerateOutput) -> TextOutput:
        """Returns what is certain with one more block. Nothing comes after a finish reason.

        Text, tokens, log probabilities and statistics end together: with the token that completes a
        stop string, or with the stop token, which has no text unless asked for.
        """
        text_output = self._push(output)
        if not output.logprobs and not output.prompt_logprobs:
            return text_output
        return replace(
            text_output,
            logprobs=output.logprobs[: len(text_output.token_ids)],
            prompt_logprobs=output.prompt_logprobs,
        )

    def _push(self, output: GenerateOutput) -> TextOutput:
        if self._params.stop:
            text, num_used, stop_string = self._scan(output)
            if stop_string is not None:
                # What was accepted behind the end does not count.
                num_accepted = min(output.round.num_accepted, num_used)
                self._speculation.count(output.round._replace(num_accepted=num_accepted))
                return self._stopped(text, output, num_used, stop_string)
        else:
            text = "".join(map(self._characters.push, self._tokens_with_text(output)))
        self._speculation.count(output.round)
        self._num_tokens += len(output.token_ids)
        if output.finish_reason is None:
            return TextOutput(text, output.token_ids, speculation=self._speculation)
        end, stop_string = self._end()
        if stop_string is not None:
            return self._stopped(text + end, output, len(output.token_ids), stop_string)
        return TextOutput(
            text + end,
            output.token_ids,
            output.finish_reason,
            self._stop_reason(output.stop_token_id),
            self._speculation,
        )

    def _scan(self, output: GenerateOutput) -> tuple[str, int, str | None]:
        """Returns the text up to a stop string, the number of its tokens, and the string if any."""
        texts, num_used = [], 0
        for num_used, token_id in enumerate(self._tokens_with_text(output), start=1):
            may_stop = self._num_tokens + num_used > self._params.min_tokens
            text = self._characters.push(token_id)
            text, stop_string = self._scanner.push(text, may_stop=may_stop)
            texts.append(text)
            if stop_string is not None:
                return "".join(texts), num_used, stop_string
        return "".join(texts), num_used, None

    def flush(self) -> TextOutput:
        """Returns the text held so far, for an output that breaks off."""
        return TextOutput(self._end()[0], (), speculation=self._speculation)

    def _tokens_with_text(self, output: GenerateOutput) -> Sequence[int]:
        if not self._params.detokenize:
            return ()
        is_stopped = output.stop_token_id is not None
        hides_last = is_stopped and not self._params.include_stop_str_in_output
        return output.token_ids[:-1] if hides_last else output.token_ids

    def _end(self) -> tuple[str, str | None]:
        """Releases what is held. The rest of a character may still complete a stop string."""
        may_stop = self._num_tokens > self._params.min_tokens
        text, stop_string = self._scanner.push(self._characters.flush(), may_stop=may_stop)
        return text + self._scanner.flush(), stop_string

    def _stopped(
        self, text: str, output: GenerateOutput, num_used: int, stop_string: str
    ) -> TextOutput:
        token_ids = output.token_ids[:num_used]
        return TextOutput(text, token_ids, FinishReason.STOP, stop_string, self._speculation)

    def _stop_reason(self, stop_token_id: int | None) -> int | None:
        is_eos = stop_token_id == self._eos_token_id and not self._params.ignore_eos
        return (
            stop_token_id if stop_token_id in self._params.stop_token_ids and not is_eos else None
        )
