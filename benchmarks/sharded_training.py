"""Training steps of an 8B model with FSDP2 on several GPUs: ligerzoo's variants against transformers + liger-kernel.

    torchrun --nproc-per-node 2 -m benchmarks.sharded_training
    torchrun --nproc-per-node 2 -m benchmarks.sharded_training --variants default ctas-8 --profile
    torchrun --nproc-per-node 2 -m benchmarks.sharded_training --tiny            (on a CPU)

Llama-3-8B shape, random weights, 1 x 8192 random tokens per GPU, bf16 weights and fused AdamW states, with all blocks
recomputed and with none. Blocks of steps of ligerzoo and of liger-kernel alternate in one process per GPU. The JSON
file is written after each row. `--variants list` prints what each variant changes.

"default" is `shard_model(model)`, "one-gpu" the model without FSDP2 on each GPU. liger-kernel's model is sharded per
block and at the root: its loss function reads the weight of the head outside the head's forward, so the head must
belong to the root. Both reduce gradients in fp32.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from benchmarks.measure import save_result, synchronize
from benchmarks.overlap import kernels_of, summary
from ligerzoo import AutoModel, models
from ligerzoo.parallel import gather_objects, initialize_sharded, shard_model, start_processes, stop_processes
from ligerzoo.parallel.processes import default_mesh

LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
TINY["num_key_value_heads"] = 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OURS, LIGER = "ligerzoo", "transformers + liger-kernel"


@dataclass(frozen=True)
class Variant:
    """One way to shard and run a model.

    Attributes:
        why: what it tests.
        reduce_dtype: see `shard_model`, as for `reshard_after_forward` and `prefetch`.
        is_simple: shards blocks and root only, as the documentation of torch does.
        max_ctas: most thread blocks of an NCCL kernel; None for NCCL's choice.
        free_sms: multiprocessors that matrix products leave free.
        symmetric: all-gathers in symmetric memory, by copy engines or fewer thread blocks.
        separate_reduce: reduce-scatters in another NCCL communicator than all-gathers.
        input_buffers: reduce-scatter inputs that may exist at a time.
        is_alone: each GPU trains the whole model, without FSDP2.
    """

    why: str
    reduce_dtype: torch.dtype | None = torch.float32
    reshard_after_forward: bool = True
    prefetch: int | None = None
    is_simple: bool = False
    max_ctas: int | None = None
    free_sms: int = 0
    symmetric: bool = False
    separate_reduce: bool = False
    input_buffers: int = 1
    is_alone: bool = False


VARIANTS = {
    "default": Variant("shard_model(model)"),
    "one-gpu": Variant("without communication", is_alone=True),
    "simple": Variant("embedding and head in the root group, last block gathered again", is_simple=True),
    "reduce-bf16": Variant("half the bytes of the reduce-scatters", reduce_dtype=None),
    "ctas-4": Variant("NCCL takes 4 multiprocessors from the products", max_ctas=4),
    "ctas-8": Variant("NCCL takes 8 multiprocessors from the products", max_ctas=8),
    "ctas-16": Variant("NCCL takes 16 multiprocessors from the products", max_ctas=16),
    "ctas-8-free-8": Variant("and the products leave them free from the start", max_ctas=8, free_sms=8),
    "prefetch-1": Variant("gathering is issued before the block, not when the host reaches the next", prefetch=1),
    "prefetch-2": Variant("two groups ahead", prefetch=2),
    "no-reshard": Variant("no all-gathers in backward", reshard_after_forward=False),
    "separate-reduce": Variant("all-gathers do not wait for reduce-scatters (torch 2.13)", separate_reduce=True),
    "buffers-2": Variant("backward does not wait for the last reduce-scatter (torch 2.13)", input_buffers=2),
    "symmetric": Variant("all-gathers without multiprocessors, if NCCL supports it", symmetric=True),
}
DEFAULT_VARIANTS = ("default", "one-gpu", "simple", "ctas-8", "ctas-16", "reduce-bf16", "prefetch-1", "no-reshard")


def mesh_of(variant: Variant) -> DeviceMesh:
    """Returns the mesh of all processes, with a separate communicator if the variant limits it."""
    if variant.max_ctas is None:
        return default_mesh()
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas, options.config.max_ctas = 1, variant.max_ctas
    return DeviceMesh.from_group(dist.new_group(backend="nccl", pg_options=options), "cuda")


def shard_simply(model: nn.Module, mesh: DeviceMesh, reduce_dtype: torch.dtype | None) -> nn.Module:
    """Shards a model of ours or transformers as torch's documentation does: blocks and root."""
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for block in model.model.layers:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=policy)  # type: ignore[arg-type]
    return fully_shard(model, mesh=mesh, mp_policy=policy)  # type: ignore[return-value]


def ours(config: dict[str, Any], variant: Variant, dtype: torch.dtype) -> nn.Module:
    if variant.is_alone:
        return AutoModel.from_config(models.LlamaConfig(**config), device=DEVICE, dtype=dtype)
    mesh = mesh_of(variant)
    model = AutoModel.from_config(models.LlamaConfig(**config), device="meta", dtype=dtype)
    if variant.is_simple:
        shard_simply(model, mesh, variant.reduce_dtype)
    else:
        shard_model(
            model, mesh, reduce_dtype=variant.reduce_dtype, reshard_after_forward=variant.reshard_after_forward,
            prefetch=variant.prefetch,
        )  # fmt: skip
    initialize_sharded(model)
    for group in (module for module in model.modules() if isinstance(module, FSDPModule)):
        if variant.symmetric:
            group.set_symm_mem_for_comm()
        if variant.input_buffers > 1:
            group.set_reduce_scatter_max_input_buffers(variant.input_buffers)
    if variant.separate_reduce:
        model.set_separate_reduce_scatter_group(True)  # type: ignore[operator]
    return model


def liger(config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Returns transformers' model with liger-kernel's layers and loss; without them on a CPU."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    with device:
        theirs = LlamaConfig(**config, tie_word_embeddings=False, use_cache=False)
        model = AutoModelForCausalLM.from_config(theirs, dtype=dtype, attn_implementation="sdpa")
    if device.type == "cuda":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(rope=True, swiglu=True, rms_norm=True, fused_linear_cross_entropy=True, model=model)
    return shard_simply(model, default_mesh(), torch.float32)


class Training:
    """Steps of one model with AdamW.

    Args:
        model: a sharded model.
        length: tokens per step and process.
        vocab_size: number of tokens to sample from.
        free_sms: see `Variant`.
    """

    def __init__(self, model: nn.Module, length: int, vocab_size: int, free_sms: int = 0) -> None:
        self.model = model.train()
        self.free_sms = free_sms
        device = next(model.parameters()).device
        self.ids = torch.randint(vocab_size, (1, length), device=device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")

    def recompute(self, blocks: bool) -> None:
        if blocks:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        else:
            self.model.gradient_checkpointing_disable()  # type: ignore[operator]

    def step(self) -> None:
        self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def milliseconds(self, steps: int) -> float:
        """Returns the time of a step, of the slowest process, over a block of steps."""
        with leaving_free(self.free_sms):
            self.step()
            synchronize(DEVICE)
            begin = time.perf_counter()
            for _ in range(steps):
                self.step()
            synchronize(DEVICE)
        return max(gather_objects((time.perf_counter() - begin) / steps * 1e3))  # type: ignore[no-any-return]

    def profile(self) -> dict[str, Any]:
        """Returns the `summary` of a step in this process."""
        activities = [
            torch.profiler.ProfilerActivity.CUDA if torch.cuda.is_available() else torch.profiler.ProfilerActivity.CPU
        ]
        with leaving_free(self.free_sms), torch.profiler.profile(activities=activities) as profiler:
            self.step()
            synchronize(DEVICE)
        return summary(kernels_of(profiler))


@contextmanager
def leaving_free(multiprocessors: int) -> Iterator[None]:
    """Makes cuBLAS leave multiprocessors to other kernels in this block."""
    if not multiprocessors:
        yield
        return
    torch._C._set_sm_carveout_experimental(multiprocessors)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(None)


def peak_gib(work: Callable[[], object]) -> float:
    if not torch.cuda.is_available():
        work()
        return 0.0
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    return (torch.cuda.max_memory_allocated() - base) / 2**30


def measure(variant: Variant, peer: Training | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of a variant and of the peer, with and without recomputation."""
    config, dtype = (TINY, torch.float32) if arguments.tiny else (LLAMA_8B, torch.bfloat16)
    own = Training(ours(config, variant, dtype), arguments.length, config["vocab_size"], variant.free_sms)
    row: dict[str, Any] = {}
    trainings = {OURS: own} if peer is None else {OURS: own, LIGER: peer}
    for name, recompute in (("recomputed", True), ("kept", False)):
        if name not in arguments.modes:
            continue
        times: dict[str, list[float]] = {provider: [] for provider in trainings}
        for training in trainings.values():
            training.recompute(recompute)
        for _ in range(arguments.rounds):
            for provider, training in trainings.items():
                times[provider].append(training.milliseconds(arguments.steps))
        figures: dict[str, Any] = {}
        for provider, training in trainings.items():
            ms = statistics.median(times[provider])
            figures[provider] = {"ms": ms, "tokens_per_s": arguments.length / ms * 1e3, "all_ms": times[provider]}
            figures[provider]["activations_gib"] = peak_gib(training.step)
            if arguments.profile:
                figures[provider]["profile"] = training.profile()
        if peer is not None:
            figures["tokens/s / liger-kernel"] = figures[LIGER]["ms"] / figures[OURS]["ms"]
        row[name] = figures
    return row


def described(variant: Variant) -> dict[str, str]:
    defaults = asdict(Variant(""))
    return {key: str(value) for key, value in asdict(variant).items() if value != defaults[key]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=list(DEFAULT_VARIANTS), choices=[*VARIANTS, "list"])
    parser.add_argument("--modes", nargs="+", default=["recomputed", "kept"], choices=["recomputed", "kept"])
    parser.add_argument("--length", type=int, default=8192, help="tokens per GPU")
    parser.add_argument("--steps", type=int, default=3, help="steps of a block, after one to warm up")
    parser.add_argument("--rounds", type=int, default=2, help="alternating blocks of each provider")
    parser.add_argument("--profile", action="store_true", help="also profile a step of each provider, in each row")
    parser.add_argument("--no-peer", action="store_true", help="measure ligerzoo only")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the benchmark")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sharded_training.json"))
    arguments = parser.parse_args()
    if "list" in arguments.variants:
        for name, variant in VARIANTS.items():
            print(f"{name:16} {variant.why}")
        return
    processes = start_processes()
    torch.manual_seed(processes.rank)
    rows: dict[str, Any] = {}
    peer = None
    if not arguments.no_peer:
        config, dtype = (TINY, torch.float32) if arguments.tiny else (LLAMA_8B, torch.bfloat16)
        peer = Training(liger(config, processes.device, dtype), arguments.length, config["vocab_size"])
    for name in arguments.variants:
        variant = VARIANTS[name]
        begin = time.perf_counter()
        try:
            rows[name] = {"variant": described(variant), **measure(variant, peer, arguments)}
        except (AttributeError, RuntimeError, ValueError) as error:  # such as an option that this torch lacks
            rows[name] = {"variant": described(variant), "error": f"{type(error).__name__}: {error}"}
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if processes.is_main:
            print(f"{name} ({time.perf_counter() - begin:.0f} s): {brief(rows[name])}", flush=True)
            shape = {"tokens per process": arguments.length, "processes": processes.count}
            raw = {"what": __doc__, "shape": shape, "rows": rows}
            save_result(arguments.out, raw, {"shape": shape, "rows": without_profiles(rows)})
    stop_processes()


def without_profiles(value: Any) -> Any:
    """Returns nested dicts without their entries "profile"."""
    if not isinstance(value, dict):
        return value
    return {key: without_profiles(entry) for key, entry in value.items() if key != "profile"}


def brief(row: dict[str, Any]) -> str:
    """Returns the figures of a row in a few lines."""
    if "error" in row:
        return str(row["error"])[:300]
    lines = []
    for mode in ("recomputed", "kept"):
        for provider in (OURS, LIGER):
            figures = row.get(mode, {}).get(provider)
            if figures is None:
                continue
            line = f"{mode}, {provider}: {figures['ms']:.1f} ms, {figures['activations_gib']:.1f} GiB"
            if profile := figures.get("profile"):
                kinds = {kind: value["ms"] for kind, value in profile["by kind"].items()}
                shown = {**{key: value for key, value in profile.items() if key != "by kind"}, **kinds}
                line += " | " + ", ".join(f"{key} {value:.1f}" for key, value in shown.items())
            lines.append(line)
    return "".join(f"\n    {line}" for line in lines)


if __name__ == "__main__":
    main()
