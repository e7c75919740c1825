"""Training steps of an 8B model with FSDP2 on several GPUs: ligerzoo's variants against transformers + liger-kernel.

    torchrun --nproc-per-node 2 -m benchmarks.sharded_training
    torchrun --nproc-per-node 2 -m benchmarks.sharded_training --variants default nccl liger --profile
    torchrun --nproc-per-node 2 -m benchmarks.sharded_training --tiny            (on a CPU)

Llama-3-8B shape, random weights, 1 x 8192 random tokens per GPU, bf16 weights and fused AdamW states, with all blocks
recomputed and with none. Each round builds, trains and frees the variants one after the other, so that each has the
memory of the GPUs for itself. The JSON file is written after each measurement. `--variants list` prints what each
variant changes.

"default" is `shard_model(model)`, "one-gpu" the model without FSDP2 on each GPU. liger-kernel's model is sharded per
block and at the root: its loss function reads the weight of the head outside the head's forward, so the head must
belong to the root.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tqdm import tqdm

from benchmarks.decoding import clean_up
from benchmarks.measure import save_result, synchronize
from benchmarks.overlap import kernels_of, summary
from ligerzoo import AutoModel, models
from ligerzoo.kernels.recompute import Recompute
from ligerzoo.memory.simulation import on_meta, simulate_step
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
RECOMPUTED, KEPT = "recomputed", "kept"


@dataclass(frozen=True)
class Variant:
    """One way to shard and run a model.

    Attributes:
        why: what it tests.
        reduce_dtype: see `shard_model`, as for `reshard_after_forward`, `prefetch` and `copy_engines`.
        max_ctas: most thread blocks of an NCCL kernel; None for NCCL's choice.
        is_alone: each GPU trains the whole model, without FSDP2.
        is_peer: the model of transformers and liger-kernel, sharded as torch's documentation does.
    """

    why: str
    reduce_dtype: torch.dtype | None = torch.float32
    reshard_after_forward: bool = True
    prefetch: int | None = None
    copy_engines: bool = True
    max_ctas: int | None = None
    is_alone: bool = False
    is_peer: bool = False


VARIANTS = {
    "default": Variant("shard_model(model)"),
    "one-gpu": Variant("without communication", is_alone=True),
    "liger": Variant("transformers + liger-kernel", is_peer=True),
    "liger-bf16": Variant("and gradients reduced in bf16", is_peer=True, reduce_dtype=None),
    "liger-gathered": Variant("and no all-gathers in backward", is_peer=True, reshard_after_forward=False),
    "reduce-bf16": Variant("half the bytes of the reduce-scatters", reduce_dtype=None),
    "prefetch-1": Variant("gathering is issued before the block, not when the host reaches the next", prefetch=1),
    "gathered": Variant("no all-gathers in backward, as `ligerzoo train` if it fits", reshard_after_forward=False),
    "nccl": Variant("NCCL's kernels instead of copy engines", copy_engines=False),
    "nccl-bf16": Variant("half the bytes of the reduce-scatters", copy_engines=False, reduce_dtype=None),
    "nccl-ctas-8": Variant("NCCL takes 8 multiprocessors from the products", copy_engines=False, max_ctas=8),
}
DEFAULT_VARIANTS = ("default", "one-gpu", "liger", "liger-bf16", "liger-gathered", "nccl", "gathered")


def mesh_of(variant: Variant) -> DeviceMesh:
    """Returns the mesh of all processes, with a separate communicator if the variant limits it."""
    if variant.max_ctas is None:
        return default_mesh()
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas, options.config.max_ctas = 1, variant.max_ctas
    return DeviceMesh.from_group(dist.new_group(backend="nccl", pg_options=options), "cuda")


def build(config: dict[str, Any], variant: Variant, dtype: torch.dtype, device: torch.device) -> nn.Module:
    if variant.is_peer:
        return liger(config, variant, dtype, device)
    if variant.is_alone:
        return AutoModel.from_config(models.LlamaConfig(**config), device=DEVICE, dtype=dtype)
    model = shard_model(
        AutoModel.from_config(models.LlamaConfig(**config), device="meta", dtype=dtype), mesh_of(variant),
        reduce_dtype=variant.reduce_dtype, reshard_after_forward=variant.reshard_after_forward,
        prefetch=variant.prefetch, copy_engines=variant.copy_engines,
    )  # fmt: skip
    initialize_sharded(model)
    return model


def liger(config: dict[str, Any], variant: Variant, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Returns transformers' model with liger-kernel's layers and loss; without them on a CPU.

    It is sharded over the processes of the process group, if there is one.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    with device:
        theirs = LlamaConfig(**config, tie_word_embeddings=False, use_cache=False)
        model = AutoModelForCausalLM.from_config(theirs, dtype=dtype, attn_implementation="sdpa")
    if device.type == "cuda":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(rope=True, swiglu=True, rms_norm=True, fused_linear_cross_entropy=True, model=model)
    if not dist.is_initialized():
        return model  # type: ignore[no-any-return]
    policy = MixedPrecisionPolicy(reduce_dtype=variant.reduce_dtype)
    for block in model.model.layers:
        fully_shard(block, mesh=default_mesh(), mp_policy=policy, reshard_after_forward=variant.reshard_after_forward)
    return fully_shard(model, mesh=default_mesh(), mp_policy=policy)  # type: ignore[no-any-return]


class Training:
    """Steps of one model.

    Args:
        model: a sharded model.
        length: tokens per step and process.
        vocab_size: number of tokens to sample from.
        optimizer: of the model; None for torch's fused AdamW.

    Attributes:
        loss: of the last step, in this process.
        host_ms: milliseconds that the host needed for a step of the last block, without waiting for its end.
    """

    loss: Tensor
    host_ms: float

    def __init__(
        self, model: nn.Module, length: int, vocab_size: int, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self.model = model.train()
        device = next(model.parameters()).device
        self.ids = torch.randint(vocab_size, (1, length), device=device)
        self.optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")

    def recompute(self, blocks: bool) -> None:
        if blocks:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        else:
            self.model.gradient_checkpointing_disable()  # type: ignore[operator]

    def step(self) -> None:
        loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()
        self.loss = loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def milliseconds(self, steps: int, warmup: int = 1) -> float:
        """Returns the time of a step, of the slowest process, over a block of steps after some to warm up."""
        for _ in range(warmup):
            self.step()
        synchronize(DEVICE)
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.host_ms = (time.perf_counter() - begin) / steps * 1e3
        synchronize(DEVICE)
        return max(gather_objects((time.perf_counter() - begin) / steps * 1e3))  # type: ignore[no-any-return]

    def profile(self, trace: Path) -> dict[str, Any]:
        """Returns the `summary` of a step in this process, and writes its trace."""
        activities = [
            torch.profiler.ProfilerActivity.CUDA if torch.cuda.is_available() else torch.profiler.ProfilerActivity.CPU
        ]
        with torch.profiler.profile(activities=activities) as profiler:
            self.step()
            synchronize(DEVICE)
        if dist.get_rank() == 0:
            profiler.export_chrome_trace(str(trace))
        return summary(kernels_of(profiler))


def measure(training: Training, mode: str, arguments: argparse.Namespace, trace: Path | None) -> dict[str, Any]:
    """Returns the milliseconds of a step and the peak memory, and a profile if its trace has a path."""
    training.recompute(mode == RECOMPUTED)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found: dict[str, Any] = {"ms": training.milliseconds(arguments.steps)}
    if DEVICE == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if trace is not None:
        found["profile"] = training.profile(trace)
    return found


def measured_round(name: str, arguments: argparse.Namespace, device: torch.device, profile: bool) -> dict[str, Any]:
    """Builds a variant, and returns its figures by mode, or an error."""
    traces = {mode: arguments.out.with_suffix(f".{name}.{mode}.trace.json.gz") for mode in arguments.modes}
    config, dtype = (TINY, torch.float32) if arguments.tiny else (LLAMA_8B, torch.bfloat16)
    try:
        training = Training(build(config, VARIANTS[name], dtype, device), arguments.length, config["vocab_size"])
        return {
            mode: measure(training, mode, arguments, trace if profile else None)
            | predicted_gib(VARIANTS[name], mode, arguments)
            for mode, trace in traces.items()
        }
    except (AttributeError, RuntimeError, ValueError) as error:  # such as an option that this torch lacks
        return {mode: {"error": f"{type(error).__name__}: {error}"[:300]} for mode in arguments.modes}


def summarized(rounds: Sequence[dict[str, Any]], length: int) -> dict[str, Any]:
    """Returns the figures of a variant and mode; the time is that of the fastest round."""
    if failed := [found for found in rounds if "error" in found]:
        return failed[0]
    ms = min(found["ms"] for found in rounds)
    return {**rounds[-1], "ms": ms, "all_ms": [found["ms"] for found in rounds], "tokens_per_s": length / ms * 1e3}


def compared(rows: dict[str, Any], mode: str) -> dict[str, dict[str, float]]:
    """Returns the speed of each of ligerzoo's variants over that of each peer and of one GPU."""
    ms = {name: row[mode]["ms"] for name, row in rows.items() if "ms" in row.get(mode, {})}
    others = [name for name in ms if VARIANTS[name].is_peer or VARIANTS[name].is_alone]
    return {f"{name} over": {other: ms[other] / ms[name] for other in others} for name in ms if name not in others}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=list(DEFAULT_VARIANTS), choices=[*VARIANTS, "list"])
    parser.add_argument("--modes", nargs="+", default=[RECOMPUTED, KEPT], choices=[RECOMPUTED, KEPT])
    parser.add_argument("--length", type=int, default=8192, help="tokens per GPU")
    parser.add_argument("--steps", type=int, default=3, help="steps of a block, after one to warm up")
    parser.add_argument("--rounds", type=int, default=2, help="times that each variant is built and measured")
    parser.add_argument("--profile", action="store_true", help="also profile a step of each, in the last round")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the benchmark")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sharded_training.json"))
    arguments = parser.parse_args()
    if "list" in arguments.variants:
        for name, variant in VARIANTS.items():
            print(f"{name:16} {variant.why}")
        return
    processes = start_processes()
    torch.manual_seed(processes.rank)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.variants}
    order = [(number, name) for number in range(arguments.rounds) for name in arguments.variants]
    for number, name in tqdm(order, unit="variant", disable=not processes.is_main):
        profile = arguments.profile and number == arguments.rounds - 1
        found[name].append(measured_round(name, arguments, processes.device, profile))
        clean_up()
        if processes.is_main:
            rows = {
                name: {
                    "variant": described(VARIANTS[name]),
                    **{mode: summarized([one[mode] for one in rounds], arguments.length) for mode in arguments.modes},
                }
                for name, rounds in found.items()
                if rounds
            }
            tqdm.write(f"{name}: {brief(rows[name], arguments.modes)}")
            shape = {"tokens per process": arguments.length, "processes": processes.count}
            compact = {"shape": shape, **{mode: compared(rows, mode) for mode in arguments.modes}}
            raw = {"what": __doc__, "shape": shape, "rows": rows}
            save_result(arguments.out, raw, {**compact, "rows": without_profiles(rows)})
    stop_processes()


def predicted_gib(variant: Variant, mode: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Returns our prediction of the peak memory, of ligerzoo only."""
    if variant.is_peer or arguments.tiny:
        return {}
    outline = on_meta(AutoModel.from_config(models.LlamaConfig(**LLAMA_8B), device="meta", dtype=torch.bfloat16))
    level = Recompute.BLOCK if mode == RECOMPUTED else Recompute.NOTHING
    step = simulate_step(
        outline, 1, arguments.length, [level] * LLAMA_8B["num_hidden_layers"],
        gpus=1 if variant.is_alone else dist.get_world_size(), keeps_gathered=not variant.reshard_after_forward,
    )  # fmt: skip
    return {"predicted_gib": step.peak / 2**30}


def described(variant: Variant) -> dict[str, str]:
    defaults = asdict(Variant(""))
    return {key: str(value) for key, value in asdict(variant).items() if value != defaults[key]}


def without_profiles(value: Any) -> Any:
    """Returns nested lists and dicts without entries "profile"."""
    if isinstance(value, list):
        return [without_profiles(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    return {key: without_profiles(entry) for key, entry in value.items() if key != "profile"}


def brief(row: dict[str, Any], modes: Sequence[str]) -> str:
    """Returns the figures of a row in a few lines."""
    lines = []
    for mode in modes:
        figures = row[mode]
        if "error" in figures:
            lines.append(f"{mode}: {figures['error']}")
            continue
        line = f"{mode}: {figures['ms']:.1f} ms, {figures.get('peak_gib', 0.0):.2f} GiB"
        line += f" (predicted {figures['predicted_gib']:.2f})" if "predicted_gib" in figures else ""
        if profile := figures.get("profile"):
            kinds = {kind: value["ms"] for kind, value in profile["by kind"].items()}
            shown = {**{key: value for key, value in profile.items() if isinstance(value, float)}, **kinds}
            line += " | " + ", ".join(f"{key} {value:.1f}" for key, value in shown.items())
        lines.append(line)
    return "".join(f"\n    {line}" for line in lines)


if __name__ == "__main__":
    main()
