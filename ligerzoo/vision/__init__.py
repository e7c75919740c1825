"""Image and video preprocessing, and the processors of vision-language models. Knows no model.

`read_image` and `read_video` return uint8 RGB tensors. One file for each model family (`qwen2_vl`, `gemma3`, `mllama`)
resizes, normalizes and cuts them into patches or tiles, with the shared functions in `transforms`. `processor` combines
this with a tokenizer. Pillow is needed only to read files and to resize.
"""

from ligerzoo.vision.gemma3 import Gemma3Preprocessor
from ligerzoo.vision.io import read_image, read_video
from ligerzoo.vision.mllama import MllamaPreprocessor
from ligerzoo.vision.qwen2_vl import Qwen2VLPreprocessor
from ligerzoo.vision.settings import Settings

__all__ = [
    "Gemma3Preprocessor",
    "MllamaPreprocessor",
    "Qwen2VLPreprocessor",
    "Settings",
    "read_image",
    "read_video",
]
