"""Training on meshes of two GPUs compared with one GPU, and with transformers: liger-kernel, torch and its plans.

    python -m benchmarks.meshes                            # two GPUs, about 8 minutes
    python -m benchmarks.meshes --only dense --providers ligerzoo
    python -m benchmarks.meshes --tiny --out tiny.json     # two processes on a CPU

Four cases, each with 4 layers and AdamW, in bf16, of random weights:

    dense    the shape of Llama-3-8B, all weights, 8 x 4096 tokens a step
    experts  the shape of Qwen3-30B-A3B, LoRA of rank 16, 8 x 4096 tokens a step. Ours updates experts and attention,
             the peers update attention alone, since PEFT has no kernels for experts
    long     the dense shape with a vocabulary of 32,000, one text of 32,768 tokens
    longest  the same with the longest text that one GPU can train on, and with one twice as long on two

All see the same tokens in each step, whatever the number of GPUs, so that the losses of 20 steps can be compared. Most
tokens follow from the one before. Each provider runs in separate processes, which `torchrun` starts. A step includes
the optimizer; its time is the median of the second half of the steps. The file is written after each run; rows in it
that are not measured again stay.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.decoding import clean_up
from benchmarks.measure import save_result, synchronize
from benchmarks.processes import Json, run_module
from benchmarks.sharded_training import LLAMA_8B
from benchmarks.trainer import QWEN3_30B_A3B_4_LAYERS
from ligerzoo.adapters import add_lora
from ligerzoo.models import Llama, LlamaConfig, Qwen3Moe, Qwen3MoeConfig
from ligerzoo.parallel import items_per_process, parallelize, start_processes, stop_processes

STEPS = 20
DENSE = {**LLAMA_8B, "num_hidden_layers": 4, "max_position_embeddings": 1 << 20, "rms_norm_eps": 1e-6}
EXPERTS = {**QWEN3_30B_A3B_4_LAYERS, "rope_theta": 1e4}
LONG = {**DENSE, "vocab_size": 32000}
SHAPES = {"dense": DENSE, "experts": EXPERTS, "long": LONG, "longest": LONG}
TOKENS = {"dense": (8, 4096), "experts": (8, 4096), "long": (1, 32768)}
"""Rows, and tokens of a row."""

LENGTHS = [16384 * count for count in range(5, 11)]
"""Tokens of texts of which one GPU trains on the longest that fits."""

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
TINY_EXPERTS = {**TINY, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}
OURS, PEER = "ligerzoo", "transformers"
REVERSED = "rows in reverse order"
"""One GPU with the rows of a step in reverse order: how much rounding alone changes the losses."""

CASES = {
    (OURS, 1): {"dense": ["", REVERSED], "experts": ["", REVERSED], "long": [""], "longest": [""]},
    (OURS, 2): {
        "dense": ["shard=2", "tensor=2"],
        "experts": ["shard=2", "shard=2 expert=2", "tensor=2"],
        "long": ["context=2"],
        "longest": ["context=2"],
    },
    (PEER, 1): {"dense": [""], "experts": [""], "long": [""]},
    (PEER, 2): {"dense": ["tensor plan", "fsdp"], "experts": ["expert plan", "fsdp"], "long": ["context_parallel"]},
}
"""What each provider and number of GPUs runs, by case: our meshes and the peers' engines. liger-kernel changes classes
of transformers for good, so plans come first."""


class Run:
    """Settings of one process of a run.

    Attributes:
        case: name of the case, see `CASES`.
        tiny: whether models are tiny, on a CPU.
        device: of this process.
        count: number of processes.
        sizes: rows of a step, and tokens of a row.
        steps: number of steps.
    """

    def __init__(self, case: str, tiny: bool) -> None:
        self.case, self.tiny = case, tiny
        self.sizes = (2, 64) if tiny or case == "longest" else TOKENS[case]
        self.rank, self.count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device("cpu") if tiny else torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        self.dtype = torch.float32 if tiny else torch.bfloat16
        self.steps = 4 if tiny else STEPS

    @property
    def shape(self) -> Json:
        return SHAPES[self.case] | ((TINY_EXPERTS if self.case == "experts" else TINY) if self.tiny else {})

    def text(self, step: int) -> Tensor:
        """The tokens of a step, (rows, tokens): four of five follow from the one before."""
        vocabulary, (rows, tokens) = self.shape["vocab_size"], self.sizes
        draw = torch.Generator().manual_seed(step % 4)
        ids = torch.randint(vocabulary, (rows, tokens), generator=draw)
        follows = torch.rand(tokens, rows, generator=draw) < 0.8
        columns = list(ids.T)
        for position in range(1, tokens):
            columns[position] = torch.where(
                follows[position], (columns[position - 1] * 7 + 3) % min(vocabulary, 251), columns[position]
            )
        return torch.stack(columns, 1).to(self.device)

    def measured(self, model: nn.Module, loss_of: Callable[[Tensor], Tensor], divides: bool) -> Json:
        """Trains, and returns losses, tokens/s and memory.

        Args:
            model: in this process.
            loss_of: the forward and backward of a step; it returns the loss of this process.
            divides: whether each process has its own rows.
        """
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        kinds = {type(weight) for weight in weights}  # fused AdamW takes one kind of tensor
        groups = [{"params": [weight for weight in weights if type(weight) is kind]} for kind in kinds]
        optimizer = torch.optim.AdamW(groups, lr=1e-3 if self.case == "experts" else 1e-4, fused=not self.tiny)
        texts = [self.text(step) for step in range(4)]
        clean_up()
        if not self.tiny:
            torch.cuda.reset_peak_memory_stats()
        losses, seconds = [], []
        for step in range(self.steps):
            ids = texts[step % 4]
            synchronize(self.device.type)
            if self.count > 1:
                dist.barrier()
            begin = time.perf_counter()
            loss = loss_of(ids[self.rank :: self.count] if divides else ids)
            optimizer.step()
            optimizer.zero_grad()
            synchronize(self.device.type)
            seconds.append(time.perf_counter() - begin)
            if divides and self.count > 1:
                dist.all_reduce(loss, dist.ReduceOp.SUM)
                loss /= self.count
            losses.append(loss.item())
        middle = statistics.median(seconds[len(seconds) // 2 :])
        peak = {} if self.tiny else {"peak_gib": torch.cuda.max_memory_allocated() / 2**30}
        return {"tokens_per_s": texts[0].numel() / middle, "ms": middle * 1e3, **peak, "losses": losses}


def ours(run: Run, mesh: str) -> Json:
    """Trains a model of ligerzoo on a mesh."""
    torch.manual_seed(0)
    shape = run.shape
    model: Llama | Qwen3Moe
    if run.case == "experts":
        model = Qwen3Moe(Qwen3MoeConfig(**shape), dtype=run.dtype, device=run.device).train()
        add_lora(model, 16, 32)
    else:
        model = Llama(LlamaConfig(**shape), dtype=run.dtype, device=run.device).train()
    if run.count > 1:
        parallelize(model, mesh)
    divides = "shard" in mesh

    def loss_of(ids: Tensor) -> Tensor:
        ids = ids.flip(0) if mesh == REVERSED else ids
        own = ids[:, 1:].numel()
        items = items_per_process(own, run.device) if divides else own
        loss: Tensor = model(ids, labels=ids, num_items_in_batch=items).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach().clone()

    return run.measured(model, loss_of, divides)


def longest(run: Run, mesh: str, lengths: Sequence[int]) -> Json:
    """Trains on longer and longer texts until one does not fit in memory, and returns what the longest took."""
    found: Json = {"error": "none fits"}
    run.steps = 2
    for tokens in lengths:
        run.sizes = (1, tokens)
        try:
            found = {"tokens": tokens, **ours(run, mesh)}
        except torch.OutOfMemoryError:
            break
        clean_up()
    return found


def theirs(run: Run, engine: str) -> Json:
    """Trains a model of transformers with liger-kernel's layers, or with a plan that transformers brings."""
    model = _planned(run, engine) if "plan" in engine else _patched(run)
    if run.case == "experts":
        from peft import LoraConfig, get_peft_model

        names = ["q_proj", "k_proj", "v_proj", "o_proj"]
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=names))
    if engine == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in (model.get_base_model() if run.case == "experts" else model).model.layers:
            fully_shard(layer)
        fully_shard(model)
    model.train()
    if engine == "context_parallel":
        return run.measured(model, lambda ids: _in_parts(run, model, ids), divides=False)

    def loss_of(ids: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach().clone()

    return run.measured(model, loss_of, divides=engine == "fsdp")


def _their_config(run: Run) -> Any:
    from transformers import LlamaConfig as Dense
    from transformers import Qwen3MoeConfig as Sparse

    shape = {**run.shape, "tie_word_embeddings": False}
    return Sparse(**shape) if run.case == "experts" else Dense(**shape)


def _patched(run: Run) -> Any:
    from transformers import AutoModelForCausalLM

    if not run.tiny:
        from liger_kernel.transformers import apply_liger_kernel_to_llama, apply_liger_kernel_to_qwen3_moe

        (apply_liger_kernel_to_qwen3_moe if run.case == "experts" else apply_liger_kernel_to_llama)()
    torch.manual_seed(0)
    with run.device:
        return AutoModelForCausalLM.from_config(
            _their_config(run), dtype=run.dtype, attn_implementation=_attention_of(run.case)
        )


def _planned(run: Run, engine: str) -> Any:
    """A model that `from_pretrained` divides; its weights are saved first."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    directory = [mkdtemp() if run.rank == 0 else ""]
    dist.broadcast_object_list(directory)
    if run.rank == 0:
        torch.manual_seed(0)
        with run.device:
            whole = AutoModelForCausalLM.from_config(_their_config(run), dtype=run.dtype)
        whole.save_pretrained(directory[0])
        del whole
        clean_up()
    dist.barrier()
    options: Json = {"tp_plan": "auto"}
    if engine == "expert plan":
        options = {"distributed_config": DistributedConfig(tp_size=run.count, enable_expert_parallel=True)}
    model = AutoModelForCausalLM.from_pretrained(directory[0], dtype=run.dtype, attn_implementation="sdpa", **options)
    dist.barrier()
    if run.rank == 0:
        shutil.rmtree(directory[0])
    return model


def _attention_of(case: str) -> str:
    """The name of an attention function; torch's context parallelism takes as many heads of keys as of queries."""
    if case != "long":
        return "sdpa"
    from transformers import AttentionInterface

    def repeated(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("repeated", repeated)
    return "repeated"


def _in_parts(run: Run, model: Any, ids: Tensor) -> Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    ids = ids.clone()
    labels = torch.cat([ids[:, 1:], ids.new_full((len(ids), 1), -100)], 1)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    items = (labels != -100).sum().item()
    parts = init_device_mesh(run.device.type, (run.count,))
    buffers = [ids, labels, positions]
    with context_parallel(parts, buffers=buffers, buffer_seq_dims=[1, 1, 1]):
        loss: Tensor = model(
            input_ids=ids, position_ids=positions, labels=labels, shift_labels=labels, use_cache=False,
            num_items_in_batch=items,
        ).loss  # fmt: skip
        loss.backward()  # type: ignore[no-untyped-call]
    for weight in model.parameters():
        dist.all_reduce(weight.grad)
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss


TRAIN = {OURS: ours, PEER: theirs}


def work(arguments: argparse.Namespace) -> None:
    """Runs the cases of a provider in this process, and prints a line of JSON for each."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1 if arguments.tiny else 8)
    start_processes("cpu" if arguments.tiny else "cuda")
    train = partial(longest, lengths=arguments.lengths) if arguments.lengths else TRAIN[arguments.worker]
    for case, name in arguments.cases:
        run = Run(case, arguments.tiny)
        row: Json = {"provider": arguments.worker, "gpus": run.count, "case": case, "mesh": name}
        try:
            row |= train(run, name)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[-300:]
        clean_up()
        if run.rank == 0:
            print(json.dumps(row), flush=True)
    stop_processes()


def run_apart(provider: str, gpus: int, cases: list[list[str]], lengths: list[int], arguments: Any) -> list[Json]:
    """Runs cases in new processes; those that end without a result have an "error"."""
    command = ["benchmarks.meshes", "--worker", provider, "--cases", json.dumps(cases)]
    command += ["--lengths", json.dumps(lengths), *["--tiny"] * arguments.tiny]
    output, failure = run_module(command, gpus, arguments.limit)
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    unfinished: Json = {"provider": provider, "gpus": gpus, "error": failure or "no result"}
    return rows + [{**unfinished, "case": case, "mesh": name} for case, name in cases[len(rows) :]]


def compared(rows: list[Json]) -> list[Json]:
    """Adds to each row how it compares with one GPU of the same provider, and ours with the peer's fastest."""
    for row in rows:
        same = [other for other in rows if other["case"] == row["case"] and "ms" in other]
        if "ms" not in row or row["case"] == "longest":
            continue
        for other in same:
            if other["provider"] == row["provider"] and other["gpus"] == 1 and not other["mesh"]:
                row["speedup"] = other["ms"] / row["ms"]
                pairs = zip(row["losses"], other["losses"], strict=True)
                row["largest_loss_difference"] = max(abs(mine - alone) for mine, alone in pairs)
        peers = [other["ms"] for other in same if other["provider"] == PEER and other["gpus"] == row["gpus"]]
        if row["provider"] == OURS and peers:
            row["over_peer"] = min(peers) / row["ms"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(SHAPES), choices=list(SHAPES), help="cases")
    parser.add_argument("--providers", nargs="+", default=[OURS, PEER], choices=[OURS, PEER])
    parser.add_argument("--limit", type=float, default=120, help="seconds for the cases of one provider and case")
    parser.add_argument("--tiny", action="store_true", help="tiny models on a CPU, to try the benchmark")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/meshes.json"))
    parser.add_argument("--earlier", type=Path, metavar="FILE", help="results whose rows stay (default: --out)")
    parser.add_argument("--worker", choices=[OURS, PEER], help=argparse.SUPPRESS)
    parser.add_argument("--cases", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--lengths", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    plan = [
        (provider, gpus, [[case, name] for name in cases[case]])
        for case in arguments.only
        for (provider, gpus), cases in CASES.items()
        if provider in arguments.providers and case in cases
    ]
    rows = earlier_rows(arguments.earlier or arguments.out)
    for provider, gpus, cases in tqdm(plan, unit="run"):
        lengths = lengths_for(gpus, rows, arguments.tiny) if cases[0][0] == "longest" else []
        found = run_apart(provider, gpus, cases, lengths, arguments)
        names = {identity(row) for row in found}
        rows = compared([row for row in rows if identity(row) not in names] + found)
        for row in found:
            tqdm.write(json.dumps({key: value for key, value in row.items() if key != "losses"}))
        save_result(arguments.out, {"what": __doc__, "rows": rows}, {"rows": rows})


def identity(row: Json) -> tuple[Any, ...]:
    """What a row measures."""
    return row["provider"], row["gpus"], row["case"], row["mesh"]


def earlier_rows(path: Path) -> list[Json]:
    """The rows of a file, which stay if they are not measured again."""
    rows: list[Json] = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    return rows


def lengths_for(gpus: int, rows: list[Json], tiny: bool) -> list[int]:
    """The lengths to try: on two GPUs, twice the longest of one."""
    if gpus == 1:
        return [64, 128] if tiny else LENGTHS
    alone = (row for row in rows if row["case"] == "longest" and row["gpus"] == 1)
    return [2 * row["tokens"] for row in alone if "tokens" in row]


if __name__ == "__main__":
    main()
