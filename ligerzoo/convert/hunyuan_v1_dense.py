"""Converter for dense Hunyuan checkpoints, which have other names of QK-norms.

transformers ignores entries of Hunyuan's code that would change the model, such as `use_cla`. Other values are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import refuse
from ligerzoo.convert.layout import Layout, Rename


def _read_entries(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns config.json. As in transformers, `head_dim` counts; another `attention_head_dim` is refused."""
    refuse(raw, "attention_head_dim", unless=(None, raw.get("head_dim")), remedy="Set head_dim, which is used instead.")
    return raw


ARCHITECTURE = Architecture(
    "hunyuan_v1_dense",
    accepted={
        "use_cla": (False,),
        "use_qk_norm": (True,),
        "use_rotary_pos_emb": (True,),
        "mlp_bias": (False,),
        "norm_type": ("rms",),
        "num_experts": (1,),
    },
    read_entries=_read_entries,
    layouts=lambda config: (Layout((Rename("query_layernorm", "q_norm"), Rename("key_layernorm", "k_norm"))),),
)
