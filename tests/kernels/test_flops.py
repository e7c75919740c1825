"""`FlopCounterMode` counts the matrix products inside our ops."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ligerzoo import kernels
from ligerzoo.models import Mixtral, MixtralConfig
from tests.kernels.accuracy import as_tuple
from tests.kernels.operations import OPERATIONS, Operation
from tests.kernels.oracles import linear_cross_entropy_oracle, numbers, targets

BACKWARD_COMPUTES_LOGITS_AGAIN = {
    "linear_cross_entropy-none",
    "linear_cross_entropy-options",
    "token_statistics",
    "contrastive-symmetric",
}

matrix_operations = pytest.mark.parametrize(
    "operation",
    [o for o in OPERATIONS if any(part in o.name for part in ("linear", "experts", "token", "contrastive"))],
    ids=lambda operation: operation.name,
)


def count(function: Callable[..., Any], inputs: list[Tensor]) -> int:
    """Returns the operations of a forward and a backward pass."""
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
    with FlopCounterMode(display=False) as counter:
        outputs = [t for t in as_tuple(function(*leaves)) if t.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    return int(counter.get_total_flops())


@matrix_operations
def test_operations_count_as_their_reference(operation: Operation, device: str) -> None:
    inputs = operation.inputs(2, torch.float32, device)
    expected = count(operation.reference, inputs)
    if operation.name in BACKWARD_COMPUTES_LOGITS_AGAIN:
        expected = expected * 4 // 3  # 8MHV instead of 6MHV
    assert count(operation.function, inputs) == expected > 0


@matrix_operations
def test_gradients_that_are_not_needed_are_not_counted(operation: Operation, device: str) -> None:
    inputs = operation.inputs(2, torch.float32, device)
    inputs = [inputs[0], *(t.detach() for t in inputs[1:])]
    expected = count(operation.reference, inputs)
    if operation.name in BACKWARD_COMPUTES_LOGITS_AGAIN:
        expected = expected * 3 // 2  # 6MHV instead of 4MHV
    assert count(operation.function, inputs) == expected > 0


def test_ignored_tokens_count(device: str) -> None:
    inputs = [numbers(6, 17, device=device), numbers(33, 17, device=device), targets(6, classes=33, device=device)]
    inputs[2][2:] = -100
    assert count(kernels.linear_cross_entropy, inputs) == count(linear_cross_entropy_oracle, inputs)


def test_a_compiled_model_counts_as_an_eager_one(device: str) -> None:
    torch._dynamo.reset()
    sizes = {"vocab_size": 53, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    model = Mixtral(MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, num_experts=4)).to(device)
    ids = torch.randint(53, (2, 9), device=device)

    def loss() -> Tensor:
        return model(ids, labels=ids).loss

    assert count(torch.compile(loss, backend="aot_eager"), []) == count(loss, []) > 0


SCRIPT = """
import sys, torch
from ligerzoo.kernels import linear_cross_entropy
assert "torch.utils.flop_counter" not in sys.modules
from torch.utils.flop_counter import FlopCounterMode
hidden, weight, target = torch.randn(5, 8), torch.randn(7, 8), torch.zeros(5, dtype=torch.int64)
with FlopCounterMode(display=False, custom_mapping={torch.ops.ligerzoo.scaled: lambda *args, **kwargs: 1}) as counter:
    linear_cross_entropy(hidden, weight, target)
assert counter.get_total_flops() == 2 * 5 * 7 * 8, counter.get_total_flops()
"""


@pytest.mark.plain
def test_the_counter_is_not_imported_with_the_kernels() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
