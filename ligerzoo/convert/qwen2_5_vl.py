"""Converter for Qwen2.5-VL checkpoints, which have the format of Qwen2-VL."""

from ligerzoo.convert.architecture import SILU
from ligerzoo.convert.qwen2_vl import qwen2_vision

ARCHITECTURE = qwen2_vision("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", SILU)
