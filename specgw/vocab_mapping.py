"""Pairs the tokens of two vocabularies that stand for the same: by bytes, or by role.

The intersection of Timor et al., 2025, arXiv:2502.05202 (TLI), on bytes. No torch: `specgw check`
tells the coverage, and the proposer maps with it.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specgw.speculative_config import SpeculativeConfig
from specgw.spelling import Spelling, load_spelling
from specgw.types import MAX_TEMPERATURE

MIN_COVERAGE = 0.1
"""Least `Coverage.of_draft_text` for drafts of common tokens."""

_KEY = "speculative_config.heterogeneous_vocab_method"
_ALL = 0.99  # of the target's text: as good as all of it
_TEMPERATURE_PER_SHARE = 10  # what sampled drafts must gain for the text that tokens cannot draft
_NOTHING = -1
_PAIRED_ROLES = ("eos", "bos")


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much two vocabularies have in common.

    Attributes:
        num_common: Tokens that stand for the same in both, special ones among them.
        of_target: The share of the target's tokens for text that the draft has too.
        of_draft: The share of the draft's tokens for text that the target has too.
        of_draft_text: Their share of the draft's text, if its tokens are as frequent as Zipf's law
            says of their ids. Tokenizers number tokens in the order in which they were learned.
        of_target_text: Their share of the target's text, reckoned likewise.
    """

    num_common: int
    of_target: float
    of_draft: float
    of_draft_text: float
    of_target_text: float


@dataclass(frozen=True)  # without slots, for what is computed once
class VocabMapping:
    """Which tokens of a draft's vocabulary are which of a target's: one to one.

    Attributes:
        target: The target's tokenizer.
        draft: The draft's tokenizer.
        draft_to_target: The target's id for each row of the draft's embedding, or -1. int64.
        markers: The draft's id for each of the target's special tokens that it has.
    """

    target: Spelling
    draft: Spelling
    draft_to_target: npt.NDArray[np.int64]
    markers: dict[int, int]

    @cached_property
    def coverage(self) -> Coverage:
        """How much is in common."""
        is_common = self.draft_to_target >= 0
        common_of_draft = set(np.flatnonzero(is_common).tolist()) & self.draft.token_bytes.keys()
        common_of_target = set(self.draft_to_target.tolist()) & self.target.token_bytes.keys()
        return Coverage(
            int(is_common.sum()),
            len(common_of_target) / max(len(self.target.token_bytes), 1),
            len(common_of_draft) / max(len(self.draft.token_bytes), 1),
            _share_of_text(common_of_draft, self.draft),
            _share_of_text(common_of_target, self.target),
        )

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the mapping, in hex."""
        return hashlib.sha256(self.draft_to_target.astype("<i8").tobytes()).hexdigest()


def map_vocabs(
    target: Spelling, draft: Spelling, target_size: int, draft_size: int
) -> VocabMapping:
    """Pairs the tokens of two tokenizers whose models have embeddings of the given sizes.

    Of several tokens for the same bytes the one that its tokenizer really uses is paired; the
    others are not, as their probability would add to its own.
    """
    markers = _pair_markers(target, draft)
    pairs = [(theirs, ours) for ours, theirs in markers.items()]
    pairs += [
        (theirs, target.ids_by_bytes[spelled])
        for spelled, theirs in draft.ids_by_bytes.items()
        if spelled in target.ids_by_bytes
    ]
    draft_to_target = np.full(draft_size, _NOTHING, dtype=np.int64)
    taken: set[int] = set()
    for theirs, ours in pairs:
        is_free = ours not in taken and theirs < draft_size and draft_to_target[theirs] < 0
        if ours < target_size and is_free:
            draft_to_target[theirs] = ours
            taken.add(ours)
    markers = {ours: theirs for ours, theirs in markers.items() if theirs < draft_size}
    return VocabMapping(target, draft, draft_to_target, markers)


def load_mapping(
    target_dir: Path, target_size: int, draft_dir: Path, draft_size: int
) -> VocabMapping:
    """Reads both tokenizers and pairs their tokens.

    Raises:
        ConfigError: if one of them cannot be mapped by bytes.
    """
    target, draft = load_spelling(target_dir), load_spelling(draft_dir)
    return map_vocabs(target, draft, target_size, draft_size)


def _share_of_text(token_ids: Iterable[int], spelling: Spelling) -> float:
    def total(ids: Iterable[int]) -> float:
        return sum(1 / (token_id + 1) for token_id in sorted(ids))

    return total(token_ids) / max(total(spelling.token_bytes), 1e-9)


def _pair_markers(target: Spelling, draft: Spelling) -> dict[int, int]:
    """Returns the draft's id for special tokens of the target: by their text, else by role."""
    by_text = {text: token_id for token_id, text in draft.added_tokens.items()}
    paired = {i: by_text[text] for i, text in target.added_tokens.items() if text in by_text}
    for role in _PAIRED_ROLES:
        for ours, theirs in zip(
            target.roles.get(role, ()), draft.roles.get(role, ()), strict=False
        ):
            if ours not in paired and theirs not in paired.values():
                paired[ours] = theirs
    return paired


@dataclass(frozen=True, slots=True)
class VocabMethods:
    """Which sessions are drafted for by `token`: those from a temperature on; others by `string`.

    Attributes:
        token_from: That temperature: 0 for all sessions, infinite for none.
    """

    token_from: float

    def at(self, temperature: float) -> str:
        """Returns the method for sessions of a temperature."""
        return "token" if temperature >= self.token_from else "string"

    @property
    def all(self) -> Sequence[str]:
        """Those in use."""
        return list(dict.fromkeys((self.at(0), self.at(MAX_TEMPERATURE))))

    @property
    def summary(self) -> str:
        """The method in use, or `auto` for both."""
        return self.all[0] if len(self.all) == 1 else "auto"

    def __str__(self) -> str:
        if len(self.all) == 1:
            return self.summary
        return f"string, from temperature {self.token_from:.2f} on token"


def choose_methods(config: SpeculativeConfig, coverage: Coverage) -> VocabMethods:
    """Returns the methods as configured, or as `auto` has it from what was measured.

    Text can draft what is no token of both, but its drafts are greedy: the hotter a request is, the
    more do tokens gain that are drawn with its own random numbers, or from a law. Where nothing is
    lost by tokens, they take fewer passes. docs/benchmarks.md has what was measured.
    """
    method = config.heterogeneous_vocab_method
    if method != "auto":
        return VocabMethods(0.0 if method == "token" else math.inf)
    if coverage.of_target_text >= _ALL:
        return VocabMethods(0.0)
    if config.draft_sample_method == "greedy":
        return VocabMethods(math.inf)
    return VocabMethods(_TEMPERATURE_PER_SHARE * (1 - coverage.of_target_text))


def coverage_problems(coverage: Coverage, methods: VocabMethods) -> list[str]:
    """Returns why vocabularies have too little in common for the methods chosen."""
    if not coverage.num_common:
        return [f"{_KEY}: the two vocabularies have no token in common, not even a byte"]
    if "token" in methods.all and coverage.of_draft_text < MIN_COVERAGE:
        return [
            f"{_KEY}: token drafts what is a token of both models: {coverage.num_common} tokens, "
            f"about {coverage.of_draft_text:.1%} of what the draft writes; it needs "
            f"{MIN_COVERAGE:.0%}; string needs less, for drafts that are not probabilistic"
        ]
    return []
