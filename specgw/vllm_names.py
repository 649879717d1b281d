"""The words of vLLM 0.32.0's `speculative_config`: values, retired names, keys put where others go.

Data only, copied from `vllm/config/speculative.py`, `config/kernel.py`, `config/cache.py` and
`v1/attention/backends/registry.py`.
"""

from typing import Literal

DEPRECATED_METHODS = (
    "deepseek_mtp", "dots3_note_mtp", "mimo_mtp", "mimo_v2_mtp", "glm4_moe_mtp",
    "glm4_moe_lite_mtp", "glm_ocr_mtp", "ernie_mtp", "nemotron_h_mtp", "exaone_moe_mtp",
    "exaone4_5_mtp", "qwen3_next_mtp", "qwen4_exp_mtp", "qwen3_5_mtp", "longcat_flash_mtp",
    "bailing_hybrid_v3_mtp", "minimax_m3_mtp", "bailing_hybrid_mtp", "kimi_k3_mtp",
    "pangu_ultra_moe_mtp", "step3p5_mtp", "hy_v3_mtp", "hy_v4_mtp", "gemma4_mtp", "inkling_mtp",
    "glm5_next_mtp",
)  # fmt: skip
"""Values of `method` that all mean `mtp`."""

Method = Literal[
    "draft_model", "ngram", "ngram_gpu", "suffix", "eagle", "eagle3", "mtp", "dflash", "dspark",
    "medusa", "mlp_speculator", "custom_class", "extract_hidden_states",
]  # fmt: skip

MoEBackend = Literal[
    "auto", "triton", "batched_triton", "deep_gemm", "deep_gemm_mega_moe", "cutlass",
    "flashinfer_trtllm", "flashinfer_cutlass", "flashinfer_cutedsl", "flashinfer_moe_ep_cutedsl",
    "flashinfer_b12x", "b12x", "flashinfer_moe_ep_mega_deep_gemm", "marlin", "humming",
    "triton_unfused", "aiter", "aiter_mega_moe", "aiter_triton_mxfp4_bf16", "flydsl", "hpc",
    "emulation", "rdna3",
]  # fmt: skip

CacheDType = Literal[
    "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla",
    "nvfp4_ds_mla", "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc",
    "turboquant_3bit_nc", "ultraquant_4bit", "int4_per_token_head", "int8_per_token_head",
    "fp8_per_token_head", "nvfp4", "nvfp4_4over6",
]  # fmt: skip

AttentionBackend = Literal[
    "AMX_MLA", "B12X", "CPU_ATTN", "CPU_MLA", "CUSTOM", "CUTLASS_MLA", "CUTLASS_MSA", "FLASHINFER",
    "FLASHINFER_MLA", "FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_DSV4",
    "FLASHINFER_MLA_SPARSE_DSV41", "FLASHINFER_MLA_SPARSE_SM120", "FLASHINFER_MLA_SPARSE_SM90",
    "FLASHMLA", "FLASHMLA_MEGA_ATTN_DSV41", "FLASHMLA_SPARSE", "FLASHMLA_SPARSE_DSV4",
    "FLASHMLA_SPARSE_DSV41", "FLASH_ATTN", "FLASH_ATTN_DIFFKV", "FLASH_ATTN_MLA",
    "FLASH_ATTN_MLA_SPARSE", "FLEX_ATTENTION", "HPC_ATTN", "MINIMAX_M3_SPARSE", "NO_ATTENTION",
    "ROCM_AITER_FA", "ROCM_AITER_MLA", "ROCM_AITER_MLA_SPARSE", "ROCM_AITER_TRITON_MLA",
    "ROCM_AITER_UNIFIED_ATTN", "ROCM_ATTN", "ROCM_FLASHMLA_SPARSE_DSV4", "ROCM_SEGMENTED_ATTN",
    "TOKENSPEED_MLA", "TORCH_SDPA", "TRITON_ATTN", "TRITON_ATTN_DIFFKV", "TRITON_FLASHINFER",
    "TRITON_FLASH_ATTN", "TRITON_MLA", "TRITON_MSA", "TURBOQUANT", "ULTRAQUANT", "XPU_MLA_SPARSE",
]  # fmt: skip

RUNNABLE_ATTENTION = ("FLASH_ATTN", "TORCH_SDPA")
"""Those of them that specgw has."""

_SAMPLING = "is a sampling parameter: it goes into each request"
_NOT_THE_USERS = "is set by the engine"

MISPLACED_KEYS = {
    "tensor_parallel_size": "is a top-level key; the draft has draft_tensor_parallel_size",
    "temperature": _SAMPLING,
    "top_p": _SAMPLING,
    "top_k": _SAMPLING,
    "min_p": _SAMPLING,
    "seed": "is a top-level key, and a sampling parameter of each request",
    "max_tokens": _SAMPLING,
    "dtype": "is a top-level key and holds for both models",
    "tokenizer": "is a top-level key; a draft's tokenizer is the one beside its weights",
    "gpu_memory_utilization": "is a top-level key",
    "max_num_seqs": "is a top-level key; the draft has specgw.proposer.max_sessions",
    "max_num_batched_tokens": "is a top-level key; the draft has "
    "specgw.proposer.max_num_batched_tokens",
    "target_model": "is the top-level key `model`",
    "target_model_config": f"{_NOT_THE_USERS}: the target model is the top-level key `model`",
    "target_parallel_config": f"{_NOT_THE_USERS}: see the top-level tensor_parallel_size",
    "draft_model_config": f"{_NOT_THE_USERS}: the draft model is `speculative_config.model`",
    "draft_parallel_config": f"{_NOT_THE_USERS}: see draft_tensor_parallel_size",
}
"""Keys that users put into `speculative_config`, and where they belong."""

_NO_SUCCESSOR = "was removed from vLLM without a successor: delete it"
_ACCEPTANCE = "was removed from vLLM; what is left of it is rejection_sample_method"

RETIRED_KEYS = {
    "disable_by_batch_size": "was removed from vLLM; use num_speculative_tokens_per_batch_size "
    "with entries whose K is 0",
    "disable_logprobs": _NO_SUCCESSOR,
    "disable_mqa_scorer": _NO_SUCCESSOR,
    "acceptance_method": _ACCEPTANCE,
    "typical_acceptance_sampler_posterior_threshold": _ACCEPTANCE,
    "typical_acceptance_sampler_posterior_alpha": _ACCEPTANCE,
    "posterior_threshold": _ACCEPTANCE,
    "posterior_alpha": _ACCEPTANCE,
    "synthetic_acceptance_rate": "is now synthetic_acceptance_rates, one for each position",
    "ngram_prompt_lookup_max": "is now prompt_lookup_max",
    "ngram_prompt_lookup_min": "is now prompt_lookup_min",
    "draft_model": "is now model",
    "speculative_model": "is now model",
    "speculative_max_model_len": "is now max_model_len",
}
"""Keys that `speculative_config` once had, and what replaced each."""


def _key(name: str) -> str:
    return f"""use --speculative-config '{{"{name}": ...}}'"""


RETIRED_FLAGS = {
    "--speculative-model": f"{_key('model')} or --spec-model",
    "--num-speculative-tokens": f"{_key('num_speculative_tokens')} or --spec-tokens",
    "--speculative-method": f"{_key('method')} or --spec-method",
    "--speculative-draft-tensor-parallel-size": _key("draft_tensor_parallel_size"),
    "--speculative-max-model-len": _key("max_model_len"),
    "--speculative-model-quantization": _key("quantization"),
    "--speculative-disable-by-batch-size": _key("num_speculative_tokens_per_batch_size"),
    "--ngram-prompt-lookup-max": _key("prompt_lookup_max"),
    "--ngram-prompt-lookup-min": _key("prompt_lookup_min"),
    "--spec-decoding-acceptance-method": _key("rejection_sample_method"),
    "--speculative-disable-mqa-scorer": _NO_SUCCESSOR,
    "--disable-logprobs-during-spec-decoding": _NO_SUCCESSOR,
    "--typical-acceptance-sampler-posterior-threshold": _key("rejection_sample_method"),
    "--typical-acceptance-sampler-posterior-alpha": _key("rejection_sample_method"),
    "--use-v2-block-manager": _NO_SUCCESSOR,
}
"""Flags that `vllm serve` once had, and what replaced each."""

ALIASES = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
}
"""Top-level keys that set one key of `speculative_config`."""
