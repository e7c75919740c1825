"""Muse Glimmer's processor against the functions of transformers', whose processors need torchvision as a whole."""

import dataclasses
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
from transformers.video_utils import VideoMetadata

import ligerzoo
from ligerzoo.errors import ConfigError
from ligerzoo.vision.families.muse_glimmer import MuseGlimmerPreprocessor, MuseGlimmerVideoPreprocessor
from ligerzoo.vision.processor import Processor
from ligerzoo.vision.settings import Settings
from tests.models.comparing import assert_close
from tests.models.tiny_muse_glimmer import CHECKPOINTS
from tests.vision.test_processor import NAMED, SETTINGS, TEMPLATES, TOKENS, checkpoint, picture, text, user

with pytest.MonkeyPatch.context() as patch:  # the modules import torchvision, which the tested functions do not use
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        patch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["torchvision.transforms.v2"].functional = SimpleNamespace(InterpolationMode=int)  # type: ignore[attr-defined]
    from transformers.models.muse_glimmer.image_processing_muse_glimmer import MuseGlimmerImageProcessor, smart_resize
    from transformers.models.muse_glimmer.processing_muse_glimmer import MuseGlimmerProcessor
    from transformers.models.muse_glimmer.video_processing_muse_glimmer import MuseGlimmerVideoProcessor

KIND = "muse_glimmer"
MARKS = {
    "image": "<|patch|>", "image_start": "<|image_start|>", "image_end": "<|image_end|>", "video": "<|video|>",
    "video_start": "<|vid_start|>", "video_end": "<|vid_end|>", "video_sep": "<|vid_frame_separator|>",
}  # fmt: skip
TOKENS[KIND] = ["<|begin_of_text|>", "<|eot|>", *MARKS.values()]
NAMED[KIND] = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot|>"}
SETTINGS[KIND] = {"image_processor_type": "MuseGlimmerImageProcessor", "max_image_tokens": 12, "size": None}
TEMPLATES[KIND] = (
    "{% for message in messages %}{{ message['role'] }}: {% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}<|patch|>{% elif item['type'] == 'video' %}<|video|>"
    "{% else %}{{ item['text'] }}{% endif %}{% endfor %}<|eot|>{% endfor %}"
)
SIDES = st.integers(1, 3000)


@given(height=SIDES, width=SIDES, limit=st.integers(1, 300))
def test_sizes(height: int, width: int, limit: int) -> None:
    preprocessor = MuseGlimmerPreprocessor.from_settings(Settings({"limit": limit}, ""), "limit", 1)
    rows, columns = preprocessor.tokens(height, width)
    assert (rows * 28, columns * 28) == smart_resize(height, width, 28, limit)


@given(frames=st.integers(1, 3000), fps=st.floats(0.5, 100), size=st.integers(1, 4))
def test_samples_of_videos(frames: int, fps: float, size: int) -> None:
    preprocessor = MuseGlimmerVideoPreprocessor.for_videos(Settings({"temporal_patch_size": size}, ""))
    theirs = SimpleNamespace(fps=2.0)
    indices = MuseGlimmerVideoProcessor.sample_frames(theirs, VideoMetadata(frames, fps=fps), size, 96)
    assert preprocessor.sampled(frames, fps) == indices.tolist()
    every = MuseGlimmerVideoPreprocessor.for_videos(Settings({"do_sample_frames": False}, ""))
    assert every.sampled(frames, fps) == list(range(frames))


def resized(image: Image.Image, height: int, width: int) -> torch.Tensor:
    levels = np.array(image.resize((width, height), Image.Resampling.LANCZOS))
    return ((torch.from_numpy(levels).permute(2, 0, 1).double() / 255).float() - 0.5) / 0.5


def test_texts_and_pixels(tmp_path: Path) -> None:
    process = Processor.from_pretrained(checkpoint(tmp_path, KIND))
    images = [picture(90, 130), picture(300, 100)]
    video = [picture(60, 80).rotate(i) for i in range(5)]
    got = process("Two: <|patch|><|patch|>, one <|video|>?", images=images, videos=[video], fps=2.0)

    pixels = [resized(image, *smart_resize(image.height, image.width, 28, 12))[None] for image in images]
    patches = [MuseGlimmerImageProcessor.patchify(None, one, 14, 2) for one in pixels]
    assert torch.equal(got["pixel_values"], torch.cat([one[0] for one, *_ in patches]))
    assert got["image_grid_thw"].tolist() == [[1, h, w] for _, h, w in patches]
    frames = torch.stack([resized(video[i], *smart_resize(60, 80, 28, 144)) for i in (0, 1, 2, 4)])
    flat, *grid = MuseGlimmerVideoProcessor.patchify(None, frames[None], 14, 2)
    assert torch.equal(got["pixel_values_videos"], flat[0])
    assert got["video_grid_thw"].tolist() == [grid]

    names: dict[str, Any] = {f"{name}_token": token for name, token in MARKS.items()}
    sizes = SimpleNamespace(merge_size=2, temporal_patch_size=2, frame_timestamp_format="Time: {timestamp:.1f}s")
    theirs = SimpleNamespace(**names, image_processor=sizes, video_processor=sizes)
    first, second = (MuseGlimmerProcessor.replace_image_token(theirs, got, i) for i in (0, 1))
    metadata = VideoMetadata(5, fps=2.0, frames_indices=[0, 1, 2, 4])
    inputs = {"video_grid_thw": got["video_grid_thw"], "video_metadata": [metadata]}
    clip = MuseGlimmerProcessor.replace_video_token(theirs, inputs, 0)
    decoded = process.tokenizer.decode(got["input_ids"][0])
    assert decoded.removeprefix("<|begin_of_text|>") == f"Two: {first}{second}, one {clip}?"


def test_a_timestamp_of_another_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="frame_timestamp_format: unsupported value"):
        MuseGlimmerVideoPreprocessor.for_videos(Settings({"frame_timestamp_format": "{timestamp:99999999999f}"}, ""))


@torch.no_grad()
def test_the_model_reads_the_inputs(tmp_path: Path, device: str) -> None:
    process = Processor.from_pretrained(checkpoint(tmp_path, KIND))
    row = CHECKPOINTS[0]
    ids = {f"{name}_token_id": process.tokenizer.token_to_id(MARKS[name]) for name in ("image", "video")}
    text_config = {**row.config["text_config"], "vocab_size": len(process.tokenizer)}
    vision = {**row.config["vision_config"], "patch_size": 14}
    dataclasses.replace(row, config={**row.config, **ids, "text_config": text_config, "vision_config": vision}).write(
        tmp_path
    )
    ours = ligerzoo.AutoModel.from_pretrained(tmp_path, dtype=torch.float32, device=device)
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).to(device)
    clip, one, other = [picture(60, 90)] * 7, picture(90, 40), picture(30, 50)
    conversations = [
        user({"type": "video", "video": clip}, text("and"), {"type": "image", "image": one}),
        user(text("What?"), {"type": "image", "image": other}),
    ]
    inputs = {name: value.to(device) for name, value in process(conversations, fps=1).items()}
    is_token = inputs["attention_mask"] == 1
    assert_close(ours(**inputs).logits[is_token], theirs(**inputs).logits[is_token], "logits")
    prompt = inputs.pop("input_ids")
    assert ours.generate(prompt, **inputs, max_new_tokens=3, eos_token_id=[]).shape == (2, prompt.shape[1] + 3)
