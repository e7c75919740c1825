"""`ligerzoo doctor` judges the kernels of a model by plain torch, and names a wrong one."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.doctor.kernels import KernelCall, accuracy, kernel_findings
from ligerzoo.layers import attention, norm
from ligerzoo.models import CausalLM, Llama, LlamaConfig
from tests.kernels.machine import HALF_DTYPE, kernel_file

SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip


@pytest.fixture
def model(device: str) -> CausalLM:
    return Llama(LlamaConfig(**SIZES), device=device).eval()


def statuses(model: CausalLM) -> dict[str, str]:
    return {finding.name: finding.status for finding in kernel_findings(model, random.Random(0))}


def test_all_kernels_of_a_model_hold(model: CausalLM) -> None:
    functions = norm.rms_norm, attention.rope
    found = statuses(model)
    assert found.pop("others") == "not covered"
    assert set(found.values()) == {"holds"}, found
    expected = {"add_rms_norm", "attend", "glu_linear", "linear_cross_entropy", "linears", "residual_rms_norm", "rope"}
    assert found.keys() >= expected
    assert (norm.rms_norm, attention.rope) == functions  # recording has ended


@pytest.mark.parametrize("what", ["epsilon", "gradient", "nan"])
def test_a_wrong_kernel_is_named(model: CausalLM, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = kernel_file("rms_norm")
    launch, backward = file._launch_forward, file._backward

    def wrong_launch(x: Any, residual: Any, weight: Any, results: Any, options: Any) -> None:
        launch(x, residual, weight, results, options._replace(eps=math.nan if what == "nan" else 1e-3))

    def wrong_backward(*arguments: Any) -> Any:
        dx, dweight = backward(*arguments)
        return dx * 1.01, dweight

    if what == "gradient":
        monkeypatch.setattr(file, "_backward", wrong_backward)
    else:
        monkeypatch.setattr(file, "_launch_forward", wrong_launch)
    found = statuses(model)
    wrong = {name for name, status in found.items() if status == "fails"}
    if what == "nan":  # the first norm, whose output all others get
        assert wrong == {"residual_rms_norm"}
        assert found["rope"] == found["linears"] == "not covered"
    else:
        assert wrong == {name for name in found if "rms_norm" in name}, found


def test_a_kernel_that_raises_is_named(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    file = kernel_file("rope")

    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("no such GPU\nhere")

    monkeypatch.setattr(file, "reference", fails)
    found = {finding.name: finding for finding in kernel_findings(model, random.Random(0))}
    assert found["rope"].status == "fails"
    assert found["rope"].detail == "ValueError: no such GPU here"


def test_half_precision(device: str) -> None:
    found = statuses(Llama(LlamaConfig(**SIZES), device=device, dtype=HALF_DTYPE).eval())
    assert found.keys() >= {"gate_few_rows"}
    assert {status for name, status in found.items() if name != "others"} == {"holds"}, found


def test_inputs_are_not_written() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    before = x.clone()

    def add_in_place(x: Tensor, y: Tensor, backend: str = "auto") -> Tensor:
        return x.add_(y)

    found = accuracy(KernelCall("add", add_in_place, {"x": x, "y": y, "backend": "auto"}, False), None, 0)
    assert found.share <= 1
    assert torch.equal(x, before)
