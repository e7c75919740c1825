"""Whether a model gives the same logits, up to rounding, by different ways: packed rows, padding, and KV caches."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ligerzoo.doctor.findings import Finding
from ligerzoo.doctor.texts import longest_text, random_tokens
from ligerzoo.models import CausalLM

ALLOWED = 10.0
"""How many times the effect of rounding an error may be: that of a change of all embeddings by up to an ulp."""


@torch.no_grad()
def path_findings(model: CausalLM, chance: random.Random) -> Iterator[Finding]:
    """Yields a finding for each way."""
    lengths = [chance.randint(2, min(200, longest_text(model))) for _ in range(3)]
    texts = [random_tokens(model, chance, 1, length).to(model.device) for length in lengths]
    alone = torch.cat([model(text).logits for text in texts], 1)
    eps = torch.finfo(alone.dtype).eps
    with model.get_input_embeddings().register_forward_hook(_changed):
        changed = torch.cat([model(text).logits for text in texts], 1)
    rounding = max(eps / 2, _error(changed, alone))

    positions = torch.cat([torch.arange(length, device=model.device) for length in lengths])[None]
    packed = model(torch.cat(texts, 1), position_ids=positions).logits
    yield _finding("packed row", _error(packed, alone), rounding)
    ids = random_tokens(model, chance, len(texts), max(lengths)).to(model.device)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, -text.shape[1] :], mask[row, -text.shape[1] :] = text[0], 1
    yield _finding("left padding", _error(model(ids, mask).logits[mask == 1], alone[0]), rounding)
    cache, parts = model.new_cache(), torch.split(texts[0], [lengths[0] - lengths[0] // 2, *[1] * (lengths[0] // 2)], 1)
    steps = [model(part, past_key_values=cache).logits for part in parts]
    yield _finding("KV cache", _error(torch.cat(steps, 1), alone[:, : lengths[0]]), rounding)


def _changed(module: nn.Module, inputs: object, x: Tensor) -> Tensor:
    """Returns the output of the embedding, changed by up to an ulp."""
    return x + x * torch.finfo(x.dtype).eps * (2 * torch.rand_like(x) - 1)


def _error(logits: Tensor, expected: Tensor) -> float:
    return float((logits.double() - expected.double()).norm() / expected.double().norm())


def _finding(name: str, error: float, rounding: float) -> Finding:
    detail = f"relative error of the logits {error:.1e}; an ulp of the embeddings changes them by {rounding:.1e}"
    return Finding("model", name, "holds" if error <= ALLOWED * rounding else "fails", detail)
