"""Model architectures, one file each, named after the Hugging Face `model_type`."""

from ligerzoo.models.apertus import Apertus, ApertusConfig
from ligerzoo.models.arcee import Arcee, ArceeConfig
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.deepseek_v3 import DeepseekV3, DeepseekV3Config
from ligerzoo.models.ernie4_5 import Ernie4_5, Ernie4_5Config
from ligerzoo.models.ernie4_5_moe import Ernie4_5Moe, Ernie4_5MoeConfig
from ligerzoo.models.exaone4 import Exaone4, Exaone4Config
from ligerzoo.models.gemma import Gemma, GemmaConfig
from ligerzoo.models.gemma2 import Gemma2, Gemma2Config
from ligerzoo.models.gemma3 import Gemma3, Gemma3Config, Gemma3VisionConfig
from ligerzoo.models.gemma3_text import Gemma3Text, Gemma3TextConfig
from ligerzoo.models.glm import Glm, GlmConfig
from ligerzoo.models.glm4 import Glm4, Glm4Config
from ligerzoo.models.glm4_moe import Glm4Moe, Glm4MoeConfig
from ligerzoo.models.glm4_moe_lite import Glm4MoeLite, Glm4MoeLiteConfig
from ligerzoo.models.gpt_oss import GptOss, GptOssConfig
from ligerzoo.models.granite import Granite, GraniteConfig
from ligerzoo.models.hunyuan_v1_dense import HunYuanDenseV1, HunYuanDenseV1Config
from ligerzoo.models.llama import Llama, LlamaConfig
from ligerzoo.models.minimax_m2 import MiniMaxM2, MiniMaxM2Config
from ligerzoo.models.ministral import Ministral, MinistralConfig
from ligerzoo.models.ministral3 import Ministral3, Ministral3Config
from ligerzoo.models.mistral import Mistral, MistralConfig
from ligerzoo.models.mixtral import Mixtral, MixtralConfig
from ligerzoo.models.mllama import Mllama, MllamaConfig
from ligerzoo.models.mllama_vision import MllamaVisionConfig
from ligerzoo.models.nanochat import NanoChat, NanoChatConfig
from ligerzoo.models.olmo2 import Olmo2, Olmo2Config
from ligerzoo.models.olmo3 import Olmo3, Olmo3Config
from ligerzoo.models.output import CausalLMOutput, SequenceClassifierOutput
from ligerzoo.models.phi3 import Phi3, Phi3Config
from ligerzoo.models.qwen2 import Qwen2, Qwen2Config
from ligerzoo.models.qwen2_5_vl import Qwen2_5VL, Qwen2_5VLConfig, Qwen2_5VLVisionConfig
from ligerzoo.models.qwen2_moe import Qwen2Moe, Qwen2MoeConfig
from ligerzoo.models.qwen2_vl import Qwen2VL, Qwen2VLConfig, Qwen2VLVisionConfig
from ligerzoo.models.qwen3 import Qwen3, Qwen3Config
from ligerzoo.models.qwen3_5 import Qwen3_5, Qwen3_5Config
from ligerzoo.models.qwen3_5_moe import Qwen3_5Moe, Qwen3_5MoeConfig
from ligerzoo.models.qwen3_5_moe_text import Qwen3_5MoeText, Qwen3_5MoeTextConfig
from ligerzoo.models.qwen3_5_text import Qwen3_5Text, Qwen3_5TextConfig
from ligerzoo.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig
from ligerzoo.models.qwen3_next import Qwen3Next, Qwen3NextConfig
from ligerzoo.models.qwen3_vision import Qwen3VisionConfig, Qwen3VLVisionConfig
from ligerzoo.models.qwen3_vl import Qwen3VL, Qwen3VLConfig
from ligerzoo.models.qwen3_vl_moe import Qwen3VLMoe, Qwen3VLMoeConfig
from ligerzoo.models.seed_oss import SeedOss, SeedOssConfig
from ligerzoo.models.sequence_classifier import Labels, SequenceClassifier
from ligerzoo.models.smollm3 import SmolLM3, SmolLM3Config

__all__ = [
    "Apertus",
    "ApertusConfig",
    "Arcee",
    "ArceeConfig",
    "CausalLM",
    "CausalLMOutput",
    "DeepseekV3",
    "DeepseekV3Config",
    "Ernie4_5",
    "Ernie4_5Config",
    "Ernie4_5Moe",
    "Ernie4_5MoeConfig",
    "Exaone4",
    "Exaone4Config",
    "Gemma",
    "Gemma2",
    "Gemma2Config",
    "Gemma3",
    "Gemma3Config",
    "Gemma3Text",
    "Gemma3TextConfig",
    "Gemma3VisionConfig",
    "GemmaConfig",
    "Glm",
    "Glm4",
    "Glm4Config",
    "Glm4Moe",
    "Glm4MoeConfig",
    "Glm4MoeLite",
    "Glm4MoeLiteConfig",
    "GlmConfig",
    "GptOss",
    "GptOssConfig",
    "Granite",
    "GraniteConfig",
    "HunYuanDenseV1",
    "HunYuanDenseV1Config",
    "Labels",
    "Llama",
    "LlamaConfig",
    "MiniMaxM2",
    "MiniMaxM2Config",
    "Ministral",
    "Ministral3",
    "Ministral3Config",
    "MinistralConfig",
    "Mistral",
    "MistralConfig",
    "Mixtral",
    "MixtralConfig",
    "Mllama",
    "MllamaConfig",
    "MllamaVisionConfig",
    "NanoChat",
    "NanoChatConfig",
    "Olmo2",
    "Olmo2Config",
    "Olmo3",
    "Olmo3Config",
    "Phi3",
    "Phi3Config",
    "Qwen2",
    "Qwen2Config",
    "Qwen2Moe",
    "Qwen2MoeConfig",
    "Qwen2VL",
    "Qwen2VLConfig",
    "Qwen2VLVisionConfig",
    "Qwen2_5VL",
    "Qwen2_5VLConfig",
    "Qwen2_5VLVisionConfig",
    "Qwen3",
    "Qwen3Config",
    "Qwen3Moe",
    "Qwen3MoeConfig",
    "Qwen3Next",
    "Qwen3NextConfig",
    "Qwen3VL",
    "Qwen3VLConfig",
    "Qwen3VLMoe",
    "Qwen3VLMoeConfig",
    "Qwen3VLVisionConfig",
    "Qwen3VisionConfig",
    "Qwen3_5",
    "Qwen3_5Config",
    "Qwen3_5Moe",
    "Qwen3_5MoeConfig",
    "Qwen3_5MoeText",
    "Qwen3_5MoeTextConfig",
    "Qwen3_5Text",
    "Qwen3_5TextConfig",
    "SeedOss",
    "SeedOssConfig",
    "SequenceClassifier",
    "SequenceClassifierOutput",
    "SmolLM3",
    "SmolLM3Config",
]
