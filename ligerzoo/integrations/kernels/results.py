"""The results of a model on random tokens, before and after modules were replaced."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from ligerzoo.integrations.kernels.compare import training_mode
from ligerzoo.layers.plain import find_modules

TOKENS = 16
"""Number of random tokens on which models are compared."""


def hf_models(module: nn.Module) -> list[PreTrainedModel]:
    """Returns the models of transformers among a module and the modules in it, outer ones first."""
    return find_modules(module, PreTrainedModel)


class ModelResults(NamedTuple):
    """The results of a model for random tokens.

    Attributes:
        tensors: its logits or hidden states, and its loss if it has one.
        problem: the reason if the model has not run; None otherwise.
    """

    tensors: tuple[Tensor, ...] = ()
    problem: str | None = None

    def change(self, after: ModelResults) -> str | None:
        """Returns how results have changed; None if they agree up to rounding."""
        for name, old, new in zip(("logits", "loss"), self.tensors, after.tensors, strict=False):
            error = ((new.float() - old.float()).norm() / old.float().norm()).item()
            if not error <= max(1e-3, 16 * torch.finfo(old.dtype).eps):
                return f"its {name} on random tokens have changed by {error:.1e}"
        return after.problem


def run_model(model: nn.Module) -> ModelResults:
    """Runs a model on random tokens; of several modalities, on text only. Dropout is off. The loss is of training."""
    hf_model = hf_models(model)[0]
    try:
        tokens = _random_tokens(hf_model)
        with torch.no_grad(), training_mode(model, False):
            results = [model(input_ids=tokens, use_cache=False)[0]]
            hf_model.training = True
            if hf_model.get_output_embeddings() is not None:
                results.append(model(input_ids=tokens, labels=tokens, use_cache=False)[0])
    except Exception as error:  # the forward of any model, on input that it may not accept
        problem = f"The results of the model have not been compared, since its forward fails on text: {error}"
        return ModelResults(problem=problem)
    if all(result.isfinite().all() for result in results):
        return ModelResults(tuple(results))
    return ModelResults(problem="The results of the model have not been compared, since they are not finite.")


def _random_tokens(model: PreTrainedModel) -> Tensor:
    """(1, T) tokens, none of which the config names, such as placeholders of images."""
    weight: Tensor = model.get_input_embeddings().weight
    entries = [*model.config.to_dict().items(), *model.config.get_text_config().to_dict().items()]
    special = {value for key, value in entries if isinstance(value, int) and key.endswith(("token_id", "token_index"))}
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(weight.shape[0], generator=generator).tolist()
    tokens = [token for token in order[: TOKENS + len(special)] if token not in special][:TOKENS]
    return torch.tensor([tokens], device=weight.device)
