"""Tiny Llama 3.2 Vision checkpoints, and prompts with images."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.models.tiny import Tensors, Tiny

IMAGE = 101  # the first token without a logit

TEXT: dict[str, Any] = {
    "bos_token_id": 1,
    "cross_attention_layers": [1, 3],
    "dropout": 0.0,
    "eos_token_id": [2, 98],
    "hidden_act": "silu",
    "hidden_size": 48,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "model_type": "mllama_text_model",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 32,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 101,
}
VISION: dict[str, Any] = {
    "attention_heads": 2,
    "hidden_act": "gelu",
    "hidden_size": 24,
    "image_size": 12,
    "initializer_range": 0.02,
    "intermediate_layers_indices": [0, 2],
    "intermediate_size": 40,
    "max_num_tiles": 4,
    "model_type": "mllama_vision_model",
    "norm_eps": 1e-05,
    "num_channels": 3,
    "num_global_layers": 2,
    "num_hidden_layers": 3,
    "patch_size": 4,
    "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
    "vision_output_dim": 72,
}
MLLAMA: dict[str, Any] = {
    "architectures": ["MllamaForConditionalGeneration"],
    "image_token_index": IMAGE,
    "model_type": "mllama",
    "text_config": TEXT,
    "torch_dtype": "float32",
    "vision_config": VISION,
}


def on_the_hub(tensors: Tensors) -> Tensors:
    """Renames tensors from transformers 5 to transformers 4."""

    def rename(name: str) -> str:
        name = name.replace("model.language_model.", "language_model.model.")
        return name.replace("lm_head.", "language_model.lm_head.").removeprefix("model.")

    return {rename(name): tensor for name, tensor in tensors.items()}


def mllama(
    name: str,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    top: Mapping[str, Any] | None = None,
    absent: tuple[str, ...] = (),
    tensors: Callable[[Tensors], Tensors] = on_the_hub,
    **options: Any,
) -> Tiny:
    def changed(base: Mapping[str, Any], changes: Mapping[str, Any] | None) -> dict[str, Any]:
        return {key: value for key, value in {**base, **(changes or {})}.items() if key not in absent}

    config = {**changed(MLLAMA, top), "text_config": changed(TEXT, text), "vision_config": changed(VISION, vision)}
    return Tiny(f"mllama {name}", config, tensors=tensors, **options)


def mllamas() -> Iterator[Tiny]:
    yield mllama("as on the hub", top={"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16, shards=3)
    yield mllama("saved by transformers", by_transformers=True, shards=2)
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}
    yield mllama(
        "transformers 5 in-memory layout",
        rope,
        top={"dtype": "float32"},
        absent=("rope_scaling", "rope_theta"),
        tensors=dict,
    )
    yield mllama(
        "minimal config",
        {"rope_scaling": None},
        absent=(
            "cross_attention_layers", "dropout", "hidden_act", "initializer_range", "norm_eps",
            "num_channels", "rms_norm_eps", "rope_theta", "supported_aspect_ratios", "tie_word_embeddings",
            "torch_dtype",
        ),
    )  # fmt: skip
    smaller = {"supported_aspect_ratios": [[2, 1], [1, 1], [1, 2]], "max_num_tiles": 2, "num_channels": 1}
    deeper = {"num_hidden_layers": 4, "num_global_layers": 1, "intermediate_layers_indices": [3, 0, 1]}
    yield mllama(
        "other vision tower", {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {**smaller, **deeper, "patch_size": 6, "attention_heads": 4, "norm_eps": 1e-2, "vision_output_dim": 96},
    )  # fmt: skip
    yield mllama("one cross-attention layer", {"cross_attention_layers": [2]})
    yield mllama(
        "cross-attention in the first layer",
        {"cross_attention_layers": [0, 1, 3], "num_key_value_heads": 4, "rms_norm_eps": 1e-2},
    )
    one = {"intermediate_layers_indices": [2], "vision_output_dim": 48, "image_size": 4, "num_global_layers": 3}
    yield mllama("a tile of one patch", {"num_key_value_heads": 1}, one, stray="consolidated.safetensors")


CHECKPOINTS = list(mllamas())


# Prompts: a row lists, in order, numbers of random text tokens and tile arrangements (rows, columns) of images

Row = list[int | tuple[int, int]]

PROMPTS: dict[str, list[Row]] = {
    "text": [[40]],
    "an image": [[5, (1, 2), 25]],
    "images of several tilings": [[(1, 1), 5, (2, 1), (1, 2), 27]],
    "a padded batch": [[3, (1, 2), 25], [22], [4, (2, 1), 2, (1, 1), 3, (1, 2), 17]],
}


@dataclass(frozen=True)
class Prompt:
    """Model inputs for some rows: token ids and padding mask, both (B, T), and vision inputs by argument name."""

    ids: Tensor
    mask: Tensor
    vision: dict[str, Tensor]


def prompt(rows: list[Row], config: Mapping[str, Any], side: str = "left", image_token: int = IMAGE) -> Prompt:
    """Returns random text and images, padded to the longest row.

    A token attends to the last image before it, and to the images directly preceding that one.
    """
    arrangements, tiles = [tuple(ratio) for ratio in config["supported_aspect_ratios"]], config["max_num_tiles"]
    longest = max(sum(piece if isinstance(piece, int) else 1 for piece in row) for row in rows)
    images = max(sum(not isinstance(piece, int) for piece in row) for row in rows)
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.int64), torch.zeros(len(rows), longest, dtype=torch.int64)
    pixels = torch.zeros(len(rows), images, tiles, config["num_channels"], config["image_size"], config["image_size"])
    arrangement = torch.zeros(len(rows), images, dtype=torch.int64)
    is_tile = torch.zeros(len(rows), images, tiles, dtype=torch.int64)
    is_tile[:, :, 0] = 1
    visible = torch.zeros(len(rows), longest, images, tiles, dtype=torch.int64)
    for i, row in enumerate(rows):
        length = sum(piece if isinstance(piece, int) else 1 for piece in row)
        position = start = longest - length if side == "left" else 0
        mask[i, start : start + length] = 1
        image, first = 0, 0  # the next image, and the first one that tokens attend to
        for j, piece in enumerate(row):
            if isinstance(piece, int):
                ids[i, position : position + piece] = torch.randint(3, 89, (piece,))
                visible[i, position : position + piece, first:image] = is_tile[i, first:image]
                position += piece
                continue
            count = piece[0] * piece[1]
            pixels[i, image, :count] = torch.randn(count, *pixels.shape[3:])
            arrangement[i, image] = 1 + arrangements.index(piece)
            is_tile[i, image, :count] = 1
            ids[i, position] = image_token
            first = image if j == 0 or isinstance(row[j - 1], int) else first
            image += 1
            visible[i, position, first:image] = is_tile[i, first:image]
            position += 1
    vision = {
        "pixel_values": pixels,
        "aspect_ratio_ids": arrangement,
        "aspect_ratio_mask": is_tile,
        "cross_attention_mask": visible,
    }
    return Prompt(ids, mask, vision if images else {})
