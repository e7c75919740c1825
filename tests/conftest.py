"""Shared by all tests: no network, a fixed seed, the device, and uninitialized memory that is NaN."""

import functools
import gc
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads it once, at import

import pytest
import torch
import torch.utils._device
from torch import Tensor

from tests.covering import covering_rows

KERNEL_TESTS = Path(__file__).parent / "kernels"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run the tests marked slow or thorough")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until the tests are collected: what they import stays
    if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores, so each keeps to one
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def _parameters(item: pytest.Item) -> list[tuple[int, ...]]:
    """Returns the parameters of a test case; those of one `parametrize` with several names are one parameter.

    Values are identified by `id`, since many cannot be hashed: all cases of a test share the objects of its lists.
    """
    values = {name: id(value) for name, value in item.callspec.params.items()} if hasattr(item, "callspec") else {}
    together = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        together.append(tuple(values.pop(name.strip()) for name in names))
    return together + [(value,) for value in values.values()]


def _mark_more_than_pairs(items: list[pytest.Item]) -> None:
    """Marks `thorough` the cases of a test with three or more parameters that add no new pair of values.

    Stacked `parametrize` markers give all combinations: 81 of four parameters with three values, where each pair of
    values occurs 9 times. A fault that needs three particular values at once is rare. So `make test` covers every value
    and every pair of values of each test; `make test-thorough` and GPU runs cover every combination. Cases with other
    markers (such as `gpu`) are counted separately, because they may be skipped.
    """
    cases: dict[tuple[str, ...], list[pytest.Item]] = {}
    for item in items:
        marks = [str(mark) for mark in item.own_markers if mark.name != "parametrize"]
        if len(_parameters(item)) > 2:
            cases.setdefault((item.nodeid.partition("[")[0], *marks), []).append(item)
    for group in cases.values():
        taken = {group[i] for i in covering_rows([_parameters(item) for item in group])}
        for item in group:
            if item not in taken:
                item.add_marker(pytest.mark.thorough)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_more_than_pairs(items)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    if not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        for item in items:
            if item.get_closest_marker("inductor"):
                item.add_marker(pytest.mark.skip(reason="needs a C++ compiler"))
    if not config.getoption("--run-slow"):
        markers = ("slow",) if torch.cuda.is_available() else ("slow", "thorough")
        deselected = {item for item in items if any(map(item.get_closest_marker, markers))}
        config.hook.pytest_deselected(items=list(deselected))
        items[:] = [item for item in items if item not in deselected]


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.enable()
    gc.collect()
    gc.freeze()  # the modules and collected tests stay: scanning them in each collection costs a tenth of the run


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")  # an earlier test may have changed it
    torch.backends.cudnn.allow_tf32 = False  # or transformers' convolutions would round to 10 bits


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(allocate)
    def allocate_nan(*args: object, **kwargs: object) -> Tensor:
        tensor = allocate(*args, **kwargs)
        is_traced = torch.compiler.is_compiling() or type(tensor) is not Tensor
        if tensor.is_floating_point() and not is_traced:
            with torch.no_grad():
                tensor.fill_(math.nan)
        return tensor

    return allocate_nan


@pytest.fixture(autouse=True)
def _poisoned_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within tests/kernels, uninitialized floating-point memory is NaN, unless the test is marked `no_poison`."""
    if request.path.is_relative_to(KERNEL_TESTS) and not request.node.get_closest_marker("no_poison"):
        # Dynamo and `with torch.device(...)` look torch's functions up once: they must not find the poisoned ones.
        torch._dynamo.trace_rules.get_torch_obj_rule_map()
        torch.utils._device._device_constructors()
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))
