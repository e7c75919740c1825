from typing import Any

import pytest
import torch

from ligerzoo.kernels import write_to_cache
from ligerzoo.kernels.cache_write import reference
from tests.covering import covering
from tests.kernels.compiling import compiling_for_hopper
from tests.kernels.machine import DTYPES, INTERPRETING, needs_triton
from tests.kernels.oracles import numbers

OPTIONS: dict[str, list[Any]] = {
    "dtype": list(DTYPES),
    "batch": [1, 3],
    "tokens": [1, 5],
    "heads": [1, 3, 8],
    "head_dim": [16, 10],
    "layout": ["tokens first", "heads first", "fused projection"],
    "rows": ["all", "every other"],
}


def inputs(case: dict[str, Any], device: str) -> tuple[torch.Tensor, ...]:
    """Returns the caches, keys, values and positions."""
    torch.manual_seed(0)
    batch, tokens, heads, head_dim = (case[name] for name in ("batch", "tokens", "heads", "head_dim"))

    def draw(*shape: int) -> torch.Tensor:
        return numbers(*shape, dtype=case["dtype"], device=device).detach()

    if case["layout"] == "fused projection":
        keys, values = draw(batch, tokens, 2 * heads, head_dim).split(heads, 2)
    elif case["layout"] == "heads first":
        keys, values = (draw(batch, heads, tokens, head_dim).transpose(1, 2) for _ in range(2))
    else:
        keys, values = (draw(batch, tokens, heads, head_dim) for _ in range(2))
    step = 1 if case["rows"] == "all" else 2
    caches = [draw(batch * step, heads, 20, head_dim)[::step] for _ in range(2)]
    first = torch.randint(0, 20 - tokens + 1, (batch, 1), device=device)
    return *caches, keys, values, first + torch.arange(tokens, device=device)


@needs_triton
@pytest.mark.parametrize("case", covering(OPTIONS), ids=str)
def test_every_pair_of_options(case: dict[str, Any], device: str) -> None:
    tensors = inputs(case, device)
    expected = [t.clone() for t in tensors]
    reference(*expected)
    write_to_cache(*tensors, backend="triton")
    assert all(torch.equal(*pair) for pair in zip(tensors, expected, strict=True))
    assert torch.equal(tensors[0].transpose(1, 2)[0, tensors[4][0]], tensors[2][0])


@pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")
def test_it_compiles() -> None:
    case = {"dtype": torch.bfloat16, "batch": 2, "tokens": 1, "heads": 8, "head_dim": 128, "rows": "all"}
    with compiling_for_hopper():
        write_to_cache(*inputs({**case, "layout": "fused projection"}, "cpu"), backend="triton")


def test_arguments_are_checked() -> None:
    case = {"dtype": torch.float32, "batch": 2, "tokens": 1, "heads": 3, "head_dim": 4, "rows": "all"}
    caches_and_new = list(inputs({**case, "layout": "tokens first"}, "cpu"))
    for index, wrong in (
        (0, torch.ones(2, 3, 20, 5)), (1, torch.ones(2, 3, 21, 4)), (2, torch.ones(2, 3, 4)),
        (3, torch.ones(2, 2, 3, 4)), (3, torch.ones(2, 1, 3, 4).half()), (4, torch.ones(2, 2).long()),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^write_to_cache: caches are .*; expected \(B, K, S, D\) twice"):
            write_to_cache(*caches_and_new[:index], wrong, *caches_and_new[index + 1 :])
