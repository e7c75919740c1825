"""Gemma 4's processors against transformers', whose video processors and that of the 12B need torchvision."""

import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

import ligerzoo
from ligerzoo.errors import ConfigError, ImageError
from ligerzoo.vision.families.gemma4 import Gemma4Preprocessor, Gemma4VideoPreprocessor
from ligerzoo.vision.processor import Processor
from ligerzoo.vision.settings import Settings
from tests.models import tiny_gemma4, tiny_gemma4_unified
from tests.models.comparing import assert_close
from tests.vision.test_processor import NAMED, SETTINGS, TEMPLATES, TOKENS, checkpoint, picture, text, user

with pytest.MonkeyPatch.context() as patch:  # the modules import torchvision, which the tested functions do not use
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        patch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["torchvision.transforms.v2"].functional = SimpleNamespace(InterpolationMode=int)  # type: ignore[attr-defined]
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
    from transformers.models.gemma4_unified.image_processing_gemma4_unified import patches_merge

KINDS = ("gemma4", "gemma4_unified")
MARKS = {
    "boi": "<|image>", "image": "<|image|>", "eoi": "<image|>", "boa": "<|audio>", "audio": "<|audio|>",
    "eoa": "<audio|>", "video": "<|video|>", "sot": "<|turn>", "eot": "<turn|>",
}  # fmt: skip
for kind in KINDS:
    TOKENS[kind] = ["<bos>", "<eos>", "<pad>", *MARKS.values()]
    NAMED[kind] = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    NAMED[kind] |= {f"{name}_token": token for name, token in MARKS.items() if name != "video"}
    SETTINGS[kind] = {"do_normalize": False, "image_mean": [0.5] * 3, "max_soft_tokens": 70, "size": None}
    SETTINGS[kind] |= {"image_seq_length": 280, "patch_size": 4, "pooling_kernel_size": 2, "resample": 3}
    TEMPLATES[kind] = "".join(
        [
            "{{ bos_token }}{% for message in messages %}", MARKS["sot"], "{{ message['role'] }}\n",
            "{% for item in message['content'] %}{% if item['type'] == 'image' %}\n\n<|image|>\n\n",
            "{% elif item['type'] == 'video' %}\n\n<|video|>\n\n{% elif item['type'] == 'audio' %}<|audio|>",
            "{% else %}{{ item['text'] | trim }}{% endif %}{% endfor %}", MARKS["eot"], "\n{% endfor %}",
        ]
    )  # fmt: skip
SETTINGS["gemma4"]["image_processor_type"] = "Gemma4ImageProcessor"
SETTINGS["gemma4_unified"]["image_processor_type"] = "Gemma4UnifiedImageProcessor"
SIDES = st.integers(1, 5000)
has_same_videos = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="it samples videos with other rounding, and stacks them"
)


@given(height=SIDES, width=SIDES, tokens=st.sampled_from([70, 280, 1120]))
def test_sizes(height: int, width: int, tokens: int) -> None:
    settings = Settings({"max_soft_tokens": tokens}, "")
    rows, columns = Gemma4Preprocessor.from_settings(settings, 70, merges=False).tokens(height, width)
    expected = get_aspect_ratio_preserving_size(height, width, 16, 9 * tokens, 3)
    assert (48 * rows, 48 * columns) == expected
    assert Gemma4Preprocessor.from_settings(settings, 70, merges=True).tokens(height, width) == (rows, columns)


@has_same_videos
@given(frames=st.integers(1, 3000), fps=st.floats(0.5, 100), rate=st.floats(0.1, 100))
def test_samples_of_videos(frames: int, fps: float, rate: float) -> None:
    def sampled(**entries: Any) -> list[int]:
        return Gemma4VideoPreprocessor.for_videos(Settings(entries, ""), merges=False).sampled(frames, fps)

    metadata = VideoMetadata(frames, fps=fps)
    assert sampled() == default_sample_indices_fn(metadata, num_frames=min(32, frames)).tolist()
    count = min(max(1, int(frames / fps * rate)), frames)  # transformers refuses more frames than there are
    assert sampled(fps=rate) == default_sample_indices_fn(metadata, num_frames=count).tolist()
    assert sampled(do_sample_frames=False) == list(range(frames))


def test_settings_of_videos_are_refused() -> None:
    for entries, named in (
        ({"fps": 2, "num_frames": 8}, "num_frames"),
        ({"max_soft_tokens": 71}, "max_soft_tokens: .* one of 70, 140"),
        ({"do_resize": False}, "do_resize"),
    ):
        with pytest.raises(ConfigError, match=named):
            Gemma4VideoPreprocessor.for_videos(Settings(entries, ""), merges=False)


def merged(patches: Tensor, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Merges padded patches as the processor of the 12B does."""
    if kind == "gemma4":
        return patches, positions
    rows, positions_of = torch.zeros(len(patches), 70, 192), torch.full((len(patches), 70, 2), -1)
    for i, (one, own) in enumerate(zip(patches, positions, strict=True)):
        count = int((own[:, 0] >= 0).sum())
        rows[i, : count // 4], positions_of[i, : count // 4] = patches_merge(one[:count], own[:count], count // 4)
    return rows, positions_of


@has_same_videos
@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_pixels(kind: str, tmp_path: Path) -> None:
    process = Processor.from_pretrained(checkpoint(tmp_path, kind))
    images = [picture(90, 130), picture(20, 500), picture(7, 9)]
    video = [picture(60, 80).rotate(i) for i in range(40)]
    got = process(["Two: <|image|><|image|>", "one <|image|>, one <|video|>?"], images=images, videos=[video], fps=0.5)

    theirs = Gemma4ImageProcessorPil(max_soft_tokens=70, patch_size=4, pooling_kernel_size=2)
    expected = theirs(images, return_tensors="pt")
    patches, positions = merged(expected["pixel_values"], expected["image_position_ids"], kind)
    assert torch.equal(got["pixel_values"], patches)
    assert torch.equal(got["image_position_ids"], positions)
    indices = default_sample_indices_fn(VideoMetadata(40, fps=0.5), num_frames=32).tolist()
    frames = theirs([video[i] for i in indices], return_tensors="pt")
    patches, positions = merged(frames["pixel_values"], frames["image_position_ids"], kind)
    assert torch.equal(got["pixel_values_videos"], patches)
    assert torch.equal(got["video_position_ids"], positions)
    assert got["num_frames_per_video"].tolist() == [32]

    marks: dict[str, Any] = {f"{name}_token": token for name, token in MARKS.items()}
    writer = SimpleNamespace(**marks)
    first, second, third = (Gemma4Processor.replace_image_token(writer, expected, i) for i in range(3))
    metadata = VideoMetadata(40, fps=0.5, frames_indices=indices)
    inputs = {"num_soft_tokens_per_video": frames["num_soft_tokens_per_image"][:1], "video_metadata": [metadata]}
    clip = Gemma4Processor.replace_video_token(writer, inputs, 0)
    decoded = [process.tokenizer.decode(row[row != 258]) for row in got["input_ids"]]
    assert decoded == [f"<bos>Two: {first}{second}", f"<bos>one {third}, one {clip}?"]
    ids = got["input_ids"]
    types = got["mm_token_type_ids"]
    assert torch.equal(types == 1, ids == process.tokenizer.token_to_id("<|image|>"))
    assert torch.equal(types == 2, ids == process.tokenizer.token_to_id("<|video|>"))
    assert types.max() == 2


def test_settings_in_processor_config(tmp_path: Path) -> None:
    """As on the hub. Audio is refused; without a token for videos, so are these."""
    checkpoint(tmp_path, "gemma4")
    (tmp_path / "preprocessor_config.json").unlink()
    parts = {
        "audio_ms_per_token": 40,
        "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
        "image_processor": {**SETTINGS["gemma4"], "max_soft_tokens": 280},
        "processor_class": "Gemma4Processor",
        "video_processor": {**SETTINGS["gemma4"], "video_processor_type": "Gemma4VideoProcessor", "num_frames": 3},
    }
    (tmp_path / "processor_config.json").write_text(json.dumps(parts))
    process = Processor.from_pretrained(tmp_path)
    assert process.family.images.max_tokens == 280
    assert process.family.videos.num_frames == 3
    with pytest.raises(ImageError, match=r"text: audio is not supported; got '<\|audio\|>'"):
        process([user({"type": "audio"}, text("What?"))])
    process.save_pretrained(tmp_path / "saved")
    saved = (tmp_path / "saved" / "processor_config.json").read_text()
    assert saved == (tmp_path / "processor_config.json").read_text()

    tokenizer = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(tokenizer.replace("<|video|>", "<|other|>"))
    without = Processor.from_pretrained(tmp_path)
    assert [*without.family.placeholders] == ["image"]
    assert without("<|image|>", images=picture(9, 9))["mm_token_type_ids"].any()


@pytest.mark.parametrize("kind, family", [("gemma4", tiny_gemma4), ("gemma4_unified", tiny_gemma4_unified)], ids=KINDS)
@has_same_videos
@torch.no_grad()
def test_the_model_reads_the_inputs(kind: str, family: Any, tmp_path: Path, device: str) -> None:
    process = Processor.from_pretrained(checkpoint(tmp_path, kind))
    row = family.CHECKPOINTS[0]
    ids = {f"{name}_token_id": process.tokenizer.token_to_id(MARKS[name]) for name in ("image", "video", "audio")}
    sizes = {"vocab_size": len(process.tokenizer), "vocab_size_per_layer_input": len(process.tokenizer)}
    config = {
        "text_config": {**row.config["text_config"], **sizes, "use_bidirectional_attention": None},
        "vision_config": {**row.config["vision_config"], "patch_size": 4, "position_embedding_size": 200},
    }
    if kind == "gemma4_unified":
        config["vision_config"] |= {"mm_posemb_size": 70, "model_patch_size": 8}
        del config["vision_config"]["position_embedding_size"]
    dataclasses.replace(row, config={**row.config, **ids, **config}).write(tmp_path)
    ours = ligerzoo.AutoModel.from_pretrained(tmp_path, dtype=torch.float32, device=device)
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).to(device)
    clip, one, other = [picture(60, 90)] * 3, picture(90, 40), picture(30, 50)
    conversations = [
        user({"type": "video", "video": clip}, text("and"), {"type": "image", "image": one}),
        user(text("What?"), {"type": "image", "image": other}),
    ]
    inputs = {name: value.to(device) for name, value in process(conversations, fps=1).items()}
    is_token = inputs["attention_mask"] == 1
    assert_close(ours(**inputs).logits[is_token], theirs(**inputs).logits[is_token], "logits")
    prompt = inputs.pop("input_ids")
    assert ours.generate(prompt, **inputs, max_new_tokens=3, eos_token_id=[]).shape == (2, prompt.shape[1] + 3)
