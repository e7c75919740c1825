"""What each process of `test_mesh_plan.py` does. Does not import transformers, which takes seconds."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ligerzoo.adapters import add_lora
from ligerzoo.models import CausalLM, DeepseekV3, DeepseekV3Config, Llama, LlamaConfig, Qwen3Moe, Qwen3MoeConfig
from ligerzoo.parallel import make_mesh, parallelize
from ligerzoo.parallel.mesh import expert_mesh, fsdp_mesh

SIZES: dict[str, Any] = {
    "vocab_size": 72,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
ROUTED: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2}
ROWS, TOKENS = 2, 32

QUICK = [
    ("dense", "shard=4"),
    ("dense", "shard=2 context=2"),
    ("tied", "shard=2 tensor=2"),
    ("adapted", "replicate=2 tensor=2"),
    ("experts", "shard=4 expert=2"),
    ("experts", "replicate=2 context=2 expert=2"),
    ("latent", "context=2 tensor=2"),
]
"""Models and meshes of four processes: another combination of axes in each."""
OTHERS = [
    ("dense", "replicate=2 shard=2"),
    ("dense", "shard=2 tensor=2"),
    ("dense", "context=2 tensor=2"),
    ("experts", "shard=2 tensor=2 expert=2"),
    ("experts", "tensor=4"),
]

_PARTS = {"_allgather_base_": 1, "_reduce_scatter_base_": 1, "allreduce_": 2, "alltoall_base_": 1}
"""How often a tensor is sent by the processes, but for the part of each, by its collective of torch."""


def build(kind: str, device: str) -> CausalLM:
    options: dict[str, Any] = {"device": device}
    model: CausalLM
    if kind == "experts":
        model = Qwen3Moe(Qwen3MoeConfig(**SIZES, **ROUTED, num_key_value_heads=4, head_dim=16), **options)
    elif kind == "latent":
        latent = {
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        }
        routed = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
        model = DeepseekV3(DeepseekV3Config(**SIZES, **latent, **routed, n_group=1, topk_group=1), **options)
    else:
        model = Llama(LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=kind == "tied"), **options)
    if kind == "adapted":
        add_lora(model, 4)
    return model.train()


class Recorder(TorchDispatchMode):
    """Counts the bytes that this process sends, by process group."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        if func.namespace == "c10d" and name in _PARTS:
            tensors = [one for one in tree_leaves(args) if isinstance(one, Tensor)]
            group = next(ProcessGroup.unbox(one) for one in args[1:] if type(one).__name__ == "ScriptObject")
            # The input of an all-to-all, and the whole tensor of the others, is the largest.
            tensor = tensors[1] if name == "alltoall_base_" else max(tensors, key=Tensor.numel)
            n = group.size()
            key = group.group_name, tuple(dist.get_process_group_ranks(group))
            self.sent[key] += _PARTS[name] * tensor.numel() * tensor.element_size() * (n - 1) // n
        return func(*args, **(kwargs or {}))


def axes_of(mesh: DeviceMesh) -> dict[object, str]:
    """Returns the axis of each process group, by its name; of those that FSDP2 makes, by its ranks."""
    sharded, experts = fsdp_mesh(mesh), expert_mesh(mesh)
    named = {axis: mesh[axis] for axis in ("replicate", "context", "tensor")}
    fsdp = {
        "shard": sharded if sharded.ndim == 1 else sharded["shard_context" if mesh["context"].size() > 1 else "shard"]
    }
    if experts is not None:
        named["expert"] = experts["expert"]
        fsdp["expert shard"] = experts["expert_shard"]
    found: dict[object, str] = {one.get_group().group_name: axis for axis, one in named.items()}
    for axis, one in {"replicate": mesh["replicate"], **fsdp}.items():
        found[tuple(dist.get_process_group_ranks(one.get_group()))] = axis
    for axis, one in named.items():  # DTensors remember an equal mesh of an earlier model, with other groups
        found.setdefault(tuple(dist.get_process_group_ranks(one.get_group())), axis)
    return found


def measure(kind: str, sizes: str) -> dict[str, float]:
    """Trains a step. Returns what a process sends by axis, and the bytes of its weights and optimizer states."""
    torch.manual_seed(0)
    mesh = make_mesh(sizes)
    model = parallelize(build(kind, "cpu"), mesh)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-3)
    ids = torch.randint(72, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    with Recorder() as recorder:
        model(ids, labels=ids).loss.backward()
    optimizer.step()
    axes = axes_of(mesh)
    found: dict[str, float] = {}
    for (name, ranks), sent in recorder.sent.items():
        axis = axes.get(name) or axes[ranks]
        found[axis] = found.get(axis, 0) + sent
    own = [one.to_local() if isinstance(one, DTensor) else one for one in model.parameters()]
    states = [one for state in optimizer.state.values() for one in state.values() if one.ndim]
    found["weights"] = sum(one.nbytes for one in own)
    found["optimizer states"] = sum(one.to_local().nbytes if isinstance(one, DTensor) else one.nbytes for one in states)
    names = sorted(found)
    mean = torch.tensor([float(found[name]) for name in names])
    dist.all_reduce(mean)
    return dict(zip(names, (mean / dist.get_world_size()).tolist(), strict=True))


def measure_all(rank: int, file: Path, cases: list[tuple[str, str]]) -> None:
    """Writes what a process sends and holds, for each case, on average."""
    found = {f"{kind} {sizes}": measure(kind, sizes) for kind, sizes in cases}
    if rank == 0:
        file.write_text(json.dumps(found))
