"""Checks of the labels that a model is called with."""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.autograd import any_true, innermost
from ligerzoo.kernels.dispatch import DEBUG
from ligerzoo.tensor_checks import check_tensor

_REMEDIES = {
    "labels": "Pass labels of all tokens: the model shifts them itself",
    "": "Pass the token to predict, or -100 for one that is not predicted",
    "shift_labels": "Pass the label that each token predicts, or -100 for an ignored token",
}


def check_labels(
    labels: Tensor | None,
    shift_labels: Tensor | None,
    shape: torch.Size,
    vocab_size: int,
    model_class: type,
    *,
    shifts: bool = True,
) -> None:
    """Raises for labels of another type, dtype or shape, or (on a CPU, or if LIGERZOO_DEBUG=1) outside the vocabulary.

    Args:
        labels: (B, T), not shifted, or None.
        shift_labels: (B, T), already shifted, or None; takes precedence over `labels`.
        shape: (B, T) of the tokens.
        vocab_size: V.
        model_class: the class that messages name.
        shifts: the model shifts `labels`, so that the label of the first token is never read.
    """
    name = model_class.__name__
    for argument, target, first in (("labels", labels, int(shifts)), ("shift_labels", shift_labels, 0)):
        if target is None:
            continue
        check_tensor(name, argument, target, "integer", [tuple(shape)], remedy=_REMEDIES[argument if shifts else ""])
        is_read = argument == "shift_labels" or shift_labels is None
        if is_read and (DEBUG or target.device.type == "cpu") and not torch.compiler.is_compiling():
            read = target[:, first:]
            is_wrong = (read != -100) & ((read < 0) | (read >= vocab_size))
            if any_true(is_wrong):
                read, wrong = innermost(torch.stack([read, is_wrong.to(read.dtype)], -1)).unbind(-1)
                *_, row, column = index = wrong.nonzero()[0].tolist()
                what, where = "label outside the vocabulary", f"{argument}[{row}, {first + column}]"
                got, expected = int(read[tuple(index)]), f"0 to {vocab_size - 1}, or -100 for an ignored token"
                remedy = "Use the tokenizer of this model, and -100 for prompts and padding."
                raise LigerzooError(what, where=where, got=got, expected=expected, remedy=remedy)
