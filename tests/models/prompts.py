"""Prompts with images and videos, in the format of a processor's output."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IMAGE, VIDEO, VIDEO_START, VIDEO_END = 90, 91, 92, 93  # token ids

# A row lists, in order, numbers of random text tokens and (token id, grid) pairs of images and videos.

Grid = tuple[int, int, int]
Row = list[int | tuple[int, Grid]]


def image(height: int, width: int) -> tuple[int, Grid]:
    return IMAGE, (1, height, width)


def video(frames: int, height: int, width: int) -> tuple[int, Grid]:
    return VIDEO, (frames, height, width)


def apart(row: Row, vision_config: Mapping[str, Any]) -> Row:
    """Returns the row with videos as the model reads them: Qwen3-VL has text, a timestamp, before each frame.

    So have Qwen3.5, Muse Glimmer and Gemma 4. Their towers have learned positions. GLM-4.1V, whose tower has an
    image_size, has text after each frame, marks the video, and reads frames as images.
    """
    marks_videos = "image_size" in vision_config
    learned = {"num_position_embeddings", "position_side", "pos_emb_height", "pooling_kernel_size"}
    if not (marks_videos or vision_config.keys() & learned):
        return row
    pieces: Row = []
    for piece in row:
        if isinstance(piece, int) or piece[0] != VIDEO:
            pieces.append(piece)
            continue
        frames, height, width = piece[1]
        if marks_videos:
            pieces += [(VIDEO_START, (1, 1, 1)), *[image(height, width), 1] * frames, (VIDEO_END, (1, 1, 1))]
        else:
            pieces += [1, video(1, height, width)] * frames
    return pieces


PROMPTS: dict[str, list[Row]] = {
    "text": [[40]],
    "images of one size": [[4, image(2, 4), 5, image(2, 4), 19]],
    "a long video": [[12, video(12, 1, 2), 4]],  # its positions exceed those of the text after it
    "a padded batch": [
        [3, image(1, 3), 25],
        [22],
        [image(3, 2), 5, video(2, 2, 2), 1, image(2, 1), 3, video(3, 1, 1), 17],
    ],
}


@dataclass(frozen=True)
class Prompt:
    """Model inputs for some rows.

    Attributes:
        ids: token ids, (B, T).
        mask: padding mask, (B, T); 0 for padding.
        vision: the vision inputs of the model, by argument name.
    """

    ids: Tensor
    mask: Tensor
    vision: dict[str, Tensor]

    @property
    def types(self) -> Tensor:
        in_video = (self.ids == VIDEO_START).cumsum(1) > (self.ids == VIDEO_END).cumsum(1)
        is_image = self.ids == IMAGE
        return (is_image & ~in_video).int() + 2 * (is_image & in_video | (self.ids == VIDEO)).int()


def prompt(rows: list[Row], vision_config: Mapping[str, Any], side: str = "left") -> Prompt:
    v = {"in_channels": 3, "temporal_patch_size": vision_config.get("patch_temporal"), **vision_config}
    m = v.get("spatial_merge_size") or v.get("merge_size", 1)
    texts: list[list[int]] = []
    grids: dict[int, list[Grid]] = {IMAGE: [], VIDEO: []}
    for row in rows:
        text: list[int] = []
        for piece in apart(row, vision_config):
            if isinstance(piece, int):
                text += torch.randint(3, 89, (piece,)).tolist()
            else:
                text += [piece[0]] * math.prod(piece[1])
        texts.append(text)
        for kind, (frames, height, width) in (piece for piece in row if not isinstance(piece, int)):
            grids[kind].append((frames, m * height, m * width))
    longest = max(map(len, texts))
    pads = [[0] * (longest - len(text)) for text in texts]
    both = zip(texts, pads, strict=True)
    ids = torch.tensor([pad + text if side == "left" else text + pad for text, pad in both])
    both = zip(texts, pads, strict=True)
    mask = [[0] * len(pad) + [1] * len(text) if side == "left" else [1] * len(text) + pad for text, pad in both]
    if "pooling_kernel_size" in v:
        return Prompt(ids, torch.tensor(mask), padded_vision(grids, v))
    size = v["in_channels"] * v["temporal_patch_size"] * v["patch_size"] ** 2
    vision = {}
    names = {IMAGE: ("pixel_values", "image_grid_thw"), VIDEO: ("pixel_values_videos", "video_grid_thw")}
    for kind, (pixels, grid) in names.items():
        if grids[kind]:
            vision[grid] = torch.tensor(grids[kind])
            vision[pixels] = torch.randn(int(vision[grid].prod(1).sum()), size)
    if grids[VIDEO] and "tokens_per_second" in vision_config:
        # Integers, since transformers before 5.18 rounds them down.
        vision["second_per_grid_ts"] = torch.randint(1, 4, (len(grids[VIDEO]),)).float()
    return Prompt(ids, torch.tensor(mask), vision)


def padded_vision(grids: Mapping[int, list[Grid]], vision_config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns images and frames as Gemma 4 reads them: patches of each, padded, with their columns and rows.

    Args:
        grids: frames, rows and columns of tokens of each image and video.
        vision_config: with a tower, which pools patches, or without.
    """
    k, side = vision_config["pooling_kernel_size"], vision_config["patch_size"]
    k, side = (k, side) if "hidden_size" in vision_config else (1, k * side)
    images: dict[int, list[tuple[Tensor, Tensor]]] = {IMAGE: [], VIDEO: []}
    for kind, each in grids.items():
        for frames, height, width in each:
            axes = torch.meshgrid(torch.arange(k * width), torch.arange(k * height), indexing="xy")
            positions = torch.stack(axes, -1).view(-1, 2)
            images[kind] += [(torch.rand(len(positions), 3 * side**2), positions) for _ in range(frames)]
    length = max((len(patches) for each in images.values() for patches, _ in each), default=0) + k**2

    def padded(x: Tensor, value: float) -> Tensor:
        return torch.cat([x, x.new_full((length - len(x), *x.shape[1:]), value)])

    vision = {}
    names = {IMAGE: ("pixel_values", "image_position_ids"), VIDEO: ("pixel_values_videos", "video_position_ids")}
    for kind, (pixels, columns_and_rows) in names.items():
        if images[kind]:
            vision[pixels] = torch.stack([padded(one, 0.0) for one, _ in images[kind]])
            vision[columns_and_rows] = torch.stack([padded(one, -1) for _, one in images[kind]])
    if grids[VIDEO]:
        vision["num_frames_per_video"] = torch.tensor([frames for frames, *_ in grids[VIDEO]])
    return vision
