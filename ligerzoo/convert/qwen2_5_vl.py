"""Converter for Qwen2.5-VL checkpoints, which have the format of Qwen2-VL."""

from ligerzoo.convert.architecture import SILU
from ligerzoo.convert.qwen2_vl import vision_lm
from ligerzoo.models.qwen2_5_vl import Qwen2_5VL, Qwen2_5VLConfig

ARCHITECTURE = vision_lm("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", Qwen2_5VL, Qwen2_5VLConfig, SILU)
