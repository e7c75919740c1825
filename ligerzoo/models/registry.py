"""The lists of architectures, from which exports, converters, tables and tests derive."""

ARCHITECTURES = {
    "apertus": "Apertus",
    "arcee": "Arcee",
    "bamba": "Bamba",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "ernie4_5": "Ernie4_5",
    "ernie4_5_moe": "Ernie4_5Moe",
    "exaone": "Exaone",
    "exaone4": "Exaone4",
    "falcon_h1": "FalconH1",
    "flint": "Flint",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "gemma3_text": "Gemma3Text",
    "gemma4": "Gemma4",
    "gemma4_text": "Gemma4Text",
    "gemma4_unified": "Gemma4Unified",
    "glm": "Glm",
    "glm4": "Glm4",
    "glm4_moe": "Glm4Moe",
    "glm4_moe_lite": "Glm4MoeLite",
    "glm4v": "Glm4v",
    "glm4v_moe": "Glm4vMoe",
    "gpt_oss": "GptOss",
    "granite": "Granite",
    "granite_swa": "GraniteSWA",
    "granitemoe_swa": "GraniteMoeSWA",
    "granitemoehybrid": "GraniteMoeHybrid",
    "hunyuan_v1_dense": "HunYuanDenseV1",
    "hyperclovax": "HyperCLOVAX",
    "internlm3": "InternLM3",
    "iquestcoder": "IQuestCoder",
    "kimi_linear": "KimiLinear",
    "kolibri1": "Kolibri1",
    "lfm2": "Lfm2",
    "lfm2_moe": "Lfm2Moe",
    "lfm3": "Lfm3",
    "llama": "Llama",
    "llama4_text": "Llama4Text",
    "mellum": "Mellum",
    "minimax_m2": "MiniMaxM2",
    "ministral": "Ministral",
    "ministral3": "Ministral3",
    "mistral": "Mistral",
    "mistral3": "Mistral3",
    "mixtral": "Mixtral",
    "mllama": "Mllama",
    "muse_glimmer": "MuseGlimmer",
    "muse_glimmer_text": "MuseGlimmerText",
    "nanochat": "NanoChat",
    "nemotron_h": "NemotronH",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "olmo_hybrid": "OlmoHybrid",
    "olmoe": "Olmoe",
    "phi3": "Phi3",
    "qwen2": "Qwen2",
    "qwen2_5_vl": "Qwen2_5VL",
    "qwen2_moe": "Qwen2Moe",
    "qwen2_vl": "Qwen2VL",
    "qwen3": "Qwen3",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
    "qwen3_5_moe_text": "Qwen3_5MoeText",
    "qwen3_5_text": "Qwen3_5Text",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
    "qwen3_vl": "Qwen3VL",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "sarvam_mla": "SarvamMLA",
    "sarvam_moe": "SarvamMoE",
    "seed_oss": "SeedOss",
    "smollm3": "SmolLM3",
    "youtu": "Youtu",
}
"""The class of a causal language model by the `model_type` in config.json.

It is in the module of this name, with `<class>Config`.
"""

ENCODERS = {
    "bert": "Bert",
    "modernbert": "ModernBert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
}
"""The same of encoders, which have a head for masked tokens and generate no text."""

MODEL_CLASSES = {**ARCHITECTURES, **ENCODERS}
"""All of them."""

ALIASES = {"kimi_k2": "deepseek_v3"}
"""Values of `model_type` that name an architecture of another name."""

VISION_CONFIGS = {
    "Gemma3VisionConfig": "gemma3",
    "Gemma4UnifiedVisionConfig": "gemma4_unified",
    "Gemma4VisionConfig": "gemma4_vision",
    "Glm4vVisionConfig": "glm4v_vision",
    "Mistral3VisionConfig": "mistral3_vision",
    "MllamaVisionConfig": "mllama_vision",
    "MuseGlimmerVisionConfig": "muse_glimmer_vision",
    "Qwen2VLVisionConfig": "qwen2_vl",
    "Qwen2_5VLVisionConfig": "qwen2_5_vl",
    "Qwen3VLVisionConfig": "qwen3_vision",
    "Qwen3VisionConfig": "qwen3_vision",
}
"""The modules of the configs of vision towers."""


def module_of(model_type: str) -> str:
    """Returns the name of the module of an architecture, in `models` and in `convert`."""
    return model_type.replace("-", "_")
