"""Records the operations that run and the memory that they allocate; replaces kernel launches by no-ops."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.kernels.machine import kernel_file


@dataclass
class Recorder(TorchDispatchMode):
    """Records all operations that run, including those inside ligerzoo's ops.

    Attributes:
        names: of the operations.
        allocated: bytes of each allocated storage.
    """

    names: list[str] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "ligerzoo":
            key = torch._C.DispatchKey.CUDA if args[0].is_cuda else torch._C.DispatchKey.CPU
            with self:
                return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)
        inputs = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **kwargs)
        self.names.append(func.overloadpacket.__name__)
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.numel() and t.untyped_storage().data_ptr() not in inputs:
                self.allocated.append(t.untyped_storage().nbytes())
        return result


def launch_nothing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Runs the launching code of a kernel file on any machine, with kernels replaced by no-ops."""
    file = kernel_file(name)
    monkeypatch.setattr(file, "uses_triton", lambda *_, **__: True, raising=False)
    for kernel in [name for name in vars(file) if name.endswith("_kernel")]:
        monkeypatch.setattr(file, kernel, defaultdict(lambda: lambda *_, **__: None))  # kernel[grid](...)
