"""Qwen2-VL's checkpoints, and prompts with images and videos."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.models.tiny import HEAD, Tensors, Tiny, with_another_head, without

IMAGE, VIDEO = 90, 91

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
VISION: dict[str, Any] = {
    "depth": 2,
    "embed_dim": 32,
    "hidden_act": "quick_gelu",
    "hidden_size": 64,
    "in_channels": 3,
    "in_chans": 3,
    "mlp_ratio": 2,
    "model_type": "qwen2_vl",
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "spatial_patch_size": 4,
    "temporal_patch_size": 2,
}
TOP: dict[str, Any] = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "image_token_id": IMAGE,
    "model_type": "qwen2_vl",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "video_token_id": VIDEO,
    "vision_config": VISION,
    "vision_end_token_id": 93,
    "vision_start_token_id": 92,
}
QWEN2_VL = {**TOP, **TEXT}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mrope_section": [3, 3, 2]}


def renamed(text: str, vision: str, then: Callable[[Tensors], Tensors] = dict) -> Callable[[Tensors], Tensors]:
    """Names that begin with `text` and `vision` in the place of what transformers 5 has."""

    def rename(name: str) -> str:
        return name.replace("model.language_model.", text).replace("model.visual.", vision)

    return lambda tensors: then({rename(name): tensor for name, tensor in tensors.items()})


def on_the_hub(then: Callable[[Tensors], Tensors] = dict) -> Callable[[Tensors], Tensors]:
    return renamed("model.", "visual.", then)


def qwen2_vl(name: str, changes: Mapping[str, Any] | None = None, **options: Any) -> Tiny:
    return Tiny(f"qwen2_vl {name}", {**QWEN2_VL, **(changes or {})}, **{"tensors": on_the_hub(), **options})


def nested(
    name: str, text: Mapping[str, Any] | None = None, top: Mapping[str, Any] | None = None, **options: Any
) -> Tiny:
    config = {**TOP, "text_config": {**TEXT, "model_type": "qwen2_vl_text", **(text or {})}, **(top or {})}
    return Tiny(f"qwen2_vl {name}", config, **options)


def qwen2_vls() -> Iterator[Tiny]:
    yield qwen2_vl("as on the hub", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16, shards=3)
    yield qwen2_vl("tied", {"tie_word_embeddings": True, "rope_theta": 300}, tensors=on_the_hub(without(HEAD)))
    without_head = renamed("language_model.", "visual.", without(HEAD))
    yield qwen2_vl("of the base model", {"tie_word_embeddings": True}, tensors=without_head)
    yield qwen2_vl("saved by transformers", {"num_key_value_heads": 4}, by_transformers=True, shards=2)
    yield nested("as transformers 5 holds it", top={"dtype": "float32"})
    yield nested(
        "tied inside, beside other entries",
        {"tie_word_embeddings": True, "image_token_id": None},
        {"hidden_size": 48, "num_hidden_layers": 7, "rope_theta": 3.0},
        tensors=renamed("model.", "model.visual.", without(HEAD)),
    )
    yield nested(
        "tied inside, for all that the files say",
        {"tie_word_embeddings": True},
        tensors=on_the_hub(with_another_head),
        corrected={
            "text_config": {**TEXT, "model_type": "qwen2_vl_text", "tie_word_embeddings": False},
        },
    )
    yield qwen2_vl("yarn, a window", {"rope_scaling": YARN, "use_sliding_window": True, "sliding_window": 13})
    other = {"spatial_merge_size": 3, "in_channels": 1, "temporal_patch_size": 1, "mlp_ratio": 3, "embed_dim": 24}
    few = {"hidden_size": 128, "rope_parameters": {"type": "default", "rope_theta": 700.0, "mrope_section": [4, 0, 4]}}
    absent = ("rope_scaling", "rope_theta", "max_window_layers", "num_key_value_heads", "rms_norm_eps")
    config = {**QWEN2_VL, **few, "num_attention_heads": 8, "vision_config": {**VISION, **other, "hidden_size": 128}}
    yield Tiny(
        "qwen2_vl few keys, another tower", {k: v for k, v in config.items() if k not in absent},
        tensors=renamed("model.language_model.", "visual."),
    )  # fmt: skip


CHECKPOINTS = list(qwen2_vls())


# Prompts: a row is a list of numbers of random text tokens, and of grids of tokens between them

Grid = tuple[int, int, int]


def image(height: int, width: int) -> tuple[int, Grid]:
    return IMAGE, (1, height, width)


def video(frames: int, height: int, width: int) -> tuple[int, Grid]:
    return VIDEO, (frames, height, width)


Row = list[int | tuple[int, Grid]]

PROMPTS: dict[str, list[Row]] = {
    "text": [[40]],
    "an image": [[5, image(2, 3), 20]],
    "images of several sizes": [[image(1, 2), 5, image(3, 2), 1, image(2, 2), 17]],
    "images of one size": [[4, image(2, 2), 5, image(2, 2), 9]],
    "a long video": [[4, video(5, 1, 2), 22]],
    "an image, videos": [[3, video(2, 2, 2), 5, image(2, 1), 4, video(3, 1, 1), 16]],
    "a padded batch": [[3, image(1, 3), 25], [22], [4, video(4, 1, 1), 2, image(2, 2), 3, image(3, 1), 17]],
}


@dataclass(frozen=True)
class Prompt:
    """What a processor would make of some rows, padded on the left."""

    ids: Tensor
    mask: Tensor
    vision: dict[str, Tensor]

    @property
    def types(self) -> Tensor:
        return (self.ids == IMAGE).int() + 2 * (self.ids == VIDEO).int()


def prompt(rows: list[Row], vision_config: Mapping[str, Any], side: str = "left") -> Prompt:
    m = vision_config["spatial_merge_size"]
    texts: list[list[int]] = []
    grids: dict[int, list[Grid]] = {IMAGE: [], VIDEO: []}
    for row in rows:
        text: list[int] = []
        for piece in row:
            if isinstance(piece, int):
                text += torch.randint(3, 89, (piece,)).tolist()
                continue
            kind, (frames, height, width) = piece
            text += [kind] * (frames * height * width)
            grids[kind].append((frames, m * height, m * width))
        texts.append(text)
    longest = max(map(len, texts))
    pads = [[0] * (longest - len(text)) for text in texts]
    both = zip(texts, pads, strict=True)
    ids = torch.tensor([pad + text if side == "left" else text + pad for text, pad in both])
    both = zip(texts, pads, strict=True)
    real = [[0] * len(pad) + [1] * len(text) if side == "left" else [1] * len(text) + pad for text, pad in both]
    size = vision_config["in_channels"] * vision_config["temporal_patch_size"] * vision_config["patch_size"] ** 2
    vision = {}
    names = {IMAGE: ("pixel_values", "image_grid_thw"), VIDEO: ("pixel_values_videos", "video_grid_thw")}
    for kind, (pixels, grid) in names.items():
        if grids[kind]:
            vision[grid] = torch.tensor(grids[kind])
            vision[pixels] = torch.randn(int(vision[grid].prod(1).sum()), size)
    return Prompt(ids, torch.tensor(real), vision)
