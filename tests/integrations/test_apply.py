"""ligerzoo's kernels in models of transformers."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.utils.deprecation import deprecate_kwarg

from ligerzoo.integrations import AutoKernelModelForCausalLM, MissingKernelWarning, apply
from ligerzoo.integrations.kernels import apply_kernels, head
from ligerzoo.integrations.kernels.attention import AttentionFunctions
from ligerzoo.integrations.kernels.head import DeferredLogits, KernelHead
from ligerzoo.integrations.kernels.promised import PROMISED, parts_of, used_kinds
from ligerzoo.integrations.kernels.replace import KernelModule
from ligerzoo.integrations.kernels.results import ModelResults
from ligerzoo.integrations.transformers import wrap
from ligerzoo.models import Llama, LlamaConfig
from tests.integrations.families import BROKEN, ENCODERS, FAMILIES, VOCABULARY, inputs, tiny
from tests.kernels.op_recorder import Recorder, launch_nothing
from tests.models.comparing import TOLERANCE
from tools.kernel_table import PAGE, with_table

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of transformers, PEFT and torch
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning", "error::ligerzoo.integrations.MissingKernelWarning"),
]


def case(family: str, *values: Any, name: str) -> Any:
    """Returns the parameters of a test of a family, which must fail where transformers itself does."""
    broken = family in BROKEN.get(transformers.__version__, ())
    marks = pytest.mark.xfail(raises=AttributeError, strict=True) if broken else ()
    return pytest.param(family, *values, marks=marks, id=name)


def results(model: nn.Module, given: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Returns the logits, the loss of training and all gradients; of a vision tower, its output and its gradients."""
    model.eval()
    if "input_ids" not in given:
        output = model(**given)[0]
        output.square().sum().backward()
        return {"output": output.detach(), **gradients(model)}
    with torch.no_grad():
        logits = model(**given).logits
    model.train()
    loss = model(**given, labels=given["input_ids"], **options).loss
    loss.backward()
    return {"logits": logits, "loss": loss.detach(), **gradients(model)}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Compares each tensor relative to its largest value, and those that are 0 up to rounding to the largest of all."""
    assert ours.keys() == theirs.keys()
    negligible = 1e-4 * max(tensor.abs().max().item() for tensor in theirs.values())
    for name, tensor in theirs.items():
        scale = tensor.abs().max().item()
        error = (ours[name] - tensor).abs().max().item()
        assert ours[name].shape == tensor.shape
        assert error <= TOLERANCE * max(scale, negligible), f"{name}: error {error:.1e}, largest value {scale:.1e}"


def classes(model: nn.Module) -> dict[str, type[nn.Module]]:
    return {name: type(module) for name, module in model.named_modules()}


@pytest.mark.parametrize("family", [case(family, name=family) for family in (*FAMILIES, *ENCODERS)])
def test_results_are_those_of_the_model(family: str) -> None:
    model = tiny(family)
    given = inputs(model)
    before, own, keys = results(model, given), classes(model), list(model.state_dict())
    report = apply(model)
    assert_same(results(model, given), before)
    assert list(model.state_dict()) == keys
    assert [entry.name for entry in report.modules] == list(own)
    assert not report.missing
    for part, modules in parts_of(model).items():
        assert used_kinds(modules) <= set(PROMISED.get(part, ())), f"{part}: add its kinds to PROMISED"
    report.undo()
    assert classes(model) == own
    assert results(model, given).keys() == before.keys()


def products() -> Iterator[Any]:
    """Random products of a family, the arguments of `apply` and the conditions of a step."""
    draw = random.Random(0)
    for number in range(24):
        arguments = {name: draw.random() < 0.6 for name in ("norm", "rope", "mlp", "loss", "experts", "attention")}
        conditions = {
            "checkpointing": draw.random() < 0.4,
            "num_items": draw.choice([None, 7, torch.tensor(11)]),
            "dtype": draw.choice([torch.float32, torch.float64]),
            "check": draw.random() < 0.7,
        }
        family = draw.choice([family for family in FAMILIES if family not in ("pixtral", "mllama")])
        yield case(family, arguments, conditions, name=f"{number}-{family}")


@pytest.mark.parametrize("family, arguments, conditions", list(products()))
def test_options_in_products(family: str, arguments: dict[str, bool], conditions: dict[str, Any]) -> None:
    model = tiny(family).to(conditions["dtype"])
    if conditions["dtype"] == torch.float64:
        model.set_experts_implementation("eager")  # the other one does not support fp64
    given = {
        name: x.to(conditions["dtype"]) if x.is_floating_point() else x for name, x in inputs(tiny(family)).items()
    }
    options = {"num_items_in_batch": conditions["num_items"], "use_cache": False}
    if conditions["checkpointing"] and model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    before = results(model, given, **options)
    report = apply(model, **arguments, check=conditions["check"])
    for entry in report.replaced:
        enabled = {
            "rms_norm": "norm", "layer_norm": "norm", "add_rms_norm": "norm", "rope": "rope", "attend": "attention",
            "glu_linear": "mlp", "activation_linear": "mlp", "experts_mlp": "experts", "linear_cross_entropy": "loss",
        }  # fmt: skip
        for kernel in entry.kernel.split(" and "):
            assert arguments[enabled[kernel.split(" ")[0]]], entry
    assert_same(results(model, given, **options), before)


def test_other_models_and_transformers_do_not_change() -> None:
    def state() -> dict[str, Any]:
        functions = {name: value for name, value in vars(modeling_llama).items() if callable(value)}
        members = {
            (name, key): value
            for name, cls in functions.items()
            if isinstance(cls, type)
            for key, value in vars(cls).items()
            if not key.startswith("_abc")
        }
        return {**functions, **members}

    other, before = tiny("llama"), state()
    own = classes(other)
    apply(tiny("llama"))
    after = state()
    assert {key for key in before.keys() | after.keys() if before.get(key) is not after.get(key)} <= {
        key for key in after if isinstance(key, tuple) and key[1] == "__subclasses__"
    }
    assert classes(other) == own
    assert not any(isinstance(module, KernelModule) for module in tiny("llama").modules())


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "phi3", "qwen2_vl"])
def test_copies_and_pickles_keep_the_kernels(family: str) -> None:
    model = tiny(family)
    given = inputs(model)
    model.kernel_report = apply(model)
    before = results(model, given)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert classes(other) == classes(model)
        assert_same(results(other, given), before)
        other.kernel_report.undo()
        assert not any(isinstance(module, KernelModule) for module in other.modules())
    assert isinstance(model, KernelModule)


def test_the_loss_takes_what_transformers_takes() -> None:
    model, theirs = tiny("llama").train(), tiny("llama").train()
    ids = torch.randint(3, 90, (2, 24))
    labels = ids.masked_fill(torch.rand(2, 24) < 0.3, -100)
    apply(model)
    for options in (
        {},
        {"num_items_in_batch": 5},
        {"num_items_in_batch": torch.tensor(5)},
        {"shift_labels": labels.roll(3, 1)},
        {"ignore_index": 7},
        {"output_hidden_states": True},
        {"return_dict": False},
        {"logits_to_keep": torch.arange(24)},
    ):
        given = labels.clamp(min=7) if "ignore_index" in options else labels
        ours, expected = (x(ids, labels=given, use_cache=False, **options) for x in (model, theirs))
        loss, expected_loss = ours[0], expected[0]
        assert abs(loss - expected_loss) < 1e-5, options
        assert type(ours) is type(expected)
        if "return_dict" in options:
            assert len(ours) == len(expected) - 1
        else:
            has_logits = "logits_to_keep" in options
            assert set(ours) == set(expected) - (set() if has_logits else {"logits"})
    positional, expected = (x(ids, None, None, None, None, labels) for x in (model, theirs))
    assert positional.logits is None
    assert abs(positional.loss - expected.loss) < 1e-5
    assert model(ids).logits is not None
    model.eval()
    assert torch.allclose(model(ids, labels=labels).logits, theirs(ids).logits, atol=1e-4)


def test_a_loss_function_of_the_user_receives_logits() -> None:
    model = tiny("llama").train()
    apply(model)
    seen: list[Any] = []

    def summed(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
        seen.append(logits)
        return logits.sum()

    model.loss_function = summed
    ids = torch.randint(3, 90, (1, 8))
    assert model(ids, labels=ids).logits is seen[0]
    assert isinstance(seen[0], Tensor)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_the_auxiliary_loss_is_kept(family: str) -> None:
    model = tiny(family)
    given = inputs(model)
    before = results(model, given, output_router_logits=True)
    apply(model)
    after = results(model, given, output_router_logits=True)
    assert_same(after, before)
    output = model(**given, labels=given["input_ids"], output_router_logits=True)
    assert output.aux_loss is not None
    assert output.loss - model(**given, labels=given["input_ids"]).loss != 0


def test_deferred_logits_behave_as_logits() -> None:
    torch.manual_seed(0)
    model = tiny("llama")
    apply(model)
    head = model.lm_head
    assert isinstance(head, KernelHead)
    hidden, target = torch.randn(2, 6, 32), torch.randint(VOCABULARY, (2, 6))
    for function in (
        lambda x: x,
        lambda x: x * 0.3 / 2.0,
        lambda x: torch.tanh(x / 5.0) * 5.0,
        lambda x: (2 * x).float(),
        lambda x: torch.tanh(x) * -2.0,
        lambda x: torch.tanh(torch.tanh(x)),
        lambda x: x + 1,
        lambda x: x[..., :50],
        lambda x: x / torch.tensor(2.0),
        lambda x: torch.tanh(x) / 3,
    ):
        deferred, logits = function(DeferredLogits(head, hidden)), function(head(hidden))
        if isinstance(deferred, DeferredLogits):
            expected = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
            assert abs(deferred.loss(target, VOCABULARY, None, -100) - expected) < 1e-5
        assert torch.equal(torch.softmax(deferred, -1), torch.softmax(logits, -1))
        assert deferred.shape == logits.shape


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(f, marks=pytest.mark.slow) for f in ("qwen2_vl", "gemma2", "qwen3_moe", "phi3"))]
)
def test_compiled_models_compute_with_the_kernels(family: str) -> None:
    model = tiny(family).train()
    ids = torch.randint(3, 90, (2, 24))
    expected = model(ids, labels=ids).loss
    apply(model)
    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert abs(compiled(ids, labels=ids, use_cache=False).loss - expected) < 1e-5
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert any("linear_cross_entropy" in target for target in targets)
    assert not any("neg" in target for target in targets)  # as in transformers' rotation


@pytest.mark.parametrize("after", [False, True], ids=["PEFT before", "PEFT after"])
@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral"])
def test_adapters_train_as_in_transformers(family: str, after: bool) -> None:
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "down_proj", "gate_up_proj", "lm_head"] if family == "phi3" else ["q_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")

    def adapted(model: PreTrainedModel) -> nn.Module:
        torch.manual_seed(2)
        return peft.get_peft_model(model, config)  # type: ignore[no-any-return]

    theirs = adapted(tiny(family))
    given = inputs(tiny(family))
    model = tiny(family)
    if after:
        apply(model)
        model = adapted(model)
    else:
        model = adapted(model)
        with pytest.warns(MissingKernelWarning, match="linear_cross_") if "lm_head" in targets else nullcontext():
            apply(model)
    assert_same(results(model, given), results(theirs, given))


class Steps(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(3, 90, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(12) < index % 5, -100)}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_trainer_logs_the_same_losses(tmp_path: Path, smoothing: float) -> None:
    def losses(model: PreTrainedModel) -> list[float]:
        arguments = TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
            label_smoothing_factor=smoothing, adam_epsilon=1e-5, learning_rate=1e-2, report_to=[], use_cpu=True,
            save_strategy="no", seed=1, gradient_checkpointing=True, eval_strategy="steps", eval_steps=3,
            disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=Steps(), eval_dataset=Steps())
        trainer.train()
        history = trainer.state.log_history
        return [entry[key] for entry in history for key in ("loss", "grad_norm", "eval_loss") if key in entry]

    theirs, ours = tiny("llama"), tiny("llama")
    apply(ours)
    expected = losses(theirs)
    assert len(expected) == 7
    assert losses(ours) == pytest.approx(expected, rel=1e-4)


@pytest.fixture
def one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_sharded_models_compute_the_same(one_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    given = inputs(model)
    before = results(model, given)
    report = apply(model)
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fused = mock.Mock(wraps=head.linear_cross_entropy)
    monkeypatch.setattr(head, "linear_cross_entropy", fused)
    after = results(model, given)
    fused.assert_called_once()
    assert_same({name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in after.items()}, before)
    with pytest.raises(RuntimeError, match=r"Report.undo: replaced modules have another class now \(FSDP"):
        report.undo()
    late = apply(model, check=False)
    assert all(entry.reason for entry in late.kept)


def test_hidden_states_are_recorded_once() -> None:
    model = tiny("llama").eval()
    ids = torch.randint(3, 90, (1, 8))
    before = model(ids, output_hidden_states=True)
    apply(model)
    after = model(ids, output_hidden_states=True)
    assert len(after.hidden_states) == len(before.hidden_states) == 3
    for ours, theirs in zip(after.hidden_states, before.hidden_states, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_generation_is_the_same() -> None:
    model = tiny("gemma3_text").eval()
    ids = torch.randint(3, 90, (2, 8))
    expected = model.generate(ids, max_new_tokens=10, do_sample=False)
    apply(model, attention=True)
    assert torch.equal(model.generate(ids, max_new_tokens=10, do_sample=False), expected)


def test_a_checkpoint_is_loaded_and_saved(tmp_path: Path) -> None:
    theirs = tiny("llama")
    theirs.save_pretrained(tmp_path / "theirs")
    model = AutoKernelModelForCausalLM.from_pretrained(tmp_path / "theirs", kernels={"mlp": False})
    assert type(model).__name__ == "LlamaForCausalLM"
    assert isinstance(model, LlamaForCausalLM)
    assert {entry.reason for entry in model.kernel_report.kept if entry.class_name == "LlamaMLP"} == {"mlp=False"}
    model.save_pretrained(tmp_path / "ours")
    assert (tmp_path / "ours/config.json").read_text() == (tmp_path / "theirs/config.json").read_text()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.state_dict().items())


def test_a_checkpoint_is_loaded_with_information(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    model, information = AutoKernelModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert model.kernel_report.replaced
    assert not information["missing_keys"]
    for kernels in ({"nrom": False}, ["norm"], "norm"):
        with pytest.raises(TypeError, match=r"from_pretrained: kernels is .*; expected a mapping from names"):
            AutoKernelModelForCausalLM.from_pretrained(tmp_path, kernels=kernels)


class ClampedMLP(nn.Module):
    """An MLP with the structure of Llama's that computes something else for large inputs."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = mlp.gate_proj, mlp.up_proj, mlp.down_proj, nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=7)) * self.up_proj(x))
        return down


class MeanNorm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)


def reasons(model: nn.Module, **options: Any) -> dict[str, str | None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MissingKernelWarning)
        return {entry.name: entry.reason for entry in apply(model, **options).modules}


def test_modules_that_compute_something_else_are_kept() -> None:
    model = tiny("llama")
    first, second = model.model.layers
    first.mlp = ClampedMLP(first.mlp)
    first.input_layernorm = MeanNorm(first.input_layernorm)
    second.mlp.act_fn = nn.ReLU()
    second.post_attention_layernorm.forward = lambda x: x  # as other libraries patch instances
    found = reasons(model)
    assert "differ from the kernel's" in (found["model.layers.0.mlp"] or "")
    assert found["model.layers.0.input_layernorm"] == (
        "its results on random input are not those of an RMS or layer norm"
    )
    assert found["model.layers.1.mlp"] == "no kernel for its activation, ReLU"
    assert found["model.layers.1.post_attention_layernorm"] == "another library has replaced the instance's forward"
    assert found["model.layers.1"] == "post_attention_layernorm is not a replaced RMS norm"
    assert found["model.layers.0.self_attn"] is None


class GatedNorm(nn.Module):
    """An RMSNorm whose forward may get a gate, as those of Mamba-2 and of Kimi Linear, which needs it."""

    def __init__(self, size: int, *, needs_gate: bool) -> None:
        super().__init__()
        self.weight, self.variance_epsilon, self.needs_gate = nn.Parameter(torch.ones(size)), 1e-6, needs_gate

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        assert gate is not None or not self.needs_gate
        gated = hidden_states if gate is None else hidden_states * gate.sigmoid()
        return nn.functional.rms_norm(gated, self.weight.shape, self.weight, 1e-6)


@pytest.mark.parametrize("needs_gate", [False, True])
def test_norms_with_a_gate_are_kept(needs_gate: bool) -> None:
    model = tiny("llama")
    model.model.gated_norm = GatedNorm(32, needs_gate=needs_gate)
    found = reasons(model)
    assert found["model.gated_norm"] == "its forward takes hidden_states, gate, not only hidden states"
    assert found["model.norm"] is None


class DroppingMLP(nn.Module):
    """An MLP with the structure of Llama's that drops elements in training, as that of Seed-OSS."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = mlp.gate_proj, mlp.up_proj, mlp.down_proj, nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return nn.functional.dropout(down, 0.1, self.training)


class DroppingDecoderLayer(nn.Module):
    """A decoder layer with the submodules of Llama's that drops elements in training, as that of IDEFICS."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm

    def forward(self, hidden_states: Tensor, **named: Any) -> Tensor:
        attended = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **named)[0]
        hidden_states = hidden_states + nn.functional.dropout(attended, 0.1, self.training)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))  # type: ignore[no-any-return]


@pytest.mark.parametrize("training", [False, True])
def test_modules_with_dropout_in_their_forward_are_kept(training: bool) -> None:
    model = tiny("llama").train(training)
    model.model.layers[0].mlp = DroppingMLP(model.model.layers[0].mlp)
    model.model.layers[1] = DroppingDecoderLayer(model.model.layers[1])
    model.train(training)
    model.model.layers[0].mlp.eval()
    generator = torch.get_rng_state()
    found = reasons(model)
    assert "differ from the kernel's" in (found["model.layers.0.mlp"] or "")
    assert "differ from the kernel's" in (found["model.layers.1"] or "")
    assert found["model.layers.1.mlp"] is None
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.training == model.model.layers[1].training == training
    assert not model.model.layers[0].mlp.training


def test_kernels_add_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer, only the gradients of the query, key and value projections are added by autograd."""
    model = tiny("llama").requires_grad_(False)
    apply(model)
    for name in ("rms_norm", "tiling", "linears", "glu", "rope"):
        launch_nothing(monkeypatch, name)
    x = torch.ones(1, 4, 32, requires_grad=True)
    y = model.model.layers[0](x, position_embeddings=model.model.rotary_emb(x, torch.arange(4)[None]))
    upstream = torch.ones_like(y)
    with Recorder() as recorder:
        torch.autograd.grad(y, x, upstream)
    assert sum(name in ("add", "add_") for name in recorder.names) == 2


@pytest.mark.parametrize("tied", [False, True])
def test_resized_models_keep_the_fused_loss(tied: bool) -> None:
    model = tiny("llama")
    model.config.tie_word_embeddings = tied
    model.tie_weights()
    report, before = apply(model), model.lm_head
    model.resize_token_embeddings(VOCABULARY + 7, mean_resizing=False)
    head = model.lm_head
    assert (head is before) == tied
    assert (head.weight is model.get_input_embeddings().weight) == tied
    assert isinstance(head, KernelHead)
    ids = torch.randint(3, VOCABULARY + 7, (2, 24))
    output, logits = model.train()(ids, labels=ids), model.eval()(ids).logits
    assert output.get("logits") is None
    expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert abs(output.loss - expected) < 1e-5
    report.undo()
    assert type(model.lm_head) is type(before) is nn.Linear
    assert not any(isinstance(module, KernelModule) for module in model.modules())
    assert torch.equal(model(ids).logits, logits)


def test_heads_of_other_kinds_compute_logits() -> None:
    class OtherHead(nn.Linear):
        pass

    model = tiny("llama").train()
    report = apply(model)
    ids = torch.randint(3, 90, (2, 24))
    model.set_output_embeddings(OtherHead(32, VOCABULARY, bias=False))
    assert type(model.lm_head) is OtherHead
    assert model(ids, labels=ids).logits is not None
    report.undo()
    assert type(model.lm_head) is OtherHead


class UnusualActivation(nn.Module):
    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.relu(gate) * up


def test_activations_of_two_arguments_have_no_kernel() -> None:
    model = tiny("llama")
    mlp = model.model.layers[0].mlp
    mlp.act_fn = UnusualActivation()
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x), mlp.up_proj(x)))
    mlp = model.model.layers[1].mlp
    mlp.act_fn = nn.PReLU(dtype=torch.bfloat16)
    found = reasons(model, check=False)
    assert "replaced the instance's forward" in (found["model.layers.0.mlp"] or "")
    assert found["model.layers.1.mlp"] == "no kernel for its activation, PReLU"


class ParameterlessRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return y.to(x.dtype)


def test_layers_whose_norms_have_no_weight_are_replaced() -> None:
    model = tiny("llama")
    for layer in model.model.layers:  # as those of nanochat
        layer.input_layernorm, layer.post_attention_layernorm = ParameterlessRMSNorm(), ParameterlessRMSNorm()
    given = inputs(model)
    before = results(model, given)
    report = apply(model)
    assert {entry.kernel for entry in report.modules if entry.class_name == "LlamaDecoderLayer"} == {"add_rms_norm"}
    assert_same(results(model, given), before)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral"])
def test_the_first_token_after_padding_has_the_loss_of_sdpa(family: str) -> None:
    model = tiny(family)
    given = {"input_ids": torch.randint(3, 90, (2, 12)), "attention_mask": torch.ones(2, 12, dtype=torch.long)}
    given["attention_mask"][0, :5] = 0
    given["attention_mask"][1, 9:] = 0
    before = results(model, given)
    apply(model, attention=True)
    assert_same(results(model, given), before)


def test_a_bias_of_the_scores_is_passed_to_sdpa() -> None:
    torch.manual_seed(0)
    q, k, v, bias = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 4, 6, 6)
    module = tiny("llama").model.layers[0].self_attn
    if "position_bias" not in inspect.signature(ALL_ATTENTION_FUNCTIONS["sdpa"]).parameters:
        pytest.skip("a newer argument of transformers' function")
    ours, theirs = (
        functions.get_interface("sdpa", None)(module, q, k, v, None, position_bias=bias)[0]
        for functions in (AttentionFunctions(), ALL_ATTENTION_FUNCTIONS)
    )
    assert torch.equal(ours, theirs)


def test_a_model_is_restored_when_apply_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: nn.Module) -> None:
        raise KeyError("a layer")

    model = tiny("llama")
    own = classes(model)
    monkeypatch.setattr(apply_kernels, "recognize_layer", fail)
    with pytest.raises(KeyError, match="a layer"):
        apply(model)
    assert classes(model) == own


def test_undo_refuses_forwards_that_call_the_kernels() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = tiny("llama")
    own, given = classes(model), inputs(model)
    before = results(model, given)
    report = apply(model)
    for module in (model, model.lm_head):
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook("cpu"))
    assert_same(results(model, given), before)
    with pytest.raises(RuntimeError, match=r"replaced the forward of instances \(Linear, LlamaForCausalLM\)"):
        report.undo()
    assert isinstance(model, KernelModule)
    hooks.remove_hook_from_module(model, recurse=True)
    report.undo()
    assert classes(model) == own
    assert_same(results(model, given), before)


def test_quantized_heads_compute_logits() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model = tiny("llama")
    ids = torch.randint(3, 90, (2, 8))
    apply(model)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    loss = model.train()(ids, labels=ids).loss
    logits = model.eval()(ids).logits
    expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert abs(loss - expected) < 1e-5


def test_heads_with_hooks_are_kept() -> None:
    model = tiny("llama")
    model.lm_head.register_forward_hook(lambda module, args, output: None)
    assert reasons(model)[""] == "its head has hooks or another forward"


def test_a_second_call_replaces_nothing() -> None:
    model = tiny("llama")
    apply(model)
    assert not apply(model).replaced


def test_other_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"apply: hf_model is .*Llama.*; expected .* Load the model first"):
        apply("meta-llama/Llama-3.2-1B")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="apply: norm='no'; expected True or False"):
        apply(tiny("llama"), norm="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="apply: hf_model is a Linear; expected a transformers model"):
        apply(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"apply: hf_model is .*Llama.*; expected .* Load the model first"):
        apply(transformers.LlamaForCausalLM)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"apply: hf_model is None; expected .* Load the model first"):
        apply()
    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    ours = Llama(LlamaConfig(**sizes, num_attention_heads=2))
    for zoo_model in (ours, wrap(ours)):
        with pytest.raises(TypeError, match=r"of ligerzoo; expected .* The layers of ligerzoo use the kernels already"):
            apply(zoo_model)
    with pytest.raises(TypeError, match="apply: norm='yes'; expected True or False"):
        apply(tiny("llama"), norm="yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"norm=False is an argument of apply; .* Pass kernels={'norm': False}"):
        AutoKernelModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B", norm=False)
    with pytest.raises(TypeError, match=r"swiglu=False is an argument of apply; .* Pass kernels={'mlp': False}"):
        AutoKernelModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B", swiglu=False)
    with pytest.raises(TypeError, match=r"apply: unknown option rms_norm=True; .* Use norm instead of 'rms_norm'"):
        apply(tiny("llama"), rms_norm=True)  # type: ignore[call-arg]
    model = tiny("llama")
    with pytest.raises(ValueError, match=r"21 parameters are on the meta device \(model.embed_tokens.weight, ...\)"):
        apply(copy.deepcopy(model).to("meta"))
    model._tp_size = 2
    with pytest.raises(ValueError, match="sharded over 2 processes"):
        apply(model)


def test_a_model_whose_results_change_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    own = classes(model)
    run = apply_kernels.run_model
    monkeypatch.setattr(
        apply_kernels,
        "run_model",
        lambda model: ModelResults(tuple(x * (1 + isinstance(model, KernelModule)) for x in run(model).tensors)),
    )
    with pytest.raises(RuntimeError, match=r"its logits on random tokens have changed by 1.0e\+00"):
        apply(model)
    assert classes(model) == own


def test_the_report_names_every_module() -> None:
    report = apply(tiny("gemma2"))
    text = str(report)
    assert text.startswith("17 of 37 modules replaced. The results of the model are the same.")
    assert "2 x  model.layers.*.mlp" in text
    assert "glu_linear (gelu_tanh)" in text
    assert len(report.replaced) + len(report.kept) == len(report.modules)
    assert all((entry.kernel is None) != (entry.reason is None) for entry in report.modules)


def opaque(forward: Any) -> Any:
    """A decorator from which its function cannot be taken."""
    functions = {"forward": forward}

    @functools.wraps(forward)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        return functions["forward"](*arguments, **named)

    return wrapper


@pytest.mark.parametrize(
    "family, decorated, missing",
    [
        ("llama", modeling_llama.LlamaAttention, {"llama": ("rope",)}),
        ("llama", modeling_llama.LlamaDecoderLayer, {"llama": ("add_rms_norm",)}),
        ("llava", modeling_llama.LlamaAttention, {"llama": ("rope",)}),
        ("qwen2_vl", modeling_qwen2_vl.Qwen2VLAttention, {"qwen2_vl_text": ("rope",)}),
    ],
)
def test_promised_kernels_that_are_not_used_are_named_first(
    family: str, decorated: Any, missing: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decorated, "forward", opaque(decorated.forward))
    model = tiny(family)
    [(part, (kernel,))] = missing.items()
    with pytest.warns(MissingKernelWarning, match=rf"^apply: {kernel} in {part}: not used, although .* promises it"):
        report = apply(model)
    assert report.missing == missing
    assert str(report).startswith(f"Promised but not used: {kernel} in {part}. {len(report.replaced)} of ")
    reasons = {entry.reason for entry in report.kept if entry.class_name == decorated.__name__}
    assert reasons == {"its forward has a decorator that cannot be copied"}
    option = "rope" if kernel == "rope" else "norm"
    assert not apply(tiny(family), **{option: False}).missing


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_models_without_a_head_miss_no_loss(auto: Any) -> None:
    for family in ("llama", "mixtral"):
        assert not apply(auto.from_config(tiny(family).config)).missing


def test_decorated_forwards_keep_their_decorators(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny("llama")
    given = inputs(plain)
    before = results(plain, given)
    for cls in (modeling_llama.LlamaAttention, modeling_llama.LlamaDecoderLayer):
        renamed = deprecate_kwarg("old_mask", "99.0", new_name="attention_mask")(cls.forward)
        monkeypatch.setattr(cls, "forward", deprecate_kwarg("unused", "99.0")(renamed))
    model = tiny("llama")
    report = apply(model)
    assert_same(results(model, given), before)
    layer, x = model.model.layers[0], torch.randn(1, 4, 32)
    angles = model.model.rotary_emb(x, torch.arange(4)[None])
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril(-1)
    expected = layer(x, attention_mask=mask, position_embeddings=angles)
    with pytest.warns(FutureWarning, match="`old_mask` is deprecated"):
        assert torch.equal(layer(x, old_mask=mask, position_embeddings=angles), expected)
    with pytest.warns(FutureWarning, match="`old_mask` is deprecated"):
        attended = layer.self_attn(x, old_mask=mask, position_embeddings=angles)[0]
    assert torch.equal(attended, layer.self_attn(x, attention_mask=mask, position_embeddings=angles)[0])
    report.undo()
    assert not any(isinstance(module, KernelModule) for module in model.modules())


def test_the_table_of_families_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page


def test_importing_integrations_does_not_import_transformers() -> None:
    script = "import sys, ligerzoo.integrations; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
