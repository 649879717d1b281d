"""What the configuration asks the engine to load, for the target and for the draft."""

from specgw.config import EngineArgs
from specgw.engine.loading import ModelOptions
from specgw.errors import ConfigError


def target_options(args: EngineArgs) -> ModelOptions:
    """Returns what a verifier loads."""
    settings = args.specgw.verifier
    return ModelOptions(
        model=args.model,
        dtype=args.dtype,
        device=args.device,
        max_model_len=args.max_model_len,
        kv_cache_tokens=settings.kv_cache_tokens,
        memory_fraction=args.gpu_memory_utilization,
        max_num_seqs=args.max_num_seqs,
        num_threads=settings.num_threads,
    )


def draft_options(args: EngineArgs) -> ModelOptions:
    """Returns what a proposer loads. The draft has the target's data type, as in vLLM.

    Raises:
        ConfigError: if no draft model is configured.
    """
    if args.speculative_config is None:
        raise ConfigError(["speculative_config: a proposer needs one"])
    settings = args.specgw.proposer
    return ModelOptions(
        model=args.speculative_config.model,
        dtype=args.dtype,
        device=args.device,
        kv_cache_tokens=settings.kv_cache_tokens,
        memory_fraction=args.gpu_memory_utilization,
        max_num_seqs=settings.max_sessions,
        num_threads=settings.num_threads,
    )
