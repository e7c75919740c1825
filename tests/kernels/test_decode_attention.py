from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.kernels import decode_attention
from ligerzoo.kernels.decode_attention import reference
from ligerzoo.kernels.fp8 import FP8, from_storage, to_storage
from tests.covering import covering, long_cases
from tests.kernels import compiling
from tests.kernels.accuracy import assert_as_exact_as
from tests.kernels.compiling import compiling_for_hopper
from tests.kernels.machine import INTERPRETING, ROUNDED_DTYPES, kernel_file, needs_triton, on_gpu_too
from tests.kernels.oracles import numbers

OPTIONS: dict[str, list[Any]] = {
    "dtype": list(ROUNDED_DTYPES),
    "stored": [None, FP8],
    "batch": [1, 3],
    "heads": [(4, 4), (6, 2), (20, 1)],
    "head_dim": [16, 10, 80],
    "capacity": on_gpu_too([1, 64, 200], [4099]),
    "layout": ["heads first", "tokens first"],
    "window": [None, 1, 70],
    "padding": [None, "some", "all"],
    "lengths": ["full", "each row", "shared"],
    "softcap": [None, 3.0],
    "scale": [None, 0.7],
    "sinks": [False, True],
}


def tensors(
    dtype: torch.dtype, batch: int, heads: tuple[int, int], head_dim: int, capacity: int, layout: str, device: str
) -> list[Tensor]:
    """Returns queries, keys and values."""
    n_heads, n_kv_heads = heads
    q = numbers(batch, n_heads, head_dim, dtype=dtype, device=device).detach()
    if layout == "heads first":
        shape, order = (batch, n_kv_heads, capacity, head_dim), (0, 1, 2, 3)
    else:
        shape, order = (batch, capacity, n_kv_heads, head_dim), (0, 2, 1, 3)
    return [q, *(numbers(*shape, dtype=dtype, device=device).detach().permute(order) for _ in range(2))]


def bounds(
    batch: int, capacity: int, window: int | None, padding: str | None, lengths: str, device: str
) -> dict[str, Tensor]:
    """Returns the arguments that select keys."""
    rows = 1 if lengths == "shared" else batch
    last = torch.randint(capacity // 2, capacity, (rows,), device=device)
    options = {} if lengths == "full" else {"last": last}
    last = last if options else torch.full((1,), capacity - 1, device=device)
    if window is not None:
        options["first"] = last - window + 1
    if padding is not None:
        mask = torch.rand(batch, capacity, device=device) > (0.4 if padding == "some" else 1)
        index = torch.arange(capacity, device=device)
        first = options.get("first", torch.zeros_like(last))
        sees_any = (mask & (index >= first[:, None]) & (index <= last[:, None])).any(1)
        options |= {"padding_mask": mask, "fallback": last.expand(batch).where(~sees_any, -1)}
    return options


@needs_triton
@pytest.mark.parametrize("case", covering(OPTIONS), ids=str)
def test_every_pair_of_options(case: dict[str, Any], device: str) -> None:
    torch.manual_seed(0)
    inputs = tensors(*(case[name] for name in ("dtype", "batch", "heads", "head_dim", "capacity", "layout")), device)
    selected = bounds(*(case[name] for name in ("batch", "capacity", "window", "padding", "lengths")), device)
    options = {**selected, "scale": case["scale"], "softcap": case["softcap"]}
    if case["sinks"]:
        options["sinks"] = 3 * torch.randn(case["heads"][0], device=device)
    if case["stored"] == FP8:
        inputs[1:] = [to_storage(x, FP8) for x in inputs[1:]]
    before = [t.clone() for t in inputs]
    actual = decode_attention(*inputs, **options, backend="triton")
    truth = reference(*(t.double() for t in inputs), **options)
    assert_as_exact_as(actual, reference(*inputs, **options), truth)
    assert all(torch.equal(a.double(), b.double()) for a, b in zip(inputs, before, strict=True))


@needs_triton
def test_gpus_without_the_conversion_read_a_copy(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, keys, values = tensors(torch.float16, 2, (4, 2), 32, 70, "heads first", device)
    keys, values = to_storage(keys, FP8), to_storage(values, FP8)
    expected = decode_attention(q, from_storage(keys, q.dtype), from_storage(values, q.dtype))
    assert torch.equal(decode_attention(q, keys, values), expected)
    monkeypatch.setattr(kernel_file("decode_attention"), "is_supported", lambda tensor: False)
    assert torch.equal(decode_attention(q, keys, values), expected)


@needs_triton
@pytest.mark.parametrize("batch", [1, 40])
def test_the_result_does_not_depend_on_the_capacity(batch: int, device: str) -> None:
    if INTERPRETING and batch > 1:
        pytest.skip("slow in the interpreter")
    q, keys, values = tensors(torch.float16, batch, (8, 4), 32, 900, "heads first", device)
    last = torch.randint(100, 300, (batch,), device=device)
    results = [decode_attention(q, keys[:, :, :n], values[:, :, :n], last=last) for n in (300, 900)]
    assert torch.equal(*results)


COMPILED: dict[str, list[Any]] = {
    "heads": [((32, 8), 128), ((16, 8), 256), ((64, 4), 64), ((48, 2), 80)], "stored": [None, FP8],
    "dtype": [torch.float32, torch.bfloat16], "softcap": [None, 30.0],
}  # fmt: skip


@pytest.mark.plain
@pytest.mark.parametrize("case", long_cases(COMPILED), ids=str)
def test_it_compiles(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (heads, head_dim), softcap = case["heads"], case["softcap"]
    inputs = tensors(case["dtype"], 3, heads, head_dim, 1024, "heads first", "cpu")
    if case["stored"] is not None:
        inputs[1:] = [to_storage(x, case["stored"]) for x in inputs[1:]]
    selected = bounds(3, 1024, 100, "some", "each row", "cpu")
    monkeypatch.setattr(compiling, "MAX_SHARED_MEMORY", 101376)  # of smaller GPUs
    with compiling_for_hopper():
        decode_attention(*inputs, **selected, softcap=softcap, backend="triton")
        decode_attention(*inputs, **selected, sinks=torch.zeros(heads[0]), backend="triton")
        decode_attention(*inputs, softcap=softcap, backend="triton")


@pytest.mark.parametrize("values_shape, n_heads", [((1, 2, 5, 16), 4), ((2, 2, 5, 16), 3), ((2, 2, 5, 8), 4)])
def test_shapes_are_checked(values_shape: tuple[int, ...], n_heads: int) -> None:
    with pytest.raises(ValueError, match=r"^decode_attention: q is .*; expected shapes \(B, N, D\)"):
        decode_attention(torch.ones(2, n_heads, 16), torch.ones(2, 2, 5, 16), torch.ones(values_shape))
