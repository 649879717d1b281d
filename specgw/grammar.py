"""Which tokens may come next in an output that follows a grammar. No torch: any service does this.

The grammars are llguidance's. A compiled grammar is bounded by what its text may make the library
do, so that neither a schema nor an output can hold a thread for long.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from numpy.typing import NDArray

from specgw.errors import ConfigError, InvalidRequest
from specgw.model_files import resolve_model
from specgw.structured_outputs import StructuredOutputsParams
from specgw.structured_outputs_config import StructuredOutputsConfig
from specgw.types import GenerateRequest
from specgw.vocab import tokenizer_json

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # has no value at run time

_MAX_CACHED = 128
# A pathological expression costs a tenth of a second with these, and seven times that by default.
_STEP_FUEL = 100_000
_INITIAL_FUEL = 200_000
_BITS = 32  # of a word of a mask
_UNLIMITED = StructuredOutputsConfig()


class GrammarMatcher:
    """Where one output stands in its grammar. For one thread at a time."""

    def __init__(self, params: StructuredOutputsParams, start: LLMatcher, num_words: int) -> None:
        self._params = params
        self._start = start  # never advanced
        self._matcher = start.deep_copy()
        self._num_words = num_words
        self._token_ids: list[int] = []

    def advance(self, token_ids: Sequence[int]) -> int:
        """Takes the leading tokens that follow the grammar; returns how many they are.

        The end-of-sequence token follows a complete text, and nothing follows it. Where it would
        take too long to tell, tokens are taken, and `mask` says so.
        """
        count = self._consume(token_ids)
        if self._matcher.is_error():
            self._restart()
            count = self._consume(token_ids)
        if self._matcher.is_error():
            count = len(token_ids)
        self._token_ids += token_ids[:count]
        return count

    def rollback(self, count: int) -> None:
        """Takes the last `count` tokens back."""
        if not count:
            return
        del self._token_ids[-count:]
        if self._matcher.is_error():
            self._restart()
        else:
            self._matcher.rollback(count)

    def follow(self, token_ids: Sequence[int]) -> bool:
        """Stands after these tokens; returns whether they follow the grammar, as far as is known.

        Tokens shared with where it stood are not read again.
        """
        pairs = zip(self._token_ids, token_ids, strict=False)
        num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.rollback(len(self._token_ids) - num_shared)
        return self.advance(token_ids[num_shared:]) == len(token_ids) - num_shared

    def mask(self) -> NDArray[np.int32]:  # [ceil(vocab_size / 32)]
        """Returns one bit for each token id, lowest first: whether it may come next.

        Raises:
            InvalidRequest: if it would take too long to tell.
        """
        mask = self._fill()
        if self._matcher.is_error():
            self._restart()
            mask = self._fill()
        if self._matcher.is_error():
            raise self._params.refusal(f"is too complex: {_reason(self._matcher.get_error())}")
        return mask

    def _restart(self) -> None:
        """Begins anew: what the matcher learnt from tokens taken back must not decide an answer."""
        self._matcher = self._start.deep_copy()
        self._consume(self._token_ids)

    def _consume(self, token_ids: Sequence[int]) -> int:
        return self._matcher.try_consume_tokens(list(token_ids))

    def _fill(self) -> NDArray[np.int32]:
        mask = np.empty(self._num_words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return mask


class GrammarCompiler:
    """Compiles constraints for one vocabulary and keeps the latest. For any number of threads.

    Args:
        read_tokenizer: Returns the vocabulary as the text of a `tokenizer.json`; empty if the model
            has none. Called once, when the first constraint comes.
        vocab_size: Rows of the model's output layer; fewer than the tokenizer's are no limit.
        eos_token_ids: End the output; allowed exactly where the text is complete.
        config: What holds for every constraint.
    """

    def __init__(
        self,
        read_tokenizer: Callable[[], str],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        config: StructuredOutputsConfig = _UNLIMITED,
    ) -> None:
        self._config = config
        self._read_tokenizer = read_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[StructuredOutputsParams, LLMatcher] = OrderedDict()
        self.num_compiled = 0

    def start(self, request: GenerateRequest) -> GrammarMatcher | None:
        """Returns a matcher at the start of a request's output; none if any text will do.

        Raises:
            InvalidRequest: as `compile`, and for an earlier output that does not follow it.
        """
        params, earlier = request.sampling_params.structured_outputs, request.output_token_ids
        if params is None:
            return None
        matcher = self.compile(params)
        count = matcher.advance(earlier)
        if count < len(earlier):
            rule = f"must follow {params.constraint}"
            raise InvalidRequest("output_token_ids", earlier[count], rule)
        matcher.rollback(count)
        return matcher

    def compile(self, params: StructuredOutputsParams) -> GrammarMatcher:
        """Returns a matcher at the start of an output. Takes up to seconds for a new constraint.

        Raises:
            InvalidRequest: naming the field that is not a constraint, or is too large a one.
        """
        params = params.limited(
            without_whitespace=self._config.disable_any_whitespace,
            without_additional_properties=self._config.disable_additional_properties,
        )
        with self._lock:
            start = self._compiled.get(params)
            tokenizer = self._tokenizer = self._tokenizer or self._build_tokenizer()
            if start is None:
                start = self._compiled[params] = _compile(params, tokenizer)
                self.num_compiled += 1
            self._compiled.move_to_end(params)
            if len(self._compiled) > _MAX_CACHED:
                self._compiled.popitem(last=False)
        return GrammarMatcher(params, start, -(-tokenizer.vocab_size // _BITS))

    @property
    def num_kept(self) -> int:
        """Constraints that need not be compiled again."""
        return len(self._compiled)

    def _build_tokenizer(self) -> LLTokenizer:
        try:
            text = self._read_tokenizer()
        except ConfigError as error:
            raise _unavailable(str(error)) from None
        if not text:
            raise _unavailable("the model has no tokenizer")
        try:
            num_tokens = LLTokenizer(text).vocab_size
            return LLTokenizer(
                text,
                n_vocab=max(num_tokens, self._vocab_size),
                eos_token=[one for one in self._eos_token_ids if one < num_tokens],
            )
        except ValueError as error:
            raise _unavailable(f"llguidance cannot use the model's tokenizer: {error}") from None


def compiler_for(
    tokenizer: str,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    config: StructuredOutputsConfig = _UNLIMITED,
) -> GrammarCompiler:
    """Returns the compiler for the tokenizer of a model, by its name or path."""

    def read() -> str:
        return tokenizer_json(resolve_model(tokenizer, with_weights=False))

    return GrammarCompiler(read, vocab_size, eos_token_ids, config)


def _compile(params: StructuredOutputsParams, tokenizer: LLTokenizer) -> LLMatcher:
    try:
        grammar = _grammar(params)
    except (ValueError, RecursionError) as error:
        raise params.refusal(f"is not valid: {_reason(str(error))}") from None
    limits = LLParserLimits(
        step_lexer_fuel=_STEP_FUEL, initial_lexer_fuel=_INITIAL_FUEL, verbose_errors=False
    )
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # does once what every output begins with
    if matcher.is_error():
        raise params.refusal(f"is not valid: {_reason(matcher.get_error())}")
    return matcher


def _grammar(params: StructuredOutputsParams) -> str:
    """Returns the constraint as llguidance takes it."""
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        return grammar_from("choice", json.dumps(params.choice))
    if params.grammar is not None:
        return grammar_from("grammar", params.grammar)
    options: JsonCompileOptions = {}  # beats `x-guidance` in the schema
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    return LLMatcher.grammar_from_json_schema(json.dumps(params.schema()), overrides=options)


def _reason(message: str) -> str:
    """Returns what an error of the library's says, without pictures of where and of itself."""
    first, *others = message.strip().splitlines() or [""]
    cause = next((line for line in others if line.startswith("error: ")), "")
    return f"{first} {cause}".removesuffix("<non-verbose/>").strip()


def _unavailable(reason: str) -> InvalidRequest:
    return InvalidRequest("structured_outputs", "a constraint", f"is not available: {reason}")
