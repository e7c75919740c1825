# Written by python -m tools.architectures.

import torch

from ligerzoo.models.apertus import Apertus as _Apertus
from ligerzoo.models.apertus import ApertusConfig as ApertusConfig
from ligerzoo.models.arcee import Arcee as _Arcee
from ligerzoo.models.arcee import ArceeConfig as ArceeConfig
from ligerzoo.models.bamba import Bamba as _Bamba
from ligerzoo.models.bamba import BambaConfig as BambaConfig
from ligerzoo.models.bert import Bert as _Bert
from ligerzoo.models.bert import BertConfig as BertConfig
from ligerzoo.models.causal_lm import CausalLM as CausalLM
from ligerzoo.models.classifier import Labels as Labels
from ligerzoo.models.deepseek_v2 import DeepseekV2 as _DeepseekV2
from ligerzoo.models.deepseek_v2 import DeepseekV2Config as DeepseekV2Config
from ligerzoo.models.deepseek_v3 import DeepseekV3 as _DeepseekV3
from ligerzoo.models.deepseek_v3 import DeepseekV3Config as DeepseekV3Config
from ligerzoo.models.embedding import DenseStage as DenseStage
from ligerzoo.models.embedding import EmbeddingModel as EmbeddingModel
from ligerzoo.models.embedding import EmbeddingSettings as EmbeddingSettings
from ligerzoo.models.embedding import NormalizeStage as NormalizeStage
from ligerzoo.models.embedding import PoolingStage as PoolingStage
from ligerzoo.models.ernie4_5 import Ernie4_5 as _Ernie4_5
from ligerzoo.models.ernie4_5 import Ernie4_5Config as Ernie4_5Config
from ligerzoo.models.ernie4_5_moe import Ernie4_5Moe as _Ernie4_5Moe
from ligerzoo.models.ernie4_5_moe import Ernie4_5MoeConfig as Ernie4_5MoeConfig
from ligerzoo.models.exaone import Exaone as _Exaone
from ligerzoo.models.exaone import ExaoneConfig as ExaoneConfig
from ligerzoo.models.exaone4 import Exaone4 as _Exaone4
from ligerzoo.models.exaone4 import Exaone4Config as Exaone4Config
from ligerzoo.models.falcon_h1 import FalconH1 as _FalconH1
from ligerzoo.models.falcon_h1 import FalconH1Config as FalconH1Config
from ligerzoo.models.flint import Flint as _Flint
from ligerzoo.models.flint import FlintConfig as FlintConfig
from ligerzoo.models.gemma import Gemma as _Gemma
from ligerzoo.models.gemma import GemmaConfig as GemmaConfig
from ligerzoo.models.gemma2 import Gemma2 as _Gemma2
from ligerzoo.models.gemma2 import Gemma2Config as Gemma2Config
from ligerzoo.models.gemma3 import Gemma3 as _Gemma3
from ligerzoo.models.gemma3 import Gemma3Config as Gemma3Config
from ligerzoo.models.gemma3 import Gemma3VisionConfig as Gemma3VisionConfig
from ligerzoo.models.gemma3_text import Gemma3Text as _Gemma3Text
from ligerzoo.models.gemma3_text import Gemma3TextConfig as Gemma3TextConfig
from ligerzoo.models.gemma4 import Gemma4 as _Gemma4
from ligerzoo.models.gemma4 import Gemma4Config as Gemma4Config
from ligerzoo.models.gemma4_text import Gemma4Text as _Gemma4Text
from ligerzoo.models.gemma4_text import Gemma4TextConfig as Gemma4TextConfig
from ligerzoo.models.gemma4_unified import Gemma4Unified as _Gemma4Unified
from ligerzoo.models.gemma4_unified import Gemma4UnifiedConfig as Gemma4UnifiedConfig
from ligerzoo.models.gemma4_unified import Gemma4UnifiedVisionConfig as Gemma4UnifiedVisionConfig
from ligerzoo.models.gemma4_vision import Gemma4VisionConfig as Gemma4VisionConfig
from ligerzoo.models.glm import Glm as _Glm
from ligerzoo.models.glm import GlmConfig as GlmConfig
from ligerzoo.models.glm4 import Glm4 as _Glm4
from ligerzoo.models.glm4 import Glm4Config as Glm4Config
from ligerzoo.models.glm4_moe import Glm4Moe as _Glm4Moe
from ligerzoo.models.glm4_moe import Glm4MoeConfig as Glm4MoeConfig
from ligerzoo.models.glm4_moe_lite import Glm4MoeLite as _Glm4MoeLite
from ligerzoo.models.glm4_moe_lite import Glm4MoeLiteConfig as Glm4MoeLiteConfig
from ligerzoo.models.glm4v import Glm4v as _Glm4v
from ligerzoo.models.glm4v import Glm4vConfig as Glm4vConfig
from ligerzoo.models.glm4v_moe import Glm4vMoe as _Glm4vMoe
from ligerzoo.models.glm4v_moe import Glm4vMoeConfig as Glm4vMoeConfig
from ligerzoo.models.glm4v_vision import Glm4vVisionConfig as Glm4vVisionConfig
from ligerzoo.models.gpt_oss import GptOss as _GptOss
from ligerzoo.models.gpt_oss import GptOssConfig as GptOssConfig
from ligerzoo.models.granite import Granite as _Granite
from ligerzoo.models.granite import GraniteConfig as GraniteConfig
from ligerzoo.models.granite_swa import GraniteSWA as _GraniteSWA
from ligerzoo.models.granite_swa import GraniteSWAConfig as GraniteSWAConfig
from ligerzoo.models.granitemoe_swa import GraniteMoeSWA as _GraniteMoeSWA
from ligerzoo.models.granitemoe_swa import GraniteMoeSWAConfig as GraniteMoeSWAConfig
from ligerzoo.models.granitemoehybrid import GraniteMoeHybrid as _GraniteMoeHybrid
from ligerzoo.models.granitemoehybrid import GraniteMoeHybridConfig as GraniteMoeHybridConfig
from ligerzoo.models.hunyuan_v1_dense import HunYuanDenseV1 as _HunYuanDenseV1
from ligerzoo.models.hunyuan_v1_dense import HunYuanDenseV1Config as HunYuanDenseV1Config
from ligerzoo.models.hyperclovax import HyperCLOVAX as _HyperCLOVAX
from ligerzoo.models.hyperclovax import HyperCLOVAXConfig as HyperCLOVAXConfig
from ligerzoo.models.internlm3 import InternLM3 as _InternLM3
from ligerzoo.models.internlm3 import InternLM3Config as InternLM3Config
from ligerzoo.models.iquestcoder import IQuestCoder as _IQuestCoder
from ligerzoo.models.iquestcoder import IQuestCoderConfig as IQuestCoderConfig
from ligerzoo.models.kimi_linear import KimiLinear as _KimiLinear
from ligerzoo.models.kimi_linear import KimiLinearConfig as KimiLinearConfig
from ligerzoo.models.kolibri1 import Kolibri1 as _Kolibri1
from ligerzoo.models.kolibri1 import Kolibri1Config as Kolibri1Config
from ligerzoo.models.lfm2 import Lfm2 as _Lfm2
from ligerzoo.models.lfm2 import Lfm2Config as Lfm2Config
from ligerzoo.models.lfm2_moe import Lfm2Moe as _Lfm2Moe
from ligerzoo.models.lfm2_moe import Lfm2MoeConfig as Lfm2MoeConfig
from ligerzoo.models.lfm3 import Lfm3 as _Lfm3
from ligerzoo.models.lfm3 import Lfm3Config as Lfm3Config
from ligerzoo.models.llama import Llama as _Llama
from ligerzoo.models.llama import LlamaConfig as LlamaConfig
from ligerzoo.models.llama4_text import Llama4Text as _Llama4Text
from ligerzoo.models.llama4_text import Llama4TextConfig as Llama4TextConfig
from ligerzoo.models.masked_lm import MaskedLM as MaskedLM
from ligerzoo.models.mellum import Mellum as _Mellum
from ligerzoo.models.mellum import MellumConfig as MellumConfig
from ligerzoo.models.minimax_m2 import MiniMaxM2 as _MiniMaxM2
from ligerzoo.models.minimax_m2 import MiniMaxM2Config as MiniMaxM2Config
from ligerzoo.models.ministral import Ministral as _Ministral
from ligerzoo.models.ministral import MinistralConfig as MinistralConfig
from ligerzoo.models.ministral3 import Ministral3 as _Ministral3
from ligerzoo.models.ministral3 import Ministral3Config as Ministral3Config
from ligerzoo.models.mistral import Mistral as _Mistral
from ligerzoo.models.mistral import MistralConfig as MistralConfig
from ligerzoo.models.mistral3 import Mistral3 as _Mistral3
from ligerzoo.models.mistral3 import Mistral3Config as Mistral3Config
from ligerzoo.models.mistral3_vision import Mistral3VisionConfig as Mistral3VisionConfig
from ligerzoo.models.mixtral import Mixtral as _Mixtral
from ligerzoo.models.mixtral import MixtralConfig as MixtralConfig
from ligerzoo.models.mllama import Mllama as _Mllama
from ligerzoo.models.mllama import MllamaConfig as MllamaConfig
from ligerzoo.models.mllama_vision import MllamaVisionConfig as MllamaVisionConfig
from ligerzoo.models.modernbert import ModernBert as _ModernBert
from ligerzoo.models.modernbert import ModernBertConfig as ModernBertConfig
from ligerzoo.models.muse_glimmer import MuseGlimmer as _MuseGlimmer
from ligerzoo.models.muse_glimmer import MuseGlimmerConfig as MuseGlimmerConfig
from ligerzoo.models.muse_glimmer_text import MuseGlimmerText as _MuseGlimmerText
from ligerzoo.models.muse_glimmer_text import MuseGlimmerTextConfig as MuseGlimmerTextConfig
from ligerzoo.models.muse_glimmer_vision import MuseGlimmerVisionConfig as MuseGlimmerVisionConfig
from ligerzoo.models.nanochat import NanoChat as _NanoChat
from ligerzoo.models.nanochat import NanoChatConfig as NanoChatConfig
from ligerzoo.models.nemotron_h import NemotronH as _NemotronH
from ligerzoo.models.nemotron_h import NemotronHConfig as NemotronHConfig
from ligerzoo.models.olmo2 import Olmo2 as _Olmo2
from ligerzoo.models.olmo2 import Olmo2Config as Olmo2Config
from ligerzoo.models.olmo3 import Olmo3 as _Olmo3
from ligerzoo.models.olmo3 import Olmo3Config as Olmo3Config
from ligerzoo.models.olmo_hybrid import OlmoHybrid as _OlmoHybrid
from ligerzoo.models.olmo_hybrid import OlmoHybridConfig as OlmoHybridConfig
from ligerzoo.models.olmoe import Olmoe as _Olmoe
from ligerzoo.models.olmoe import OlmoeConfig as OlmoeConfig
from ligerzoo.models.output import CausalLMOutput as CausalLMOutput
from ligerzoo.models.output import MaskedLMOutput as MaskedLMOutput
from ligerzoo.models.output import SequenceClassifierOutput as SequenceClassifierOutput
from ligerzoo.models.output import TokenClassifierOutput as TokenClassifierOutput
from ligerzoo.models.phi3 import Phi3 as _Phi3
from ligerzoo.models.phi3 import Phi3Config as Phi3Config
from ligerzoo.models.qwen2 import Qwen2 as _Qwen2
from ligerzoo.models.qwen2 import Qwen2Config as Qwen2Config
from ligerzoo.models.qwen2_5_vl import Qwen2_5VL as _Qwen2_5VL
from ligerzoo.models.qwen2_5_vl import Qwen2_5VLConfig as Qwen2_5VLConfig
from ligerzoo.models.qwen2_5_vl import Qwen2_5VLVisionConfig as Qwen2_5VLVisionConfig
from ligerzoo.models.qwen2_moe import Qwen2Moe as _Qwen2Moe
from ligerzoo.models.qwen2_moe import Qwen2MoeConfig as Qwen2MoeConfig
from ligerzoo.models.qwen2_vl import Qwen2VL as _Qwen2VL
from ligerzoo.models.qwen2_vl import Qwen2VLConfig as Qwen2VLConfig
from ligerzoo.models.qwen2_vl import Qwen2VLVisionConfig as Qwen2VLVisionConfig
from ligerzoo.models.qwen3 import Qwen3 as _Qwen3
from ligerzoo.models.qwen3 import Qwen3Config as Qwen3Config
from ligerzoo.models.qwen3_5 import Qwen3_5 as _Qwen3_5
from ligerzoo.models.qwen3_5 import Qwen3_5Config as Qwen3_5Config
from ligerzoo.models.qwen3_5_moe import Qwen3_5Moe as _Qwen3_5Moe
from ligerzoo.models.qwen3_5_moe import Qwen3_5MoeConfig as Qwen3_5MoeConfig
from ligerzoo.models.qwen3_5_moe_text import Qwen3_5MoeText as _Qwen3_5MoeText
from ligerzoo.models.qwen3_5_moe_text import Qwen3_5MoeTextConfig as Qwen3_5MoeTextConfig
from ligerzoo.models.qwen3_5_text import Qwen3_5Text as _Qwen3_5Text
from ligerzoo.models.qwen3_5_text import Qwen3_5TextConfig as Qwen3_5TextConfig
from ligerzoo.models.qwen3_moe import Qwen3Moe as _Qwen3Moe
from ligerzoo.models.qwen3_moe import Qwen3MoeConfig as Qwen3MoeConfig
from ligerzoo.models.qwen3_next import Qwen3Next as _Qwen3Next
from ligerzoo.models.qwen3_next import Qwen3NextConfig as Qwen3NextConfig
from ligerzoo.models.qwen3_vision import Qwen3VisionConfig as Qwen3VisionConfig
from ligerzoo.models.qwen3_vision import Qwen3VLVisionConfig as Qwen3VLVisionConfig
from ligerzoo.models.qwen3_vl import Qwen3VL as _Qwen3VL
from ligerzoo.models.qwen3_vl import Qwen3VLConfig as Qwen3VLConfig
from ligerzoo.models.qwen3_vl_moe import Qwen3VLMoe as _Qwen3VLMoe
from ligerzoo.models.qwen3_vl_moe import Qwen3VLMoeConfig as Qwen3VLMoeConfig
from ligerzoo.models.roberta import Roberta as _Roberta
from ligerzoo.models.roberta import RobertaConfig as RobertaConfig
from ligerzoo.models.sarvam_mla import SarvamMLA as _SarvamMLA
from ligerzoo.models.sarvam_mla import SarvamMLAConfig as SarvamMLAConfig
from ligerzoo.models.sarvam_moe import SarvamMoE as _SarvamMoE
from ligerzoo.models.sarvam_moe import SarvamMoEConfig as SarvamMoEConfig
from ligerzoo.models.seed_oss import SeedOss as _SeedOss
from ligerzoo.models.seed_oss import SeedOssConfig as SeedOssConfig
from ligerzoo.models.sequence_classifier import SequenceClassifier as SequenceClassifier
from ligerzoo.models.smollm3 import SmolLM3 as _SmolLM3
from ligerzoo.models.smollm3 import SmolLM3Config as SmolLM3Config
from ligerzoo.models.token_classifier import TokenClassifier as TokenClassifier
from ligerzoo.models.xlm_roberta import XLMRoberta as _XLMRoberta
from ligerzoo.models.xlm_roberta import XLMRobertaConfig as XLMRobertaConfig
from ligerzoo.models.youtu import Youtu as _Youtu
from ligerzoo.models.youtu import YoutuConfig as YoutuConfig

_Device = torch.device | str | None
_Dtype = torch.dtype | None

class Apertus(_Apertus):
    def __init__(self, config: ApertusConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Arcee(_Arcee):
    def __init__(self, config: ArceeConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Bamba(_Bamba):
    def __init__(self, config: BambaConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Bert(_Bert):
    def __init__(self, config: BertConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class DeepseekV2(_DeepseekV2):
    def __init__(self, config: DeepseekV2Config, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class DeepseekV3(_DeepseekV3):
    def __init__(self, config: DeepseekV3Config, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Ernie4_5(_Ernie4_5):
    def __init__(self, config: Ernie4_5Config, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Ernie4_5Moe(_Ernie4_5Moe):
    def __init__(self, config: Ernie4_5MoeConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Exaone(_Exaone):
    def __init__(self, config: ExaoneConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Exaone4(_Exaone4):
    def __init__(self, config: Exaone4Config, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class FalconH1(_FalconH1):
    def __init__(self, config: FalconH1Config, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Flint(_Flint):
    def __init__(self, config: FlintConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Gemma(_Gemma):
    def __init__(self, config: GemmaConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Gemma2(_Gemma2):
    def __init__(self, config: Gemma2Config, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Gemma3(_Gemma3):
    def __init__(self, config: Gemma3Config, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Gemma3Text(_Gemma3Text):
    def __init__(self, config: Gemma3TextConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Gemma4(_Gemma4):
    def __init__(self, config: Gemma4Config, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Gemma4Text(_Gemma4Text):
    def __init__(self, config: Gemma4TextConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Gemma4Unified(_Gemma4Unified):
    def __init__(self, config: Gemma4UnifiedConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Glm(_Glm):
    def __init__(self, config: GlmConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Glm4(_Glm4):
    def __init__(self, config: Glm4Config, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Glm4Moe(_Glm4Moe):
    def __init__(self, config: Glm4MoeConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Glm4MoeLite(_Glm4MoeLite):
    def __init__(self, config: Glm4MoeLiteConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Glm4v(_Glm4v):
    def __init__(self, config: Glm4vConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Glm4vMoe(_Glm4vMoe):
    def __init__(self, config: Glm4vMoeConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class GptOss(_GptOss):
    def __init__(self, config: GptOssConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Granite(_Granite):
    def __init__(self, config: GraniteConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class GraniteSWA(_GraniteSWA):
    def __init__(self, config: GraniteSWAConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class GraniteMoeSWA(_GraniteMoeSWA):
    def __init__(self, config: GraniteMoeSWAConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class GraniteMoeHybrid(_GraniteMoeHybrid):
    def __init__(self, config: GraniteMoeHybridConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class HunYuanDenseV1(_HunYuanDenseV1):
    def __init__(self, config: HunYuanDenseV1Config, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class HyperCLOVAX(_HyperCLOVAX):
    def __init__(self, config: HyperCLOVAXConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class InternLM3(_InternLM3):
    def __init__(self, config: InternLM3Config, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class IQuestCoder(_IQuestCoder):
    def __init__(self, config: IQuestCoderConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class KimiLinear(_KimiLinear):
    def __init__(self, config: KimiLinearConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Kolibri1(_Kolibri1):
    def __init__(self, config: Kolibri1Config, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Lfm2(_Lfm2):
    def __init__(self, config: Lfm2Config, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Lfm2Moe(_Lfm2Moe):
    def __init__(self, config: Lfm2MoeConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Lfm3(_Lfm3):
    def __init__(self, config: Lfm3Config, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Llama(_Llama):
    def __init__(self, config: LlamaConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Llama4Text(_Llama4Text):
    def __init__(self, config: Llama4TextConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Mellum(_Mellum):
    def __init__(self, config: MellumConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class MiniMaxM2(_MiniMaxM2):
    def __init__(self, config: MiniMaxM2Config, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Ministral(_Ministral):
    def __init__(self, config: MinistralConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Ministral3(_Ministral3):
    def __init__(self, config: Ministral3Config, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Mistral(_Mistral):
    def __init__(self, config: MistralConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Mistral3(_Mistral3):
    def __init__(self, config: Mistral3Config, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Mixtral(_Mixtral):
    def __init__(self, config: MixtralConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Mllama(_Mllama):
    def __init__(self, config: MllamaConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class ModernBert(_ModernBert):
    def __init__(self, config: ModernBertConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class MuseGlimmer(_MuseGlimmer):
    def __init__(self, config: MuseGlimmerConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class MuseGlimmerText(_MuseGlimmerText):
    def __init__(self, config: MuseGlimmerTextConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class NanoChat(_NanoChat):
    def __init__(self, config: NanoChatConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class NemotronH(_NemotronH):
    def __init__(self, config: NemotronHConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Olmo2(_Olmo2):
    def __init__(self, config: Olmo2Config, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Olmo3(_Olmo3):
    def __init__(self, config: Olmo3Config, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class OlmoHybrid(_OlmoHybrid):
    def __init__(self, config: OlmoHybridConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Olmoe(_Olmoe):
    def __init__(self, config: OlmoeConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Phi3(_Phi3):
    def __init__(self, config: Phi3Config, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Qwen2(_Qwen2):
    def __init__(self, config: Qwen2Config, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Qwen2_5VL(_Qwen2_5VL):
    def __init__(self, config: Qwen2_5VLConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Qwen2Moe(_Qwen2Moe):
    def __init__(self, config: Qwen2MoeConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Qwen2VL(_Qwen2VL):
    def __init__(self, config: Qwen2VLConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Qwen3(_Qwen3):
    def __init__(self, config: Qwen3Config, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Qwen3_5(_Qwen3_5):
    def __init__(self, config: Qwen3_5Config, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Qwen3_5Moe(_Qwen3_5Moe):
    def __init__(self, config: Qwen3_5MoeConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Qwen3_5MoeText(_Qwen3_5MoeText):
    def __init__(self, config: Qwen3_5MoeTextConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Qwen3_5Text(_Qwen3_5Text):
    def __init__(self, config: Qwen3_5TextConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Qwen3Moe(_Qwen3Moe):
    def __init__(self, config: Qwen3MoeConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Qwen3Next(_Qwen3Next):
    def __init__(self, config: Qwen3NextConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Qwen3VL(_Qwen3VL):
    def __init__(self, config: Qwen3VLConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Qwen3VLMoe(_Qwen3VLMoe):
    def __init__(self, config: Qwen3VLMoeConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Roberta(_Roberta):
    def __init__(self, config: RobertaConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class SarvamMLA(_SarvamMLA):
    def __init__(self, config: SarvamMLAConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class SarvamMoE(_SarvamMoE):
    def __init__(self, config: SarvamMoEConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class SeedOss(_SeedOss):
    def __init__(self, config: SeedOssConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class SmolLM3(_SmolLM3):
    def __init__(self, config: SmolLM3Config, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class XLMRoberta(_XLMRoberta):
    def __init__(self, config: XLMRobertaConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...

class Youtu(_Youtu):
    def __init__(self, config: YoutuConfig, *, device: _Device = None, dtype: _Dtype = None) -> None: ...
