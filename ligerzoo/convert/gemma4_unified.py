"""Converter for checkpoints of Gemma 4 12B with images and videos.

config.json has the structure of Gemma 4's. In files, most parameters of the projection of patches are in
`vision_embedder`, not in `embed_vision`.
"""

from functools import partial

from ligerzoo.convert.architecture import GELU_TANH, Architecture
from ligerzoo.convert.fields import refuse
from ligerzoo.convert.gemma4 import EXTRA_TENSORS, PARTS, read_multimodal, write_multimodal
from ligerzoo.convert.gemma4_text import read_rope
from ligerzoo.convert.layout import Layout, Rename
from ligerzoo.entries import Entries, object_entry
from ligerzoo.models.gemma4_unified import Gemma4UnifiedVisionConfig

_KIND = "gemma4_unified"


def _read_entries(raw: Entries) -> dict[str, object]:
    text = object_entry(raw, "text_config")
    refuse(text, "hidden_size_per_layer_input", unless=(None, 0))
    refuse(text, "enable_moe_block", unless=(None, False))
    return read_multimodal(raw, _read_vision, _KIND)


def _read_vision(vision: Entries) -> Entries:
    size, default = vision.get("mm_embed_dim"), Gemma4UnifiedVisionConfig.mm_embed_dim
    refuse({"output_proj_dims": default, **vision}, "output_proj_dims", unless=(default if size is None else size,))
    return vision


def _write_vision(vision: Entries) -> Entries:
    return {**vision, "output_proj_dims": vision["mm_embed_dim"]}


_PARTS = ("patch_ln1", "patch_dense", "patch_ln2", "pos_embedding", "pos_norm")
_FILES = Layout(
    (
        *(Rename(f"vision_embedder.{name}", f"embed_vision.{name}") for name in _PARTS),
        Rename("embed_vision", "embed_vision.multimodal_embedder"),
    ),
    (*PARTS, ("vision_embedder.", "model.vision_embedder.")),
)

ARCHITECTURE = Architecture(
    _KIND,
    "Gemma4UnifiedForConditionalGeneration",
    accepted={"hidden_activation": (GELU_TANH,)},
    read_entries=_read_entries,
    read_rope=read_rope,
    write_entries=partial(write_multimodal, vision=_write_vision, kind=_KIND),
    layouts=lambda config: (_FILES, Layout((), PARTS)),
    extra_tensors=EXTRA_TENSORS,
)
