"""The decode steps of models that torchao has quantized to int8 run in the kernels for few rows."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("torchao")

from torchao.quantization import Int8WeightOnlyConfig, quantize_

from ligerzoo.integrations.torchao import is_linear
from ligerzoo.kernels import few_rows
from tests.generate.models import VOCAB
from tests.generate.test_captured import build
from tests.kernels.machine import HALF_DTYPE, needs_triton


@needs_triton
@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_decode_steps_read_int8_weights(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name, device).to(HALF_DTYPE)
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=is_linear)
    plain = copy.deepcopy(model).float()
    for module in plain.modules():
        if is_linear(module, ""):
            module.weight = nn.Parameter(module.weight.dequantize().float())
    calls: list[tuple[Any, ...]] = []
    kernel = few_rows._few_rows
    monkeypatch.setattr(few_rows, "_few_rows", lambda *arguments: calls.append(arguments) or kernel(*arguments))
    ids = torch.randint(VOCAB, (2, 70), device=device)
    with monkeypatch.context() as patch:
        patch.setattr(few_rows, "MAX_ROWS", 0)
        cache = model.new_cache()
        model(ids, past_key_values=cache)  # prefill, by torchao
        assert not calls
        unfused = model(ids[:, :1], past_key_values=cache.clone()).logits
    fused = model(ids[:, :1], past_key_values=cache).logits
    exact = plain(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:]
    error, torchao_error = ((logits.float() - exact).norm() for logits in (fused, unfused))
    assert error <= 1.5 * torchao_error
    # q, k and v; output; gate and up; down; in each of two layers; and the head
    assert len(calls) == 9
    assert all(
        weights[0].dtype == torch.int8 and scales[0].dtype == torch.float32 for _, weights, _, scales, *_ in calls
    )
    assert sum(arguments[-2] is not None for arguments in calls) == 2  # the GLUs, with activations
