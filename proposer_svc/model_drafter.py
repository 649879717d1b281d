"""Loads the draft model that a configuration names, for the method that drafts with it.

Apart from `proposer.py`, so that a proposer without a model needs no torch.
"""

import logging

from proposer_svc.draft_grammar import DraftGrammars
from proposer_svc.draft_model import DraftModelDrafter
from proposer_svc.draft_sampling import DraftSampler
from proposer_svc.draft_vocabulary_choice import build_vocabulary
from proposer_svc.drafter import Drafter
from proposer_svc.parallel_draft import ParallelDrafter
from proposer_svc.run_ahead import RunAhead
from specgw.addresses import is_local
from specgw.config import EngineArgs
from specgw.engine.loading import draft_options, load_model
from specgw.engine.model_runner import ModelRunner
from specgw.grammar import compiler_for
from specgw.model_checks import resolve_mask_token, trained_draft_tokens
from specgw.model_files import read_config, resolve_model
from specgw.service_settings import ProposerSettings

logger = logging.getLogger(__name__)


def _run_ahead(settings: ProposerSettings, runner: ModelRunner) -> RunAhead:
    # A draft on the CPU of the target's machine would take cores from the target; on a GPU there,
    # which may be the target's, only a narrow pass takes next to nothing.
    has_own_device = runner.description.is_simulated or not is_local(settings.listen)
    is_enabled, max_branches = settings.run_ahead == "on", settings.run_ahead_branches
    if settings.run_ahead == "auto":
        is_enabled = has_own_device or runner.device.type != "cpu"
        max_branches = max_branches if has_own_device else 1
    return RunAhead(is_enabled, max_branches)


def load_model_drafter(args: EngineArgs) -> Drafter:
    """Loads the model and builds its drafter.

    Raises:
        ConfigError: if it cannot be loaded.
    """
    config = args.speculative_config
    assert config is not None
    runner = load_model(draft_options(args))
    vocabulary = build_vocabulary(args, runner.description)
    grammars = None
    if vocabulary.summary is None:  # the draft model's ids are the target's
        grammars = DraftGrammars(
            compiler_for(
                str(config.model),
                runner.vocab_size,
                runner.eos_token_ids,
                args.structured_outputs_config,
            )
        )
    batched_tokens = args.specgw.proposer.max_num_batched_tokens
    method = config.draft_sample_method
    if method != "greedy" and not vocabulary.takes_samples:
        logger.warning(
            "drafts that are text to another vocabulary are greedy",
            extra={"draft_sample_method": method},
        )
        method = "greedy"
    sampler = DraftSampler(method, args.specgw.proposer.max_draft_support)
    if not config.parallel_drafting:
        ahead = _run_ahead(args.specgw.proposer, runner)
        return DraftModelDrafter(
            runner, batched_tokens, vocabulary, sampler, grammars, run_ahead=ahead
        )
    checkpoint = read_config(resolve_model(config.model))
    return ParallelDrafter(
        runner,
        batched_tokens,
        vocabulary,
        mask_token_id=resolve_mask_token(config.model, checkpoint, runner.vocab_size),
        max_draft_tokens=args.max_draft_tokens,
        num_trained_tokens=trained_draft_tokens(checkpoint),
        sampler=sampler,
        grammars=grammars,
    )
