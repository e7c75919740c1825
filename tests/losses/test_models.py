"""The losses of models: plain and wrapped, on one process and on two."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ligerzoo import losses
from ligerzoo.losses import model_sequence_logps, model_token_logps
from ligerzoo.models import CausalLM, Ernie4_5Moe, Ernie4_5MoeConfig, Llama, LlamaConfig, Mixtral, MixtralConfig
from tests.losses import oracles
from tests.parallel.spawning import PROCESSES, on_all_processes

IGNORED = -100


def tiny(tied: bool = True, layers: int = 2, seed: int = 0, vocab: int = 31, width: int = 16) -> Llama:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tied, initializer_range=0.3,
    )  # fmt: skip
    return Llama(config)


def batch_of(batch: int = 4, length: int = 7, vocab: int = 31, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Token ids, and labels with ignored prompts."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(vocab, (batch, length), generator=generator)
    labels = input_ids.clone()
    for i in range(batch):
        labels[i, : 1 + i % 3] = IGNORED
    return input_ids, labels


def naive_logps(model: CausalLM, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T) log-probabilities from all logits, and the shifted targets."""
    logits = model(input_ids).logits
    target = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    logps = logits.float().log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
    return torch.where(target != IGNORED, logps, 0.0), target


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    assert actual.keys() == expected.keys()
    largest = max(e.abs().max().item() for e in expected.values())
    for name, e in expected.items():
        torch.testing.assert_close(
            actual[name], e, rtol=0, atol=tolerance * largest, msg=lambda m, name=name: f"{name}: {m}"
        )


# References and teachers


def test_reference_logps_are_constants() -> None:
    model, reference = tiny(), tiny(seed=5)
    input_ids, labels = batch_of()
    ref_logps = model_sequence_logps(reference, input_ids, labels)
    torch.testing.assert_close(ref_logps, naive_logps(reference, input_ids, labels)[0].sum(-1), rtol=1e-5, atol=0)
    assert ref_logps.requires_grad
    for loss in (losses.DPO(), losses.KTO(desirable=torch.tensor([True, False, True, False]))):
        expected = gradients_of(model, loss.of(model, input_ids, labels, ref_logps=ref_logps.detach()).loss)
        assert_close(gradients_of(model, loss.of(model, input_ids, labels, reference=reference).loss), expected, 1e-6)
    assert all(p.grad is None for p in reference.parameters())
    with pytest.raises(TypeError, match="SimPO does not use a reference model"):
        losses.SimPO().of(model, input_ids, labels, reference=reference)


def test_grpo_with_temperature() -> None:
    """`model_token_logps` returns log-probabilities aligned with the loss, at its temperature."""
    model, reference = tiny(), tiny(seed=5)
    input_ids, labels = batch_of()
    advantages = torch.tensor([1.0, -0.5, 0.3, 2.0])
    old = model_token_logps(tiny(seed=6), input_ids, labels, temperature=0.7).detach()
    ref = model_token_logps(reference, input_ids, labels, temperature=0.7).detach()
    loss = losses.GRPO(temperature=0.7, beta=0.2)
    out = loss.of(model, input_ids, labels, advantages, old_logps=old, reference=reference)
    overridden = losses.GRPO(beta=0.2).of(
        model, input_ids, labels, advantages, old_logps=old, reference=reference, temperature=0.7
    )
    torch.testing.assert_close(overridden.loss, out.loss, rtol=0, atol=0)
    logits = model(input_ids).logits / 0.7
    target = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    logps = logits.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
    expected = oracles.grpo(logps, logps, target, advantages, old_logps=old, ref_logps=ref, beta=0.2)
    expected_gradients = gradients_of(model, expected)
    torch.testing.assert_close(out.loss, expected, rtol=1e-5, atol=1e-6)
    assert_close(gradients_of(model, out.loss), expected_gradients)


@pytest.mark.parametrize("divergence", ["forward_kl", "cosine"])
def test_teacher_of_another_size(divergence: str) -> None:
    student, teacher = tiny(), tiny(seed=5, width=32, tied=False)
    teacher.lm_head.softcap, teacher.lm_head.logit_scale = 4.0, 0.8
    input_ids, labels = batch_of()
    target = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    student_logits, teacher_logits = (
        student(input_ids).logits[target != IGNORED],
        teacher(input_ids).logits[target != IGNORED],
    )
    if divergence == "cosine":
        expected = (1 - F.cosine_similarity(student_logits, teacher_logits, dim=-1)).mean()
    else:
        expected = F.kl_div(
            student_logits.log_softmax(-1), teacher_logits.log_softmax(-1), log_target=True, reduction="batchmean"
        )
    expected = expected + 0.5 * F.cross_entropy(student_logits, target[target != IGNORED])
    expected_gradients = gradients_of(student, expected)
    teacher.zero_grad()
    out = losses.Distillation(divergence=divergence, hard_weight=0.5).of_teacher(student, teacher, input_ids, labels)
    torch.testing.assert_close(out.loss, expected, rtol=1e-5, atol=1e-6)
    assert_close(gradients_of(student, out.loss), expected_gradients)
    assert all(p.grad is None for p in teacher.parameters())
    with torch.no_grad():
        without_gradient = losses.Distillation(divergence=divergence, hard_weight=0.5).of_teacher(
            student, teacher, input_ids, labels
        )
    assert not without_gradient.loss.requires_grad
    torch.testing.assert_close(without_gradient.loss, out.loss.detach())


@pytest.mark.parametrize("tied", [True, False])
def test_bias_of_the_head(tied: bool) -> None:
    """Each loss of a model, its reference and its teacher is that of their logits."""
    models = []
    for seed in (0, 5):
        config = Ernie4_5MoeConfig(
            vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, num_experts=4, num_experts_per_tok=2, use_bias=True, tie_word_embeddings=tied,
            initializer_range=0.3,
        )  # fmt: skip
        torch.manual_seed(seed)
        models.append(Ernie4_5Moe(config))
        nn.init.normal_(models[-1].lm_head.bias)
    model, other = models
    input_ids, labels = batch_of()
    target = F.pad(labels[:, 1:], (0, 1), value=IGNORED)

    def check(actual: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
        gradients = gradients_of(model, expected)
        assert gradients["lm_head.bias"].any()
        assert_close(gradients_of(model, actual), gradients)

    def logits() -> Tensor:
        return model(input_ids).logits

    check(model(input_ids, labels=labels).loss, F.cross_entropy(logits().flatten(0, 1), target.flatten()))
    sequence_logps = model_sequence_logps(other, input_ids, labels)
    token_logps = model_token_logps(other, input_ids, labels)
    torch.testing.assert_close(token_logps, naive_logps(other, input_ids, labels)[0], rtol=1e-5, atol=1e-6)
    for loss in (losses.DPO(), losses.KTO(desirable=torch.tensor([True, False, True, False]))):
        expected = loss(logits(), None, target, ref_logps=sequence_logps.detach()).loss
        check(loss.of(model, input_ids, labels, reference=other).loss, expected)
    for loss in (losses.SimPO(), losses.CPO(), losses.ORPO()):
        check(loss.of(model, input_ids, labels).loss, loss(logits(), None, target).loss)
    given = {"advantages": torch.tensor([1.0, -0.5, 0.3, 2.0]), "old_logps": token_logps.detach()}
    grpo = losses.GRPO(beta=0.2)
    expected = grpo(logits(), None, target, **given, ref_logps=token_logps.detach()).loss
    check(grpo.of(model, input_ids, labels, **given, reference=other).loss, expected)
    for divergence in ("forward_kl", "cosine"):
        distillation = losses.Distillation(divergence=divergence, hard_weight=0.5)
        expected = distillation(logits(), None, target, teacher_logits=other(input_ids).logits).loss
        check(distillation.of_teacher(model, other, input_ids, labels).loss, expected)


def test_frozen_head_and_activation_checkpointing() -> None:
    model = tiny(tied=False)
    input_ids, labels = batch_of()
    expected = gradients_of(model, losses.ORPO().of(model, input_ids, labels).loss)
    model.gradient_checkpointing_enable()
    assert_close(gradients_of(model, losses.ORPO().of(model, input_ids, labels).loss), expected, 1e-6)
    model.lm_head.requires_grad_(False)
    actual = gradients_of(model, losses.ORPO().of(model, input_ids, labels).loss)
    assert_close(actual, {name: g for name, g in expected.items() if name != "lm_head.weight"}, 1e-6)


def test_options() -> None:
    assert repr(losses.DPO(variant="ipo", beta=0.2)) == "DPO(variant='ipo', beta=0.2)"
    assert losses.GRPO(softcap=3.0).options == {"softcap": 3.0}
    with pytest.raises(TypeError, match=r"DPO: unknown option gamma=1\.0; expected an option of DPO"):
        losses.DPO(gamma=1.0)
    with pytest.raises(TypeError, match="DPO: unknown option hidden=1"):
        losses.DPO(hidden=1)
    model = tiny()
    input_ids, labels = batch_of()
    expected = losses.CPO(variant="ipo", beta=0.2).of(model, input_ids, labels).loss
    for loss, overrides in (
        (losses.CPO(variant="ipo", beta=0.2, logits_budget=0), {}),  # overrides the model's budget
        (losses.CPO(variant="ipo"), {"beta": 0.2}),
    ):
        torch.testing.assert_close(loss.of(model, input_ids, labels, **overrides).loss, expected)
    distilled = losses.Distillation(logits_budget=0).of_teacher(model, tiny(seed=5), input_ids, labels).loss
    torch.testing.assert_close(distilled, losses.Distillation().of_teacher(model, tiny(seed=5), input_ids, labels).loss)
    with pytest.raises(ValueError, match="DPO: got both reference and ref_logps"):
        losses.DPO().of(model, input_ids, labels, reference=model, ref_logps=torch.zeros(len(labels)))
    with pytest.raises(ValueError, match="labels: got None with an objective"):
        losses.SimPO().of(model, input_ids, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="DPO: got ignore_index=-1; expected none, models ignore labels of -100"):
        losses.DPO(ignore_index=-1).of(model, input_ids, labels)
    with pytest.raises(TypeError, match="for a teacher use Distillation"):
        losses.Distillation().of(model, input_ids, labels, reference=model)
    with pytest.raises(TypeError, match="ORPO: got a function, which returns a SimpleNamespace; expected a ligerzoo"):
        losses.ORPO().of(lambda *_, **__: SimpleNamespace(logits=None), input_ids, labels)
    capped = losses.Distillation(teacher_softcap=3.0, divergence="forward_kl")
    assert capped.of_teacher(model, tiny(seed=5), input_ids, labels).loss != distilled


class Foreign(nn.Module):
    """A model of another library, which must not run."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **options: Any) -> SimpleNamespace:
        raise AssertionError("the model ran")


class Wrapper(nn.Module):
    def __init__(self, base_model: nn.Module) -> None:
        super().__init__()
        self.base_model = base_model

    def forward(self, *args: Any, **inputs: Any) -> Any:
        return self.base_model(*args, **inputs)


def test_models_of_other_libraries_raise_before_any_forward() -> None:
    from transformers import LlamaConfig as HFLlamaConfig
    from transformers import LlamaForCausalLM

    hf_model = LlamaForCausalLM(HFLlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    ))  # fmt: skip
    model, (input_ids, labels) = tiny(layers=1), batch_of()
    for foreign in (hf_model, Foreign(), Wrapper(hf_model), Wrapper(Foreign()), nn.Linear(2, 2)):
        message = rf"got a {type(foreign).__name__} \({type(foreign).__module__}\); expected a ligerzoo.models.CausalLM"
        handles = [m.register_forward_pre_hook(lambda *_: pytest.fail("the model ran")) for m in (model, hf_model)]
        for call in (
            lambda m: losses.SimPO().of(m, input_ids, labels),
            lambda m: losses.DPO().of(model, input_ids, labels, reference=m),
            lambda m: losses.DPO().of(m, input_ids, labels, reference=model),
            lambda m: losses.GRPO().of(m, input_ids, labels, torch.ones(4)),
            lambda m: losses.Distillation().of_teacher(model, m, input_ids, labels),
            lambda m: losses.Distillation().of_teacher(m, model, input_ids, labels),
            lambda m: model_token_logps(m, input_ids, labels),
            lambda m: model_sequence_logps(m, input_ids, labels),
        ):
            with pytest.raises(TypeError, match=message):
                call(foreign)
        for handle in handles:
            handle.remove()
    wrapped = losses.SimPO().of(Wrapper(Wrapper(model)), input_ids, labels).loss
    torch.testing.assert_close(wrapped, losses.SimPO().of(model, input_ids, labels).loss, rtol=0, atol=0)


def test_temperature_reaches_model_and_reference() -> None:
    model, reference = tiny(), tiny(seed=5)
    input_ids, labels = batch_of()

    def logps_of(model: CausalLM) -> Tensor:
        target = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        logps = (model(input_ids).logits / 0.6).log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
        return torch.where(target != IGNORED, logps, 0.0).sum(-1)

    log_ratio = logps_of(model) - logps_of(reference).detach()
    expected = -F.logsigmoid(0.1 * (log_ratio[:2] - log_ratio[2:])).mean()
    out = losses.DPO(temperature=0.6).of(model, input_ids, labels, reference=reference)
    torch.testing.assert_close(out.loss, expected)
    ref_logps = model_sequence_logps(reference, input_ids, labels, temperature=0.6).detach()
    assert_close(
        gradients_of(model, losses.DPO(temperature=0.6, ref_logps=ref_logps).of(model, input_ids, labels).loss),
        gradients_of(model, expected),
    )


def test_reference_respects_logits_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[int | None] = []

    def record_budget(*head: Tensor, **options: Any) -> Tensor:
        budgets.append(options["logits_budget"])
        return losses.sequence_logps(*head, **options)

    monkeypatch.setattr(losses.DPO, "reference_logps", lambda *_: record_budget)
    losses.DPO(logits_budget=1).of(tiny(), *batch_of(), reference=tiny(seed=2))
    assert budgets == [1]


def test_router_loss_is_reported() -> None:
    torch.manual_seed(0)
    model = Mixtral(MixtralConfig(
        vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_experts=4, num_experts_per_tok=2, output_router_logits=True,
    ))  # fmt: skip
    input_ids, labels = batch_of()
    loss, metrics = losses.SimPO().of(model, input_ids, labels)
    model.aux_loss_weight = 0.0
    torch.testing.assert_close(
        loss - model.config.router_aux_loss_coef * metrics["aux_loss"], losses.SimPO().of(model, input_ids, labels).loss
    )


def test_compiled() -> None:
    """Compiles to one graph, with plain autograd."""
    model = tiny(layers=1)
    input_ids, labels = batch_of()
    loss = losses.DPO(ref_logps=torch.full((len(labels),), -3.0))
    expected = gradients_of(model, loss.of(model, input_ids, labels).loss)

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(input_ids: Tensor, labels: Tensor) -> Tensor:
        return loss.of(model, input_ids, labels).loss

    assert_close(gradients_of(model, compiled(input_ids, labels)), expected, 1e-5)


# Several processes

MODEL_LOSSES: dict[str, Callable[[nn.Module, Tensor, Tensor, int, int], Tensor]] = {
    "dpo": lambda model, ids, labels, batch, tokens: losses.DPO(
        nll_weight=0.3, num_items=batch // 2, num_nll_items=tokens
    ).of(model, ids, labels, ref_logps=-3.0 * ids[:, 0].float()).loss,
    "kto": lambda model, ids, labels, batch, tokens: losses.KTO(num_items=batch).of(
        model, ids, labels, ids[:, 0] % 2 == 0, ref_logps=-3.0 * ids[:, 0].float()
    ).loss,
    "grpo": lambda model, ids, labels, batch, tokens: losses.GRPO(
        variant="dapo", entropy_coef=0.1, num_items=tokens, num_tokens=tokens
    ).of(model, ids, labels, ids[:, 0] - 15.0).loss,
    "distillation": lambda model, ids, labels, batch, tokens: losses.Distillation(
        hard_weight=0.5, num_items=tokens
    ).of_teacher(model, tiny(seed=5), ids, labels).loss,
}  # fmt: skip


def check_ddp_and_fsdp(rank: int) -> None:
    """DDP and FSDP2 average over the processes, so each process divides by its share of the items."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    input_ids, labels = batch_of(batch=8)
    local = torch.arange(8).view(2, PROCESSES, 2)[:, rank].flatten()  # whole pairs, chosen answers first
    tokens = int((labels[:, 1:] != IGNORED).sum())
    for name, loss_of in MODEL_LOSSES.items():
        for tied in (True, False):
            single = tiny(tied, layers=1)
            n_items = int((labels[:4, 1:] != IGNORED).sum()) if name == "dpo" else tokens
            expected = gradients_of(single, loss_of(single, input_ids, labels, 8, n_items))

            model = tiny(tied, layers=1)
            ddp = DistributedDataParallel(model)
            loss_of(ddp, input_ids[local], labels[local], 8 // PROCESSES, n_items / PROCESSES).backward()
            assert_close({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, expected)

            sharded = tiny(tied, layers=1)
            for block in sharded.model.layers:
                fully_shard(block, mesh=mesh)
            if not tied:
                fully_shard(sharded.lm_head, mesh=mesh)  # its weight is only gathered within its own forward
            fully_shard(sharded, mesh=mesh)
            loss_of(sharded, input_ids[local], labels[local], 8 // PROCESSES, n_items / PROCESSES).backward()
            actual = {n: p.grad.full_tensor() for n, p in sharded.named_parameters() if p.grad is not None}
            assert_close(actual, expected)


@pytest.mark.filterwarnings("ignore")  # torch.distributed warns differently in each version
def test_ddp_and_fsdp() -> None:
    on_all_processes(check_ddp_and_fsdp)
