"""Compares the results of a whole model before and after its modules have been replaced."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from ligerzoo.integrations.kernels.replace import training_mode

TOKENS = 16


def run_model(model: nn.Module) -> list[Tensor] | str:
    """Returns the results of a model for random tokens: its logits or hidden states, and its loss if it has one.

    Only text is passed to models of several modalities. Dropout is off. The loss is the one of training.

    Returns:
        The results, or the reason for not comparing them.
    """
    hf_model = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    try:
        tokens = _random_tokens(hf_model)
        with torch.no_grad(), training_mode(model, False):
            results = [model(input_ids=tokens, use_cache=False)[0]]
            hf_model.training = True
            if hasattr(hf_model, "lm_head"):
                results.append(model(input_ids=tokens, labels=tokens, use_cache=False)[0])
    except Exception as error:  # the forward of any model, on input that it may not accept
        return f"The results of the model have not been compared, since its forward fails on text: {error}"
    if all(result.isfinite().all() for result in results):
        return results
    return "The results of the model have not been compared, since they are not finite."


def change(before: list[Tensor], after: list[Tensor] | str) -> str | None:
    """Returns how results have changed; None if they agree up to rounding."""
    if isinstance(after, str):
        return after
    for name, old, new in zip(("logits", "loss"), before, after, strict=False):
        error = ((new.float() - old.float()).norm() / old.float().norm()).item()
        if not error <= max(1e-3, 16 * torch.finfo(old.dtype).eps):
            return f"its {name} on random tokens have changed by {error:.1e}"
    return None


def _random_tokens(model: PreTrainedModel) -> Tensor:
    """(1, T) tokens, none of which the config names, such as placeholders of images."""
    weight: Tensor = model.get_input_embeddings().weight
    configs = (model.config, model.config.get_text_config())
    special = {
        value
        for config in configs
        for key, value in config.to_dict().items()
        if isinstance(value, int) and key.endswith(("token_id", "token_index"))
    }
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(weight.shape[0], generator=generator).tolist()
    tokens = [token for token in order[: TOKENS + len(special)] if token not in special][:TOKENS]
    return torch.tensor([tokens], device=weight.device)
