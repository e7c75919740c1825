from typing import Any

import pytest
import torch

from ligerzoo.kernels import write_to_cache
from ligerzoo.kernels.cache_write import reference
from ligerzoo.kernels.fp8 import FP8, MAX, as_bytes, from_storage, to_storage
from tests.covering import covering
from tests.kernels.compiling import compiling_for_hopper
from tests.kernels.machine import DTYPES, INTERPRETING, kernel_file, needs_triton
from tests.kernels.oracles import numbers

OPTIONS: dict[str, list[Any]] = {
    "dtype": list(DTYPES),
    "stored": ["unchanged", "fp8"],
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
    if case["stored"] == "fp8":
        caches = [to_storage(cache, FP8) for cache in caches]
        if INTERPRETING:  # it truncates
            keys, values = (to_storage(x, FP8).to(x.dtype) for x in (keys, values))
        keys[0, 0, 0, :4] = torch.tensor([2 * MAX, -2 * MAX, torch.inf, -torch.inf])
        values[0, 0, 0, 0] = MAX if INTERPRETING else torch.nan
    first = torch.randint(0, 20 - tokens + 1, (batch, 1), device=device)
    return *caches, keys, values, first + torch.arange(tokens, device=device)


@needs_triton
@pytest.mark.parametrize("case", covering(OPTIONS), ids=str)
def test_every_pair_of_options(case: dict[str, Any], device: str) -> None:
    tensors = inputs(case, device)
    expected = [t.clone() for t in tensors]
    reference(*expected)
    write_to_cache(*tensors, backend="triton")
    for actual, reference_result in zip(tensors, expected, strict=True):
        torch.testing.assert_close(as_bytes(actual), as_bytes(reference_result), rtol=0, atol=0, equal_nan=True)
    if case["stored"] == "unchanged":
        assert torch.equal(tensors[0].transpose(1, 2)[0, tensors[4][0]], tensors[2][0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_cast_to_fp8_rounds_to_the_nearest_and_saturates(dtype: torch.dtype) -> None:
    numbers = torch.arange(127, dtype=torch.uint8).view(FP8).float()  # 0 to MAX
    assert numbers[-1] == MAX
    between = (numbers[:-1] + numbers[1:]) / 2
    even = numbers[:-1].where(torch.arange(126) % 2 == 0, numbers[1:])
    for x, expected in (
        (numbers, numbers), (between, even), (0.99 * between, numbers[:-1]), (1.01 * between, numbers[1:]),
        (torch.tensor([449.0, 6e4, torch.inf, torch.nan]), torch.tensor([MAX, MAX, MAX, torch.nan])),
    ):  # fmt: skip
        for sign in (1, -1):
            stored = from_storage(to_storage((sign * x).to(dtype), FP8), torch.float32)
            torch.testing.assert_close(stored, sign * expected, rtol=0, atol=0, equal_nan=True)


@needs_triton
def test_gpus_without_the_conversion_use_the_reference(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_write = kernel_file("cache_write")
    monkeypatch.setattr(cache_write, "is_supported", lambda tensor: False)
    monkeypatch.setattr(cache_write, "_kernel", None)
    case = {name: values[-1] for name, values in OPTIONS.items()}
    tensors = inputs(case, device)
    write_to_cache(*tensors)
    with pytest.raises(ValueError, match=r'backend="triton" with tensors torch.float8_e4m3fn'):
        write_to_cache(*tensors, backend="triton")


@pytest.mark.plain
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", OPTIONS["stored"])
def test_it_compiles(dtype: torch.dtype, stored: str) -> None:
    case = {"dtype": dtype, "stored": stored, "batch": 2, "tokens": 1, "heads": 8, "head_dim": 128, "rows": "all"}
    with compiling_for_hopper():
        write_to_cache(*inputs({**case, "layout": "fused projection"}, "cpu"), backend="triton")


def test_arguments_are_checked() -> None:
    case = {"dtype": torch.float32, "batch": 2, "tokens": 1, "heads": 3, "head_dim": 4, "rows": "all", "stored": "-"}
    caches_and_new = list(inputs({**case, "layout": "tokens first"}, "cpu"))
    for index, wrong in (
        (0, torch.ones(2, 3, 20, 5)), (1, torch.ones(2, 3, 21, 4)), (2, torch.ones(2, 3, 4)),
        (3, torch.ones(2, 2, 3, 4)), (3, torch.ones(2, 1, 3, 4).half()), (4, torch.ones(2, 2).long()),
        (1, torch.ones(2, 3, 20, 4).to(FP8)), (0, torch.ones(2, 3, 20, 4).bfloat16()),
    ):  # fmt: skip
        with pytest.raises(
            ValueError, match=r"^write_to_cache: key_cache is .*; expected \(B, K, S, D\), \(B, K, S, E\)"
        ):
            write_to_cache(*caches_and_new[:index], wrong, *caches_and_new[index + 1 :])


@needs_triton
def test_values_of_another_size(device: str) -> None:
    """As of latent attention."""
    tensors = [numbers(2, 1, 9, n, device=device).detach() for n in (20, 6)]
    tensors += [numbers(2, 3, 1, n, device=device).detach() for n in (20, 6)]
    positions = torch.tensor([[4, 5, 6], [0, 1, 2]], device=device)
    expected = [t.clone() for t in tensors]
    reference(*expected, positions)
    write_to_cache(*tensors, positions, backend="triton")
    assert all(torch.equal(*pair) for pair in zip(tensors, expected, strict=True))
