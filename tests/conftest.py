"""Shared by all tests: no network, a fixed seed, the device, and uninitialized memory that is NaN."""

import functools
import gc
import math
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads it once, at import

import pytest
import torch
import torch.utils._device
from torch import Tensor

from tests.selection import mark_combinations, mark_repeated_checkpoints

KERNEL_TESTS = Path(__file__).parent / "kernels"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run the tests marked slow or thorough")
    parser.addoption("--run-real", action="store_true", help="also run the tests that download packages")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until the tests are collected: what they import stays
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let background commands ignore Ctrl-C
    if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores, so each keeps to one
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_repeated_checkpoints(items)
    mark_combinations(items)
    for item in items:
        if item.path.is_relative_to(KERNEL_TESTS):
            _mark_for_interpreter(item)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    if not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        for item in items:
            if item.get_closest_marker("inductor"):
                item.add_marker(pytest.mark.skip(reason="needs a C++ compiler"))
    markers = [] if config.getoption("--run-real") else ["real"]
    if not config.getoption("--run-slow"):
        markers += ["slow"] if torch.cuda.is_available() else ["slow", "thorough"]
    deselected = {item for item in items if any(map(item.get_closest_marker, markers))}
    config.hook.pytest_deselected(items=list(deselected))
    items[:] = [item for item in items if item not in deselected]


def _mark_for_interpreter(item: pytest.Item) -> None:
    if not item.get_closest_marker("plain"):
        item.add_marker(pytest.mark.interpreted)
    elif os.environ.get("TRITON_INTERPRET") == "1":
        item.add_marker(pytest.mark.skip(reason="runs only without the interpreter"))


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.enable()
    gc.collect()
    gc.freeze()  # the modules and collected tests stay: scanning them in each collection costs a tenth of the run


@pytest.fixture(autouse=True, scope="session")
def _no_fsync() -> Iterator[None]:
    """No file needs to outlive a power failure; waiting for the disk takes a tenth of a training run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="module")
def _freeze() -> None:
    """What tests imported and cached stays, too: libraries collect garbage in each training run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    # Without a GPU, `torch.manual_seed` formats the stack for three kinds of devices, which takes a millisecond.
    (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(0)
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
