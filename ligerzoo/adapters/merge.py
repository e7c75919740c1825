"""Merges updates into the weights: W + s B A, computed in fp32 and rounded once."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ligerzoo.adapters.loading import load_adapter, resize_for_adapter
from ligerzoo.adapters.module_names import lora_layers
from ligerzoo.convert.stored_tensors import ComputedTensors
from ligerzoo.errors import LigerzooError
from ligerzoo.hub import save
from ligerzoo.hub.auto import load_as_saved
from ligerzoo.hub.tying import untie
from ligerzoo.layers.lora import LoRALayer
from ligerzoo.layers.plain import is_plain_tensor
from ligerzoo.models.language_model import LanguageModel


def merge_lora(model: LanguageModel) -> list[str]:
    """Replaces each updated weight by W + s B A (with DoRA, normalized), and removes the updates.

    The model is then one without adapters: `save_pretrained` writes it. If an embedding or head with an update shares
    its weight with the other, it gets its own, and `config.tie_word_embeddings` becomes False. Frozen parameters stay
    frozen.

    Returns:
        The names of the merged weights.

    Raises:
        LigerzooError: the model has no updates, or a weight is quantized or sharded.
    """
    layers = _updated_layers(model, "merge_lora")
    merged = []
    for name, layer in layers.items():
        untie(model, name)
        for parameter in layer.lora:
            with torch.no_grad():
                layer.get_parameter(parameter).copy_(layer.merged_weight(parameter))
            merged.append(f"{name}.{parameter}")
        layer.remove_updates()
    return merged


def remove_lora(model: LanguageModel) -> None:
    """Removes all updates: the model is the base model again."""
    for layer in lora_layers(model).values():
        layer.remove_updates()


def fuse(
    base: str | Path, adapter: str | Path, output: str | Path, *, max_shard_size: int | str = "5GB", **hub_options: Any
) -> list[str]:
    """Writes the checkpoint of a base model with the weights that `merge_lora` computes, in the dtype of the base.

    The checkpoint has the tokens that the adapter added. Merges one weight at a time, while it is written. The base's
    files are mapped, not read into memory.

    Args:
        base: directory or hub id of the base model.
        adapter: directory or hub id of an adapter of PEFT.
        output: directory of the new checkpoint; created if it does not exist.
        max_shard_size: maximum bytes of tensors per file.
        hub_options: `token`, `cache_dir` and `local_files_only`, as in `from_pretrained`.

    Returns:
        The names of the merged weights.

    Raises:
        LigerzooError: as `from_pretrained`, `load_adapter` and `save_pretrained`.
    """
    model = load_as_saved(base, **hub_options)
    resize_for_adapter(model, adapter, **hub_options)
    load_adapter(model, adapter, **hub_options)
    layers = _updated_layers(model, "fuse")
    for name in layers:
        untie(model, name)
    owners = {f"{name}.{parameter}": layer for name, layer in layers.items() for parameter in layer.lora}
    own = {f"{name}.{key}" for name, layer in layers.items() for key in layer.update_parameters()}
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in own}

    class MergedTensors(ComputedTensors):
        """Stored tensors that are merged at each access."""

        def compute(self, name: str) -> Tensor:
            layer = owners.get(name)
            return self._tensors[name] if layer is None else layer.merged_weight(name.rpartition(".")[2])

    save(model, output, max_shard_size=max_shard_size, state_dict=state, tensors_class=MergedTensors)
    return list(owners)


def _updated_layers(model: nn.Module, where: str) -> dict[str, LoRALayer]:
    layers = lora_layers(model)
    if not layers:
        raise LigerzooError("the model has no adapter", where=where)
    for name, layer in layers.items():
        for parameter in layer.lora:
            weight = getattr(layer, parameter)
            if not is_plain_tensor(weight):
                what, where, got = "the weight is quantized or sharded", f"{where}, {name}.{parameter}", type(weight)
                remedy = "Save the adapter, and merge it into the unquantized model."
                raise LigerzooError(what, where=where, got=got.__name__, expected="a plain tensor", remedy=remedy)
    return layers
