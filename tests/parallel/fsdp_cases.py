"""What each process of `test_fsdp.py` does. Does not import transformers, which takes seconds."""

import gc
import weakref
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from ligerzoo import AutoModel, hub
from ligerzoo.errors import CheckpointError, LigerzooError
from ligerzoo.files.checkpoint import Checkpoint
from ligerzoo.layers import RMSNorm, attention_paths
from ligerzoo.models import CausalLM, Llama, LlamaConfig
from ligerzoo.parallel import (
    accumulating,
    barrier,
    failing_together,
    initialize_sharded,
    items_per_process,
    keep_gathered,
    load_optimizer,
    load_sharded,
    replacing_directory_together,
    save_optimizer,
    shard_model,
    unsharded,
)

BATCHES = 4
OPTIONS: list[dict[str, Any]] = [{}, {"prefetch": 2}, {"reshard_after_forward": False}]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_dir())


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def batches_of(directory: Path) -> list[dict[str, Tensor]]:
    batches: list[dict[str, Tensor]] = torch.load(directory.with_suffix(".pt"))
    assert len(batches) == BATCHES
    return batches


def labels_of(batches: list[dict[str, Tensor]]) -> int:
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def tiny(**changes: Any) -> LlamaConfig:
    sizes = {"vocab_size": 33, "hidden_size": 16, "intermediate_size": 37, "num_hidden_layers": 3}
    return LlamaConfig(**{**sizes, "num_attention_heads": 2, "num_key_value_heads": 1, **changes})


def load(rank: int, directory: Path) -> None:
    """Loads shards, reading about half of the bytes, and saves the same files as a model that is not sharded."""
    for name in names(directory / "loaded"):
        loaded, read = directory / "loaded" / name, []
        whole = AutoModel.from_pretrained(loaded)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hub.loading, "tqdm", partial(Recorder, read))
            model = load_sharded(loaded)
        size = sum(info.nbytes for info in Checkpoint(loaded).tensors.values())
        assert 0.3 * size < sum(read) < 0.7 * size, (name, sum(read), size)
        expected = whole.state_dict()
        state = model.state_dict()
        assert list(state) == list(expected)
        assert all(isinstance(weight, DTensor) for weight in state.values())
        for key, weight in state.items():
            assert weight.dtype == expected[key].dtype
            assert torch.equal(full(weight), expected[key]), (name, key)
        saved = directory / "saved" / name
        model.save_pretrained(saved, max_shard_size="20KiB")
        assert files(saved) == files(directory / "expected" / name), name
        dist.barrier()


class Recorder:
    """Replaces the progress bar; records its updates."""

    def __init__(self, read: list[int], **options: Any) -> None:
        self.update = read.append

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *exception: object) -> None: ...


def gradients(
    model: CausalLM, batches: list[dict[str, Tensor]], num_items: float | Tensor
) -> tuple[float, dict[str, Tensor]]:
    """Accumulates the gradients of batches; returns the sum of the losses and the whole gradients."""
    model.zero_grad()
    total = 0.0
    for batch in batches:
        loss = model(**batch, num_items_in_batch=num_items).loss
        loss.backward()
        total += loss.item()
    return total, {name: full(weight.grad).clone() for name, weight in model.named_parameters()}


def train(rank: int, directory: Path) -> None:
    """Loss and gradients equal those of one process, with each option, with and without checkpointing."""
    world = dist.get_world_size()
    for name in names(directory / "loaded"):
        loaded = directory / "loaded" / name
        batches = batches_of(directory / name)
        own = batches[rank::world]
        whole = AutoModel.from_pretrained(loaded, dtype="float32").train()
        expected_loss, expected = gradients(whole, batches, labels_of(batches))
        items = items_per_process(labels_of(own))
        assert float(items) == labels_of(batches) / world
        for options in OPTIONS if name == "llama" else OPTIONS[:1]:
            model = load_sharded(loaded, dtype="float32", **options).train()
            for recompute in (False, True):
                if recompute:
                    model.gradient_checkpointing_enable()
                loss, actual = gradients(model, own, items)
                losses = torch.tensor(loss)
                dist.all_reduce(losses)
                torch.testing.assert_close(losses / world, torch.tensor(expected_loss), rtol=1e-5, atol=0)
                compare(actual, expected, name)


def compare(actual: dict[str, Tensor], expected: dict[str, Tensor], name: str) -> None:
    assert actual.keys() == expected.keys()
    for key, gradient in actual.items():
        scale = float(expected[key].abs().max())
        assert scale > 0, (name, key)
        torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=2e-6 * max(scale, 1), msg=f"{name} {key}")


def collectives(rank: int) -> None:
    """A step gathers each group once for forward, blocks but the last again for backward; recomputing adds nothing."""
    torch.manual_seed(0)
    ids = torch.randint(33, (2, 9))
    groups = 3 + 2 + 1  # blocks, embedding and head, root
    for tied, again, recompute in [(False, 2, False), (False, 2, True), (True, 2, True)]:
        model = shard_model(Llama(tiny(tie_word_embeddings=tied)))
        if recompute:
            model.gradient_checkpointing_enable()
        model(ids, labels=ids).loss.backward()
        with CommDebugMode() as counts:
            model(ids, labels=ids).loss.backward()
        of = {str(operation): count for operation, count in counts.get_comm_counts().items()}
        expected = groups - 2 * tied
        assert sorted(of.values()) == sorted([expected + again, expected]), of
        with CommDebugMode() as counts, accumulating(model):
            model(ids, labels=ids).loss.backward()
        assert sum(counts.get_comm_counts().values()) == expected + again, counts.get_comm_counts()
    keep_gathered(model)
    with CommDebugMode() as counts:
        model(ids, labels=ids).loss.backward()
    assert sum(counts.get_comm_counts().values()) == 2 * expected, counts.get_comm_counts()


def accumulate(rank: int) -> None:
    """Gradients accumulated without communication equal those that each microbatch reduces."""
    torch.manual_seed(rank)
    batches = [{"input_ids": (ids := torch.randint(33, (1, 9))), "labels": ids} for _ in range(3)]
    torch.manual_seed(0)
    model = shard_model(Llama(tiny(initializer_range=0.3)))
    _, expected = gradients(model, batches, 12)
    model.zero_grad()
    with accumulating(model):
        for batch in batches[:-1]:
            model(**batch, num_items_in_batch=12).loss.backward()
    assert all(weight.grad is None for weight in model.parameters())
    model(**batches[-1], num_items_in_batch=12).loss.backward()
    compare({name: full(weight.grad) for name, weight in model.named_parameters()}, expected, "accumulating")


def mixed_precision(rank: int) -> None:
    """Computes in bf16 with fp32 weights and gradients; frozen parameters get no gradient."""
    model = Llama(tiny())
    for name, weight in model.named_parameters():
        weight.requires_grad_("mlp" in name)
    shard_model(model, param_dtype=torch.bfloat16)
    ids = torch.arange(9)[None] + rank
    assert model(ids).logits.dtype == torch.bfloat16
    model(ids, labels=ids).loss.backward()
    for name, weight in model.named_parameters():
        assert weight.dtype == torch.float32
        assert (weight.grad is not None) == ("mlp" in name)
        assert weight.grad is None or weight.grad.dtype == torch.float32
    half = Llama(tiny(), dtype=torch.bfloat16)
    half.model.layers[1].mlp.up_proj.float()
    with pytest.raises(LigerzooError, match=r"layers\.1\.\S+ in torch.bfloat16, \S+up_proj.weight in torch.float32"):
        shard_model(half)


def packed(rank: int) -> None:
    """Packed documents in batches have the loss and gradients of FlexAttention, with and without recomputation."""
    ids = torch.arange(24)[None] % 7 + rank
    inputs = {"input_ids": ids, "labels": ids, "position_ids": torch.cat([torch.arange(10), torch.arange(14)])[None]}
    torch.manual_seed(0)
    model = shard_model(Llama(tiny(initializer_range=0.3)))
    loss, expected = gradients(model, [inputs], 22)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_paths, "attention_kernel", lambda *_: "cudnn")
        for checkpoints in (False, True):
            model.gradient_checkpointing_enable() if checkpoints else None
            model.zero_grad()
            other, actual = gradients(model, [{**inputs, "exact": True}], 22)
            assert other == pytest.approx(loss, rel=1e-5)
            compare(actual, expected, "packed")


def release(rank: int) -> None:
    """A sharded model is freed with its last reference."""
    model = shard_model(Llama(tiny()))
    model(torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def generate(rank: int, directory: Path) -> None:
    for name in ("llama", "tied", "mixtral"):
        whole = AutoModel.from_pretrained(directory / "loaded" / name)
        model = load_sharded(directory / "loaded" / name)
        prompt = torch.arange(3, 9 + rank)[None]
        with pytest.raises(LigerzooError, match=r"sharded.*ligerzoo.parallel.unsharded"):
            model.generate(prompt, max_new_tokens=2)
        before = {key: full(weight) for key, weight in model.state_dict().items()}
        keep_gathered(model)
        with unsharded(model):  # the processes generate different numbers of tokens
            got = model.generate(prompt, max_new_tokens=4 + 3 * rank, do_sample=False)
        assert torch.equal(got, whole.generate(prompt, max_new_tokens=4 + 3 * rank, do_sample=False))
        assert all(isinstance(weight, DTensor) for weight in model.parameters())
        assert all(torch.equal(full(weight), before[key]) for key, weight in model.state_dict().items())
        model.train()(prompt[:, :6], labels=prompt[:, :6]).loss.backward()
        with pytest.raises(LigerzooError, match="not sharded"), unsharded(whole):
            pass


def initialize(rank: int) -> None:
    """The weights are those of one process with the same seed."""
    for tied in (False, True):
        config = tiny(tie_word_embeddings=tied, initializer_range=0.1)
        expected = Llama(config)
        torch.manual_seed(3)
        expected.init_weights()
        model = shard_model(Llama(config, device="meta"))
        torch.manual_seed(3)
        initialize_sharded(model)
        for name, weight in model.state_dict().items():
            assert torch.equal(full(weight), expected.state_dict()[name]), name
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        ids = torch.arange(9)[None]
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.testing.assert_close(loss, expected(ids, labels=ids).loss, rtol=1e-6, atol=0)
    model = Llama(tiny(), device="meta")
    model.model.norm = GainNorm(model.model.norm.hidden_size, device="meta")
    with pytest.raises(LigerzooError, match=r"GainNorm 'model.norm': init_weights of GainNorm has not set gain, which"):
        initialize_sharded(shard_model(model))


class GainNorm(RMSNorm):
    """A norm with one more parameter, which its `init_weights` does not set."""

    def __init__(self, hidden_size: int, **factory_kwargs: Any) -> None:
        super().__init__(hidden_size, **factory_kwargs)
        self.gain = nn.Parameter(torch.ones(hidden_size, **factory_kwargs))


def steps(rank: int, model: CausalLM, optimizer: torch.optim.Optimizer, numbers: range) -> Iterator[Tensor]:
    for number in numbers:
        ids = torch.randint(33, (2, 9), generator=torch.Generator().manual_seed(number + 100 * rank))
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def optimizer_of(model: CausalLM) -> torch.optim.Optimizer:
    plain = [weight for weight in model.parameters() if weight.ndim < 2]
    decayed = [weight for weight in model.parameters() if weight.ndim >= 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


def resume(rank: int, directory: Path) -> None:
    """Saves after two steps, and continues in new objects: bit for bit with as many processes."""
    torch.manual_seed(0)
    model = shard_model(Llama(tiny(tie_word_embeddings=True, initializer_range=0.2)))
    optimizer = optimizer_of(model)
    list(steps(rank, model, optimizer, range(2)))
    optimizer.param_groups[1]["lr"] = 0.003
    with torch.no_grad():
        model(torch.arange(5)[None])  # leaves some groups gathered
    with replacing_directory_together(directory / "run") as run:
        model.save_pretrained(run / "model")
        save_optimizer(model, optimizer, run / "optimizer")
    assert sorted(path.name for path in (directory / "run").iterdir()) == ["model", "optimizer"]
    expected = list(steps(rank, model, optimizer, range(2, 5)))

    again = load_sharded(directory / "run" / "model").train()
    resumed = optimizer_of(again)
    load_optimizer(again, resumed, directory / "run" / "optimizer")
    assert [group["lr"] for group in resumed.param_groups] == [0.01, 0.003]
    assert resumed.param_groups[0]["betas"] == (0.9, 0.95)
    got = list(steps(rank, again, resumed, range(2, 5)))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    weights = zip(again.state_dict().values(), model.state_dict().values(), strict=True)
    assert all(torch.equal(full(a), full(b)) for a, b in weights)

    with pytest.raises(CheckpointError, match="other parameters or groups"):
        load_optimizer(again, torch.optim.AdamW(again.parameters()), directory / "run" / "optimizer")


def other_numbers(rank: int, directory: Path) -> None:
    """A run saved by two processes continues in another number of them, as on one process without FSDP2."""
    whole = AutoModel.from_pretrained(directory / "run" / "model").train()
    optimizer = optimizer_of(whole)
    load_optimizer(whole, optimizer, directory / "run" / "optimizer")
    model = load_sharded(directory / "run" / "model").train()
    sharded = optimizer_of(model)
    load_optimizer(model, sharded, directory / "run" / "optimizer")
    for weight, own in zip(whole.parameters(), model.parameters(), strict=True):
        for key, value in optimizer.state[weight].items():
            assert torch.equal(value, full(sharded.state[own][key]))
            assert value.dtype == sharded.state[own][key].dtype
    save_optimizer(model, sharded, directory / f"by {dist.get_world_size()}")
    assert files(directory / f"by {dist.get_world_size()}").keys() == files(directory / "run" / "optimizer").keys()


class LocalStates(torch.optim.SGD):
    """Has states that differ in shape and value between processes."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                rank = dist.get_rank()
                self.state[weight] = {
                    "codes": torch.full((2 + rank,), 7 * rank + weight.ndim, dtype=torch.uint8),
                    "moment": torch.full_like(weight.detach(), 1 / 3, dtype=torch.float64),
                    "count": 5,
                }


def local_states(rank: int, directory: Path) -> None:
    model = shard_model(Llama(tiny()))
    optimizer = LocalStates(model.parameters(), lr=0.1)
    optimizer.step()
    save_optimizer(model, [optimizer], directory / "local")
    resumed = LocalStates(model.parameters(), lr=0.1)
    load_optimizer(model, [resumed], directory / "local")
    for weight in model.parameters():
        expected, got = optimizer.state[weight], resumed.state[weight]
        assert got["count"] == 5
        assert got["codes"].dtype == torch.uint8
        assert torch.equal(got["codes"], expected["codes"])
        assert got["moment"].dtype == torch.float64
        assert torch.equal(full(got["moment"]), full(expected["moment"]))
    optimizer.state[next(model.parameters())]["hook"] = print
    with pytest.raises((CheckpointError, LigerzooError), match="cannot be stored"):
        save_optimizer(model, optimizer, directory / "local")


def three_processes(rank: int, directory: Path) -> None:
    model = shard_model(Llama(tiny()))
    optimizer = LocalStates(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="Resume with 2 processes"):
        load_optimizer(model, optimizer, directory / "local")
    other_numbers(rank, directory)


def raise_in(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("own error")


def fail(rank: int, directory: Path) -> None:
    """An error in one process is an error in all, and leaves the old directory."""
    (directory / "kept").mkdir(exist_ok=True)
    (directory / "kept" / "file").touch()
    for failing in range(dist.get_world_size()):
        expected = "own error" if rank == failing else f"rank {failing} failed; got ValueError: own error"
        with pytest.raises(ValueError, match=expected), replacing_directory_together(directory / "kept"):
            raise_in(failing)
        with pytest.raises(ValueError, match=expected), failing_together("a test"):
            raise_in(failing)
    assert [path.name for path in (directory / "kept").iterdir()] == ["file"]
    barrier("the end")
    if rank == 0:
        with pytest.raises(LigerzooError, match=r"barrier 'other processes': a process did not arrive.*[Rr]anks? 1"):
            barrier("other processes", timedelta(seconds=0.5))


def refuse(rank: int, directory: Path) -> None:
    model = shard_model(Llama(tiny()))
    with pytest.raises(LigerzooError, match="sharded already"):
        shard_model(model)
    with pytest.raises(LigerzooError, match="mesh: not a mesh to shard over"):
        shard_model(Llama(tiny()), init_device_mesh("cpu", (1, 2)))
    with pytest.raises(LigerzooError, match="prefetch: not a number of groups; got -1"):
        shard_model(Llama(tiny()), prefetch=-1)
    with pytest.raises(CheckpointError, match="tied weights have different values"):
        load_sharded(directory / "refused" / "another head")
    load_sharded(directory / "refused" / "another head", tie_word_embeddings=False)
    inputs = batches_of(directory / "gemma3")[0]
    gemma3 = load_sharded(directory / "loaded" / "gemma3")
    if rank == 0:
        inputs = {"input_ids": torch.arange(9)[None]}
    with pytest.raises(LigerzooError, match=r"pixel_values.*: given in some processes only"):
        gemma3(**inputs)


def replicated(rank: int, directory: Path) -> None:
    """Two dimensions: shards over one and replicates over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = load_sharded(directory / "loaded" / "llama", mesh).train()
    whole = AutoModel.from_pretrained(directory / "loaded" / "llama")
    for name, weight in model.state_dict().items():
        assert torch.equal(full(weight), whole.state_dict()[name])
    batches = batches_of(directory / "llama")
    _, expected = gradients(whole.train(), batches, labels_of(batches))
    _, actual = gradients(model, batches[rank::4], labels_of(batches) / 4)
    compare(actual, expected, "replicated")
    model.save_pretrained(directory / "saved" / "replicated", max_shard_size="20KiB")
    assert files(directory / "saved" / "replicated") == files(directory / "expected" / "llama")
