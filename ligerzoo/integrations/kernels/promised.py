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

_FAMILIES = {
    "norm, add + norm, rope, mlp, loss": (
        "gemma gemma2 gemma3_text glm4 granite hunyuan_v1_dense llama ministral mistral phi3 qwen2 qwen3 qwen3_5_text "
        "smollm3"
    ),
    "loss": (
        "gemma4 glm4v glm4v_moe llama4 llava mllama paligemma qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl "
        "qwen3_vl_moe smolvlm"
    ),
    "norm, rope, mlp": (
        "glm4v_moe_vision glm4v_vision muse_glimmer_vision pixtral qwen2_5_vl_vision qwen2_vl_vision "
        "qwen3_5_moe_vision qwen3_5_vision qwen3_vl_moe_vision qwen3_vl_vision"
    ),
    "norm, mlp": (
        "clip_vision_model internvl_vision llama4_vision_model mllama_vision_model siglip_vision_model smolvlm_vision"
    ),
    "norm, add + norm, rope, mlp": (
        "glm4v_text mllama_text_model muse_glimmer_text qwen2_5_vl_text qwen2_vl_text qwen3_vl_text"
    ),
    "norm, add + norm, rope, mlp, experts, loss": "deepseek_v2 deepseek_v3 hunyuan_v1_moe qwen3_5_moe_text qwen3_next",
    "norm, rope, mlp, loss": "exaone4 falcon_h1 llama4_text olmo2 olmo3",
    "norm, loss": "gemma3 internvl muse_glimmer",
    "norm, rope, loss": "deepseek_v4 nemotron",
    "norm, add + norm, rope, experts, loss": "mixtral qwen3_moe",
    "norm, rope, mlp, experts, loss": "gemma4_text",
    "norm, add + norm, rope, mlp, experts": "glm4v_moe_text",
    "norm, add + norm, rope, loss": "gpt_oss",
    "norm, add + norm, rope, experts": "qwen3_vl_moe_text",
}
"""The families with the same kinds of kernels, by the `model_type` of their configs."""

PROMISED = {family: tuple(kinds.split(", ")) for kinds, families in _FAMILIES.items() for family in families.split()}
"""The kinds of kernels of each family. Tests compare them with reports."""


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
