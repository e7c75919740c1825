"""Processors of Mistral Small 3.1 against transformers' image processor, and the texts of its processor's functions."""

import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoModelForImageTextToText
from transformers.models.pixtral.image_processing_pil_pixtral import (
    PixtralImageProcessorPil,
    get_resize_output_image_size,
)

import ligerzoo
from ligerzoo.errors import ConfigError, ImageError, TokenizerError
from ligerzoo.vision.families.mistral3 import Mistral3Preprocessor
from ligerzoo.vision.processor import Processor
from ligerzoo.vision.settings import Settings
from tests.models.comparing import assert_close
from tests.models.tiny_mistral3 import CHECKPOINTS
from tests.vision.test_processor import NAMED, SETTINGS, TEMPLATES, TOKENS, checkpoint, picture, text, user, write_json

with pytest.MonkeyPatch.context() as patch:  # the modules import torchvision, which the tested functions do not use
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        patch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["torchvision.transforms.v2"].functional = SimpleNamespace(InterpolationMode=int)  # type: ignore[attr-defined]
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

KIND = "mistral3"
TOKENS[KIND] = ["<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<pad>"]
NAMED[KIND] = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
SETTINGS[KIND] = {
    "crop_size": None,
    "do_center_crop": None,
    "image_processor_type": "PixtralImageProcessorFast",
    "patch_size": 14,
    "processor_class": "PixtralProcessor",
    "size": {"longest_edge": 100},
}
TEMPLATES[KIND] = (
    "{{ bos_token }}{% for message in messages %}[INST]{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}[IMG]{% else %}{{ item['text'] }}{% endif %}{% endfor %}[/INST]{% endfor %}"
)
OWN = {"processor_class": "PixtralProcessor", "patch_size": 7, "spatial_merge_size": 2}
SIDES = st.integers(1, 3000)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = checkpoint(tmp_path / KIND, KIND)
    write_json(directory / "processor_config.json", OWN)
    return directory


@given(height=SIDES, width=SIDES, limit=st.sampled_from([(1540, 1540), (90, 250)]), side=st.integers(1, 40))
@example(1, 3000, (1540, 1540), 28)
def test_sizes(height: int, width: int, limit: tuple[int, int], side: int) -> None:
    size = {"longest_edge": limit[0]} if limit[0] == limit[1] else dict(zip(("height", "width"), limit, strict=True))
    preprocessor = Mistral3Preprocessor.from_settings(Settings({"size": size}, ""), side)
    expected = get_resize_output_image_size(torch.empty(3, height, width), limit, side, "channels_first")
    if min(expected) == 0:
        with pytest.raises(ImageError, match="too thin"):
            preprocessor.tokens(height, width)
        return
    assert tuple(side * tokens for tokens in preprocessor.tokens(height, width)) == expected


def test_texts_and_pixels(directory: Path) -> None:
    process = Processor.from_pretrained(directory)
    images = [picture(90, 130), picture(300, 95), picture(9, 20)]
    got = process(["Two: [IMG][IMG]!", "None.", "[IMG]"], images=images)
    theirs = PixtralImageProcessorPil(**SETTINGS[KIND])(images, patch_size=14, return_tensors="pt")
    for name in ("pixel_values", "image_sizes"):
        assert (got[name].dtype, got[name].tolist()) == (theirs[name].dtype, theirs[name].tolist())
    names = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    their_processor = SimpleNamespace(**names, patch_size=7, spatial_merge_size=2)
    first, second, third = (PixtralProcessor.replace_image_token(their_processor, theirs, i) for i in range(3))
    decoded = [process.tokenizer.decode(row) for row in got["input_ids"]]
    assert [row.replace("<pad>", "") for row in decoded] == [f"<s>Two: {first}{second}!", "<s>None.", f"<s>{third}"]
    assert first.count("[IMG_BREAK]") == 4  # 5 rows


@pytest.mark.parametrize(
    "entries, message",
    [
        ({"do_pad": False}, "do_pad: unsupported value"),
        ({"do_center_crop": True}, "do_center_crop: unsupported value"),
        ({"size": {"longest_edge": 10**6}}, "size: longest_edge"),
        ({"size": {"height": 20, "width": 0}}, "size: width"),
        ({"do_normalize": False}, "do_normalize"),
    ],
)
def test_settings_that_are_refused(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mistral3Preprocessor.from_settings(Settings(entries, ""), 28)


def test_nested_settings_and_other_tokens(directory: Path) -> None:
    """As transformers 5 writes them."""
    (directory / "preprocessor_config.json").unlink()
    own = {**OWN, "image_break_token": "</s>", "image_processor": {**SETTINGS[KIND], "image_mean": [0.5] * 3}}
    write_json(directory / "processor_config.json", own)
    process = Processor.from_pretrained(directory)
    assert process.family.image_text(20, 20) == "[IMG][IMG]</s>[IMG][IMG][IMG_END]"
    assert process.image_token_id == 256 + TOKENS[KIND].index("[IMG]")
    write_json(directory / "processor_config.json", {**own, "image_end_token": "[END]"})
    with pytest.raises(TokenizerError, match=r"\[END\]"):
        Processor.from_pretrained(directory)


@torch.no_grad()
def test_the_model_reads_the_inputs(directory: Path, device: str) -> None:
    process, row = Processor.from_pretrained(directory), CHECKPOINTS[0]
    text_config = {**row.config["text_config"], "vocab_size": len(process.tokenizer)}
    vision = {**row.config["vision_config"], "patch_size": 7}
    entries = {"image_token_index": process.image_token_id, "text_config": text_config, "vision_config": vision}
    dataclasses.replace(row, config={**row.config, **entries}).write(directory)
    ours = ligerzoo.AutoModel.from_pretrained(directory, dtype=torch.float32, device=device)
    theirs = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).to(device)
    conversations = [
        user({"type": "image", "image": picture(60, 90)}, text("and"), {"type": "image", "image": picture(90, 40)}),
        user(text("What?"), {"type": "image", "image": picture(30, 50)}),
    ]
    inputs = {name: value.to(device) for name, value in process(conversations).items()}
    is_token = inputs["attention_mask"] == 1
    assert_close(ours(**inputs).logits[is_token], theirs(**inputs).logits[is_token], "logits")
    prompt = inputs.pop("input_ids")
    assert ours.generate(prompt, **inputs, max_new_tokens=3, eos_token_id=[]).shape == (2, prompt.shape[1] + 3)


def test_saving_keeps_the_files(directory: Path, tmp_path: Path) -> None:
    Processor.from_pretrained(directory).save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/processor_config.json").read_text()) == OWN
