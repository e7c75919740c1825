"""The inputs of a model: token ids or embeddings, of which exactly one is given."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ligerzoo.checks import is_list, is_text
from ligerzoo.tensor_checks import describe_value


def tokens_or_embeddings(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """Returns the one that was given.

    Raises:
        ValueError: both were given, or none; or it has another shape than (B, T) token ids or (B, T, H) embeddings.
        TypeError: `input_ids` is not a tensor of integers, or `inputs_embeds` not a floating-point tensor.
    """
    x = input_ids if inputs_embeds is None else inputs_embeds
    if x is None or (input_ids is not None and inputs_embeds is not None):
        raise ValueError(
            f"expected exactly one of input_ids and inputs_embeds; got {'neither' if x is None else 'both'}"
        )
    if inputs_embeds is None:
        _check_input_ids(x)
    elif not (isinstance(x, Tensor) and x.is_floating_point()):
        raise TypeError(f"inputs_embeds: got {describe_value(x)}; expected a (B, T, H) floating-point tensor")
    elif x.ndim != 3:
        raise ValueError(f"inputs_embeds: got shape {tuple(x.shape)}; expected (B, T, H)")
    return x


def _check_input_ids(input_ids: object) -> None:
    """Raises unless `input_ids` is a (B, T) tensor of integers."""
    if not isinstance(input_ids, Tensor):
        if any(map(is_text, input_ids if is_list(input_ids) else [input_ids])):
            remedy = "Encode text first: model(**tokenizer([text], return_tensors='pt'))"
        elif isinstance(input_ids, Mapping):
            remedy = "Pass the output of a tokenizer as model(**inputs)"
        else:
            remedy = "Convert it with torch.tensor"
        raise TypeError(f"input_ids: got {type(input_ids).__name__}; expected a (B, T) tensor of integers. {remedy}")
    if input_ids.is_floating_point():
        raise TypeError(
            f"input_ids: got {input_ids.dtype}; expected a (B, T) tensor of integers. Pass embeddings as inputs_embeds"
        )
    if input_ids.ndim != 2:
        remedy = ". Use input_ids[None] for one sequence" if input_ids.ndim == 1 else ""
        raise ValueError(f"input_ids: got shape {tuple(input_ids.shape)}; expected (B, T){remedy}")
