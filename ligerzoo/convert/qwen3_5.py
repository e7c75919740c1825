"""Converter for Qwen3.5 checkpoints, and the parts that its MoE models share.

config.json and the tensors of the vision tower are as in Qwen3-VL, without DeepStack; the decoder is that of
`qwen3_5_text`. The head for multi-token prediction (`mtp`) is not part of the model.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import refuse
from ligerzoo.convert.layout import Layout
from ligerzoo.convert.qwen3_5_text import ACCEPTED, KEPT_FP32, PREDICTION_HEAD
from ligerzoo.convert.qwen3_vl import qwen3_vision
from ligerzoo.entries import Entries, object_entry


def _read_entries(raw: Entries, *, architecture: Architecture) -> dict[str, object]:
    """Returns the entries of all levels of config.json under the names of our fields."""
    entries = dict(architecture.read_entries(raw))
    refuse(object_entry(entries, "vision_config"), "deepstack_visual_indexes", unless=(None, []))
    window = object_entry(raw, "text_config").get("sliding_window")  # which Qwen3-VL ignores
    return {**entries, "sliding_window": window}


def hybrid_vision(
    model_type: str, hf_class: str, accepted: Mapping[str, tuple[object, ...]], *others: Layout
) -> Architecture:
    """Returns an architecture of Qwen3-VL's format with the decoder of Qwen3.5.

    Args:
        model_type: see `ligerzoo.convert.qwen3_vl.qwen3_vision`, as for `hf_class` and `others`.
        hf_class: class in transformers.
        accepted: entries of the decoder that have no field, with their accepted values.
        others: further layouts of checkpoints.
    """
    architecture = qwen3_vision(model_type, hf_class, *others)
    return replace(
        architecture,
        accepted=accepted,
        read_entries=partial(_read_entries, architecture=architecture),
        extra_tensors=PREDICTION_HEAD,
        kept_fp32=KEPT_FP32,
    )


ARCHITECTURE = hybrid_vision("qwen3_5", "Qwen3_5ForConditionalGeneration", ACCEPTED)
