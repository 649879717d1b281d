"""Pairs the tokens of two vocabularies that stand for the same: by bytes, or by role.

The intersection of Timor et al., 2025, arXiv:2502.05202 (TLI), on bytes. No torch: `specgw check`
tells the coverage, and the proposer maps with it.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specgw.speculative_config import SpeculativeConfig
from specgw.spelling import Spelling, load_spelling

MIN_COVERAGE = 0.1
"""Least share of the draft's text that the common tokens must make up, as `Coverage.weighted`."""

_KEY = "speculative_config.heterogeneous_vocab_method"
_ENOUGH_TO_COUPLE = 0.99  # of what the draft writes
_NOTHING = -1
_PAIRED_ROLES = ("eos", "bos")


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much two vocabularies have in common.

    Attributes:
        num_common: Tokens that stand for the same in both.
        of_target: Their share of the target's tokens.
        of_draft: Their share of the draft's tokens.
        weighted: Their share of the draft's text, if its tokens are as frequent as Zipf's law says
            of their ids. Tokenizers number tokens in the order in which they were learned.
    """

    num_common: int
    of_target: float
    of_draft: float
    weighted: float


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
        num_common = int(is_common.sum())
        frequencies = 1 / np.arange(1, len(is_common) + 1)
        frequencies[[i for i in range(len(is_common)) if i not in self.draft.token_bytes]] = 0
        return Coverage(
            num_common,
            num_common / max(len(self.target.token_bytes), 1),
            num_common / max(len(self.draft.token_bytes), 1),
            float(frequencies[is_common].sum() / max(frequencies.sum(), 1e-9)),
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


def choose_method(config: SpeculativeConfig, coverage: Coverage) -> str:
    """Returns `token` or `string`, as configured or as `auto` has it.

    Text makes longer blocks than single tokens do, but its drafts are greedy. Drafts that are
    coupled gain where hardly a token is missing; those that need a law have one as tokens only.
    """
    if config.heterogeneous_vocab_method != "auto":
        return config.heterogeneous_vocab_method
    if config.draft_sample_method == "probabilistic":
        return "token"
    is_coupled = config.draft_sample_method == "coupled"
    return "token" if is_coupled and coverage.weighted >= _ENOUGH_TO_COUPLE else "string"


def coverage_problems(coverage: Coverage, method: str) -> list[str]:
    """Returns why vocabularies have too little in common for `token` or `string`."""
    if not coverage.num_common:
        return [f"{_KEY}: the two vocabularies have no token in common, not even a byte"]
    if method == "token" and coverage.weighted < MIN_COVERAGE:
        return [
            f"{_KEY}: token drafts what is a token of both models: {coverage.num_common} tokens, "
            f"about {coverage.weighted:.1%} of what the draft writes; it needs {MIN_COVERAGE:.0%}; "
            "string needs less, for drafts that are not probabilistic"
        ]
    return []
