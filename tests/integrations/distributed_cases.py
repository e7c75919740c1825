"""Two processes for `test_distributed.py`: `python -m tests.integrations.distributed_cases DIRECTORY WHAT`.

They have torchrun's variables, and are forked from one that imported transformers, which takes seconds.
"""

import json
import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
import transformers
from accelerate.parallelism_config import ParallelismConfig
from torch import Tensor

from ligerzoo.dtensors import full, is_dtensor
from ligerzoo.errors import LigerzooError
from ligerzoo.integrations.transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, wrap
from ligerzoo.models import Llama
from tests.parallel.fsdp_cases import files, tiny

IDS = torch.randint(3, 60, (24, 12), generator=torch.Generator().manual_seed(1))
LABELS = torch.where(torch.arange(12) < torch.arange(24)[:, None] % 5, -100, IDS)
"""Rows with other numbers of labels."""


def train(model: Any, directory: Path, groups: int = 1, **options: Any) -> list[list[float]]:
    """Trains 3 steps of two microbatches with transformers' Trainer, and saves the last one as a checkpoint.

    Args:
        model: a wrapped model.
        directory: the output directory.
        groups: number of groups of processes with other samples.
        options: of the Trainer.

    Returns:
        Loss and gradient norm of each step.
    """
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    arguments = transformers.TrainingArguments(
        str(directory), max_steps=3, per_device_train_batch_size=4 // groups, gradient_accumulation_steps=2,
        learning_rate=1e-2, adam_epsilon=1e-3, max_grad_norm=0.5, logging_steps=1, save_steps=3, save_only_model=True,
        report_to=[], disable_tqdm=True, use_cpu=True, **options,
    )  # fmt: skip
    rows = [{"input_ids": ids, "labels": labels} for ids, labels in zip(IDS, LABELS, strict=True)]
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    return [[log["loss"], log["grad_norm"]] for log in trainer.state.log_history if "loss" in log]


def generate(model: Any) -> list[list[list[int]]]:
    """Returns greedy, sampled and beam-searched completions."""
    model.eval()
    torch.manual_seed(3)
    options: list[dict[str, Any]] = [{"do_sample": False}, {"do_sample": True}, {"do_sample": False, "num_beams": 2}]
    return [model.generate(IDS[:2, :6], max_new_tokens=5, **one).tolist() for one in options]


CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "llama tensor": ("llama", {"tp_size": 2}, {}),
    "llama shards": ("llama", {"fsdp_size": 2}, {}),
    "qwen3 tensor": ("qwen3", {"tp_size": 2}, {"gradient_checkpointing": True}),
    "qwen3 shards": ("qwen3", {"fsdp_size": 2}, {"gradient_checkpointing": True}),
    "qwen3_moe tensor": ("qwen3_moe", {"tp_size": 2}, {}),
    "qwen3_moe shards": ("qwen3_moe", {"fsdp_size": 2}, {}),
    "qwen3_moe experts": ("qwen3_moe", {"fsdp_size": 2, "ep_size": 2}, {}),
    "qwen3_moe tensor and experts": ("qwen3_moe", {"tp_size": 2, "ep_size": 2}, {}),
}
"""Model, sizes and options of the Trainer, by case."""
EVERY_KIND = ("llama tensor", "qwen3 shards", "qwen3_moe experts", "qwen3_moe tensor and experts")
"""Cases in which every model and every way to divide it occur."""


def trained(directory: Path, cases: Iterable[str]) -> dict[str, Any]:
    """Trains and generates with some of `CASES`; returns what they computed."""
    results = {}
    for name in cases:
        model_type, sizes, options = CASES[name]
        config = transformers.DistributedConfig(**sizes)
        model: Any = AutoModelForCausalLM.from_pretrained(directory / model_type, distributed_config=config)
        assert model.is_distributed_loading_by_transformers
        assert (model.tp_size, model.fsdp_size) == (config.tp_size, config.fsdp_size)
        before = generate(model)
        losses = train(model.train(), directory / name, config.dp_size, **options)
        results[name] = {"losses": losses, "before": before, "after": generate(model)}
    return results


SHARDED_BY_ACCELERATE = {"fsdp": "full_shard", "fsdp_config": {"version": 2}}
"""Options of the Trainer with which accelerate shards a model."""


def train_adapters(directory: Path, output: Path, groups: int = 1) -> list[list[float]]:
    """Trains LoRA of PEFT, in one process or on a model whose weights `groups` processes share."""
    config = transformers.DistributedConfig(fsdp_size=groups)
    model: Any = AutoModelForCausalLM.from_pretrained(directory / "llama", distributed_config=config)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    return train(adapted, output, groups)


def equal_whole(model: Any, whole: Any) -> None:
    """The parts compute the logits of the whole, and load its weights."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    model.load_state_dict(whole.state_dict())
    assert all(torch.equal(full(value), whole.state_dict()[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        torch.testing.assert_close(model(IDS[:2]).logits, whole(IDS[:2]).logits, rtol=0, atol=1e-5)


def equal_without_the_head(directory: Path) -> None:
    """Gradients are those of one process if a trainer multiplies with the head's weight, as TRL's do."""
    for sizes in ({"tp_size": 2}, {"fsdp_size": 2}):
        config, gradients = transformers.DistributedConfig(**sizes), []
        for given in ({"distributed_config": config}, {}):
            model: Any = AutoModelForCausalLM.from_pretrained(directory / "llama", **given)

            def forward(ids: Tensor, model: Any = model) -> Tensor:
                hidden, weight = model.model(ids).last_hidden_state, model.lm_head.weight
                weight = weight.full_tensor() if is_dtensor(weight) else weight
                return F.linear(hidden, weight).logsumexp(-1).mean()

            model.forward = forward
            model(IDS[dist.get_rank() // config.tp_size : 4 : config.dp_size] if given else IDS[:4]).backward()
            gradients.append({name: full(weight.grad) for name, weight in model.named_parameters()})
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)


def train_with_trl(directory: Path, **sizes: int) -> list[list[float]]:
    """Trains with TRL's trainers for SFT and DPO; returns losses and gradient norms."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    from tests.integrations.clients import tokenizer

    config = transformers.DistributedConfig(**sizes)

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(directory / "llama", distributed_config=config)

    words = [[f"w{token}" for token in ids.tolist()] for ids in IDS]
    pairs = [{"prompt": " ".join(w[:4]), "chosen": " ".join(w[4:8]), "rejected": " ".join(w[8:])} for w in words]
    options: dict[str, Any] = {
        "max_steps": 3, "per_device_train_batch_size": 4 // config.dp_size, "learning_rate": 1e-2, "bf16": False,
        "adam_epsilon": 1e-3, "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "use_cpu": True,
    }  # fmt: skip
    texts = Dataset.from_list([{"text": " ".join(w)} for w in words])
    data = {"processing_class": tokenizer()}
    found = []
    for start in (
        lambda: SFTTrainer(load(), SFTConfig(str(directory), **options), train_dataset=texts, **data),
        lambda: DPOTrainer(
            load(), load(), DPOConfig(str(directory), **options), train_dataset=Dataset.from_list(pairs), **data
        ),
    ):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        trainer = start()
        trainer.train()
        found += [[log["loss"], log["grad_norm"]] for log in trainer.state.log_history if "loss" in log]
    return found


def other_ways(directory: Path) -> None:
    """`tp_plan`, `wrap`, mixed precision, classifiers."""
    whole: Any = AutoModelForCausalLM.from_pretrained(directory / "llama")
    by_plan: Any = AutoModelForCausalLM.from_pretrained(directory / "llama", tp_plan="auto")
    assert by_plan.tp_size == 2
    equal_whole(by_plan, whole)
    model = wrap(whole.to_zoo_model(), distributed_config={"tp_size": 2, "tp_plan": whole.tp_plan})
    equal_whole(model, whole)
    sizes = {"fsdp_size": 2, "fsdp_mixed_precision": True}
    mixed: Any = AutoModelForCausalLM.from_pretrained(directory / "llama", distributed_config=sizes)
    assert mixed(IDS[:2]).logits.dtype == torch.bfloat16
    loads = AutoModelForSequenceClassification.from_pretrained
    whole = loads(directory / "classifier")
    for one in ({"tp_size": 2}, {"fsdp_size": 2}):
        classifier: Any = loads(directory / "classifier", distributed_config=one)
        equal_whole(classifier, whole)


def fused_names(directory: Path) -> None:
    """Projections that transformers fuses are apart, and saved as transformers stores them."""
    whole: Any = AutoModelForCausalLM.from_pretrained(directory / "phi3")
    for sizes in ({"tp_size": 2}, {"fsdp_size": 2}):
        model: Any = AutoModelForCausalLM.from_pretrained(directory / "phi3", distributed_config=sizes)
        assert "model.layers.0.self_attn.q_proj.weight" in model.state_dict()
        with torch.no_grad():
            torch.testing.assert_close(model(IDS[:2]).logits, whole(IDS[:2]).logits, rtol=0, atol=1e-5)
        saved: Tensor = model.to_zoo_model().hf_state_dict()["model.layers.0.self_attn.qkv_proj.weight"]
        assert torch.equal(saved, whole.state_dict()["model.layers.0.self_attn.qkv_proj.weight"])


def refusals(directory: Path) -> None:
    """What would compute something else is refused in all processes."""
    loads = AutoModelForCausalLM.from_pretrained
    with pytest.raises(LigerzooError, match=r"model\.layers\.0\.mlp: has 37 intermediate features, which 2 processes"):
        wrap(Llama(tiny(intermediate_size=37)), distributed_config={"tp_size": 2})
    with pytest.raises(LigerzooError, match=r"argument device_map: each process has its own device; got cpu"):
        loads(directory / "llama", distributed_config={"fsdp_size": 2}, device_map="cpu")
    model: Any = loads(directory / "llama", distributed_config={"tp_size": 2})
    with pytest.raises(LigerzooError, match=r"o_proj: processes have parts of this layer; got Linear"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["o_proj"]))
    with pytest.raises(LigerzooError, match="resize_token_embeddings: the weights are sharded"):
        model.resize_token_embeddings(120)


def every_architecture(rank: int, directory: Path, sizes: dict[str, int]) -> None:
    """Losses, gradients, logits, completions and files are those of one process."""
    config = transformers.DistributedConfig(**sizes)
    samples = IDS[rank // config.tp_size : 4 : config.dp_size]
    for path in sorted(directory.iterdir()):
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(path, distributed_config=config, dtype="float32")
        except LigerzooError as error:
            if "cannot share equally" not in str(error):  # tiny models have few heads
                raise
            continue
        whole: Any = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
        losses = []
        for one, ids, groups in ((model.train(), samples, config.dp_size), (whole.train(), IDS[:4], 1)):
            loss = one(ids, labels=ids, num_items_in_batch=torch.tensor(44 / groups)).loss
            loss.backward()
            losses.append(loss.detach())
        dist.all_reduce(losses[0])
        torch.testing.assert_close(losses[0] / dist.get_world_size(), losses[1], rtol=1e-5, atol=0, msg=path.name)
        gradients = [
            {n: full(w.grad) for n, w in one.named_parameters() if w.grad is not None} for one in (model, whole)
        ]
        norms = [torch.nn.utils.get_total_norm(found.values()) for found in gradients]
        torch.testing.assert_close(*norms, rtol=1e-5, atol=0, msg=path.name)
        for name in gradients[0].keys() & gradients[1].keys():  # projections of the whole may be fused
            scale = max(float(gradients[1][name].abs().max()), 1)
            torch.testing.assert_close(gradients[0][name], gradients[1][name], rtol=1e-4, atol=2e-6 * scale, msg=name)
        assert generate(model) == generate(whole), path.name
        saved = [path.parent.parent / name / path.name for name in ("saved", "expected")]
        model.save_pretrained(saved[0])
        if rank == 0:
            whole.save_pretrained(saved[1])
            assert files(saved[0]) == files(saved[1]), path.name
        dist.barrier()


def main(directory: Path, what: str) -> None:
    """Runs "every kind" or "every case" in one process group, since starting processes takes seconds; or "trl"."""
    ParallelismConfig._validate_accelerator = lambda *_: None  # accelerate refuses CPUs, for transformers' models too
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if what == "trl":
        found = {name: train_with_trl(directory, **{name: 2}) for name in ("tp_size", "fsdp_size")}
        (directory / f"results {os.environ['RANK']}.json").write_text(json.dumps(found))
        dist.destroy_process_group()
        return
    results = trained(directory, CASES if what == "every case" else EVERY_KIND)
    model = AutoModelForCausalLM.from_pretrained(directory / "llama").train()
    losses = train(model, directory / "llama by accelerate", 2, **SHARDED_BY_ACCELERATE)
    results["llama by accelerate"] = {"losses": losses}
    results["llama adapters"] = {"losses": train_adapters(directory, directory / "adapters", 2)}
    equal_without_the_head(directory)
    other_ways(directory)
    fused_names(directory)
    refusals(directory)
    (directory / f"results {os.environ['RANK']}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def forked(rank: int, port: int, directory: Path, what: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
    main(directory, what)


if __name__ == "__main__":
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    assert transformers.Trainer  # imports it, before processes are forked
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(forked, (port, Path(sys.argv[1]), sys.argv[2]), 2, start_method="fork")  # type: ignore[no-untyped-call]
