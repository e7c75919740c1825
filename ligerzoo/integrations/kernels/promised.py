"""The kernels that `apply` promises for each family of models, and those of them that a model does not use.

A model of several families, such as a text model behind a vision tower, is one part per family. A module belongs to the
family of the nearest `PreTrainedModel` around it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from ligerzoo.integrations.kernels.replace import KernelModule

KINDS = {
    "norm": ("rms_norm", "layer_norm"),
    "add + norm": ("add_rms_norm",),
    "rope": ("rope",),
    "mlp": ("glu_linear", "activation_linear"),
    "experts": ("experts_mlp",),
    "loss": ("linear_cross_entropy",),
}
"""The kernels of each kind, of which a model uses one or more."""

PROMISED: dict[str, tuple[str, ...]] = {
    "clip_vision_model": ("norm", "mlp"),
    "deepseek_v2": ("norm", "add + norm", "rope", "mlp", "experts", "loss"),
    "deepseek_v3": ("norm", "add + norm", "rope", "mlp", "experts", "loss"),
    "deepseek_v4": ("norm", "rope", "loss"),
    "exaone4": ("norm", "rope", "mlp", "loss"),
    "falcon_h1": ("norm", "rope", "mlp", "loss"),
    "gemma": ("norm", "add + norm", "rope", "mlp", "loss"),
    "gemma2": ("norm", "add + norm", "rope", "mlp", "loss"),
    "gemma3": ("norm", "loss"),
    "gemma3_text": ("norm", "add + norm", "rope", "mlp", "loss"),
    "gemma4": ("loss",),
    "gemma4_text": ("norm", "rope", "mlp", "experts", "loss"),
    "glm4": ("norm", "add + norm", "rope", "mlp", "loss"),
    "glm4v": ("loss",),
    "glm4v_moe": ("loss",),
    "glm4v_moe_text": ("norm", "add + norm", "rope", "mlp", "experts"),
    "glm4v_moe_vision": ("norm", "rope", "mlp"),
    "glm4v_text": ("norm", "add + norm", "rope", "mlp"),
    "glm4v_vision": ("norm", "rope", "mlp"),
    "gpt_oss": ("norm", "add + norm", "rope", "loss"),
    "granite": ("norm", "add + norm", "rope", "mlp", "loss"),
    "hunyuan_v1_dense": ("norm", "add + norm", "rope", "mlp", "loss"),
    "hunyuan_v1_moe": ("norm", "add + norm", "rope", "mlp", "experts", "loss"),
    "internvl": ("norm", "loss"),
    "internvl_vision": ("norm", "mlp"),
    "llama": ("norm", "add + norm", "rope", "mlp", "loss"),
    "llama4": ("loss",),
    "llama4_text": ("norm", "rope", "mlp", "loss"),
    "llama4_vision_model": ("norm", "mlp"),
    "llava": ("loss",),
    "ministral": ("norm", "add + norm", "rope", "mlp", "loss"),
    "mistral": ("norm", "add + norm", "rope", "mlp", "loss"),
    "mixtral": ("norm", "add + norm", "rope", "experts", "loss"),
    "mllama": ("loss",),
    "mllama_text_model": ("norm", "add + norm", "rope", "mlp"),
    "mllama_vision_model": ("norm", "mlp"),
    "muse_glimmer": ("norm", "loss"),
    "muse_glimmer_text": ("norm", "add + norm", "rope", "mlp"),
    "muse_glimmer_vision": ("norm", "rope", "mlp"),
    "nemotron": ("norm", "rope", "loss"),
    "olmo2": ("norm", "rope", "mlp", "loss"),
    "olmo3": ("norm", "rope", "mlp", "loss"),
    "paligemma": ("loss",),
    "phi3": ("norm", "add + norm", "rope", "mlp", "loss"),
    "pixtral": ("norm", "rope", "mlp"),
    "qwen2": ("norm", "add + norm", "rope", "mlp", "loss"),
    "qwen2_5_vl": ("loss",),
    "qwen2_5_vl_text": ("norm", "add + norm", "rope", "mlp"),
    "qwen2_5_vl_vision": ("norm", "rope", "mlp"),
    "qwen2_vl": ("loss",),
    "qwen2_vl_text": ("norm", "add + norm", "rope", "mlp"),
    "qwen2_vl_vision": ("norm", "rope", "mlp"),
    "qwen3": ("norm", "add + norm", "rope", "mlp", "loss"),
    "qwen3_5": ("loss",),
    "qwen3_5_moe": ("loss",),
    "qwen3_5_moe_text": ("norm", "add + norm", "rope", "mlp", "experts", "loss"),
    "qwen3_5_moe_vision": ("norm", "rope", "mlp"),
    "qwen3_5_text": ("norm", "add + norm", "rope", "mlp", "loss"),
    "qwen3_5_vision": ("norm", "rope", "mlp"),
    "qwen3_moe": ("norm", "add + norm", "rope", "experts", "loss"),
    "qwen3_next": ("norm", "add + norm", "rope", "mlp", "experts", "loss"),
    "qwen3_vl": ("loss",),
    "qwen3_vl_moe": ("loss",),
    "qwen3_vl_moe_text": ("norm", "add + norm", "rope", "experts"),
    "qwen3_vl_moe_vision": ("norm", "rope", "mlp"),
    "qwen3_vl_text": ("norm", "add + norm", "rope", "mlp"),
    "qwen3_vl_vision": ("norm", "rope", "mlp"),
    "siglip_vision_model": ("norm", "mlp"),
    "smollm3": ("norm", "add + norm", "rope", "mlp", "loss"),
    "smolvlm": ("loss",),
    "smolvlm_vision": ("norm", "mlp"),
}
"""The kinds of kernels of each family, by the `model_type` of its config. Tests compare them with reports."""


class MissingKernelWarning(UserWarning):
    """`apply` has not used a kernel that it promises for a model of this family."""


def missing_kernels(model: nn.Module, expected: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Returns the promised kernels that no module of a part of the model uses, by family.

    Args:
        model: the model, after its modules have been replaced.
        expected: the kinds of kernels that the caller of `apply` wants.
    """
    missing = {}
    for family, modules in parts_of(model).items():
        kinds = [kind for kind in PROMISED.get(family, ()) if kind in expected and _applies(kind, modules)]
        unused = [kind for kind in kinds if kind not in used_kinds(modules)]
        if unused:
            missing[family] = tuple(" or ".join(KINDS[kind]) for kind in unused)
    return missing


def parts_of(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Returns the modules of each family within a model, by the `model_type` of its config."""
    parts: dict[str, list[nn.Module]] = {}
    for family, module in _with_families(model, None):
        if family is not None:
            parts.setdefault(family, []).append(module)
    return parts


def used_kinds(modules: Collection[nn.Module]) -> set[str]:
    """Returns the kinds of kernels that modules use."""
    return {module.kernel_kind for module in modules if isinstance(module, KernelModule)}


def _with_families(module: nn.Module, family: str | None) -> Iterator[tuple[str | None, nn.Module]]:
    if isinstance(module, PreTrainedModel):
        family = module.config.model_type
    yield family, module
    for child in module.children():
        yield from _with_families(child, family)


def _applies(kind: str, modules: Collection[Any]) -> bool:
    """Whether the modules compute something of this kind: not each model has a head, or is a mixture."""
    match kind:
        case "loss":
            models = (module for module in modules if isinstance(module, PreTrainedModel))
            return any(model.get_output_embeddings() is not None for model in models)
        case "experts":
            return any("Expert" in type(module).__name__ for module in modules)
    return True
