"""What each process of `test_context_parallel.py` does. Does not import transformers, which takes seconds."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ligerzoo import AutoModel, AutoModelForSequenceClassification
from ligerzoo.adapters import add_lora
from ligerzoo.errors import LigerzooError
from ligerzoo.hub import read_config
from ligerzoo.kernels.loss.chunked_head import HeadInputs
from ligerzoo.kernels.recompute import Recompute
from ligerzoo.losses import DPO, GRPO, KTO, Distillation, model_token_logps, objective
from ligerzoo.losses.modules import HeadLoss
from ligerzoo.models import CausalLM
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.models.sequence_classifier import SequenceClassifier
from ligerzoo.parallel import context_parallel, items_per_process, parallelize, shard_model

Inputs = dict[str, Any]


def build(directory: Path) -> CausalLM:
    """A model whose weights are so large that every part of it shows in the gradients."""
    torch.manual_seed(0)
    model = AutoModel.from_config(read_config(directory), dtype="float32", device="cpu")
    model.init_weights(0.2)
    for name, weight in model.named_parameters():
        if name.endswith(("attn_gate", "mlp_gate")):
            torch.nn.init.constant_(weight, 0.5)  # instead of 0
    return model.train()


def pair(directory: Path) -> tuple[CausalLM, CausalLM]:
    """A model, and one whose rows are divided."""
    return build(directory), divide(build(directory))


def divide(model: CausalLM) -> CausalLM:
    return context_parallel(model, dist.group.WORLD)


def batch(tokens: int, rows: int = 1) -> Inputs:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(3, 90, (rows, tokens), generator=generator)
    labels = ids.clone()
    labels[:, tokens // 3 : tokens // 2] = -100
    return {"input_ids": ids, "labels": labels}


def packed(*lengths: int) -> Inputs:
    positions = torch.cat([torch.arange(length) for length in lengths])
    return batch(sum(lengths)) | {"position_ids": positions[None]}


def padded(tokens: int) -> Inputs:
    given = batch(tokens, rows=2)
    mask = torch.ones_like(given["input_ids"])
    mask[0, :7], mask[1, -9:] = 0, 0
    return given | {"attention_mask": mask, "labels": given["labels"].masked_fill(mask == 0, -100)}


def batches() -> Iterator[Inputs]:
    yield padded(30)
    yield batch(29) | {"num_items_in_batch": 50}  # parts of unequal lengths
    yield batch(30) | {"cu_seqlens": torch.tensor([0, 11, 25])}  # then padding
    yield packed(3, 17, 1, 10)


def gradients(model: LanguageModel, loss: Tensor, count: int = 1) -> dict[str, Tensor]:
    """The gradients of a loss, averaged over `count` processes."""
    model.zero_grad()
    loss.backward()
    found = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
            if isinstance(gradient, DTensor):
                gradient = gradient.full_tensor()
            elif count > 1:
                dist.all_reduce(gradient)
                gradient /= count
            found[name] = gradient
    return found


def assert_close(actual: Tensor, expected: Tensor, where: str) -> None:
    scale = max(float(expected.detach().abs().max()), 1e-3)  # of biases of keys, it is 0 but for rounding
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * scale, msg=lambda text: f"{where}: {text}")


def compare(where: str, whole: CausalLM, divided: CausalLM, inputs: Inputs) -> None:
    """Loss and gradients of divided rows equal those of whole rows."""
    where = f"{where}, {', '.join(inputs)} of {tuple(inputs['input_ids'].shape)}"
    expected, found = whole(**inputs), divided(**inputs)
    assert_close(found.loss, expected.loss, where)
    if expected.aux_loss is not None:
        assert_close(found.aux_loss, expected.aux_loss, where)
    compare_gradients(where, whole, divided, expected.loss, found.loss)


def compare_gradients(
    where: str, whole: LanguageModel, divided: LanguageModel, expected: Tensor, found: Tensor
) -> None:
    ours, theirs = gradients(divided, found, dist.get_world_size()), gradients(whole, expected)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert_close(ours[name], gradient, f"{where}, {name}")


def families(rank: int, directory: Path) -> None:
    for path in sorted(directory.iterdir()):
        whole, divided = pair(path)
        for inputs in batches():
            compare(path.name, whole, divided, inputs)


def options(rank: int, directory: Path) -> None:
    """What a run adds to a forward, on some models."""
    families(rank, directory / "families")
    for check in (checkpoints, adapters, sharded, wrapped, objectives, outputs, generation, refusals):
        check(directory / "families")
    for path in sorted((directory / "images").iterdir()):
        images(path)


def four(rank: int, directory: Path) -> None:
    """More processes than key heads; and two parts of rows by two parts of each layer."""
    families(rank, directory)
    for name in ("llama", "odd"):
        whole, divided = pair(directory / name)
        compare(name, whole, divided, batch(5))  # a process without tokens
        compare(name, whole, parallelize(build(directory / name), "context=2 tensor=2"), packed(3, 17, 1, 10))


def checkpoints(directory: Path) -> None:
    """With activation checkpointing, and with an activation plan."""
    for name in ("qwen3", "gpt_oss", "deepseek_v3", "qwen3_next"):
        whole, divided = pair(directory / name)
        divided.gradient_checkpointing_enable()
        compare(f"{name}, checkpointed", whole, divided, packed(3, 17, 1, 10))
        divided.gradient_checkpointing_disable()
        levels = [Recompute.ELEMENTWISE, Recompute.MLP, Recompute.BLOCK, Recompute.NOTHING]
        count = len(divided.model.layers)
        divided.model.activation_plan = tuple((levels * count)[:count])
        compare(f"{name}, planned", whole, divided, batch(29))


def adapters(directory: Path) -> None:
    for name in ("qwen3", "deepseek_v3", "qwen3_next"):
        whole, divided = pair(directory / name)
        for model in (whole, divided):
            torch.manual_seed(1)
            add_lora(model, 2, 4)
            for key, weight in model.named_parameters():
                if key.endswith("lora_B"):
                    torch.nn.init.normal_(weight)
        compare(f"{name}, LoRA", whole, divided, batch(29))


def sharded(directory: Path) -> None:
    """With FSDP2 over the same processes, which averages gradients; tied embeddings, and two microbatches."""
    for name in ("gemma2", "qwen3_moe"):
        whole, divided = build(directory / name), shard_model(divide(build(directory / name)))
        micro_batches = [batch(29), packed(3, 17, 1, 10)]
        labels = sum(int((inputs["labels"][:, 1:] != -100).sum()) for inputs in micro_batches) - 3  # of the segments
        items = items_per_process(labels)
        assert items == labels
        expected, found = (
            sum(model(**inputs, num_items_in_batch=items).loss for inputs in micro_batches)
            for model in (whole, divided)
        )
        assert_close(found, expected, name)
        compare_gradients(f"{name}, sharded", whole, divided, expected, found)


def wrapped(directory: Path) -> None:
    """In DistributedDataParallel, which averages gradients too; and a classifier."""
    whole, divided = pair(directory / "qwen3_moe")
    inputs = packed(3, 17, 1, 10)
    expected = gradients(whole, whole(**inputs).loss)
    wrapper = DistributedDataParallel(divided)  # without a reference, it would not average gradients
    wrapper(**inputs).loss.backward()
    for name, weight in divided.named_parameters():
        assert weight.grad is not None
        assert_close(weight.grad, expected[name], f"DDP, {name}")

    def classifier() -> SequenceClassifier:
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(read_config(directory / "qwen3"), num_labels=3)
        model.init_weights(0.2)
        return model

    models = classifier(), context_parallel(classifier(), dist.group.WORLD)
    inputs = {name: value for name, value in padded(30).items() if name != "labels"}
    one, two = (model(**inputs, labels=torch.tensor([0, 2])) for model in models)
    assert_close(two.logits, one.logits, "classifier")
    compare_gradients("classifier", *models, one.loss, two.loss)


def objectives(directory: Path) -> None:
    """Losses over whole sequences, which several share a row: each process has a part of the log-probabilities."""
    sequences = torch.tensor([[0, 1, -1], [3, 4, 5], [21, 22, -1], [24, 25, 26]])
    logps = torch.tensor([[-3.0, -4.0, 0.0], [-2.0, -4.0, -1.0], [-3.0, -2.0, 0.0], [-4.0, -2.0, -1.0]])
    rollout = {"advantages": torch.tensor([1.0, -1.0, 0.5, -0.5]), "old_logps": logps, "ref_logps": logps - 1}
    losses: list[tuple[HeadLoss, Inputs]] = [
        (DPO(), {"ref_logps": torch.tensor([-9.0, -8.0, -9.0, -5.0])}),
        (GRPO(beta=0.1, with_entropy=True, entropy_coef=0.1), rollout),
        (KTO(), {"ref_logps": torch.tensor([-9.0, -8.0, -9.0, -5.0]), "desirable": torch.arange(4) < 2}),
    ]
    for name in ("qwen3", "qwen3_moe"):
        whole, divided = pair(directory / name)
        inputs = packed(3, 17, 1, 10)
        inputs["labels"] = inputs["input_ids"]
        positions = {"position_ids": inputs.pop("position_ids")}
        for loss, given in losses:
            of = partial(loss.of, **inputs, **given, sequences=sequences, model_inputs=positions)
            with recorded_heads() as tokens:
                expected, found = of(whole), of(divided)
            assert tokens == [-(-sequences.numel() // dist.get_world_size())]  # of the whole model, in one sweep
            for key, metric in expected.metrics.items():
                assert_close(found.metrics[key], metric, key)
            compare_gradients(f"{name}, {type(loss).__name__}", whole, divided, expected.loss, found.loss)
        teachers = pair(directory / name)
        for num_items in (None, 50):
            shared = {"hard_weight": 0.5, "num_items": num_items, "model_inputs": positions}
            expected, found = (
                Distillation().of_teacher(model, teacher.requires_grad_(False), *inputs.values(), **shared)
                for model, teacher in zip((whole, divided), teachers, strict=True)
            )
            for key, metric in expected.metrics.items():
                assert_close(found.metrics[key], metric, key)
            compare_gradients(f"{name}, distillation", whole, divided, expected.loss, found.loss)
        labels = inputs["labels"]
        one, two = (model_token_logps(model, labels, labels, **positions) for model in (whole, divided))
        assert_close(two, one, "log-probabilities")


@contextmanager
def recorded_heads() -> Iterator[list[int]]:
    """Records of how many tokens log-probabilities are computed outside of a sweep."""
    results, tokens = objective.token_results, []

    def recorded(name: str, head: HeadInputs, *args: Any, **options: Any) -> Any:
        tokens.append(head.hidden.shape[:-1].numel())
        return results(name, head, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objective, "token_results", recorded)
        yield tokens


def outputs(directory: Path) -> None:
    """Logits, hidden states and router logits are those of all tokens, and differentiable."""
    whole, divided = pair(directory / "qwen3_moe")
    ids = batch(29, rows=2)["input_ids"]
    expected, found = (
        model(ids, output_hidden_states=True, output_router_logits=True, logits_to_keep=3) for model in (whole, divided)
    )
    assert_close(found.logits, expected.logits, "logits")
    for name in ("hidden_states", "router_logits"):
        for ours, theirs in zip(getattr(found, name), getattr(expected, name), strict=True):
            assert_close(ours, theirs, name)
    losses = (out.logits.square().sum() + out.hidden_states[1].square().sum() for out in (expected, found))
    compare_gradients("outputs", whole, divided, *losses)


def generation(directory: Path) -> None:
    """Calls with a cache are not divided: processes may generate different texts."""
    whole, divided = pair(directory / "qwen3_next")
    ids = batch(7 + 2 * dist.get_rank())["input_ids"]
    for model in (whole, divided):
        model.eval()
        model.generation_config = {}
    assert torch.equal(
        divided.generate(ids, max_new_tokens=4 + dist.get_rank()),
        whole.generate(ids, max_new_tokens=4 + dist.get_rank()),
    )


def refusals(directory: Path) -> None:
    divided = divide(build(directory / "qwen3_next"))
    with pytest.raises(LigerzooError, match="output_attentions: each process has those of its heads only"):
        divided(**batch(8), output_attentions=True)
    hole = torch.ones(1, 8)
    hole[0, 3] = 0
    with pytest.raises(ValueError, match="got padding within a text; expected it at the ends of rows, for GatedDelta"):
        divided(**batch(8), attention_mask=hole)
    with pytest.raises(LigerzooError, match=r"block 0: heads that .*; got 1 heads; expected a multiple of 2, "):
        divide(build(directory.parent / "one key head"))
    foreign = build(directory / "llama")
    foreign.model.layers[0] = torch.nn.Identity()
    with pytest.raises(LigerzooError, match="block 0: a layer that cannot exchange heads; got Identity"):
        divide(foreign)


def images(path: Path) -> None:
    """Images of any part of a row: positions on several axes, bidirectional spans, and features between blocks."""
    whole, divided = pair(path)
    compare(path.name, whole, divided, torch.load(path / "inputs.pt"))


def zoo(rank: int, directory: Path) -> None:
    """Every model, or its refusal."""
    refusals = []
    for path in sorted(directory.iterdir()):
        try:
            whole, divided = pair(path)
        except LigerzooError as error:
            refusals.append(str(error))
        else:
            whole.eval()
            divided.eval()  # without noise in routers
            last = len(whole.lm_head.weight) - 1
            for inputs in (batch(29, rows=2), packed(3, 17, 1, 10)):
                within = {name: inputs[name].clamp(max=last) for name in ("input_ids", "labels")}
                compare(path.name, whole, divided, inputs | within)
    assert len(refusals) < 10
    assert all(re.search("heads that cannot be divided; got 1 heads", one) for one in refusals)


def eight(rank: int, directory: Path) -> None:
    """One axis of eight processes, and three of two."""
    families(rank, directory)
    for path in sorted(directory.iterdir()):
        whole = build(path)
        for mesh in ("shard=2 context=4", "replicate=2 shard=2 context=2", "shard=2 context=2 tensor=2"):
            compare(f"{path.name}, {mesh}", whole, parallelize(build(path), mesh), packed(3, 17, 1, 10))
