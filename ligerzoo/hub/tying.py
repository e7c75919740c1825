"""A head that is the embedding: the names of both, and what states and files hold of them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from ligerzoo.dtensors import full, is_sharded
from ligerzoo.entries import is_object
from ligerzoo.errors import CheckpointError
from ligerzoo.models.language_model import LanguageModel

T = TypeVar("T")

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TIED = {HEAD: EMBEDDING, EMBEDDING: HEAD}
HEAD_MODULE, EMBEDDING_MODULE = (name.removesuffix(".weight") for name in (HEAD, EMBEDDING))


def under_both_names(state: Mapping[str, T], tied: Mapping[str, str] = TIED) -> dict[str, T]:
    """Returns a state with weights that it has under one of two tied names under both."""
    named = dict(state)
    for pair in tied.items():
        for name, other in (pair, pair[::-1]):
            if name in state:
                named.setdefault(other, state[name])
    return named


def check_equal(weights: Mapping[str, Tensor], where: str | Path, remedy: str) -> None:
    """Raises CheckpointError if the weights of a tied head and embedding, by stored name, have different values."""
    if len(weights) == 2 and not torch.equal(*map(full, weights.values())):
        what, expected = "tied weights have different values", "equal tensors, or one of them"
        location = f"{where}, tensors {' and '.join(map(repr, weights))}"
        raise CheckpointError(what, where=location, expected=expected, remedy=remedy)


def is_tied(model: LanguageModel, state: Mapping[str, Tensor]) -> bool:
    """Returns whether the config ties the head to the embedding, and their weights are equal."""
    if not model.config.tie_word_embeddings or HEAD not in state:
        return False
    if is_sharded(state.values()):  # a comparison of DTensors would communicate
        return model.shares_head
    return _are_equal(state[HEAD], state[EMBEDDING])


def _are_equal(head: Tensor, embedding: Tensor) -> bool:
    if type(head.detach()) is not type(embedding.detach()):  # one of them is quantized
        return False
    return head.data_ptr() == embedding.data_ptr() or torch.equal(head, embedding)


def tie_if_equal(model: LanguageModel, raw: dict[str, object]) -> dict[str, object]:
    """Ties the head to the embedding if the config says so and their weights are equal.

    If they differ, the files take precedence: sets `tie_word_embeddings` to False in the model's config and in the
    returned config.json.
    """
    parameters = model.state_dict()
    if not (model.config.tie_word_embeddings and HEAD in parameters):
        return raw
    if _are_equal(parameters[HEAD], parameters[EMBEDDING]):
        model.tie_weights()
        return raw
    model.config = dataclasses.replace(model.config, tie_word_embeddings=False)  # type: ignore[type-var]
    return _untied({**raw, "tie_word_embeddings": False})


def _untied(raw: Mapping[str, object]) -> dict[str, object]:
    """Sets `tie_word_embeddings` to False at every level of config.json that has it."""
    untied = {name: False if name == "tie_word_embeddings" else value for name, value in raw.items()}
    return {name: _untied(value) if is_object(value) else value for name, value in untied.items()}


def tied_modules(model: LanguageModel) -> tuple[str, ...]:
    """Returns the names of the embedding and the head if they share a weight."""
    return (EMBEDDING_MODULE, HEAD_MODULE) if model.shares_head else ()


def untie(model: LanguageModel, name: str) -> None:
    """Gives a module its own copy of a weight that it shares, so that training it does not change the other module."""
    if name not in tied_modules(model):
        return
    weight = model.get_input_embeddings().weight
    model.get_submodule(name).weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    model.config = dataclasses.replace(model.config, tie_word_embeddings=False)  # type: ignore[type-var]
