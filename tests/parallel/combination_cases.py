"""What each process of `test_combinations.py` does. Does not import transformers, which takes seconds."""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ligerzoo.adapters import add_lora
from ligerzoo.dtensors import full
from ligerzoo.kernels.recompute import Recompute
from ligerzoo.layers.moe import MoE
from ligerzoo.losses import DPO, GRPO
from ligerzoo.models import CausalLM
from ligerzoo.parallel import MeshSizes, accumulating, make_mesh, parallelize
from ligerzoo.train.captured_step import part_of_loss
from ligerzoo.train.optimizers import clip_grad_norm
from tests.parallel.context_cases import Inputs, build
from tests.parallel.tensor_cases import part_of_data

MAX_NORM = 1e-4
SEQUENCES = torch.tensor([[0, 1, -1], [3, 4, 5], [14, 15, 16], [24, 25, -1]])
"""Tokens that predict the labels of two pairs, in two segments of a row."""


class Case(NamedTuple):
    """A model over a mesh.

    Attributes:
        family: name of the directory with its config.json.
        mesh: the sizes.
        options: what the step has: "accumulate", "checkpoints", "dpo", "grpo", "lora", "plan".
    """

    family: str
    mesh: str
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join((self.family, self.mesh, *self.options))


class Result(NamedTuple):
    """What a step computes.

    Attributes:
        loss: of this process.
        norm: of all gradients.
        gradients: after clipping, whole.
        experts: those of the tokens of this process, (T, k) for each batch and layer.
    """

    loss: float
    norm: float
    gradients: dict[str, Tensor]
    experts: list[Tensor]


def batches(directory: Path) -> list[Inputs]:
    """Four rows; with images, if the family reads them."""
    if (file := directory / "inputs.pt").exists():
        return list(torch.load(file))
    positions = torch.cat([torch.arange(11), torch.arange(21)])[None]
    rows = torch.randint(3, 90, (4, 1, 32), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row, "position_ids": positions} for row in rows]


def new_model(directory: Path, options: Sequence[str]) -> CausalLM:
    model = build(directory)
    if "lora" in options:
        torch.manual_seed(1)
        add_lora(model, 2, 4)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
    if "checkpoints" in options:
        model.gradient_checkpointing_enable()
    if "plan" in options:
        levels = Recompute.ELEMENTWISE, Recompute.MLP, Recompute.BLOCK, Recompute.NOTHING
        model.model.activation_plan = levels[: len(model.model.layers)]
    return model


def loss_of(model: CausalLM, inputs: Inputs, options: Sequence[str], items: float, count: int) -> Tensor:
    """Returns the part of a batch in the loss of a step of `count` batches of this process."""
    given = dict(inputs)
    shared = {"aux_loss_share": 1 / count, "num_items": torch.tensor(items)}
    pairs: Any = {**shared, "sequences": SEQUENCES, "model_inputs": {"position_ids": given.pop("position_ids", None)}}
    if "dpo" in options:
        return DPO().of(model, **given, **pairs, ref_logps=torch.tensor([-9.0, -8.0, -9.0, -5.0])).loss
    if "grpo" in options:
        logps = torch.tensor([[-3.0, -4.0, 0.0], [-2.0, -4.0, -1.0], [-3.0, -1.0, -2.0], [-4.0, -2.0, 0.0]])
        rollout: Any = {"advantages": torch.tensor([1.0, -1.0, 0.5, -0.5]), "old_logps": logps, "ref_logps": logps - 1}
        return GRPO(variant="gspo", beta=0.1).of(model, **given, **pairs, **rollout).loss
    return part_of_loss(model, model(**inputs, num_items_in_batch=torch.tensor(items)), count)


def step(model: CausalLM, rows: Sequence[Inputs], options: Sequence[str], items: float) -> Result:
    """Computes the gradients of all rows of this process, and clips them."""
    experts: dict[tuple[int, int], Tensor] = {}
    batch = 0

    def record(layer: int, module: object, args: object, routing: tuple[Tensor, Tensor, Tensor]) -> None:
        experts.setdefault((batch, layer), routing[1])  # backward may compute it again

    mixtures = [module for module in model.modules() if isinstance(module, MoE)]
    hooks = [one.gate.register_forward_hook(partial(record, layer)) for layer, one in enumerate(mixtures)]
    total = 0.0
    for batch, inputs in enumerate(rows):
        waits = "accumulate" in options and dist.is_initialized() and batch < len(rows) - 1
        with accumulating(model) if waits else contextlib.nullcontext():
            loss = loss_of(model, inputs, options, items, len(rows))
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    for hook in hooks:
        hook.remove()
    norm = clip_grad_norm(model, MAX_NORM).item()
    weights = model.named_parameters()
    gradients = {name: full(weight.grad) for name, weight in weights if weight.grad is not None}
    return Result(total, norm, gradients, list(experts.values()))


def items_of(rows: Sequence[Inputs], options: Sequence[str]) -> int:
    if "dpo" in options or "grpo" in options:
        return 4
    return sum(int((inputs["labels"][:, 1:] != -100).sum()) for inputs in rows)


def in_one_process(directory: Path, options: Sequence[str]) -> Result:
    rows = batches(directory)
    return step(new_model(directory, options), rows, options, items_of(rows, options))


def equal_one_process(rank: int, cases: Sequence[Case], directory: Path) -> None:
    """Losses, norms, clipped gradients and experts of each case are those of one process."""
    meshes = {sizes: make_mesh(sizes) for sizes in dict.fromkeys(case.mesh for case in cases)}
    wrong = []
    for number, case in enumerate(cases):
        wrong += [f"{case}: {what}" for what in differences(case, number, meshes[case.mesh], directory)]
    assert not wrong, "\n".join(wrong)


def differences(case: Case, number: int, mesh: DeviceMesh, directory: Path) -> Iterator[str]:
    """Yields what differs from one process."""
    rows = batches(directory / case.family)
    own, items = part_of_data(mesh), items_of(rows, case.options)
    model = parallelize(new_model(directory / case.family, case.options), mesh)
    found = step(model, rows[own], case.options, items * len(rows[own]) / len(rows))
    expected = Result(*torch.load(directory / f"{number}.pt"))
    assert expected.norm > MAX_NORM, str(case)
    assert MeshSizes.parse(case.mesh).expert == 1 or found.experts
    loss = torch.tensor(found.loss)
    dist.all_reduce(loss)
    numbers = {"loss": (float(loss) / dist.get_world_size(), expected.loss), "norm": (found.norm, expected.norm)}
    for name, (one, other) in numbers.items():
        if abs(one - other) > 1e-5 * abs(other):
            yield f"{name} {one}, expected {other}"
    assert found.gradients.keys() == expected.gradients.keys(), str(case)
    for name, gradient in expected.gradients.items():
        scale = max(float(gradient.abs().max()), 1e-3 * MAX_NORM)  # of biases of keys, it is 0 but for rounding
        difference = float((found.gradients[name] - gradient).abs().max()) / scale
        if difference > 1e-5:
            yield f"{name} by {difference:.1e} of {scale:.1e}"
    if "tensor" in case.mesh and "position_ids" in rows[0]:  # tokens of layers are divided, but not with a cache
        with torch.no_grad():
            divided, cached = (model(rows[0]["input_ids"], use_cache=flag).logits for flag in (False, True))
        if float((divided - cached).abs().max()) > 1e-4:
            yield "other logits with a cache"
    layers = len(expected.experts) // len(rows)
    theirs = [expected.experts[index : index + layers] for index in range(0, len(expected.experts), layers or 1)]
    of_rows = [ids for batch in theirs[own] for ids in batch]
    parts = model.row_parts.of(rows[0]["input_ids"].shape[1])
    for ids, whole in zip(found.experts, of_rows, strict=True):
        of_parts = parts.own(whole[None])  # those of this process of context, then of tensor
        own = model.residual_parts.of(of_parts.shape[1]).own(of_parts)[0]
        if not torch.equal(ids.sort(-1).values, own.sort(-1).values):
            yield "other experts"
