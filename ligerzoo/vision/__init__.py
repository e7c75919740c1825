"""Image and video preprocessing, and the processors of vision-language models. Knows no model.

`read_image` and `read_video` return uint8 RGB tensors. `families` has one file for each model family, which resizes,
normalizes and cuts them into patches or tiles, with the functions of `transforms`. `processor` combines this with a
tokenizer. Pillow is needed only to read files and to resize.
"""

from ligerzoo.vision.families.gemma3 import Gemma3Preprocessor
from ligerzoo.vision.families.mllama import MllamaPreprocessor
from ligerzoo.vision.families.qwen2_vl import Qwen2VLPreprocessor
from ligerzoo.vision.io import read_image, read_video
from ligerzoo.vision.settings import Settings

__all__ = [
    "Gemma3Preprocessor",
    "MllamaPreprocessor",
    "Qwen2VLPreprocessor",
    "Settings",
    "read_image",
    "read_video",
]
