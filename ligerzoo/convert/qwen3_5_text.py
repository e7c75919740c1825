"""Converter for dense Qwen3.5 checkpoints, text only. Tensor names match ours.

Checkpoints of vision-language models have the prefix "model.language_model.", and tensors of a vision tower. Those and
the head for multi-token prediction (`mtp`) are not part of the model. Decay rates and norms of linear attention may be
in fp32 in bf16 files.
"""

from collections.abc import Mapping

from ligerzoo.convert.architecture import ROTARY_BUFFERS, SILU, Architecture
from ligerzoo.convert.fields import rope_fields
from ligerzoo.convert.layout import Layout
from ligerzoo.entries import Entries

ACCEPTED: Mapping[str, tuple[object, ...]] = {
    "attn_output_gate": (True,),
    "mamba_ssm_dtype": ("float32",),
    "output_gate_type": SILU,
    "sliding_window": (),
    "use_sliding_window": (False,),
}
"""Entries that transformers ignores: other values would change the numbers."""

PREFIXES = (("model.", "model.", "model.language_model.", ""),)
PREDICTION_HEAD = r"mtp\..*"
EXTRA_TENSORS = rf"model\.visual\..*|{PREDICTION_HEAD}|{ROTARY_BUFFERS}"
KEPT_FP32 = r".*\.linear_attn\.(A_log|dt_bias|norm\.weight)"


def _read_rope(raw: Entries, default_theta: float) -> Entries:
    """Reads `rope_theta` and `rope_scaling` from either spelling.

    The entries of M-RoPE have no effect on text, whose tokens have equal positions on all axes.
    """
    rope = rope_fields(raw, default_theta)
    for name in ("mrope_section", "mrope_interleaved"):
        (rope["rope_scaling"] or {}).pop(name, None)
    return rope


ARCHITECTURE = Architecture(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    accepted=ACCEPTED,
    read_rope=_read_rope,
    layouts=lambda config: (Layout(prefixes=PREFIXES),),
    extra_tensors=EXTRA_TENSORS,
    kept_fp32=KEPT_FP32,
    classifier_class="Qwen3_5TextForSequenceClassification",
)
