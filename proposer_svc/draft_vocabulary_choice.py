"""Chooses how a draft model's vocabulary is brought together with the target's."""

import logging

from proposer_svc.draft_vocabulary import DraftVocabulary, SharedVocabulary
from proposer_svc.foreign_vocabulary import ForeignVocabulary
from specgw.config import EngineArgs
from specgw.errors import ConfigError
from specgw.model_files import read_config, resolve_model
from specgw.types import ModelDescription
from specgw.vocab import relate_vocabs, tokenizer_size, vocab_fingerprint
from specgw.vocab_mapping import choose_methods, coverage_problems, load_mapping

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
    methods = choose_methods(config, mapping.coverage)
    if problems := coverage_problems(mapping.coverage, methods):
        raise ConfigError(problems)
    logger.info(
        "the draft's vocabulary is mapped",
        extra={
            "method": str(methods),
            "common_tokens": mapping.coverage.num_common,
            "target_coverage": round(mapping.coverage.of_target, 3),
            "draft_coverage": round(mapping.coverage.of_draft, 3),
            "draft_text_coverage": round(mapping.coverage.of_draft_text, 3),
            "target_text_coverage": round(mapping.coverage.of_target_text, 3),
        },
    )
    return ForeignVocabulary(mapping, methods, vocab_fingerprint(target_dir))
