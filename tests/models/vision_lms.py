"""Tiny checkpoints of Qwen2-VL and Qwen2.5-VL, in every spelling of their files."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from tests.models.prompts import IMAGE, VIDEO
from tests.models.tiny import HEAD, Tensors, Tiny, with_another_head, without
from tests.models.variants import variant

TEXT: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "max_window_layers": 1,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "rope_theta": 10000.0,
    "sliding_window": 32768,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 101,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mrope_section": [3, 3, 2]}


def top(model_type: str, hf_class: str, vision: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries that occur only at the top level of config.json."""
    return {
        "architectures": [hf_class],
        "image_token_id": IMAGE,
        "model_type": model_type,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "video_token_id": VIDEO,
        "vision_config": vision,
        "vision_end_token_id": 93,
        "vision_start_token_id": 92,
    }


def renamed(text: str, vision: str, then: Callable[[Tensors], Tensors] = dict) -> Callable[[Tensors], Tensors]:
    """Returns a function that replaces transformers 5's prefixes of tensor names by `text` and `vision`."""

    def rename(name: str) -> str:
        return name.replace("model.language_model.", text).replace("model.visual.", vision)

    return lambda tensors: then({rename(name): tensor for name, tensor in tensors.items()})


def on_the_hub(then: Callable[[Tensors], Tensors] = dict) -> Callable[[Tensors], Tensors]:
    return renamed("model.", "visual.", then)


def vision_lms(top: Mapping[str, Any], other_tower: Mapping[str, Any]) -> Iterator[Tiny]:
    """Yields a checkpoint for each spelling.

    Args:
        top: the entries that `top` returns.
        other_tower: a `vision_config` with other sizes, for a decoder of 128 features. It omits every optional entry.
    """
    flat = {**top, **TEXT}
    inner = {**TEXT, "model_type": f"{top['model_type']}_text"}
    nested = {**top, "text_config": inner}
    tied = {"tie_word_embeddings": True}

    hub = {"tensors": on_the_hub()}
    yield variant(flat, "as on the hub", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16, shards=3, **hub)
    yield variant(flat, "tied", {**tied, "rope_theta": 300}, tensors=on_the_hub(without(HEAD)))
    without_head = renamed("language_model.", "visual.", without(HEAD))
    yield variant(flat, "base model", tied, tensors=without_head)
    yield variant(flat, "saved by transformers", {"num_key_value_heads": 4}, by_transformers=True, shards=2)
    yield variant(nested, "transformers 5 in-memory layout", {"dtype": "float32"})
    yield variant(
        nested,
        "tied in text_config, other entries at the top level",
        {
            "text_config": {**inner, **tied, "image_token_id": None},
            "hidden_size": 48, "num_hidden_layers": 7, "rope_theta": 3.0,
        },
        tensors=renamed("model.", "model.visual.", without(HEAD)),
    )  # fmt: skip
    yield variant(
        nested,
        "tied in text_config despite a different stored head",
        {"text_config": {**inner, **tied}},
        tensors=on_the_hub(with_another_head),
        corrected={"text_config": {**inner, "tie_word_embeddings": False}},
    )
    window = {"use_sliding_window": True, "sliding_window": 13}
    yield variant(flat, "yarn, sliding window", {"rope_scaling": YARN, **window}, **hub)
    rope = {"rope_parameters": {"type": "default", "rope_theta": 700.0, "mrope_section": [4, 0, 4]}}
    yield variant(
        flat,
        "minimal config, other vision tower",
        {"hidden_size": 128, "num_attention_heads": 8, **rope, "vision_config": other_tower},
        absent=("rope_scaling", "rope_theta", "max_window_layers", "num_key_value_heads", "rms_norm_eps"),
        tensors=renamed("model.language_model.", "visual."),
    )
