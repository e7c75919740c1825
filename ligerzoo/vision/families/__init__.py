"""The processor families, one file for each. `FAMILIES` is the one list of them."""

from ligerzoo.vision.families.gemma3 import Gemma3ProcessorFamily
from ligerzoo.vision.families.mllama import MllamaProcessorFamily
from ligerzoo.vision.families.qwen2_vl import Qwen2_5VLProcessorFamily, Qwen2VLProcessorFamily
from ligerzoo.vision.families.qwen3_vl import Qwen3VLProcessorFamily
from ligerzoo.vision.family import ProcessorFamily

FAMILIES: tuple[type[ProcessorFamily], ...] = (
    Gemma3ProcessorFamily,
    MllamaProcessorFamily,
    Qwen2VLProcessorFamily,
    Qwen2_5VLProcessorFamily,
    Qwen3VLProcessorFamily,
)
