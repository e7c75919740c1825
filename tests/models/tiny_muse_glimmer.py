"""Tiny checkpoints of Muse Glimmer with images and videos."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers.models.muse_glimmer import modeling_muse_glimmer

from tests.models.prompts import IMAGE, VIDEO
from tests.models.tiny import HEAD, Tiny, without
from tests.models.tiny_muse_glimmer_text import MUSE_GLIMMER, YARN
from tests.models.variants import variant

if Version(transformers.__version__) < Version("5.24"):  # which reads learned positions as the released model does
    taps = modeling_muse_glimmer.get_vision_interpolation_indices_and_weights

    def corrected(grid_thw: Tensor, **options: Any) -> Any:
        return taps(grid_thw[:, [0, 2, 1]], **options)

    modeling_muse_glimmer.get_vision_interpolation_indices_and_weights = corrected

FULL, WINDOW = "full_attention", "window_attention"
TOP = ("architectures", "torch_dtype", "tie_word_embeddings")
TEXT = {name: value for name, value in MUSE_GLIMMER.items() if name not in TOP}
VISION: dict[str, Any] = {
    "hidden_act": "gelu",
    "hidden_size": 32,
    "intermediate_size": 44,
    "layer_norm_eps": 1e-05,
    "layer_types": [WINDOW, FULL],
    "merge_size": 2,
    "model_type": "muse_glimmer_vision",
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "patch_size": 4,
    "patch_temporal": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"},
}
GLIMMER: dict[str, Any] = {
    "architectures": ["MuseGlimmerForConditionalGeneration"],
    "image_token_id": IMAGE,
    "model_type": "muse_glimmer",
    "out_hidden_size": 128,
    "projector_hidden_act": "gelu",
    "projector_hidden_size": 20,
    "text_config": TEXT,
    "torch_dtype": "float32",
    "video_token_id": VIDEO,
    "vision_config": VISION,
}


def glimmers() -> Iterator[Tiny]:
    glimmer = partial(variant, GLIMMER)
    yield glimmer("as on the hub", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16, shards=3)
    others = {"merge_size": 3, "pos_emb_height": 5, "pos_emb_width": 5, "layer_norm_eps": 0.01, "patch_temporal": 1}
    yield glimmer(
        "tied, windows through tokens",
        {
            "tie_word_embeddings": True,
            "vision_config": {**VISION, **others},
            "out_hidden_size": 288,
            "text_config": {**TEXT, "qk_scale_factor": 1.5},
        },
        tensors=without(HEAD),
    )
    yield glimmer("saved by transformers", {"projector_hidden_size": 12}, by_transformers=True, shards=2)
    small = {name: VISION[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "patch_size")}
    yield glimmer(
        "minimal config",
        {"vision_config": {**small, "num_hidden_layers": 5}, "text_config": {**TEXT, "rope_parameters": YARN,
         "layer_rope_theta": None, "attention_bias": True, "num_key_value_heads": 1, "qk_scale_factor": 1.2}},
        absent=("projector_hidden_act", "torch_dtype"),
    )  # fmt: skip


CHECKPOINTS = list(glimmers())
