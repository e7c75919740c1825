"""Activation plans that fit a budget."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ligerzoo.errors import LigerzooError
from ligerzoo.memory import ActivationPlan, Recompute, apply_activation_plan, plan_activations
from ligerzoo.memory.plan import efficient_levels
from ligerzoo.memory.simulation import StepMemory
from ligerzoo.models import CausalLM, Llama, LlamaConfig
from ligerzoo.optimizer_table import LOW_BIT

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=224, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Llama:
    torch.manual_seed(0)
    return Llama(CONFIG)


def plan(model: CausalLM, budget: Any, **options: Any) -> ActivationPlan:
    return plan_activations(model, batch_size=2, seq_length=512, budget=budget, **options)


def test_smaller_budgets_recompute_more(model: Llama) -> None:
    whole = plan(model, None)
    assert set(whole.levels) == {Recompute.NOTHING}
    assert whole.extra_flops == 0
    assert whole.budget is None
    least = None
    peaks, sums = [], []
    for share in (1.0, 0.98, 0.95, 0.92, 0.9, 0.88, 0.87, 0.86):
        budget = share * whole.step.peak / 2**30
        try:
            chosen = plan(model, budget)
        except LigerzooError:
            least = share
            break
        assert chosen.step.peak <= chosen.budget
        assert list(chosen.levels) == sorted(chosen.levels, reverse=True)
        peaks.append(chosen.step.peak)
        sums.append(sum(chosen.levels))
    assert len(peaks) >= 4
    assert sums == sorted(sums)
    assert len(set(sums)) >= 4
    assert least is None or peaks[-1] < whole.step.peak


def test_a_plan_recomputes_no_more_than_it_must(model: Llama) -> None:
    whole = plan(model, None)
    one_block_less = plan(model, (whole.step.peak - 4096) / 2**30)
    assert one_block_less.levels == (Recompute.ELEMENTWISE,) + (Recompute.NOTHING,) * 5


def test_a_budget_that_nothing_fits(model: Llama) -> None:
    with pytest.raises(LigerzooError, match=r"a training step of 2 x 512 tokens does not fit; got .* with everything "
                       r"recomputed; expected at most 0.06 GiB\. Use a smaller batch"):  # fmt: skip
        plan(model, 0.06)


@pytest.mark.parametrize("budget", ["all", 0, -1.0, True])
def test_budgets_that_are_none(model: Llama, budget: Any) -> None:
    with pytest.raises(LigerzooError, match=r"^budget=.*; expected a positive number of GiB, \"auto\" or None"):
        plan(model, budget)


@pytest.mark.parametrize("name, value", [("batch_size", 0), ("seq_length", 2.0), ("gpus", -1)])
def test_counts_are_checked(model: Llama, name: str, value: Any) -> None:
    options: dict[str, Any] = {"batch_size": 1, "seq_length": 8, name: value}
    with pytest.raises(LigerzooError, match=f"^{name}={value}; expected an integer, 1 or more"):
        plan_activations(model, **options)


def test_auto_without_a_gpu_has_no_limit(model: Llama) -> None:
    assert plan(model, "auto").budget is None


def test_planning_leaves_the_model_alone(model: Llama) -> None:
    before = {name: (id(p), p._version, p.grad) for name, p in model.named_parameters()}
    plan(model, None)
    assert before == {name: (id(p), p._version, p.grad) for name, p in model.named_parameters()}
    assert model.model.activation_plan == ()
    assert not any(p.is_meta for p in model.parameters())


def test_a_plan_prints_as_a_table(model: Llama) -> None:
    whole = plan(model, None)
    chosen = plan(model, 0.97 * whole.step.peak / 2**30)
    lines = str(chosen).splitlines()
    assert lines[0].startswith("activation plan for 2 x 512 tokens per GPU, within 0.0")
    assert any("recomputed" in line and line.startswith("  block") for line in lines)
    assert lines[-1].startswith("  peak             0.0")


def test_an_applied_plan_gives_the_same_gradients(model: Llama) -> None:
    ids = torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(0))
    whole = plan(model, None)
    gradients = []
    for budget in (1.0, 0.95, 0.9):
        chosen = plan(model, budget * whole.step.peak / 2**30)
        model.gradient_checkpointing_enable()
        apply_activation_plan(model, chosen)
        assert model.model.activation_plan == chosen.levels
        assert not model.model.gradient_checkpointing
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    model.model.activation_plan = ()
    assert all(all(map(torch.equal, gradients[0], others)) for others in gradients[1:])


def test_a_plan_of_another_model(model: Llama) -> None:
    shallow = Llama(LlamaConfig(**{**vars(CONFIG), "num_hidden_layers": 2}))
    with pytest.raises(LigerzooError, match=r"^plan: an activation plan for another model; got 6 blocks; expected 2"):
        apply_activation_plan(shallow, plan(model, None))


@pytest.mark.parametrize("optimizer", LOW_BIT)
def test_quantized_states_of_sharded_weights_are_refused(model: Llama, optimizer: str) -> None:
    plan(model, None, optimizer=optimizer)
    message = f"optimizer: cannot update sharded weights; got {optimizer}; expected adamw, muon, sgd"
    with pytest.raises(LigerzooError, match=message):
        plan(model, None, optimizer=optimizer, gpus=2)


def test_more_gpus_need_less_each(model: Llama) -> None:
    one, two, many = (plan(model, None, gpus=gpus).step for gpus in (1, 2, 64))
    assert one.optimizer_states == 2 * two.optimizer_states
    assert one.peak > two.peak > many.peak
    assert one.flops == many.flops


def test_shared_weights_stay_gathered_if_they_fit(model: Llama) -> None:
    plain = plan(model, None, gpus=2)
    assert not plain.keeps_gathered  # no limit, as on a CPU
    gathered = plan(model, 100.0, gpus=2)
    assert gathered.keeps_gathered
    assert "gathered from forward to backward" in str(gathered)
    blocks = sum(parameter.nbytes for parameter in model.model.layers.parameters())
    assert 0 < gathered.step.peak - plain.step.peak < blocks
    assert gathered.step.flops == plain.step.flops
    tight = plan(model, plain.step.peak / 2**30, gpus=2)
    assert (tight.levels, tight.keeps_gathered) == (plain.levels, False)
    assert not plan(model, 100.0).keeps_gathered


def test_sharded_weights_are_refused() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        sharded = Llama(CONFIG)
        chosen = plan(sharded, None)
        for layer in sharded.model.layers:
            fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(LigerzooError, match=r"^model: the weights are sharded. Plan before sharding"):
            plan(sharded, None)
        apply_activation_plan(sharded, chosen)
    finally:
        dist.destroy_process_group()


def test_levels_that_save_nothing_or_cost_too_much_are_skipped() -> None:
    def step(kept: int, teraflops: float) -> StepMemory:
        return StepMemory(
            weights=0, optimizer_states=0, gradients=0, activations=kept, workspace=0,
            flops=int(teraflops * 1e12), kept=(kept,),
        )  # fmt: skip

    gigabyte = 10**9
    steps = [step(8 * gigabyte, 10), step(8 * gigabyte, 10), step(7 * gigabyte, 19), step(gigabyte, 20)]
    assert efficient_levels(dict(zip(Recompute, steps, strict=True))) == [Recompute.NOTHING, Recompute.BLOCK]
    steps[2] = step(2 * gigabyte, 11)
    assert efficient_levels(dict(zip(Recompute, steps, strict=True))) == [
        Recompute.NOTHING, Recompute.MLP, Recompute.BLOCK,
    ]  # fmt: skip
