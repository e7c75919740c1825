"""Converter for Gemma 4 checkpoints with images and videos.

config.json holds the decoder's entries in `text_config` and the vision tower's in `vision_config`. Only the entry
`tie_word_embeddings` of the top level counts, as in transformers. Loading keeps the tensors of the audio tower, and
saving writes them again.
"""

from collections.abc import Callable
from functools import partial

from ligerzoo.convert.architecture import GELU_TANH, ROTARY_BUFFERS, Architecture
from ligerzoo.convert.fields import refuse
from ligerzoo.convert.gemma4_text import SHARED_KEYS, read_rope, read_text, write_text
from ligerzoo.convert.layout import Layout
from ligerzoo.entries import Entries, flag_entry, object_entry
from ligerzoo.models.gemma4_multimodal import Gemma4MultimodalConfig

_TOP_LEVEL = ("image_token_id", "video_token_id", "audio_token_id")
_TOKENS = ("bos_token_id", "eos_token_id")


def read_multimodal(raw: Entries, vision: Callable[[Entries], Entries], kind: str = "gemma4") -> dict[str, object]:
    """Returns the entries of all levels of config.json under the names of our fields.

    Token ids that begin and end texts at the top level take precedence over those in `text_config`.

    Args:
        raw: config.json.
        vision: returns the entries of `vision_config` under the names of our fields.
        kind: beginning of the model types of the parts.
    """
    text = object_entry(raw, "text_config")
    refuse(text, "model_type", unless=(None, f"{kind}_text"))
    own = None
    if raw.get("vision_config") is not None:
        own = object_entry(raw, "vision_config")
        refuse(own, "model_type", unless=(None, f"{kind}_vision"))
        own = vision(own)
    top = {name: raw[name] for name in (*_TOP_LEVEL, *_TOKENS) if raw.get(name) is not None}
    ties = flag_entry(raw, "tie_word_embeddings") if raw.get("tie_word_embeddings") is not None else True
    return {**read_text(text), **top, "tie_word_embeddings": ties, "vision_config": own}


def write_multimodal(
    config: Gemma4MultimodalConfig,
    entries: dict[str, object],
    vision: Callable[[Entries], Entries],
    kind: str = "gemma4",
) -> dict[str, object]:
    """Returns the entries of config.json for those named like fields; the arguments are those of `read_multimodal`."""
    top = {name: entries[name] for name in (*_TOP_LEVEL, "tie_word_embeddings")}
    left_out = {*top, "vision_config", *(("pad_token_id",) if config.pad_token_id is None else ())}  # not null there
    text = write_text(config, {name: value for name, value in entries.items() if name not in left_out})
    own = entries["vision_config"]
    if own is not None:
        own = {"model_type": f"{kind}_vision", **vision(object_entry(entries, "vision_config"))}
    return {**top, "text_config": {"model_type": f"{kind}_text", **text}, "vision_config": own}


def _read_vision(vision: Entries) -> Entries:
    rope = object_entry(vision, "rope_parameters")
    refuse(rope, "rope_type", unless=(None, "axial", "default"))
    refuse(rope, "rope_theta", unless=(None, 100.0))
    refuse(vision, "hidden_activation", unless=(None, GELU_TANH))
    refuse(vision, "attention_bias", unless=(None, False))
    return vision


def _write_vision(vision: Entries) -> Entries:
    rope = {"rope_type": "default", "rope_theta": 100.0}
    return {"hidden_activation": GELU_TANH, **vision, "rope_parameters": rope}


PARTS = (("model.", "model.language_model."), ("embed_vision.", "model.embed_vision."))
EXTRA_TENSORS = rf"{ROTARY_BUFFERS}|model\.(language_model\.{SHARED_KEYS}|(audio_tower|embed_audio)\..+)"

ARCHITECTURE = Architecture(
    "gemma4",
    "Gemma4ForConditionalGeneration",
    accepted={"hidden_activation": (GELU_TANH,)},
    read_entries=partial(read_multimodal, vision=_read_vision),
    read_rope=read_rope,
    write_entries=partial(write_multimodal, vision=_write_vision),
    layouts=lambda config: (Layout((), (*PARTS, ("vision_tower.", "model.vision_tower."))),),
    extra_tensors=EXTRA_TENSORS,
)
