"""What a draft's `config.json` says of the method it was made for. Never looks at a path's name.

The families are those that vLLM 0.32.0 knows (`SpeculativeConfig.hf_config_override`).
"""

from collections.abc import Mapping
from typing import Any

from specgw.vllm_names import DEPRECATED_METHODS

_MTP_MODEL_TYPES = frozenset({
    *DEPRECATED_METHODS, "mtp", "deepseek_v3", "deepseek_v32", "deepseek_v4", "glm_moe_dsa",
    "dots3_note", "pangu_ultra_moe", "kimi_k3", "ernie4_5_moe", "qwen3_next", "qwen4_exp",
    "qwen4_exp_text", "bailing_hybrid", "exaone_moe", "exaone4_5", "qwen3_5", "qwen3_5_moe",
    "qwen3_5_text", "qwen3_5_moe_text", "intern_s2_preview", "interns2_mobius", "longcat_flash",
    "step3p5", "step3p7", "hy_v3", "hy_v4", "inkling_mm_model", "inkling_model",
    "glm4_moe", "glm4_moe_lite", "glm_ocr", "mimo", "mimo_v2", "gemma4_assistant",
    "gemma4_unified_assistant", "minimax_m3_vl", "glm5_next", "nemotron_h",
})  # fmt: skip
_MTP_LAYER_KEYS = ("n_predict", "mtp_num_hidden_layers", "num_nextn_predict_layers",
                   "num_mtp_modules")  # fmt: skip

# The beginning of an architecture's name, longest first where one begins another.
_METHOD_BY_ARCHITECTURE = {
    "Qwen3DSparkModel": "dspark",
    "Qwen3OmniDSparkModel": "dspark",
    "Gemma4DSparkModel": "dspark",
    "K3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
    "DFlash": "dflash",
    "MuseGlimmerAssistantModel": "dflash",
    "Eagle3": "eagle3",
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle": "eagle",
}
_METHOD_BY_MODEL_TYPE = {"medusa": "medusa", "mlp_speculator": "mlp_speculator", "eagle": "eagle"}


def detect_method(config: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the method and the reason for it; `draft_model` unless the file says otherwise."""
    for architecture in config.get("architectures") or ():
        for name, method in _METHOD_BY_ARCHITECTURE.items():
            if str(architecture).startswith(name):
                return method, f"config.json: architectures has {architecture}"
    model_type = str(config.get("model_type", ""))
    if model_type in _METHOD_BY_MODEL_TYPE:
        return _METHOD_BY_MODEL_TYPE[model_type], f"config.json: model_type is {model_type}"
    if model_type in _MTP_MODEL_TYPES and num_predicted_tokens("mtp", config):
        return "mtp", f"config.json: model_type is {model_type} with prediction layers"
    return "draft_model", "config.json names no other method"


def num_predicted_tokens(method: str, config: Mapping[str, Any]) -> int | None:
    """Returns how many tokens the checkpoint predicts at once, if it says so.

    That is K if none is given; for other methods than DSpark, a larger K must be a multiple of it.
    """
    keys: tuple[str, ...] = ("n_predict",)
    if method == "mtp":
        keys = _MTP_LAYER_KEYS
    elif method == "dspark":
        keys = ("block_size", "dspark_block_size")
    text_config = config.get("text_config") or {}
    found = (part.get(key) for key in keys for part in (config, text_config))
    return next((value for value in found if isinstance(value, int)), None)
