"""Rows divided over processes: losses and gradients equal those of one process."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ligerzoo import AutoModel
from ligerzoo.convert import architecture_of
from ligerzoo.errors import LigerzooError
from ligerzoo.parallel.context_parallel import check_exchanged_heads
from tests.models.prompts import image, prompt
from tests.models.tiny_deepseek_v3 import DEEPSEEK_V3
from tests.models.tiny_falcon_h1 import FALCON
from tests.models.tiny_gemma2 import GEMMA2
from tests.models.tiny_gemma3 import GEMMA3, IMAGE
from tests.models.tiny_gemma3_text import GEMMA3_TEXT
from tests.models.tiny_gemma4_text import GEMMA4_TEXT
from tests.models.tiny_gpt_oss import GPT_OSS
from tests.models.tiny_llama import LLAMA
from tests.models.tiny_mllama import MLLAMA
from tests.models.tiny_mllama import prompt as tiled_prompt
from tests.models.tiny_nemotron_h import NEMOTRON
from tests.models.tiny_qwen2_vl import CHECKPOINTS as QWEN2_VL
from tests.models.tiny_qwen3 import QWEN3
from tests.models.tiny_qwen3_moe import QWEN3_MOE
from tests.models.tiny_qwen3_next import QWEN3_NEXT
from tests.models.tiny_qwen3_vl import CHECKPOINTS as QWEN3_VL
from tests.models.zoo import CHECKPOINTS
from tests.parallel import context_cases as process
from tests.parallel.spawning import on_all_processes

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed warns differently in each version

DELTA = QWEN3_NEXT | {"linear_num_key_heads": 4}
FAMILIES: dict[str, Mapping[str, Any]] = {
    "llama": LLAMA,
    "qwen3": QWEN3,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3_TEXT,
    "gemma4_text": GEMMA4_TEXT,
    "gpt_oss": GPT_OSS,
    "deepseek_v3": DEEPSEEK_V3,
    "qwen3_moe": QWEN3_MOE | {"output_router_logits": True},
    "qwen3_next": DELTA,
    "nemotron_h": NEMOTRON,
    "falcon_h1": FALCON | {"mamba_n_groups": 1},
    "odd": GPT_OSS | {"num_attention_heads": 6, "num_key_value_heads": 2},
}
"""Grouped queries; norms of queries and keys; windows and soft caps; keys of other layers; sinks; latents; router
losses; the delta rule; Mamba-2, also of one group; heads that the processes do not divide."""


def write(directory: Path, config: Mapping[str, Any]) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))


def write_images(directory: Path) -> None:
    """Configs, and inputs with images."""
    ids = torch.randint(3, 80, (1, 27))
    ids[:, 6:15] = IMAGE
    write(directory / "gemma3", GEMMA3)
    torch.save(
        {"input_ids": ids, "labels": ids.where(ids < 88, -100), "pixel_values": torch.randn(1, 3, 26, 26)},
        directory / "gemma3" / "inputs.pt",
    )
    write(directory / "mllama", MLLAMA)
    tiled = tiled_prompt([[5, (1, 2), 9, (2, 1), 12], [2, (1, 1), 25]], MLLAMA["vision_config"])
    labels = tiled.ids.where(tiled.mask.bool() & (tiled.ids < 100), -100)
    given = {"input_ids": tiled.ids, "labels": labels, "attention_mask": tiled.mask, **tiled.vision}
    torch.save(given, directory / "mllama" / "inputs.pt")
    for name, config in (("qwen2_vl", QWEN2_VL[3].config), ("qwen3_vl", QWEN3_VL[0].config)):
        write(directory / name, config)
        given = prompt([[4, image(2, 4), 5, image(2, 4), 9]], config["vision_config"])
        labels = given.ids.where(given.ids < 88, -100)
        torch.save({"input_ids": given.ids, "labels": labels, **given.vision}, directory / name / "inputs.pt")


def test_two_processes(tmp_path: Path) -> None:
    for name, config in FAMILIES.items():
        write(tmp_path / "families" / name, config)
    write_images(tmp_path / "images")
    write(tmp_path / "one key head", QWEN3_NEXT | {"linear_num_key_heads": 1})
    on_all_processes(partial(process.options, directory=tmp_path))


def test_four_processes(tmp_path: Path) -> None:
    for name in ("llama", "odd", "qwen3_next"):
        write(tmp_path / name, FAMILIES[name])
    on_all_processes(partial(process.four, directory=tmp_path), processes=4)


@pytest.mark.slow
def test_every_checkpoint(tmp_path: Path) -> None:
    for index, row in enumerate(CHECKPOINTS):
        write(tmp_path / f"{index} {row.name}".replace("/", " "), row.config)
    on_all_processes(partial(process.zoo, directory=tmp_path))


@pytest.mark.slow
def test_eight_processes(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 8}
    write(tmp_path / "deepseek_v3", DEEPSEEK_V3 | heads | {"num_key_value_heads": 8})
    for name in ("qwen3", "gemma2", "gpt_oss"):
        write(tmp_path / name, FAMILIES[name] | heads)
    on_all_processes(partial(process.eight, directory=tmp_path), processes=8)


@pytest.mark.parametrize("model_type", ["nemotron_h", "falcon_h1"])
def test_all_layers_of_a_block_are_checked(model_type: str) -> None:
    """Falcon-H1 has attention, which can exchange any heads, and Mamba-2 of two groups in each block."""
    row = next(row for row in CHECKPOINTS if row.config["model_type"] == model_type)
    model = AutoModel.from_config(architecture_of(model_type).config_from_hf(row.config), device="meta")
    with pytest.raises(LigerzooError, match="block 0: heads that cannot be divided; got 2 heads"):
        check_exchanged_heads(model, 3)
