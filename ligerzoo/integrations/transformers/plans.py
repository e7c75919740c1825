"""Plans of distributed models under transformers' names, derived from the plans of our layers (`TensorPlan`).

A plan maps modules and parameters, with "*" for the numbers of layers, to styles. Ours have the names of transformers'
with a prefix: a layer of ligerzoo computes its part as a whole, where transformers changes the forward of each linear
layer. So `parallelize` divides our models, and transformers' functions that apply styles refuse ours.

    style of transformers     in our plans                        divides
    colwise                   ligerzoo_colwise                    output features, own parameters, norms over heads
    packed_colwise            ligerzoo_packed_colwise             what is computed of fused projections, which are whole
    rowwise                   ligerzoo_rowwise                    input features
    replicated_with_grad_...  ligerzoo_replicated_with_grad_...   nothing: the gradients of all processes are added up
    embedding_rowwise         ligerzoo_embedding_rowwise          the vocabulary
    colwise_gather_output     ligerzoo_colwise_gather_output      the vocabulary, of the head
    ep_dispatch_experts       ligerzoo_ep_dispatch_experts        the experts, for tensor parallelism too
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NoReturn

from torch import nn

from ligerzoo.errors import LigerzooError
from ligerzoo.integrations.transformers.modules import FUSED_NAMES
from ligerzoo.integrations.transformers.versions import PARALLEL_STYLES
from ligerzoo.layers.tensor_plan import Kind, TensorPlan
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.parallel.fsdp import block_stacks
from ligerzoo.parallel.tensor import planned_layers

COLUMNS, FUSED, ROWS = "ligerzoo_colwise", "ligerzoo_packed_colwise", "ligerzoo_rowwise"
WHOLE = "ligerzoo_replicated_with_grad_allreduce"
OF_LAYERS: Mapping[Kind, str] = {
    "experts": "ligerzoo_ep_dispatch_experts",
    "embedding": "ligerzoo_embedding_rowwise",
    "head": "ligerzoo_colwise_gather_output",
}
"""Style of a layer that is divided as a whole."""


class OwnStyle:
    """A style that only `parallelize` applies."""

    def install_forward(self, module: nn.Module, *args: object, **options: object) -> NoReturn:
        """Called by transformers' functions that apply a plan to a model.

        Raises:
            LigerzooError: always.
        """
        what = "transformers' functions cannot divide a layer of ligerzoo"
        remedy = "Load the model with from_pretrained(..., distributed_config=DistributedConfig(...))."
        raise LigerzooError(what, where="tp_plan or ep_plan", got=type(module).__name__, remedy=remedy)

    validate_param = shard_param = install_forward


if PARALLEL_STYLES is not None:
    for _style in (COLUMNS, FUSED, ROWS, WHOLE, *OF_LAYERS.values()):
        PARALLEL_STYLES.register(_style, OwnStyle())


def tensor_rules(model: LanguageModel) -> dict[str, str]:
    """Returns the plan of tensor parallelism; empty if a layer cannot be divided."""
    planned = _planned(model)
    return {} if any(plan.obstacle for _, _, plan in planned) else _rules(planned)


def expert_rules(model: LanguageModel) -> dict[str, str]:
    """Returns the plan of expert parallelism; empty without experts."""
    return _rules([one for one in _planned(model) if one[2].kind == "experts"])


def fsdp_rules(model: LanguageModel) -> dict[str, str]:
    """Returns the plan of FSDP2: blocks free their weights after their forward, and so does an embedding without ties.

    The rest is gathered until its backward.
    """
    rules: dict[nn.Module, str] = {}
    if not model.shares_head:
        rules[model.get_input_embeddings()] = "free_full_weight"
        if (head := model.get_output_embeddings()) is not None:
            rules |= dict.fromkeys((*model.gathered_with_head, head), "keep_full_weight")
    rules |= {block: "free_full_weight" for stack in block_stacks(model) for block in stack}
    return {_generic(name): rules[module] for name, module in model.named_modules() if module in rules}


def _planned(model: LanguageModel) -> list[tuple[str, nn.Module, TensorPlan]]:
    return [(name, layer, layer.tensor_plan()) for name, layer in planned_layers(model).items()]  # type: ignore[operator]


def _rules(planned: Iterable[tuple[str, nn.Module, TensorPlan]]) -> dict[str, str]:
    rules: dict[str, str] = {}
    for name, layer, plan in planned:
        if plan.kind != "sum":
            rules[_generic(name)] = OF_LAYERS[plan.kind]
            continue
        stored_names = vars(layer).get("stored_names", {})
        owners = [part for part, module in layer.named_modules() if part and module._parameters]
        parts = {part: WHOLE for part in owners if part not in FUSED_NAMES}
        parts |= dict.fromkeys((*plan.columns, *plan.norms, *plan.own), COLUMNS)
        parts |= dict.fromkeys(plan.fused, FUSED) | dict.fromkeys(plan.rows, ROWS)
        rules |= {_generic(f"{name}.{stored_names.get(part, part)}"): style for part, style in parts.items()}
    return rules


def _generic(name: str) -> str:
    """Returns a name with "*" for the numbers of layers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
