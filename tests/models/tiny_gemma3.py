"""Tiny Gemma 3 checkpoints with a vision tower, and prompts with images."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.models.tiny import HEAD, Tensors, Tiny, without

IMAGE = 90

TEXT: dict[str, Any] = {
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 56,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pad_token_id": None,  # transformers gives the embedding of the padding token no gradient
    "query_pre_attn_scalar": 352,  # random norm weights make queries and keys twice as large as in trained models
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 12,
    "sliding_window_pattern": 2,
    "vocab_size": 101,
}
VISION: dict[str, Any] = {
    "hidden_size": 24,
    "image_size": 26,
    "intermediate_size": 40,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "patch_size": 4,  # 6 patches per side, and some pixels left over
    "vision_use_head": False,
}
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 88,
    "eoi_token_index": 89,
    "eos_token_id": [1, 87],
    "image_token_index": IMAGE,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 9,
    "model_type": "gemma3",
    "text_config": TEXT,
    "torch_dtype": "float32",
    "vision_config": VISION,
}


without_head = without(HEAD)


def renamed(
    text: str, tower: str, projector: str, head: str = HEAD, then: Callable[[Tensors], Tensors] = without_head
) -> Callable[[Tensors], Tensors]:
    """Replaces the prefixes of transformers 5 by these. Both of its prefixes of the vision tower are replaced."""
    spellings = {
        "model.language_model.": text,
        "model.vision_tower.vision_model.": tower,
        "model.vision_tower.": tower,
        "model.multi_modal_projector.": projector,
    }

    def rename(name: str) -> str:
        found = (theirs + name.removeprefix(ours) for ours, theirs in spellings.items() if name.startswith(ours))
        return next(found, name.replace(HEAD, head))

    return lambda tensors: {rename(name): tensor for name, tensor in then(tensors).items()}


def on_the_hub(then: Callable[[Tensors], Tensors] = without_head) -> Callable[[Tensors], Tensors]:
    return renamed(
        "language_model.model.", "vision_tower.vision_model.", "multi_modal_projector.",
        f"language_model.{HEAD}", then,
    )  # fmt: skip


def with_another_head(tensors: Tensors) -> Tensors:
    return {**tensors, HEAD: tensors["model.language_model.embed_tokens.weight"].flip(0)}


def gemma3(
    name: str,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    top: Mapping[str, Any] | None = None,
    absent: tuple[str, ...] = (),
    **options: Any,
) -> Tiny:
    """A checkpoint whose config.json is GEMMA3 with the given changes."""
    config = {
        **GEMMA3,
        "text_config": {k: v for k, v in {**TEXT, **(text or {})}.items() if k not in absent},
        "vision_config": {k: v for k, v in {**VISION, **(vision or {})}.items() if k not in absent},
        **(top or {}),
    }
    return Tiny(f"gemma3 {name}", {k: v for k, v in config.items() if k not in absent}, **options)


def gemma3s() -> Iterator[Tiny]:
    yield gemma3(
        "as on the hub", top={"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16, shards=3, tensors=on_the_hub()
    )
    yield gemma3(
        "minimal config",
        vision={"num_channels": 1, "num_hidden_layers": 1},
        top={"mm_tokens_per_image": 4},
        absent=(
            "boi_token_index", "eoi_token_index", "head_dim", "image_size", "initializer_range", "num_attention_heads",
            "num_key_value_heads", "patch_size", "query_pre_attn_scalar", "rope_scaling", "sliding_window",
            "sliding_window_pattern", "torch_dtype", "vision_use_head",
        ),
        tensors=on_the_hub(),
    )  # fmt: skip
    yield gemma3("saved by transformers, classification head", vision={"vision_use_head": True}, shards=2,
        by_transformers=True)  # fmt: skip
    yield gemma3(
        "transformers 5 in-memory layout",
        {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 300.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
            },
            "num_key_value_heads": 4,
        },
        top={"dtype": "float32", "tie_word_embeddings": True},
        absent=("rope_scaling", "sliding_window_pattern", "torch_dtype"),
        tensors=without_head,
    )
    of_the_base_model = renamed("language_model.", "vision_tower.", "multi_modal_projector.")
    yield gemma3("base model, sliding window shorter than an image", {"sliding_window": 5}, tensors=of_the_base_model)
    untied = {"tie_word_embeddings": False}
    yield gemma3(
        "untied, biases, ignored soft caps",
        {**untied, "attention_bias": True, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 7.0},
        top=untied,
        tensors=on_the_hub(dict),
    )
    yield gemma3(
        "tied despite a different stored head",
        {"tie_word_embeddings": True},
        tensors=on_the_hub(with_another_head),
        corrected={"text_config": {**TEXT, **untied}, **untied},
    )
    other = {"layer_norm_eps": 0.1, "hidden_size": 20, "num_attention_heads": 1, "image_size": 12}
    yield gemma3(
        "image token outside the vocabulary, other tower", {"num_key_value_heads": 1, "sliding_window": 40}, other,
        {"image_token_id": 105}, ("image_token_index",),
        tensors=renamed("model.language_model.", "model.vision_tower.vision_model.", "model.multi_modal_projector."),
    )  # fmt: skip


CHECKPOINTS = list(gemma3s())


# Prompts: a row lists, in order, numbers of random text tokens and images

Row = list[int | str]

PROMPTS: dict[str, list[Row]] = {
    "text": [[40]],
    "an image": [[5, "image", 24]],
    "images, two of them side by side": [["image", 3, "image", "image", 12]],
    "a padded batch": [[3, "image", 22], [20], [4, "image", 2, "image", 6]],
}


@dataclass(frozen=True)
class Prompt:
    """Model inputs for some rows.

    Attributes:
        ids: token ids, (B, T).
        mask: padding mask, (B, T); 0 for padding.
        types: (B, T), 1 for image tokens.
        pixels: pixel values of all images, (n, C, height, width); None without images.
    """

    ids: Tensor
    mask: Tensor
    types: Tensor
    pixels: Tensor | None

    @property
    def images(self) -> dict[str, Tensor]:
        return {} if self.pixels is None else {"pixel_values": self.pixels}


def prompt(rows: list[Row], config: Any, side: str = "left") -> Prompt:
    """Returns random tokens and pixels for a model with our config `config`."""
    image, v = [config.image_token_id] * config.mm_tokens_per_image, config.vision_config
    texts = [
        [token for n in row for token in (image if isinstance(n, str) else torch.randint(3, 87, (n,)).tolist())]
        for row in rows
    ]
    longest = max(map(len, texts))
    pads = [[0] * (longest - len(text)) for text in texts]
    ids = torch.tensor([p + t if side == "left" else t + p for t, p in zip(texts, pads, strict=True)])
    count = sum(row.count("image") for row in rows)
    pixels = torch.randn(count, v.num_channels, v.image_size, v.image_size) if count else None
    return Prompt(ids, (ids != 0).long(), (ids == config.image_token_id).long(), pixels)
