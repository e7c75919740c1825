"""Options that scripts for transformers pass to `from_pretrained`: accepted with one meaning, or refused by name."""

from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
import torch

from ligerzoo import AutoModel, AutoModelForSequenceClassification, Processor, Tokenizer
from ligerzoo.errors import ConfigError
from ligerzoo.files import transformers_options
from ligerzoo.models import Llama
from tests.models.tiny import Tiny
from tests.models.tiny_llama import LLAMA

ASSETS = Path(__file__).parent.parent / "ligerzoo" / "demo" / "assets" / "tiny-python-llama"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "llama"
    Tiny("llama", LLAMA).write(path)
    return path


CPU_MAPS = ["cpu", torch.device("cpu"), {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}]
ACCEPTED: list[dict[str, Any]] = [
    *({"device_map": device_map} for device_map in CPU_MAPS),
    *({"attn_implementation": name} for name in ("eager", "sdpa", "flash_attention_2", "flex_attention", None)),
    {"attn_implementation": {"": "sdpa", "vision_config": "eager"}},
    {"torch_dtype": torch.bfloat16}, {"torch_dtype": "bfloat16", "dtype": "bfloat16"}, {"torch_dtype": None},
    {"trust_remote_code": True, "low_cpu_mem_usage": True, "use_safetensors": True, "use_cache": False},
    {"device_map": None, "quantization_config": None, "load_in_8bit": False, "max_memory": None, "use_cache": True},
]  # fmt: skip


@pytest.mark.parametrize("options", ACCEPTED, ids=str)
def test_accepted(directory: Path, options: dict[str, Any]) -> None:
    for load in (Llama.from_pretrained, AutoModel.from_pretrained):
        model = load(directory, **options)
        assert model.dtype == (torch.bfloat16 if options.get("torch_dtype") else torch.float32)
    classifier = AutoModelForSequenceClassification.from_pretrained
    with pytest.warns(UserWarning, match=r"score.weight"):
        assert classifier(directory, num_labels=2, **options).device.type == "cpu"


@pytest.mark.parametrize("device_map", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_a_map_over_all_devices_means_the_first(directory: Path, device_map: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert AutoModel.from_pretrained(directory, device_map=device_map).device.type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert transformers_options.model_options({"device_map": device_map}, "auto", None) == ({}, "auto", "cuda:0")


@pytest.mark.parametrize(
    "device_map, device", [(0, "cuda:0"), ({"": 1}, "cuda:1"), ({"a": 0, "b": "cuda:0"}, "cuda:0")]
)
def test_numbers_of_devices(device_map: Any, device: str) -> None:
    assert transformers_options.model_options({"device_map": device_map}, "auto", None)[2] == device


@pytest.mark.parametrize(
    "options, message",
    [
        ({"device_map": {"model": 0, "lm_head": 1}}, "argument device_map: not one device.*load_sharded"),
        ({"device_map": {"": "disk"}}, "argument device_map: not one device"),
        ({"device_map": {}}, "argument device_map: not one device"),
        ({"device_map": [0]}, "argument device_map: not one device"),
        ({"device_map": "cpu", "device": "cpu"}, "device and device_map: given twice"),
        ({"device_map": "gpu"}, "no such device; got gpu"),
        ({"torch_dtype": "float32", "dtype": "bfloat16"}, "argument torch_dtype: differs from dtype"),
        ({"torch_dtype": "int3"}, "not a dtype of weights"),
        ({"attn_implementation": "kernels-community/attn"}, "attn_implementation: not supported.*chooses its kernel"),
        ({"attn_implementation": {"": "sdpa", "vision_config": "other"}}, "attn_implementation: not supported"),
        ({"quantization_config": {"load_in_4bit": True}}, "quantization_config: not supported; got .*torchao"),
        ({"load_in_4bit": True}, "load_in_4bit: not supported; got True.*torchao"),
        ({"use_safetensors": False}, "use_safetensors: not supported; got False.*only safetensors"),
        ({"max_memory": {0: "1GB"}}, "max_memory: not supported"),
        ({"use_auth_token": "x"}, "use_auth_token: not supported.*Use token"),
        ({"torch_dtipe": "float32"}, "argument torch_dtipe: unknown"),
        ({"attn_implementatoin": "sdpa"}, "argument attn_implementatoin: unknown"),
    ],
    ids=str,
)
def test_refused(directory: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AutoModel.from_pretrained(directory, **options)


def test_what_changes_nothing_is_noted_once(directory: Path) -> None:
    transformers_options._log.cache_clear()
    with TestCase().assertLogs("ligerzoo", "WARNING") as logs:
        for _ in range(2):
            AutoModel.from_pretrained(directory, attn_implementation="sdpa", trust_remote_code=True, use_cache=False)
    assert [record.getMessage().partition(":")[0] for record in logs.records] == [
        "attn_implementation='sdpa'", "trust_remote_code=True"
    ]  # fmt: skip


def test_tokenizer() -> None:
    options: dict[str, Any] = {"use_fast": False, "trust_remote_code": False}
    tokenizer = Tokenizer.from_pretrained(ASSETS, padding_side="left", model_max_length=7, **options)
    assert (tokenizer.padding_side, tokenizer.model_max_length) == ("left", 7)
    assert (
        Tokenizer.from_pretrained(ASSETS, padding_side=None).padding_side
        == Tokenizer.from_pretrained(ASSETS).padding_side
    )
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"paddingside": "left"}, "argument paddingside: unknown.*Did you mean 'padding_side'"),
        ({"padding_side": "middle"}, "padding_side: invalid value; got 'middle'"),
        ({"model_max_length": 0}, "model_max_length: invalid value"),
        ({"use_fast": "yes"}, "use_fast: not supported"),
    ]
    for options, message in wrong:
        with pytest.raises(ConfigError, match=message):
            Tokenizer.from_pretrained(ASSETS, **options)
    with pytest.raises(ConfigError, match=r"Processor.from_pretrained, argument use_fats: unknown.*'use_fast'"):
        Processor.from_pretrained(ASSETS, use_fats=True)
