"""Converter for Qwen3.5 checkpoints with MoE, text only.

Experts are stored one by one, or stacked under our names. Otherwise as `qwen3_5_text`.
"""

from dataclasses import replace

from ligerzoo.convert.families import PER_EXPERT
from ligerzoo.convert.fields import first_spelling
from ligerzoo.convert.layout import Layout
from ligerzoo.convert.qwen3_5_text import ACCEPTED, PREFIXES
from ligerzoo.convert.qwen3_5_text import ARCHITECTURE as DENSE

ARCHITECTURE = replace(
    DENSE,
    model_type="qwen3_5_moe_text",
    class_name="Qwen3_5MoeForCausalLM",
    accepted={**ACCEPTED, "norm_topk_prob": (True,), "mlp_only_layers": ([],), "decoder_sparse_step": (1,)},
    read_entries=first_spelling(num_experts=("num_local_experts", "num_experts")),
    layouts=lambda config: (Layout(PER_EXPERT, PREFIXES), Layout(prefixes=PREFIXES)),
    classifier_class="",
)
