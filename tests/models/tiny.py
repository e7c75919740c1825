"""Tiny random checkpoints that cover the ways in which real checkpoint files differ.

`CHECKPOINTS` in `tiny_<model_type>.py` lists those of an architecture. `zoo.py` collects them all, and the tests in
this folder are parametrized over them.
"""

import copy
import json
import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    PreTrainedModel,
)

from ligerzoo.models.registry import ENCODERS

Tensors = dict[str, Tensor]

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Tiny:
    """Description of a checkpoint that a test writes.

    Attributes:
        name: what the checkpoint covers; the test id.
        config: exact content of config.json.
        tensors: maps all tensors of the transformers model (including a tied head) to those that the files contain.
        shards: number of weight files.
        stored_dtype: dtype of the tensors on disk.
        tokens: length of the test sequences.
        by_transformers: transformers' `save_pretrained` writes the weights and config.json, in its own spelling.
        stray: name of an additional file in the directory, which must not be read.
        corrected: entries of config.json that contradict the weights, with the values that saving writes instead.
    """

    name: str
    config: Mapping[str, Any]
    tensors: Callable[[Tensors], Tensors] = dict
    shards: int = 1
    stored_dtype: torch.dtype = torch.float32
    tokens: int = 40
    by_transformers: bool = False
    stray: str | None = None
    corrected: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rotation_depends_on_length(self) -> bool:
        """Whether the largest position changes the rotation of all tokens: packed segments then affect each other."""
        scaling = self.config.get("rope_scaling") or self.config.get("rope_parameters") or {}
        is_fixed = scaling.get("alpha") is not None  # of Hunyuan
        return not is_fixed and {scaling.get("rope_type"), scaling.get("type")} & {"dynamic", "longrope", "su"} != set()

    def positions(self, mask: Tensor) -> dict[str, Tensor]:
        """Returns the position ids that transformers needs to compute padded texts as it does them alone.

        Empty for most architectures, whose scores depend on relative positions only.
        """
        absolute = ("bert", "hunyuan_v1_dense", "ministral3", "mistral3", "roberta", "xlm-roberta")
        if self.config["model_type"] not in absolute:
            return {}
        return {"position_ids": (mask.cumsum(1) - 1).clamp(min=0) + self.first_position}

    @property
    def first_position(self) -> int:
        """Position of a text's first token."""
        return int(self.config.get("pad_token_id", 1)) + 1 if "roberta" in self.config["model_type"] else 0

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    def write(self, directory: Path) -> None:
        model = random_model(self.config)
        exact = {name: t.clone() for name, t in model.state_dict().items() if stays_fp32(name, self.config)}
        model.to(self.stored_dtype)
        for name, tensor in exact.items():  # as on the hub; `to` rounds them
            path, _, own = name.rpartition(".")
            module = model.get_submodule(path)
            if own in module._buffers:
                module._buffers[own] = tensor
            else:
                module._parameters[own].data = tensor  # type: ignore[union-attr]
        directory.mkdir(parents=True, exist_ok=True)
        if self.by_transformers:
            size = sum(parameter.nbytes for parameter in model.parameters())
            model.save_pretrained(directory, max_shard_size=math.ceil(size / self.shards * 1.2))
            assert len(list(directory.glob("*.safetensors"))) == self.shards
        else:
            (directory / "config.json").write_text(json.dumps(self.config))
            tensors = self.tensors({name: tensor.clone() for name, tensor in model.state_dict().items()})
            write_shards(directory, tensors, self.shards)
        if self.stray is not None:
            poison = {name: torch.full_like(tensor, math.nan) for name, tensor in model.state_dict().items()}
            save_file(poison, directory / self.stray)


def random_model(config: Mapping[str, Any], seed: int = 0) -> PreTrainedModel:
    """Returns a transformers model with random weights of std 0.2; the default of 0.02 would hide most mistakes."""
    copied = copy.deepcopy(dict(config))  # transformers changes its argument in place
    auto_class = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    auto_class = AutoModelForMaskedLM if config["model_type"] in ENCODERS else auto_class
    model = auto_class.from_config(AutoConfig.for_model(**copied), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    is_recurrent = any(name.endswith("A_log") for name, _ in model.named_parameters())
    adds_one = config["model_type"].startswith("qwen")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if is_recurrent and (values := well_conditioned(name, noise, adds_one)) is not None:
                parameter.copy_(values)
                continue
            is_scale = re.search(r"(norm(_?\d|_f|_pre|_post)?|ln_q)\.weight$|\.router\.(per_expert_)?scale$", name)
            is_gate = parameter.shape == (1,)  # its tanh scales a branch
            parameter.copy_(1 + 0.2 * noise if is_scale else noise if is_gate else 0.2 * noise)
            if config["model_type"].startswith("gemma4") and re.search(r"(q_norm|post_\w+norm(_\d)?)\.weight$", name):
                parameter *= 0.3  # scores have no scale, and small branches amplify rounding less
        for name, buffer in model.named_buffers():
            if stays_fp32(name, config):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.2 * torch.randn(buffer.shape, generator=generator))
    return model


def stays_fp32(name: str, config: Mapping[str, Any]) -> bool:
    """Returns whether a tensor stays in fp32 in checkpoints of any dtype."""
    is_router = config["model_type"] in ("ernie4_5_moe", "flint") and name.endswith(".mlp.gate.weight")
    is_sink = config["model_type"] == "flint" and name.endswith((".sinks", ".softmax_offset"))
    return is_router or is_sink or name.endswith(("e_score_correction_bias", ".expert_bias"))


def well_conditioned(name: str, noise: Tensor, adds_one: bool) -> Tensor | None:
    """Returns random weights of a hybrid decoder with which rounding is not amplified from layer to layer, or None.

    Decay rates are moderate, matrices keep the size of their inputs, norms scale by about 1, and embeddings of tokens
    and images have features of about 1.

    Args:
        name: name of the parameter.
        noise: from N(0, 1), in its shape.
        adds_one: the scale of norms is 1 plus their weight.
    """
    if name.endswith(("embed_tokens.weight", "embeddings.weight", ".visual.merger.linear_fc2.bias")):
        return noise
    if ".visual." in name:
        return None
    if name.endswith("A_log"):
        return -1.2 + 0.5 * noise
    if name.endswith(".D"):
        return 1 + 0.2 * noise
    if name.endswith("dt_bias"):
        return -0.3 + 0.4 * noise
    if name.endswith("norm.weight") and "linear_attn" not in name and adds_one:
        return 0.2 * noise
    if noise.ndim > 1:
        return noise * math.prod(noise.shape[2 if noise.ndim == 3 and noise.shape[1] > 1 else 1 :]) ** -0.5
    return None


def write_shards(directory: Path, tensors: Tensors, shards: int = 1) -> None:
    """Writes tensors to files chosen pseudorandomly, since shard boundaries are arbitrary."""
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return
    number = {name: zlib.crc32(name.encode()) % shards + 1 for name in tensors}
    weight_map = {name: f"model-{number[name]:05d}-of-{shards:05d}.safetensors" for name in tensors}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


# Variants of what the files contain


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def with_another_head(tensors: Tensors) -> Tensors:
    return {**tensors, HEAD: tensors[EMBEDDING].flip(0)}


def with_an_equal_head(tensors: Tensors) -> Tensors:
    return {**tensors, HEAD: tensors[EMBEDDING].clone()}


def with_rotary_buffers(tensors: Tensors) -> Tensors:
    wrong = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.rand(4) for i in range(2)}
    return {**tensors, **wrong}


def with_another_layer(tensors: Tensors) -> Tensors:
    last = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.1.")}
    return {**tensors, **{name.replace("layers.1.", "layers.12."): tensor.clone() for name, tensor in last.items()}}


def with_an_mtp_layer(tensors: Tensors) -> Tensors:
    """Adds a layer for multi-token prediction, whose index is the number of layers."""
    layers = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    names = ("self_attn.o_proj", "mlp.gate", "mlp.experts.1.up_proj", "eh_proj", "enorm", "shared_head.norm")
    return {**tensors, **{f"model.layers.{layers}.{name}.weight": torch.rand(3, i + 1) for i, name in enumerate(names)}}


def of_the_base_model(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != HEAD}
