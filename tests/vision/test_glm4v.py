"""The processors of GLM-4.1V and GLM-4.6V against the functions of transformers', whose video processors need
torchvision."""

import dataclasses
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil, smart_resize
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor
from transformers.video_utils import VideoMetadata

import ligerzoo
from ligerzoo.errors import ConfigError, ImageError
from ligerzoo.vision.families.glm4v import (
    Glm4vImagePreprocessor,
    Glm4vVideoPreprocessor,
    Glm46VProcessorFamily,
    Glm46VVideoPreprocessor,
)
from ligerzoo.vision.processor import Processor
from ligerzoo.vision.settings import Settings
from tests.models import tiny_glm4v, tiny_glm4v_moe
from tests.models.comparing import assert_close
from tests.vision.test_processor import NAMED, SETTINGS, TEMPLATES, TOKENS, checkpoint, picture, text, user, write_json

with pytest.MonkeyPatch.context() as patch:  # the module imports torchvision, which the tested functions do not use
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        patch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["torchvision.transforms.v2"].functional = SimpleNamespace(InterpolationMode=int)  # type: ignore[attr-defined]
    from transformers.models.glm46v.video_processing_glm46v import Glm46VVideoProcessor

MARKS = ["<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|image|>", "<|video|>"]
for kind in ("glm4v", "glm4v_moe"):
    TOKENS[kind] = ["<|endoftext|>", "<|user|>", *MARKS]
    NAMED[kind] = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    SETTINGS[kind] = {
        "image_processor_type": "Glm4vImageProcessor",
        "processor_class": "Glm4vProcessor",
        "size": {"shortest_edge": 3000, "longest_edge": 20000},
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    TEMPLATES[kind] = (
        "{% for message in messages %}<|{{ message['role'] }}|>\n{% for item in message['content'] %}"
        "{% if item['type'] == 'image' %}<|begin_of_image|><|image|><|end_of_image|>"
        "{% elif item['type'] == 'video' %}<|begin_of_video|><|video|><|end_of_video|>"
        "{% else %}{{ item['text'] }}{% endif %}{% endfor %}{% endfor %}"
    )
KINDS = {"Glm4v": (Glm4vProcessor, Glm4vVideoProcessor), "Glm46V": (Glm46VProcessor, Glm46VVideoProcessor)}
SIDES = st.integers(1, 2000)


def size(limits: tuple[int, int]) -> dict[str, dict[str, int]]:
    return {"size": {"shortest_edge": min(limits), "longest_edge": max(limits)}}


@given(height=SIDES, width=SIDES, frames=st.integers(1, 9), temporal=st.integers(1, 3),
       limits=st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)))  # fmt: skip
def test_sizes(height: int, width: int, frames: int, temporal: int, limits: tuple[int, int]) -> None:
    settings = Settings({**size(limits), "temporal_patch_size": temporal}, "")
    options = {"factor": 28, "temporal_factor": temporal, "min_pixels": min(limits), "max_pixels": max(limits)}
    for preprocessor, count in (
        (Glm4vImagePreprocessor.for_images(settings), temporal),
        (Glm4vVideoPreprocessor.for_videos(settings), frames),
    ):
        try:
            expected = smart_resize(count, height, width, **options)
        except ValueError:
            with pytest.raises(ImageError, match=r"too long and thin|too few frames"):
                preprocessor.resized(height, width, frames=frames)
        else:
            assert preprocessor.resized(height, width, frames=frames) == expected


@given(frames=st.integers(1, 5000), fps=st.floats(0.2, 100), rate=st.floats(0.1, 100), seconds=st.integers(1, 300))
def test_samples_of_videos(frames: int, fps: float, rate: float, seconds: int) -> None:
    theirs = SimpleNamespace(fps=rate, max_duration=seconds, temporal_patch_size=2)
    settings = Settings({"fps": rate, "max_duration": seconds}, "")
    for ours, reference in (
        (Glm4vVideoPreprocessor, Glm4vVideoProcessor),
        (Glm46VVideoPreprocessor, Glm46VVideoProcessor),
    ):
        expected = reference.sample_frames(theirs, VideoMetadata(frames, fps=fps))
        assert ours.for_videos(settings).sampled(frames, fps) == expected.tolist()


def resized(image: Image.Image, height: int, width: int) -> torch.Tensor:
    levels = np.array(image.resize((width, height), Image.Resampling.BICUBIC))
    mean, std = (
        torch.tensor(values)[:, None, None]
        for values in (Glm4vVideoProcessor.image_mean, Glm4vVideoProcessor.image_std)
    )
    return ((torch.from_numpy(levels).permute(2, 0, 1).double() / 255).float() - mean) / std


@pytest.mark.parametrize("name", KINDS)
def test_texts_and_pixels(tmp_path: Path, name: str) -> None:
    processor_class, video_class = KINDS[name]
    directory = checkpoint(tmp_path, "glm4v")
    limits = SETTINGS["glm4v"]["size"]
    write_json(
        directory / "preprocessor_config.json",
        {**SETTINGS["glm4v"], "image_processor_type": f"{name}ImageProcessor", "processor_class": f"{name}Processor"},
    )
    process = Processor.from_pretrained(directory)
    images = [picture(90, 130), picture(300, 100), picture(20, 40)]
    video = [picture(60, 80).rotate(i) for i in range(7)]
    got = process(
        "Three: <|image|><|image|><|image|>, one <|begin_of_video|><|video|><|end_of_video|>?",
        images=images,
        videos=[video],
        fps=2.0,
    )

    expected = Glm4vImageProcessorPil(size=limits)(images, return_tensors="pt")
    assert torch.equal(got["image_grid_thw"], expected["image_grid_thw"])
    torch.testing.assert_close(got["pixel_values"], expected["pixel_values"])

    settings = SimpleNamespace(fps=2, max_duration=300, temporal_patch_size=2)
    metadata = VideoMetadata(7, fps=2.0)
    metadata.frames_indices = video_class.sample_frames(settings, metadata)
    edges = smart_resize(len(metadata.frames_indices), 60, 80, 2, 28, limits["shortest_edge"], limits["longest_edge"])
    frames = torch.stack([resized(video[i], *edges) for i in metadata.frames_indices])
    flat, *grid = video_class.patchify(None, frames[None], 14, 2, 2)
    torch.testing.assert_close(got["pixel_values_videos"], flat[0])
    assert got["video_grid_thw"].tolist() == [grid]

    one = SimpleNamespace(merge_size=2)
    theirs = SimpleNamespace(image_token="<|image|>", image_processor=one, video_processor=one)
    theirs.replace_frame_token_id = lambda *args, **kwargs: processor_class.replace_frame_token_id(
        theirs, *args, **kwargs
    )
    texts = [processor_class.replace_image_token(theirs, got, i) for i in range(3)]
    inputs = {"video_grid_thw": got["video_grid_thw"], "video_metadata": [metadata]}
    clip = processor_class.replace_video_token(theirs, inputs, 0)
    decoded = process.tokenizer.decode(got["input_ids"][0])
    assert decoded == f"Three: {''.join(texts)}, one <|begin_of_video|>{clip}<|end_of_video|>?"


def test_settings(tmp_path: Path) -> None:
    every = Glm4vVideoPreprocessor.for_videos(Settings({"do_sample_frames": False}, ""))
    assert every.sampled(5, 24.0) == list(range(5))
    with pytest.raises(ConfigError, match="fps: unsupported value; got 1000000"):
        Glm4vVideoPreprocessor.for_videos(Settings({"fps": 10**6}, ""))
    directory = checkpoint(tmp_path, "glm4v")
    (directory / "config.json").unlink()
    write_json(
        directory / "preprocessor_config.json",
        {**SETTINGS["glm4v"], "processor_class": "Glm46VProcessor", "image_processor_type": None},
    )
    assert type(Processor.from_pretrained(directory).family) is Glm46VProcessorFamily
    write_json(directory / "config.json", {"model_type": "glm4v_moe"})
    write_json(
        directory / "preprocessor_config.json", {**SETTINGS["glm4v"], "image_processor_type": "Qwen2VLImageProcessor"}
    )
    with pytest.raises(ConfigError, match=re.escape("not the image processor of Glm4vProcessor")):
        Processor.from_pretrained(directory)


def test_image_tokens_in_the_text_are_refused(tmp_path: Path) -> None:
    process = Processor.from_pretrained(checkpoint(tmp_path, "glm4v"))
    with pytest.raises(ImageError, match="the number given differs from the number of placeholders"):
        process("<|image|><|video|>", videos=[[picture(30, 30)] * 2], fps=1)
    assert (process("<|video|>", videos=[[picture(30, 30)] * 2], fps=1)["input_ids"] == process.image_token_id).any()


@pytest.mark.parametrize(
    "row",
    [tiny_glm4v.CHECKPOINTS[0], pytest.param(tiny_glm4v_moe.CHECKPOINTS[0], marks=pytest.mark.thorough)],
    ids=str,
)
@torch.no_grad()
def test_the_model_reads_the_inputs(tmp_path: Path, device: str, row: Any) -> None:
    """Images and videos, with the types of transformers' processor and without."""
    process = Processor.from_pretrained(checkpoint(tmp_path, row.config["model_type"]))
    names = ["image_start", "image_end", "video_start", "video_end", "image", "video"]
    ids = {f"{name}_token_id": process.tokenizer.token_to_id(mark) for name, mark in zip(names, MARKS, strict=True)}
    text_config = {**row.config["text_config"], "vocab_size": len(process.tokenizer)}
    vision = {**row.config["vision_config"], "patch_size": 14, "image_size": 84}
    dataclasses.replace(row, config={**row.config, **ids, "text_config": text_config, "vision_config": vision}).write(
        tmp_path
    )
    ours = ligerzoo.AutoModel.from_pretrained(tmp_path, dtype=torch.float32, device=device)
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).to(device)
    clip, one, other = [picture(60, 90)] * 7, picture(90, 40), picture(30, 50)
    batches = [
        [user({"type": "image", "image": one}, text("and"), {"type": "image", "image": other}), user(text("Who?"))],
        [user({"type": "video", "video": clip}, text("What?")), user(text("Where?"))],
    ]
    marks = SimpleNamespace(**{name.replace("token_", ""): value for name, value in ids.items()}, **ids)
    for conversations in batches:
        inputs = {name: value.to(device) for name, value in process(conversations, fps=1).items()}
        types = torch.tensor(Glm4vProcessor.create_mm_token_type_ids(marks, inputs["input_ids"].tolist()))
        typed = {**inputs, "mm_token_type_ids": types.to(device)}
        is_token = inputs["attention_mask"] == 1
        got = ours(**inputs).logits
        assert_close(got[is_token], theirs(**typed).logits[is_token], "logits")
        assert torch.equal(ours(**typed).logits, got)
        prompt = inputs.pop("input_ids")
        generated = [
            ours.generate(prompt, **each, max_new_tokens=3, eos_token_id=[])
            for each in (inputs, {**inputs, "mm_token_type_ids": types})
        ]
        assert torch.equal(*generated)
        assert generated[0].shape == (2, prompt.shape[1] + 3)
    ours(**{name: value.to(device) for name, value in process([batches[0][0], batches[1][0]], fps=1).items()})
