"""Updates of weights that torchao has quantized: int8, int4 and NF4."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("torchao")

from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_, to_nf4

from ligerzoo import adapters
from ligerzoo.errors import LigerzooError
from ligerzoo.integrations.torchao import is_linear
from ligerzoo.layers.plain import dequantized
from ligerzoo.models import CausalLM
from tests.adapters.models import gradients, llama, mixtral, randomize, token_ids


def _nf4(model: CausalLM) -> None:
    for name, module in model.named_modules():
        if is_linear(module, name):
            module.weight = nn.Parameter(to_nf4(module.weight.detach(), 16, 2), requires_grad=False)


METHODS: dict[str, Callable[[CausalLM], None]] = {
    "int8": lambda model: quantize_(model, Int8WeightOnlyConfig(), filter_fn=is_linear),
    "int4": lambda model: quantize_(
        model, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16)), filter_fn=is_linear
    ),
    "nf4": _nf4,
}


@pytest.mark.parametrize("is_first", [False, True], ids=["adapters first", "quantized first"])
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("method", METHODS)
def test_training_is_that_with_the_dequantized_weights(method: str, dora: bool, is_first: bool, tmp_path: Path) -> None:
    model, ids = llama(), token_ids()
    options: dict[str, Any] = {"rank": 4, "targets": ["self_attn", "mlp", "lm_head"], "dora": dora}
    if is_first:
        METHODS[method](model)
        adapters.add_lora(model, **options)
    else:
        adapters.add_lora(model, **options)
        METHODS[method](model)
    randomize(model)
    plain = llama()
    adapters.add_lora(plain, **options)
    for name, parameter in plain.named_parameters():
        weight = model.get_parameter(name)
        assert (type(weight) is not nn.Parameter) == name.endswith(("proj.weight", "lm_head.weight")), name
        parameter.data = dequantized(weight).detach().clone()
    expected, actual = gradients(plain, ids), gradients(model, ids)
    assert expected.keys() == actual.keys() == {name for name, p in model.named_parameters() if "lora_" in name}
    for name, value in expected.items():
        assert (actual[name] - value).norm() <= 1e-4 * value.norm(), name
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(model.generate(ids, max_new_tokens=3), plain.generate(ids, max_new_tokens=3))

    adapters.save_adapter(model, tmp_path)
    with pytest.raises(LigerzooError, match=r"quantized or sharded; got (Int|NF).*merge it into the unquantized model"):
        adapters.merge_lora(model)


def test_quantized_attention_with_plain_experts() -> None:
    model, ids = mixtral(), token_ids()
    METHODS["int8"](model)
    adapters.add_lora(model, rank=4)
    randomize(model)
    assert any("experts" in name for name in gradients(model, ids))
