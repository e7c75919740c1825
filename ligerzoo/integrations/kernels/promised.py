"""The kernels that `apply` promises for each family of models, and those of them that a model does not use.

A model of several families, such as a text model behind a vision tower, is one part per family. A module belongs to the
family of the nearest `PreTrainedModel` around it.
"""

from __future__ import annotations

from collections.abc import Collection

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

NORMS = "norm", "add + norm"

PROMISED: dict[str, tuple[str, ...]] = {
    "bamba": ("norm", "rope", "mlp", "loss"),
    "bert": ("norm", "loss"),
    "clip_vision_model": ("norm", "mlp"),
    "deepseek_v2": (*NORMS, "rope", "mlp", "experts", "loss"),
    "deepseek_v3": (*NORMS, "rope", "mlp", "experts", "loss"),
    "deepseek_v4": ("norm", "rope", "loss"),
    "exaone4": ("norm", "rope", "mlp", "loss"),
    "falcon_h1": ("norm", "rope", "mlp", "loss"),
    "gemma": (*NORMS, "rope", "mlp", "loss"),
    "gemma2": (*NORMS, "rope", "mlp", "loss"),
    "gemma3": ("norm", "loss"),
    "gemma3_text": (*NORMS, "rope", "mlp", "loss"),
    "gemma4": ("loss",),
    "gemma4_text": ("norm", "rope", "mlp", "experts", "loss"),
    "glm4": (*NORMS, "rope", "mlp", "loss"),
    "glm4v": ("loss",),
    "glm4v_moe": ("loss",),
    "glm4v_moe_text": (*NORMS, "rope", "mlp", "experts"),
    "glm4v_moe_vision": ("norm", "rope", "mlp"),
    "glm4v_text": (*NORMS, "rope", "mlp"),
    "glm4v_vision": ("norm", "rope", "mlp"),
    "gpt_oss": (*NORMS, "rope", "loss"),
    "granite": (*NORMS, "rope", "mlp", "loss"),
    "granitemoehybrid": ("norm", "experts", "loss"),
    "hunyuan_v1_dense": (*NORMS, "rope", "mlp", "loss"),
    "hunyuan_v1_moe": (*NORMS, "rope", "mlp", "experts", "loss"),
    "internvl": ("norm", "loss"),
    "internvl_vision": ("norm", "mlp"),
    "llama": (*NORMS, "rope", "mlp", "loss"),
    "llama4": ("loss",),
    "llama4_text": ("norm", "rope", "mlp", "loss"),
    "llama4_vision_model": ("norm", "mlp"),
    "llava": ("loss",),
    "ministral": (*NORMS, "rope", "mlp", "loss"),
    "mistral": (*NORMS, "rope", "mlp", "loss"),
    "mistral3": ("norm", "loss"),
    "mixtral": (*NORMS, "rope", "experts", "loss"),
    "mllama": ("loss",),
    "modernbert": ("norm", "rope", "mlp", "loss"),
    "mllama_text_model": (*NORMS, "rope", "mlp"),
    "mllama_vision_model": ("norm", "mlp"),
    "muse_glimmer": ("norm", "loss"),
    "muse_glimmer_text": (*NORMS, "rope", "mlp"),
    "muse_glimmer_vision": ("norm", "rope", "mlp"),
    "nemotron": ("norm", "rope", "mlp", "loss"),
    "nemotron_h": ("norm", "mlp", "experts", "loss"),
    "olmo2": ("norm", "rope", "mlp", "loss"),
    "olmo3": ("norm", "rope", "mlp", "loss"),
    "paligemma": ("loss",),
    "phi3": (*NORMS, "rope", "mlp", "loss"),
    "pixtral": ("norm", "rope", "mlp"),
    "qwen2": (*NORMS, "rope", "mlp", "loss"),
    "qwen2_5_vl": ("loss",),
    "qwen2_5_vl_text": (*NORMS, "rope", "mlp"),
    "qwen2_5_vl_vision": ("norm", "rope", "mlp"),
    "qwen2_vl": ("loss",),
    "qwen2_vl_text": (*NORMS, "rope", "mlp"),
    "qwen2_vl_vision": ("norm", "rope", "mlp"),
    "qwen3": (*NORMS, "rope", "mlp", "loss"),
    "qwen3_5": ("loss",),
    "qwen3_5_moe": ("loss",),
    "qwen3_5_moe_text": (*NORMS, "rope", "mlp", "experts", "loss"),
    "qwen3_5_moe_vision": ("norm", "rope", "mlp"),
    "qwen3_5_text": (*NORMS, "rope", "mlp", "loss"),
    "qwen3_5_vision": ("norm", "rope", "mlp"),
    "qwen3_moe": (*NORMS, "rope", "experts", "loss"),
    "qwen3_next": (*NORMS, "rope", "mlp", "experts", "loss"),
    "qwen3_vl": ("loss",),
    "qwen3_vl_moe": ("loss",),
    "qwen3_vl_moe_text": (*NORMS, "rope", "experts"),
    "qwen3_vl_moe_vision": ("norm", "rope", "mlp"),
    "qwen3_vl_text": (*NORMS, "rope", "mlp"),
    "qwen3_vl_vision": ("norm", "rope", "mlp"),
    "roberta": ("norm", "loss"),
    "siglip_vision_model": ("norm", "mlp"),
    "smollm3": (*NORMS, "rope", "mlp", "loss"),
    "smolvlm": ("loss",),
    "smolvlm_vision": ("norm", "mlp"),
    "xlm-roberta": ("norm", "loss"),
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
        used = used_kinds(modules)
        kinds = [kind for kind in PROMISED.get(family, ()) if kind in expected and kind not in used]
        if unused := [" or ".join(KINDS[kind]) for kind in kinds if _applies(kind, modules)]:
            missing[family] = tuple(unused)
    return missing


def parts_of(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Returns the modules of each family within a model, by the `model_type` of its config."""
    parts: dict[str, list[nn.Module]] = {}

    def add(module: nn.Module, family: str | None) -> None:
        if isinstance(module, PreTrainedModel):
            family = module.config.model_type
        if family is not None:
            parts.setdefault(family, []).append(module)
        for child in module.children():
            add(child, family)

    add(model, None)
    return parts


def used_kinds(modules: Collection[nn.Module]) -> set[str]:
    """Returns the kinds of kernels that modules use."""
    return {module.kernel_kind for module in modules if isinstance(module, KernelModule)}


def _applies(kind: str, modules: Collection[nn.Module]) -> bool:
    """Whether the modules compute something of this kind: not each model has a head, or is a mixture."""
    match kind:
        case "loss":
            models = (module for module in modules if isinstance(module, PreTrainedModel))
            return any(model.get_output_embeddings() is not None for model in models)
        case "experts":
            return any("Expert" in type(module).__name__ for module in modules)
    return True
