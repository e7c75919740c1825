"""Images and videos as the vision models take them: read, resized, normalized and cut into patches or tiles.

Reading (`picture`) gives every image as a uint8 tensor of its red, green and blue values. What is done with it then is
one file per family of models, on top of the steps they share (`steps`). Only reading files and resizing need Pillow.
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
