"""Processors agree with transformers' processors, built from the same toy tokenizer and settings."""

import dataclasses
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.mllama.processing_mllama import MllamaProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize
from transformers.video_utils import VideoMetadata

import ligerzoo
from ligerzoo.convert import MODEL_TYPES, architecture_of
from ligerzoo.errors import CheckpointError, ConfigError, ImageError, LigerzooError, TokenizerError
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.vision.families.qwen3_vl import Qwen3VLVideoPreprocessor
from ligerzoo.vision.processor import VISION_MODEL_TYPES, Processor, load_processor_or_tokenizer
from ligerzoo.vision.settings import Settings
from tests.models.comparing import assert_close
from tests.models.tiny import Tiny

SETTINGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "min_pixels": 1000,
        "max_pixels": 9000,
    },
}
SETTINGS["gemma3"] = {
    "image_processor_type": "Gemma3ImageProcessor",
    "do_convert_rgb": None,
    "do_pan_and_scan": None,
    "size": {"height": 56, "width": 56},
}
SETTINGS["mllama"] = {
    "image_processor_type": "MllamaImageProcessor",
    "image_mean": [0.4, 0.5, 0.6],
    "size": {"height": 56, "width": 56},
}
SETTINGS["qwen2_5_vl"] = {**SETTINGS["qwen2_vl"], "processor_class": "Qwen2_5_VLProcessor"}

SETTINGS["qwen3_vl"] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": 2,
    "patch_size": 16,
    "size": {"shortest_edge": 2048, "longest_edge": 9000},
    "temporal_patch_size": 2,
}
SETTINGS["qwen3_5"] = SETTINGS["qwen3_vl"]
VIDEO_SETTINGS = {**SETTINGS["qwen3_vl"], "video_processor_type": "Qwen3VLVideoProcessor"}
VIDEO_SETTINGS["size"] = {"shortest_edge": 4096, "longest_edge": 20000}

# Similar to the templates on the hub.
QWEN_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif content['type'] == 'video' or 'video' in content %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENS = {
    "qwen2_vl": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"],
}
TOKENS["qwen2_vl"] += ["<|image_pad|>", "<|video_pad|>"]
TOKENS["gemma3"] = ["<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>"]
TOKENS["gemma3"] += ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
TOKENS["mllama"] = ["<|begin_of_text|>", "<|eot_id|>", "<|pad|>", "<|python_tag|>", "<|image|>"]
TOKENS["qwen2_5_vl"] = TOKENS["qwen3_vl"] = TOKENS["qwen3_5"] = TOKENS["qwen2_vl"]
NAMED: dict[str, dict[str, str]] = {
    "qwen2_vl": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
}
NAMED["gemma3"] = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
NAMED["gemma3"] |= {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
NAMED["mllama"] = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|pad|>"}
NAMED["qwen2_5_vl"] = NAMED["qwen3_vl"] = NAMED["qwen3_5"] = NAMED["qwen2_vl"]
TEMPLATES = dict.fromkeys(["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"], QWEN_TEMPLATE)
TEMPLATES["gemma3"] = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}\n"
    "{% for item in message['content'] %}{% if item['type'] == 'image' %}<start_of_image>"
    "{% else %}{{ item['text'] | trim }}{% endif %}{% endfor %}<end_of_turn>\n{% endfor %}"
)
TEMPLATES["mllama"] = (
    "{{ bos_token }}{% for message in messages %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}<|image|>{% else %}{{ item['text'] }}{% endif %}{% endfor %}<|eot_id|>{% endfor %}"
)

QWENS = ["qwen2_vl", "qwen2_5_vl"]
QWENS_3 = ["qwen3_vl", "qwen3_5"]


def picture(height: int, width: int) -> Image.Image:
    noise = np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def checkpoint(directory: Path, kind: str) -> Path:
    """Writes the files of a processor of this kind, as on the hub."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(TOKENS[kind])
    if bos := NAMED[kind].get("bos_token"):
        backend.post_processor = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A $B", [(bos, len(alphabet))])
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", NAMED[kind])
    write_json(directory / "config.json", {"model_type": kind})
    write_json(directory / "preprocessor_config.json", SETTINGS[kind])
    if kind in QWENS_3:
        write_json(directory / "video_preprocessor_config.json", VIDEO_SETTINGS)
    write_json(directory / "chat_template.json", {"chat_template": TEMPLATES[kind]})
    return directory


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "qwen", "qwen2_5_vl")


class VideosWithoutTorchvision:
    """transformers' video processor, computed by its image processor because the original needs torchvision."""

    merge_size = temporal_patch_size = 2

    def __init__(self, process: Callable[..., Any]) -> None:
        self.process = process

    def __call__(self, videos: list[Any], fps: Any = None, **kwargs: Any) -> dict[str, Any]:
        patches, grids = [], []
        for video in videos:
            frames = [self.process(frame, return_tensors="pt") for frame in video]
            frames += frames[-1:] * (len(frames) % 2)
            halves = [frame["pixel_values"].unflatten(1, (3, 2, -1)) for frame in frames]
            for one, two in zip(halves[::2], halves[1::2], strict=True):
                patches.append(torch.stack([one[:, :, 0], two[:, :, 1]], dim=2).flatten(1))
            grids.append([len(frames) // 2, *frames[0]["image_grid_thw"][0, 1:].tolist()])
        metadata = [SimpleNamespace(sampled_fps=speed) for speed in fps or [24] * len(videos)]
        grid = np.array(grids)
        return {"pixel_values_videos": torch.cat(patches), "video_grid_thw": grid, "video_metadata": metadata}


class Qwen3VideosWithoutTorchvision:
    """transformers' video processor of Qwen3-VL, which resizes with Pillow, because the original needs torchvision."""

    merge_size = temporal_patch_size = 2
    min_frames, max_frames = 4, 768

    def __call__(self, videos: list[Any], video_metadata: list[Any], **kwargs: Any) -> dict[str, Any]:
        patches, grids = [], []
        for video, metadata in zip(videos, video_metadata, strict=True):
            metadata.frames_indices = Qwen3VLVideoProcessor.sample_frames(self, metadata, fps=2)
            frames = [video[i] for i in metadata.frames_indices]
            limits = {"min_pixels": 4096, "max_pixels": 20000}
            height, width = smart_resize(len(frames), frames[0].height, frames[0].width, 2, 32, **limits)
            levels = np.stack([np.array(frame.resize((width, height), Image.Resampling.BICUBIC)) for frame in frames])
            pixels = (torch.from_numpy(levels).permute(0, 3, 1, 2)[None] / 255 - 0.5) / 0.5
            flat, *grid = Qwen3VLVideoProcessor.patchify(self, pixels, 16, 2, 2)
            patches.append(flat[0])
            grids.append(grid)
        grid = np.array(grids)
        return {"pixel_values_videos": torch.cat(patches), "video_grid_thw": grid, "video_metadata": video_metadata}


def their_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    named = json.loads((directory / "tokenizer_config.json").read_text())
    return PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), padding_side="left", **named)


def their_qwen(directory: Path, kind: str) -> Any:
    base = {"qwen2_vl": Qwen2VLProcessor, "qwen2_5_vl": Qwen2_5_VLProcessor}.get(kind, Qwen3VLProcessor)
    unchecked = {"check_argument_for_proper_class": lambda *_: None}  # the check requires the video processor
    images = Qwen2VLImageProcessorPil(**SETTINGS[kind])
    videos = Qwen3VideosWithoutTorchvision() if kind in QWENS_3 else VideosWithoutTorchvision(images)
    return type(base.__name__, (base,), unchecked)(
        images, their_tokenizer(directory), videos, chat_template=TEMPLATES[kind]
    )


def their_gemma3(directory: Path) -> Any:
    images = Gemma3ImageProcessorPil(**SETTINGS["gemma3"])
    return Gemma3Processor(images, their_tokenizer(directory), chat_template=TEMPLATES["gemma3"], image_seq_length=9)


def their_mllama(directory: Path) -> Any:
    images = MllamaImageProcessorPil(**SETTINGS["mllama"])
    return MllamaProcessor(images, their_tokenizer(directory), chat_template=TEMPLATES["mllama"])


def assert_same(ours: dict[str, torch.Tensor], theirs: Any, *names: str) -> None:
    assert set(ours) == {"input_ids", "attention_mask", *names}
    for name, value in ours.items():
        expected = torch.as_tensor(theirs[name])
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected), name


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


IMAGE, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"


def test_every_model_that_reads_images_has_a_processor() -> None:
    with_images = {name for name in MODEL_TYPES if "pixel_values" in architecture_of(name).model_class.modalities}
    assert with_images == {*VISION_MODEL_TYPES}


@pytest.mark.parametrize("kind", QWENS)
def test_qwen_texts(tmp_path: Path, kind: str) -> None:
    directory = checkpoint(tmp_path, kind)
    texts = [f"Two: {IMAGE}{IMAGE}, one {VIDEO}?", "None.", f"{VIDEO} and {IMAGE}"]
    images = [picture(40, 90), picture(200, 100), picture(31, 30)]
    videos = [[picture(60, 80)] * 2 + [picture(60, 80).rotate(90)], [picture(50, 60)]]
    ours = ligerzoo.Processor.from_pretrained(directory)(texts, images=images, videos=videos, fps=[2.0, 30])
    theirs = their_qwen(directory, kind)(
        text=texts, images=images, videos=videos, videos_kwargs={"fps": [2.0, 30]}, padding=True, return_tensors="pt"
    )
    extra = ["second_per_grid_ts"] if kind == "qwen2_5_vl" else []
    assert_same(ours, theirs, "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", *extra)
    if extra:
        torch.testing.assert_close(ours["second_per_grid_ts"], torch.tensor([1.0, 2 / 30]))


def test_qwen3_texts(tmp_path: Path) -> None:
    """The tokens around a video in the prompt are replaced, too: each of its temporal patches has its own."""
    directory = checkpoint(tmp_path, "qwen3_vl")
    texts = [f"Two: {IMAGE}{IMAGE}, one {VIDEO}?", "None.", f"{VIDEO} and {IMAGE}"]
    images = [picture(40, 90), picture(200, 100), picture(31, 30)]
    videos = [[picture(60, 80).rotate(i) for i in range(70)], [picture(50, 20)] * 5]
    rates = [8.0, 3.0]
    ours = Processor.from_pretrained(directory)(texts, images=images, videos=videos, fps=rates)
    metadata = [VideoMetadata(len(video), fps=rate) for video, rate in zip(videos, rates, strict=True)]
    bare = [one.replace(VIDEO, "<|video_pad|>") for one in texts]
    theirs = their_qwen(directory, "qwen3_vl")(
        text=bare, images=images, videos=videos, video_metadata=metadata, padding=True, return_tensors="pt"
    )
    assert_same(ours, theirs, "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
    assert ours["video_grid_thw"][:, 0].tolist() == [9, 2]
    decoded = Processor.from_pretrained(directory).tokenizer.decode(ours["input_ids"][2], skip_special_tokens=False)
    assert "<|vision_end|><1.2 seconds><|vision_start|><|video_pad|>" in decoded


frame_sizes = st.integers(8, 500)


@given(height=frame_sizes, width=frame_sizes, frames=st.integers(2, 50))
def test_qwen3_sizes_of_videos(height: int, width: int, frames: int) -> None:
    preprocessor = Qwen3VLVideoPreprocessor.for_videos(Settings(VIDEO_SETTINGS, ""))
    expected = smart_resize(frames, height, width, 2, 32, min_pixels=4096, max_pixels=20000)
    assert preprocessor.resized(height, width, frames=frames) == expected


@given(frames=st.integers(1, 3000), fps=st.floats(0.5, 100))
def test_qwen3_samples_of_videos(frames: int, fps: float) -> None:
    preprocessor = Qwen3VLVideoPreprocessor.for_videos(Settings({}, ""))
    metadata = VideoMetadata(frames, fps=fps)
    expected = Qwen3VLVideoProcessor.sample_frames(Qwen3VideosWithoutTorchvision(), metadata, fps=2).tolist()
    got = preprocessor.sampled(frames, fps)
    assert got == expected
    assert preprocessor.timestamps(got, fps) == Qwen3VLProcessor._calculate_timestamps(None, expected, fps, 2)
    every = Qwen3VLVideoPreprocessor.for_videos(Settings({"do_sample_frames": False}, ""))
    assert every.sampled(frames, fps) == list(range(frames))


def test_qwen3_refuses_a_video_of_one_frame(tmp_path: Path) -> None:
    process = Processor.from_pretrained(checkpoint(tmp_path, "qwen3_vl"))
    with pytest.raises(ImageError, match=r"videos\[0\]: the video has too few frames; got 1; expected at least 2"):
        process(VIDEO, videos=[[picture(60, 80)]])


@pytest.mark.parametrize("kind", [*QWENS, "qwen3_vl"])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_qwen_conversations(tmp_path: Path, kind: str, add_generation_prompt: bool) -> None:
    directory = checkpoint(tmp_path, kind)
    messages = [
        {"role": "system", "content": "Be brief."},
        *user({"type": "image", "image": picture(40, 90)}, text("and"), {"type": "image", "image": picture(90, 40)}),
        {"role": "assistant", "content": [text("A cat.")]},
        *user(text("Is it?")),
    ]
    ours = Processor.from_pretrained(directory)(messages, add_generation_prompt=add_generation_prompt)
    theirs = their_qwen(directory, kind).apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=True, return_tensors="pt"
    )
    assert_same(ours, theirs, "pixel_values", "image_grid_thw")


@pytest.mark.parametrize("kind", [*QWENS, *QWENS_3])
@torch.no_grad()
def test_qwen_models_read_the_inputs(tmp_path: Path, kind: str, device: str) -> None:
    """The model gives transformers' logits for the processor's inputs of conversations."""
    process = Processor.from_pretrained(checkpoint(tmp_path, kind))
    row: Tiny = import_module(f"tests.models.tiny_{kind}").CHECKPOINTS[0]
    ids = {f"{name}_token_id": process.tokenizer.token_to_id(f"<|{name}_pad|>") for name in ("image", "video")}
    vision = {**row.config["vision_config"], "patch_size": 16 if kind in QWENS_3 else 14, "window_size": 56}
    size = {"vocab_size": len(process.tokenizer)}
    size |= {"text_config": {**row.config["text_config"], **size}} if kind in QWENS_3 else {}
    config = {**row.config, **ids, **size, "vision_config": vision}
    dataclasses.replace(row, config=config).write(tmp_path)
    ours = ligerzoo.AutoModel.from_pretrained(tmp_path, dtype=torch.float32, device=device)
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).to(device)

    conversations = [
        user(
            {"type": "video", "video": [picture(60, 90)] * 7}, text("and"), {"type": "image", "image": picture(90, 40)}
        ),
        user(text("What?"), {"type": "image", "image": picture(30, 50)}),
    ]
    inputs = {name: value.to(device) for name, value in process(conversations, fps=1).items()}
    is_media = [inputs["input_ids"] == ids[f"{name}_token_id"] for name in ("image", "video")]
    expected = theirs(**inputs, mm_token_type_ids=is_media[0] + 2 * is_media[1].int()).logits
    is_token = inputs["attention_mask"] == 1
    assert_close(ours(**inputs).logits[is_token], expected[is_token], "logits")
    prompt = inputs.pop("input_ids")
    assert ours.generate(prompt, **inputs, max_new_tokens=3, eos_token_id=[]).shape == (2, prompt.shape[1] + 3)


def test_ways_to_pass_images_and_videos(qwen: Path, tmp_path: Path) -> None:
    process = Processor.from_pretrained(qwen)
    image, path = picture(40, 90), tmp_path / "image.png"
    image.save(path)
    frames = [picture(30, 30), picture(30, 30)]
    expected = process(
        user({"type": "image", "image": image}, text("a"), {"type": "video", "video": frames}),
        add_generation_prompt=True,
    )
    video = torch.stack([torch.from_numpy(np.array(frame)).permute(2, 0, 1) for frame in frames])
    for part in (
        {"type": "image", "path": str(path)},
        {"type": "image", "url": f"file://{path}"},
        {"type": "image", "image": np.array(image)},
        {"type": "image_url", "image_url": {"url": str(path)}},
    ):
        for clip in ({"type": "video", "video": video}, {"type": "video", "path": [picture(30, 30)] * 2}):
            ours = process(user(part, text("a"), clip), add_generation_prompt=True)
            assert ours.keys() == expected.keys()
            assert all(torch.equal(ours[name], expected[name]) for name in expected)

    placeholders = user({"type": "image"}, text("a"), {"type": "video"})
    for images in (image, [image], [[image]], str(path)):
        for videos in (frames, [frames], video, [video]):
            ours = process(placeholders, images=images, videos=videos, add_generation_prompt=True)
            assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_several_conversations(qwen: Path) -> None:
    conversations = [
        user({"type": "image", "image": picture(40, 90)}, text("What?")),
        user(text("Hello")),
        user({"type": "image", "image": picture(90, 50)}),
    ]
    ours = Processor.from_pretrained(qwen)(conversations, padding_side="right")
    theirs = their_qwen(qwen, "qwen2_5_vl").apply_chat_template(
        conversations, tokenize=True, return_dict=True,
        processor_kwargs={"padding": True, "padding_side": "right", "return_tensors": "pt"},
    )  # fmt: skip
    assert_same(ours, theirs, "pixel_values", "image_grid_thw")


def test_text_only(qwen: Path) -> None:
    process = Processor.from_pretrained(qwen)
    assert process("Hello").keys() == {"input_ids", "attention_mask"}
    assert process.tokenizer.decode(process("Hello")["input_ids"][0]) == "Hello"
    assert process([{"role": "user", "content": "Hello"}]).keys() == {"input_ids", "attention_mask"}


@pytest.fixture
def gemma3(tmp_path: Path) -> Path:
    directory = checkpoint(tmp_path / "gemma3", "gemma3")
    write_json(directory / "processor_config.json", {"processor_class": "Gemma3Processor", "image_seq_length": 9})
    return directory


def test_gemma3_texts(gemma3: Path) -> None:
    texts = ["<start_of_image> and <start_of_image>", "None.", "See: <start_of_image>"]
    images = [[picture(40, 90), picture(30, 30)], [], [picture(100, 20)]]
    ours = Processor.from_pretrained(gemma3)(texts, images=images)
    theirs = their_gemma3(gemma3)(text=texts, images=images, padding=True, return_tensors="pt")
    assert_same(ours, theirs, "pixel_values", "token_type_ids")
    assert ours["token_type_ids"].sum() == 27


def test_gemma3_conversations(gemma3: Path) -> None:
    messages = user({"type": "image", "image": picture(40, 90)}, text("What is it?"))
    ours = Processor.from_pretrained(gemma3)(messages)
    theirs = their_gemma3(gemma3).apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
    assert_same(ours, theirs, "pixel_values", "token_type_ids")


def test_gemma3_pan_and_scan(gemma3: Path) -> None:
    """The file enables pan and scan; transformers' processor needs an argument."""
    write_json(gemma3 / "preprocessor_config.json", {**SETTINGS["gemma3"], "do_pan_and_scan": True})
    texts, images = ["<start_of_image>!", "<start_of_image>"], [[picture(300, 1000)], [picture(600, 300)]]
    ours = Processor.from_pretrained(gemma3)(texts, images=images)
    theirs = their_gemma3(gemma3)(text=texts, images=images, padding=True, return_tensors="pt", do_pan_and_scan=True)
    assert len(ours["pixel_values"]) == 1 + 3 + 1 + 2
    assert_same(ours, theirs, "pixel_values", "token_type_ids")


MLLAMA = ["pixel_values", "aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask"]


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_mllama_texts(tmp_path: Path, padding_side: Any) -> None:
    directory = checkpoint(tmp_path, "mllama")
    texts = [
        "<|image|><|image|>Compare<|image|>",
        "<|image|><|begin_of_text|>See",
        "Long before any <|image|> comes, and long after",
        "<|image|>a<|image|><|image|><|image|>b<|image|>c",
    ]
    images = [[picture(30 + 40 * i, 90) for i in range(text.count("<|image|>"))] for text in texts]
    ours = Processor.from_pretrained(directory)(texts, images=images, padding_side=padding_side)
    theirs = their_mllama(directory)(
        text=texts, images=images, padding=True, padding_side=padding_side, return_tensors="pt"
    )
    assert_same(ours, theirs, *MLLAMA)


def test_mllama_conversations(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, "mllama")
    messages = user({"type": "image", "image": picture(40, 90)}, text("What?")) + user(text("And?"))
    ours = Processor.from_pretrained(directory)(messages)
    theirs = their_mllama(directory).apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
    assert_same(ours, theirs, *MLLAMA)
    assert Processor.from_pretrained(directory)("Hello").keys() == {"input_ids", "attention_mask"}


def test_special_tokens_of_messages_may_be_text(gemma3: Path, tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    write_json(gemma3 / "chat_template.json", {"chat_template": template})
    processor = Processor.from_pretrained(gemma3)
    chats = [[{"role": "user", "content": content}] for content in ("<bos>See <image_soft_token>", "<pad>")]
    inputs = processor(chats, special_tokens="text", padding_side="right")
    rows = [row[mask.bool()].tolist() for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    texts = [chat[0]["content"] for chat in chats]
    assert [processor.tokenizer.decode(row[1:]) for row in rows] == texts
    bos = processor.tokenizer.bos_token_id
    assert [[one for one in row if one >= 256] for row in rows] == [[bos], [bos]]
    assert processor(chats[1])["input_ids"].tolist() == [[bos, processor.tokenizer.pad_token_id]]
    with pytest.raises(TokenizerError, match="special_tokens: given with texts"):
        processor("<bos>See", special_tokens="text")
    with pytest.raises(TokenizerError, match=r"special_tokens: unsupported value; got 'txt'"):
        processor(chats[0], special_tokens="txt")  # type: ignore[arg-type]

    processor = Processor.from_pretrained(checkpoint(tmp_path / "qwen3", "qwen3_vl"))
    frames = [picture(64, 64)] * 4
    asked = [
        processor(user({"type": "video", "video": frames}, text(t)), fps=2, special_tokens="text") for t in (VIDEO, "")
    ]
    ids = [one["input_ids"][0].tolist() for one in asked]
    assert [one for one in ids[0] if one >= 256] == [one for one in ids[1] if one >= 256]
    assert len(ids[0]) == len(ids[1]) + len(VIDEO)


def test_a_family_without_videos_refuses_them(gemma3: Path) -> None:
    with pytest.raises(ImageError, match="gemma3 models read images only"):
        Processor.from_pretrained(gemma3)("x", videos=[picture(30, 30)])


# The files


def test_nested_settings_of_transformers_5(qwen: Path) -> None:
    nested = {"image_processor": {**SETTINGS["qwen2_vl"], "min_pixels": 5000}, "video_processor": {"max_pixels": 4000}}
    write_json(qwen / "processor_config.json", {"processor_class": "Qwen2_5_VLProcessor", **nested})
    family: Any = Processor.from_pretrained(qwen).family
    assert (family.images.min_pixels, family.images.max_pixels) == (5000, 9000)
    assert (family.videos.min_pixels, family.videos.max_pixels) == (128 * 28 * 28, 4000)


@pytest.mark.parametrize("kind", ["gemma3", "mllama"])
def test_files_saved_by_transformers_5(tmp_path: Path, kind: str) -> None:
    theirs = {"gemma3": their_gemma3, "mllama": their_mllama}[kind](checkpoint(tmp_path / "before", kind))
    theirs.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved/preprocessor_config.json").exists()
    messages = user({"type": "image", "image": picture(40, 90)}, text("What is it?"))
    expected = theirs.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
    ours = Processor.from_pretrained(tmp_path / "saved")(messages)
    assert_same(ours, expected, *(MLLAMA if kind == "mllama" else ["pixel_values", "token_type_ids"]))


def test_settings_of_videos(qwen: Path) -> None:
    family: Any = Processor.from_pretrained(qwen).family
    assert (family.videos.min_pixels, family.videos.max_pixels) == (1000, 9000)
    write_json(qwen / "video_preprocessor_config.json", {"size": {"shortest_edge": 2000, "longest_edge": 7000}})
    family = Processor.from_pretrained(qwen).family
    assert (family.videos.min_pixels, family.videos.max_pixels) == (2000, 7000)
    assert (family.images.min_pixels, family.images.max_pixels) == (1000, 9000)


@pytest.mark.parametrize("kind", QWENS)
def test_without_a_config_json(tmp_path: Path, kind: str) -> None:
    directory = checkpoint(tmp_path, kind)
    (directory / "config.json").unlink()
    assert kind in Processor.from_pretrained(directory).family.model_types


def test_priority_of_chat_templates(qwen: Path) -> None:
    """The priority is transformers'."""

    def chosen() -> str:
        process = Processor.from_pretrained(qwen)
        rendered: str = process.tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
        return rendered

    (qwen / "chat_template.json").unlink()
    write_json(qwen / "tokenizer_config.json", {**NAMED["qwen2_vl"], "chat_template": "tokenizer_config"})
    assert chosen() == "tokenizer_config"
    (qwen / "chat_template.jinja").write_text("jinja")
    assert chosen() == "jinja"
    write_json(qwen / "chat_template.json", {"chat_template": "chat_template.json"})
    assert chosen() == "chat_template.json"
    write_json(qwen / "processor_config.json", {"chat_template": "processor_config"})
    assert chosen() == "processor_config"


@pytest.mark.parametrize(
    "file, content, error, message",
    [
        (
            "config.json",
            {"model_type": "llama"},
            ConfigError,
            r"got 'llama'; expected one of gemma3, .*text only with ligerzoo.Tokenizer",
        ),
        ("config.json", {}, ConfigError, "got None"),
        ("config.json", {"model_type": ["qwen2_vl"]}, ConfigError, "model_type"),
        ("preprocessor_config.json", None, ConfigError, "there is no preprocessor_config.json"),
        ("preprocessor_config.json", [], CheckpointError, "not a JSON object"),
        (
            "preprocessor_config.json",
            {"image_processor_type": "CLIPImageProcessor"},
            ConfigError,
            "Qwen2VLImageProcessor",
        ),
        ("preprocessor_config.json", {"patch_size": 0}, ConfigError, "patch_size"),
        ("video_preprocessor_config.json", {"do_sample_frames": True}, ConfigError, "do_sample_frames"),
        ("processor_config.json", {"image_processor": 3}, ConfigError, "image_processor"),
        ("chat_template.json", {"chat_template": ["a"]}, ConfigError, "chat_template"),
        ("tokenizer.json", None, TokenizerError, "there is no tokenizer.json"),
    ],
)
def test_invalid_files_are_refused(
    qwen: Path, file: str, content: Any, error: type[LigerzooError], message: str
) -> None:
    (qwen / file).unlink(missing_ok=True)
    if content is not None:
        write_json(qwen / file, content)
    with pytest.raises(error, match=message):
        Processor.from_pretrained(qwen)


def test_a_tokenizer_without_image_tokens_is_refused(qwen: Path) -> None:
    content = (qwen / "tokenizer.json").read_text()
    (qwen / "tokenizer.json").write_text(content.replace("image_pad", "else"))
    with pytest.raises(TokenizerError, match=r"has no token that marks images.* expected '<\|image_pad\|>'"):
        Processor.from_pretrained(qwen)


# Saving


def files_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "config.json"}


@pytest.mark.parametrize("kind", SETTINGS)
def test_saving_keeps_every_byte(tmp_path: Path, kind: str) -> None:
    before = checkpoint(tmp_path / "before", kind)
    write_json(before / "video_preprocessor_config.json", {"max_pixels": 5000})
    (before / "chat_template.jinja").write_text("another")
    Processor.from_pretrained(before).save_pretrained(tmp_path / "new" / "saved")
    assert files_in(tmp_path / "new" / "saved") == files_in(before)
    assert not (tmp_path / "new" / "saved" / "config.json").exists()


def test_a_saved_processor_prepares_the_same_inputs(qwen: Path, tmp_path: Path) -> None:
    messages = user({"type": "image", "image": picture(40, 90)}, text("What is it?"))
    Processor.from_pretrained(qwen).save_pretrained(tmp_path / "saved")
    ours, theirs = Processor.from_pretrained(qwen), Processor.from_pretrained(tmp_path / "saved")
    expected, again = ours(messages), theirs(messages)
    assert expected.keys() == again.keys()
    assert all(torch.equal(expected[name], again[name]) for name in expected)


@pytest.mark.parametrize("kind", ["gemma3", "mllama"])
def test_transformers_reads_saved_files(tmp_path: Path, kind: str) -> None:
    their_class, their_images = {
        "gemma3": (Gemma3Processor, Gemma3ImageProcessorPil),
        "mllama": (MllamaProcessor, MllamaImageProcessorPil),
    }[kind]
    saved = tmp_path / "saved"
    Processor.from_pretrained(checkpoint(tmp_path / "before", kind)).save_pretrained(saved)
    theirs: Any = their_class.from_pretrained(saved, image_processor=their_images.from_pretrained(saved))
    messages = user({"type": "image", "image": picture(40, 90)}, text("What is it?"))
    expected = theirs.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
    write_json(saved / "config.json", {"model_type": kind})
    ours = Processor.from_pretrained(saved)(messages)
    assert_same(ours, expected, *(MLLAMA if kind == "mllama" else ["pixel_values", "token_type_ids"]))


def test_saving_removes_the_files_of_another_processor(qwen: Path, tmp_path: Path) -> None:
    saved = checkpoint(tmp_path / "saved", "gemma3")
    write_json(saved / "processor_config.json", {"image_seq_length": 9})
    (qwen / "chat_template.json").unlink()
    Processor.from_pretrained(qwen).save_pretrained(saved)
    assert files_in(saved) == files_in(qwen)
    assert json.loads((saved / "config.json").read_text()) == {"model_type": "gemma3"}  # belongs to the model


# Processor or tokenizer


@pytest.mark.parametrize(
    "model_type, preprocessing, expected",
    [
        ("qwen2_vl", "preprocessor_config.json", Processor),
        ("qwen2_vl", "processor_config.json", Processor),
        ("qwen2_vl", None, Tokenizer),  # a model fine-tuned and saved for text only
        ("qwen2", "preprocessor_config.json", Tokenizer),
    ],
)
def test_load_processor_or_tokenizer(
    qwen: Path, model_type: str, preprocessing: str | None, expected: type[Any]
) -> None:
    write_json(qwen / "config.json", {"model_type": model_type})
    (qwen / "preprocessor_config.json").unlink()
    if preprocessing is not None:
        settings = SETTINGS["qwen2_vl"]
        nested = {"image_processor": settings, "video_processor": {}}
        write_json(qwen / preprocessing, settings if preprocessing == "preprocessor_config.json" else nested)
    assert type(load_processor_or_tokenizer(qwen)) is expected


# Errors of a call

P = picture(30, 30)


@pytest.mark.parametrize(
    "args, kwargs, message",
    [
        (
            [IMAGE],
            {},
            r"images: the number given differs from the number of placeholders .* got 0; expected 1",
        ),
        (["none"], {"images": P}, "got 1; expected 0"),
        ([[IMAGE + IMAGE, "none"]], {"images": [[P], [P]]}, r"images\[0\]: .* got 1; expected 2"),
        ([[IMAGE, IMAGE]], {"images": [[P, P]]}, "the number of lists differs from the number of texts"),
        ([VIDEO], {}, "videos: the number given differs"),
        ([VIDEO], {"videos": "film.mp4"}, "Decode a video file first"),
        ([user({"type": "video", "path": "film.mp4"})], {}, "Decode a video file first"),
        ([VIDEO], {"videos": [P], "fps": 0}, "fps: invalid frames per second"),
        ([VIDEO], {"videos": [P], "fps": float("inf")}, "fps: invalid frames per second"),
        ([VIDEO], {"videos": [P], "fps": [1.0, 2.0]}, "fps: invalid frames per second"),
        ([IMAGE], {"images": picture(1, 201)}, r"images\[0\]: the image is too long and thin; got 201 x 1 pixels"),
        ([user({"type": "image", "url": "https://example.org/a.png"})], {}, "Download it first"),
        ([user({"type": "image", "image": P, "path": "a.png"})], {}, "more than one image"),
        ([user({"type": "images", "path": "a.png"})], {}, "neither an image nor a video.*Did you mean 'image'"),
        ([user({"type": "image", "file": "a.png"})], {}, "got 0; expected 1. Pass one for each .* names its file"),
        ([user({"type": "image", "image": P})], {"images": P}, "given both in the messages and as an argument"),
        ([user({"type": "image", "image": P}, text("<|image_pad|>"))], {}, "got 1; expected 2"),
        ([[]], {}, "neither text nor messages"),
        ([[["x"]]], {}, "not a message"),
        ([[3]], {}, "not a conversation"),
        ([["x", user(text("x"))]], {}, "not a conversation"),
        (["x"], {"return_tensors": "np"}, "return_tensors"),
        (["x"], {"padding_side": "up"}, "padding_side"),
    ],
)
def test_invalid_calls_are_refused(qwen: Path, args: list[Any], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(LigerzooError, match=message):
        Processor.from_pretrained(qwen)(*args, **kwargs)


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_text_of_an_image_follows_from_its_size(tmp_path: Path, kind: str) -> None:
    checkpoint(tmp_path, kind)
    crops = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16} if kind == "gemma3" else {}
    write_json(tmp_path / "preprocessor_config.json", {**SETTINGS[kind], **crops})
    family = Processor.from_pretrained(tmp_path).family
    sizes = [(30, 40), (40, 30), (20, 100), (121, 33), (17, 16), (64, 64)]
    tensors = [torch.zeros(3, *size, dtype=torch.uint8) for size in sizes]
    assert family.preprocess_images([tensors]).replacements == [family.image_text(*size) for size in sizes]
