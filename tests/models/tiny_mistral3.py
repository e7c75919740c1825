"""Tiny checkpoints of Mistral Small 3.1 and Ministral 3 with images, and prompts with images."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.models.tiny import HEAD, Tensors, Tiny, without
from tests.models.tiny_ministral3 import ROPE

IMAGE, BREAK, END = 90, 91, 92

TEXT: dict[str, Any] = {
    "attention_dropout": 0.0,
    "head_dim": 12,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "model_type": "mistral",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000000.0,
    "sliding_window": None,
    "use_cache": True,
    "vocab_size": 101,
}
VISION: dict[str, Any] = {
    "attention_dropout": 0.0,
    "head_dim": 12,
    "hidden_act": "silu",
    "hidden_size": 24,
    "image_size": 48,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "model_type": "pixtral",
    "num_attention_heads": 2,
    "num_channels": 3,
    "num_hidden_layers": 2,
    "patch_size": 4,
    "rope_theta": 10000.0,
}
MISTRAL3: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": IMAGE,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": TEXT,
    "torch_dtype": "float32",
    "vision_config": VISION,
    "vision_feature_layer": -1,
}
MINISTRAL3 = {
    **{name: value for name, value in TEXT.items() if name != "rope_theta"},
    "model_type": "ministral3",
    "pad_token_id": None,  # transformers gives the embedding of its default, 11, no gradient
    "rope_parameters": ROPE,
}


def renamed(
    text: str, before: str = "", head: str = HEAD, then: Callable[[Tensors], Tensors] = dict
) -> Callable[[Tensors], Tensors]:
    """Replaces the prefixes of transformers 5: that of the decoder, those of the other parts, and the head's name."""

    def rename(name: str) -> str:
        if name == HEAD:
            return head
        is_text = name.startswith("model.language_model.")
        return text + name.removeprefix("model.language_model.") if is_text else before + name.removeprefix("model.")

    return lambda tensors: {rename(name): tensor for name, tensor in then(tensors).items()}


def with_another_head(tensors: Tensors) -> Tensors:
    return {**tensors, HEAD: tensors["model.language_model.embed_tokens.weight"].flip(0)}


def on_the_hub(then: Callable[[Tensors], Tensors] = dict) -> Callable[[Tensors], Tensors]:
    return renamed("language_model.model.", head=f"language_model.{HEAD}", then=then)


def mistral3(
    name: str,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    top: Mapping[str, Any] | None = None,
    absent: tuple[str, ...] = (),
    base: Mapping[str, Any] = TEXT,
    **options: Any,
) -> Tiny:
    """A checkpoint whose config.json is MISTRAL3 without the entries `absent` and with the given changes."""

    def changed(entries: Mapping[str, Any], changes: Mapping[str, Any] | None) -> dict[str, Any]:
        return {**{k: v for k, v in entries.items() if k not in absent}, **(changes or {})}

    parts = {"text_config": changed(base, text), "vision_config": changed(VISION, vision)}
    return Tiny(f"mistral3 {name}", {**changed(MISTRAL3, top), **parts}, **options)


def mistral3s() -> Iterator[Tiny]:
    untied = {"tie_word_embeddings": False}
    yield mistral3(
        "as on the hub",
        top={"torch_dtype": "bfloat16"},
        stored_dtype=torch.bfloat16,
        shards=3,
        tensors=on_the_hub(with_another_head),
        corrected=untied,  # the default is a tied head
    )
    yield mistral3(
        "ministral, saved by transformers",
        vision={"rope_parameters": {"rope_theta": 50.0, "rope_type": "axial"}, "hidden_act": "gelu"},
        top={**untied, "projector_hidden_act": "silu"},
        absent=("rope_theta",),
        base=MINISTRAL3,
        by_transformers=True,
        shards=2,
    )
    yield mistral3(
        "tied ministral, transformers 5 in-memory layout",
        {"sliding_window": 17, "rms_norm_eps": 0.01},
        {"num_hidden_layers": 3},
        {"dtype": "float32", "tie_word_embeddings": True, "multimodal_projector_bias": True, "spatial_merge_size": 3,
         "vision_feature_layer": -2},
        ("torch_dtype",),
        MINISTRAL3,
        tensors=without(HEAD),
    )  # fmt: skip
    yield mistral3(
        "minimal config",
        {"num_attention_heads": 8},
        {"hidden_size": 64, "rope_theta": 40.0},
        {"image_token_id": 89},
        (
            "attention_dropout", "head_dim", "hidden_act", "image_token_index", "image_size", "initializer_range",
            "max_position_embeddings", "multimodal_projector_bias", "num_attention_heads", "num_channels",
            "num_key_value_heads", "patch_size", "projector_hidden_act", "rms_norm_eps", "sliding_window",
            "spatial_merge_size", "torch_dtype", "use_cache", "vision_feature_layer",
        ),
        tensors=renamed("language_model.", then=without(HEAD)),
    )  # fmt: skip
    yield mistral3(
        "one patch per token, no blocks, sliding window",
        {"sliding_window": 9, "num_key_value_heads": 1, "tie_word_embeddings": True},
        {"num_channels": 1, "num_attention_heads": 1, "head_dim": 24},
        {**untied, "spatial_merge_size": 1, "vision_feature_layer": -3},
        tensors=on_the_hub(),
    )


CHECKPOINTS = list(mistral3s())


# Prompts: a row lists, in order, numbers of random text tokens and sizes of images, in patches

Row = list[int | tuple[float, float]]

PROMPTS: dict[str, list[Row]] = {
    "text": [[40]],
    "an image": [[5, (6, 8), 20]],
    "images of one size": [[4, (6, 6), 5, (6, 6), 19]],
    "a padded batch": [[3, (3, 9), 25], [22], [(6.5, 4), 5, (7, 8.25), 1, (3, 3), 6]],
}
"""Some images have rows and columns of patches, or pixels, beyond those of their tokens."""


@dataclass(frozen=True)
class Prompt:
    """Model inputs for some rows.

    Attributes:
        ids: token ids, (B, T).
        mask: padding mask, (B, T); 0 for padding.
        images: pixels and sizes of all images, by argument name.
    """

    ids: Tensor
    mask: Tensor
    images: dict[str, Tensor]


def prompt(rows: list[Row], config: Any, side: str = "left") -> Prompt:
    """Returns random tokens and images for a model with our config `config`."""
    patch, m = config.vision_config.patch_size, config.spatial_merge_size
    texts, sizes = [], []
    for row in rows:
        text: list[int] = []
        for piece in row:
            if isinstance(piece, int):
                text += torch.randint(3, 88, (piece,)).tolist()
                continue
            height, width = piece
            for _ in range(int(height) // m):
                text += [*[config.image_token_id] * (int(width) // m), BREAK]
            text[-1] = END
            sizes.append((int(patch * height), int(patch * width)))
        texts.append(text)
    longest = max(map(len, texts))
    pads = [[0] * (longest - len(text)) for text in texts]
    ids = torch.tensor([p + t if side == "left" else t + p for t, p in zip(texts, pads, strict=True)])
    images = {}
    if sizes:
        images["image_sizes"] = torch.tensor(sizes)
        largest = images["image_sizes"].amax(0).tolist()
        images["pixel_values"] = torch.randn(len(sizes), config.vision_config.num_channels, *largest)
    return Prompt(ids, (ids != 0).long(), images)
