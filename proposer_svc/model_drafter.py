"""Loads the draft model that a configuration names, for the method that drafts with it.

Apart from `proposer.py`, so that a proposer without a model needs no torch.
"""

from proposer_svc.draft_chooser import DraftChooser
from proposer_svc.draft_grammar import DraftGrammars
from proposer_svc.draft_model import DraftModelDrafter
from proposer_svc.draft_sampling import DraftSampler
from proposer_svc.draft_vocabulary import DraftVocabulary
from proposer_svc.draft_vocabulary_choice import build_vocabulary
from proposer_svc.drafter import Drafter
from proposer_svc.parallel_draft import ParallelDrafter
from proposer_svc.run_ahead import RunAhead
from specgw.addresses import is_local
from specgw.config import EngineArgs
from specgw.engine.loading import draft_options, load_eos_token_ids, load_model
from specgw.engine.model_runner import ModelRunner
from specgw.grammar import GrammarCompiler, compiler_for
from specgw.model_checks import resolve_mask_token, trained_draft_tokens
from specgw.model_files import read_config, resolve_model
from specgw.service_settings import ProposerSettings


def _has_own_device(settings: ProposerSettings, runner: ModelRunner) -> bool:
    """Whether no target computes where the draft model does, as far as one can tell."""
    return runner.description.is_simulated or not is_local(settings.listen)


def _run_ahead(settings: ProposerSettings, runner: ModelRunner) -> RunAhead:
    # A draft on the CPU of the target's machine would take cores from the target; on a GPU there,
    # which may be the target's, only a narrow pass takes next to nothing.
    has_own_device = _has_own_device(settings, runner)
    is_enabled, max_branches = settings.run_ahead == "on", settings.run_ahead_branches
    if settings.run_ahead == "auto":
        is_enabled = has_own_device or runner.device.type != "cpu"
        max_branches = max_branches if has_own_device else 1
    return RunAhead(is_enabled, max_branches)


def _yields_cores(settings: ProposerSettings, runner: ModelRunner) -> bool:
    if settings.yield_cores == "auto":
        return runner.device.type == "cpu" and not _has_own_device(settings, runner)
    return settings.yield_cores == "on"


def _grammar_compiler(
    args: EngineArgs, runner: ModelRunner, vocabulary: DraftVocabulary
) -> GrammarCompiler:
    """Returns what compiles grammars for the ids that drafts are chosen among."""
    assert args.speculative_config is not None
    settings = args.structured_outputs_config
    if vocabulary.summary is None:  # the draft model's are the target's
        model = str(args.speculative_config.model)
        return compiler_for(model, runner.vocab_size, runner.eos_token_ids, settings)
    vocab_size = int(read_config(resolve_model(args.model, with_weights=False))["vocab_size"])
    return compiler_for(args.tokenizer_path, vocab_size, load_eos_token_ids(args.model), settings)


def load_model_drafter(args: EngineArgs) -> Drafter:
    """Loads the model and builds its drafter.

    Raises:
        ConfigError: if it cannot be loaded.
    """
    config = args.speculative_config
    assert config is not None
    runner = load_model(draft_options(args))
    vocabulary = build_vocabulary(args, runner.description)
    sampler = DraftSampler(config.draft_sample_method, args.specgw.proposer.max_draft_support)
    chooser = DraftChooser(sampler, DraftGrammars(_grammar_compiler(args, runner, vocabulary)))
    settings = args.specgw.proposer
    batched_tokens, yields = settings.max_num_batched_tokens, _yields_cores(settings, runner)
    if not config.parallel_drafting:
        ahead = _run_ahead(settings, runner)
        return DraftModelDrafter(
            runner, batched_tokens, vocabulary, chooser, run_ahead=ahead, yields_cores=yields
        )
    checkpoint = read_config(resolve_model(config.model))
    return ParallelDrafter(
        runner,
        batched_tokens,
        vocabulary,
        mask_token_id=resolve_mask_token(config.model, checkpoint, runner.vocab_size),
        max_draft_tokens=args.max_draft_tokens,
        num_trained_tokens=trained_draft_tokens(checkpoint),
        chooser=chooser,
        yields_cores=yields,
    )
