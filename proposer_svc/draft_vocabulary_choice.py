"""Chooses how a draft model's vocabulary is brought together with the target's."""

import logging

from proposer_svc.draft_vocabulary import DraftVocabulary, SharedVocabulary
from proposer_svc.foreign_vocabulary import FOREIGN_VOCABULARIES
from specgw.config import EngineArgs, SpeculativeConfig
from specgw.errors import ConfigError
from specgw.model_files import read_config, resolve_model
from specgw.types import ModelDescription
from specgw.vocab import relate_vocabs, tokenizer_size, vocab_fingerprint
from specgw.vocab_mapping import Coverage, coverage_problems, load_mapping

_ENOUGH_TO_SAMPLE = 0.99  # of what the draft writes

logger = logging.getLogger(__name__)


def build_vocabulary(args: EngineArgs, draft_model: ModelDescription) -> DraftVocabulary:
    """Returns the vocabulary of a loaded draft model, as against the configured target's.

    Raises:
        ConfigError: if it shall be mapped and cannot be.
    """
    config = args.speculative_config
    assert config is not None, "a proposer needs a speculative_config"
    draft_dir = resolve_model(config.model)
    shared = SharedVocabulary(draft_model, tokenizer_size(draft_dir))
    if not config.use_heterogeneous_vocab:
        return shared
    target_dir = resolve_model(args.tokenizer_path, with_weights=False)
    target_size = int(read_config(resolve_model(args.model, with_weights=False))["vocab_size"])
    sizes = target_size, draft_model.vocab_size
    relation = relate_vocabs(target_dir, target_size, draft_dir, draft_model.vocab_size)
    if relation.has_same_tokens:
        logger.info("the draft has the target's tokens: nothing to map", extra={"sizes": sizes})
        return shared
    mapping = load_mapping(target_dir, target_size, draft_dir, draft_model.vocab_size)
    if problems := coverage_problems(mapping.coverage, config.heterogeneous_vocab_method):
        raise ConfigError(problems)
    method = choose_method(config, mapping.coverage)
    logger.info(
        "the draft's vocabulary is mapped",
        extra={
            "method": method,
            "common_tokens": mapping.coverage.num_common,
            "target_coverage": round(mapping.coverage.of_target, 3),
            "draft_coverage": round(mapping.coverage.of_draft, 3),
            "weighted_coverage": round(mapping.coverage.weighted, 3),
        },
    )
    return FOREIGN_VOCABULARIES[method](mapping, vocab_fingerprint(target_dir))


def choose_method(config: SpeculativeConfig, coverage: Coverage) -> str:
    """Returns `token` or `string`.

    Text makes longer blocks than single tokens do, but its drafts are greedy. Drafts that are
    sampled gain where hardly a token is missing.
    """
    if config.heterogeneous_vocab_method != "auto":
        return config.heterogeneous_vocab_method
    is_sampled = config.draft_sample_method != "greedy"
    return "token" if is_sampled and coverage.weighted >= _ENOUGH_TO_SAMPLE else "string"
