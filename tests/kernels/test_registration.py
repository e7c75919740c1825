"""`registration.register`: schemas, NamedTuples, fakes, and which calls go through the dispatcher."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ligerzoo.kernels import registration
from ligerzoo.kernels.registration import Op, register

Mode = Literal["add", "subtract"]


class Scaling(NamedTuple):
    factor: float
    offset: Tensor | None


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


class Statistics(NamedTuple):
    total: Tensor
    maximum: Tensor


@pytest.fixture(autouse=True)
def _scratch_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registers into a namespace that ends with the test."""
    with torch.library._scoped_library("ligerzoo_test", "FRAGMENT") as library:
        monkeypatch.setattr(registration, "_library", library)
        monkeypatch.setattr(registration, "OPS", {})
        yield


def register_scale() -> Op[Tensor, Scaling, Mode, Tensor]:
    @register("scale", fake=lambda x: x.new_empty(x.shape))
    def scale(x: Tensor, scaling: Scaling, mode: Mode) -> Tensor:
        offset = 0.0 if scaling.offset is None else scaling.offset
        return x * scaling.factor + (offset if mode == "add" else -offset)

    return scale


def register_statistics() -> Op[Pair, Tensor, Scaling, Statistics]:
    """The first argument and one more are NamedTuples, and so is the result."""

    @register("statistics", fake=lambda x: (x.new_empty(()), x.new_empty(())))
    def statistics(first: Pair, x: Tensor, scaling: Scaling) -> Statistics:
        y = (x + first.a - first.b) * scaling.factor
        return Statistics(y.sum(), y.max())

    return statistics


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_each_type_of_parameter_has_its_schema_type() -> None:
    @register("every_type", fake=lambda x: x)
    def every_type(
        x: Tensor, a: Tensor | None, b: int, c: float, d: bool, e: str, f: torch.dtype, g: Mode, h: int | None,
        i: float | None, j: Mode | None, k: Scaling,
    ) -> Tensor:  # fmt: skip
        return x

    assert str(every_type.overload._schema) == (
        "ligerzoo_test::every_type(Tensor x, Tensor? a, int b, float c, bool d, str e, ScalarType f, str g, int? h, "
        "float? i, str? j, float k_factor, Tensor? k_offset) -> Tensor"
    )


def test_results_are_a_tensor_a_tuple_or_a_named_tuple() -> None:
    @register("pair", fake=lambda x: (x, x))
    def pair(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x + 2

    def returns(op: Any) -> str:
        return str(op.overload._schema).split("->")[1].strip()

    assert returns(register_scale()) == "Tensor"
    assert returns(pair) == returns(register_statistics()) == "(Tensor, Tensor)"
    with Recorder():
        assert isinstance(pair(torch.ones(3)), tuple)


def test_an_unknown_type_of_parameter() -> None:
    def function(x: Tensor, sizes: list[int]) -> Tensor:
        return x

    with pytest.raises(TypeError, match=r"parameter sizes has type list\[int\]; expected one of Tensor, int"):
        register("unknown", fake=lambda x: x)(function)


def test_a_fake_with_a_parameter_that_the_function_lacks() -> None:
    def function(x: Tensor) -> Tensor:
        return x

    with pytest.raises(TypeError, match="lacking: the fake has parameter y; expected some of x"):
        register("lacking", fake=lambda y: y)(function)


@pytest.mark.parametrize("offset", [None, 2.0])
def test_a_plain_call_and_a_dispatched_one_agree(offset: float | None) -> None:
    scale, statistics = register_scale(), register_statistics()
    x = torch.arange(5.0)
    scaling = Scaling(3.0, None if offset is None else torch.tensor(offset))
    plain = scale(x, scaling, "subtract"), statistics(Pair(x, x), x, scaling)
    with Recorder() as recorder:
        dispatched = scale(x, scaling, "subtract"), statistics(Pair(x, x), x, scaling)
    assert {"ligerzoo_test.scale.default", "ligerzoo_test.statistics.default"} <= set(recorder.names)
    torch.testing.assert_close(dispatched, plain)
    assert isinstance(dispatched[1], Statistics)
    assert isinstance(plain[1], Statistics)


def test_plain_tensors_bypass_the_dispatcher() -> None:
    scale = register_scale()
    with torch.profiler.profile(acc_events=True) as profile:
        scale(torch.ones(3), Scaling(2.0, None), "add")
    assert not any("ligerzoo_test" in event.key for event in profile.key_averages())


def test_flat_arguments_are_by_keyword_in_any_order() -> None:
    x, offset = torch.ones(3), torch.ones(())
    scale = register_scale()
    flat = scale.flat_arguments(mode="add", scaling=Scaling(2.0, offset), x=x)
    assert all(a is b for a, b in zip(flat, (x, 2.0, offset, "add"), strict=True))
    assert torch.equal(scale.overload(*flat), 3 * x)
    assert list(registration.OPS) == ["scale"]


def test_meta_tensors_take_the_fake() -> None:
    assert register_scale()(torch.ones(3, 5, device="meta"), Scaling(2.0, None), "add").shape == (3, 5)
    meta = torch.ones(4, device="meta")
    result = register_statistics()(Pair(meta, meta), meta, Scaling(2.0, None))
    assert isinstance(result, Statistics)
    assert result.total.device.type == "meta"


@pytest.mark.no_poison  # opcheck compares what two runs write
def test_opcheck() -> None:
    x = torch.randn(3, 5)
    scale, statistics = register_scale(), register_statistics()
    for scaling in (Scaling(2.0, None), Scaling(0.5, torch.ones(5))):
        torch.library.opcheck(scale.overload, scale.flat_arguments(x=x, scaling=scaling, mode="add"))
        torch.library.opcheck(statistics.overload, statistics.flat_arguments(first=Pair(x, x), x=x, scaling=scaling))


def test_compiles_as_one_graph_with_named_tuples() -> None:
    scale, statistics = register_scale(), register_statistics()

    def run(x: Tensor, offset: Tensor) -> tuple[Tensor, ...]:
        y = scale(x, Scaling(2.0, offset), "add")
        result = statistics(Pair(x, y), y, Scaling(3.0, None))
        return y, result.total, result.maximum

    torch._dynamo.reset()
    inputs = torch.randn(3, 5), torch.randn(5)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), run(*inputs))


def test_calls_with_another_number_of_arguments() -> None:
    scale = register_scale()
    x, scaling = torch.ones(3), Scaling(2.0, None)
    for args in ((x, scaling), (x, scaling, "add", 1)):
        with pytest.raises(TypeError, match="argument"):
            scale(*args)  # type: ignore[call-arg, arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        scale(x, scaling=scaling, mode="add")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing a required argument: 'mode'"):
        scale.flat_arguments(x=x, scaling=scaling)
