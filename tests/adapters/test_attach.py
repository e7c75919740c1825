"""Adding updates: what is updated, what trains, and what a forward computes and saves."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ligerzoo import adapters
from ligerzoo.errors import LigerzooError
from ligerzoo.layers import GatedMLP, Linear
from ligerzoo.layers.adapt import adapt
from ligerzoo.layers.capture import can_capture
from ligerzoo.layers.lora import LoRALayer, LoRAOptions
from ligerzoo.layers.projection import project as project_jointly
from tests.adapters.models import gemma2, gpt_oss, gradients, llama, mixtral, phi3, randomize, token_ids
from tests.covering import every_backend, long_cases

ALL = ["q_proj", "o_proj", "gate_proj", "down_proj", "experts", "gate", "lm_head", "embed_tokens"]
MODELS: dict[str, Any] = {"llama": llama, "mixtral": mixtral, "phi3": phi3, "gemma2": gemma2}

every_model = pytest.mark.parametrize("name", MODELS)


def names_of(name: str) -> list[str]:
    absent = {"mixtral": {"gate_proj", "down_proj"}}.get(name, {"experts", "gate"})
    return [target for target in ALL if target not in absent]


@every_model
def test_a_new_adapter_changes_nothing_and_only_adapters_train(name: str) -> None:
    model, ids = MODELS[name](), token_ids()
    expected = model(ids).logits
    before = model.state_dict().keys()
    adapters.add_lora(model, rank=4, targets=names_of(name))
    torch.testing.assert_close(model(ids).logits, expected)
    assert before <= model.state_dict().keys()
    assert all("lora_" in name for name in gradients(model, ids))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == set(gradients(model, ids)) == model.state_dict().keys() - before


@every_model
@pytest.mark.parametrize("dora", [False, True])
def test_results_are_those_of_the_merged_weights(name: str, dora: bool) -> None:
    model, ids = MODELS[name](), token_ids()
    targets = [target for target in names_of(name) if not (dora and target == "experts")]
    adapters.add_lora(model, rank=4, targets=targets, dora=dora)
    randomize(model)
    outputs = model(ids).logits, model(ids, labels=ids).loss
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, outputs[0])
        torch.testing.assert_close(model(ids, labels=ids).loss, outputs[1])
    generated = model.generate(ids, max_new_tokens=5)
    adapters.merge_lora(model)
    assert not [module for module in model.modules() if isinstance(module, LoRALayer)]
    torch.testing.assert_close(model(ids).logits, outputs[0], rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(model(ids, labels=ids).loss, outputs[1])
    assert torch.equal(model.generate(ids, max_new_tokens=5), generated)


def test_the_bias_of_a_router_has_no_factors_of_dora() -> None:
    model, ids = gpt_oss(), token_ids()
    adapters.add_lora(model, rank=4, targets=["mlp.gate"], dora=True)
    randomize(model)
    expected = model(ids).logits
    adapters.merge_lora(model)
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=2e-5)


def test_default_targets_are_the_linear_layers_and_experts_of_blocks() -> None:
    names = adapters.add_lora(llama())
    assert len(names) == 2 * 7
    assert names[:2] == ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"]
    names = adapters.add_lora(mixtral())
    assert len(names) == 2 * (4 + 2)
    assert "model.layers.0.mlp.experts.gate_up_proj" in names


@pytest.mark.parametrize(
    "targets, expected",
    [
        ("layers.1.self_attn.q_proj", ["model.layers.1.self_attn.q_proj"]),
        ("layers.*.mlp.up_proj", ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]),
        (["lm_head", "embed_tokens"], ["model.embed_tokens", "lm_head"]),
    ],
)
def test_targets_are_patterns_of_names(targets: Any, expected: list[str]) -> None:
    assert adapters.add_lora(llama(), targets=targets) == expected


def test_one_of_the_experts_weights() -> None:
    model = mixtral()
    names = adapters.add_lora(model, targets="layers.0.mlp.experts.down_proj")
    assert names == ["model.layers.0.mlp.experts.down_proj"]
    randomize(model)
    assert {name.rpartition(".")[2] for name in gradients(model, token_ids())} == {
        "down_proj_lora_A", "down_proj_lora_B"
    }  # fmt: skip


def test_the_fused_name_shares_a() -> None:
    model = phi3()
    adapters.add_lora(model, targets=["qkv_proj", "up_proj"])
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.lora_A is attention.k_proj.lora_A is attention.v_proj.lora_A
    adapters.remove_lora(model)
    adapters.add_lora(model, targets="self_attn")
    assert attention.q_proj.lora_A is not attention.k_proj.lora_A


@pytest.mark.parametrize(
    "options, message",
    [
        ({"targets": "q_pro"}, "targets: matches nothing; got 'q_pro'.*Did you mean 'q_proj'"),
        ({"trained": "nrm"}, "trained: matches nothing; got 'nrm'"),
        ({"rank": 0}, "add_lora: rank=0; expected an integer"),
        ({"alpha": 0.0}, "alpha=0.0; expected a positive number"),
        ({"dropout": 1.0}, r"dropout=1.0; expected a number from 0 to 1, not 1"),
        ({"dora": True}, "experts have no dora.*Leave the experts out"),
        ({"dropout": 0.1}, "experts have no dropout"),
    ],
)
def test_invalid_options(options: dict[str, Any], message: str) -> None:
    model = mixtral()
    with pytest.raises(LigerzooError, match=message):
        adapters.add_lora(model, **options)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_second_adapter_is_refused() -> None:
    model = llama()
    adapters.add_lora(model, targets="q_proj")
    with pytest.raises(LigerzooError, match="has adapters already"):
        adapters.add_lora(model, targets="v_proj")


def test_unknown_layers_are_refused() -> None:
    class Mine(Linear):
        pass

    with pytest.raises(ValueError, match="Mine has no update of weight; expected one of Linear"):
        adapt(Mine(4, 4), LoRAOptions())


def test_freeze_all_but() -> None:
    model, ids = llama(), token_ids()
    names = adapters.freeze_all_but(model, ["layers.1.mlp", "norm"])
    mlp = [f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    assert names == [*mlp, "model.norm.weight"]
    assert list(gradients(model, ids)) == names
    with pytest.raises(LigerzooError, match=r"freeze_all_but: matches nothing; got 'layers.7'"):
        adapters.freeze_all_but(model, "layers.7")


def test_modules_that_train_in_full_are_untied() -> None:
    model, ids = gemma2(), token_ids()
    adapters.add_lora(model, targets="q_proj", trained="lm_head")
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert not model.config.tie_word_embeddings
    assert "lm_head.weight" in gradients(model, ids)


def test_merging_unties_only_what_was_updated() -> None:
    model, ids = gemma2(), token_ids()
    adapters.add_lora(model, targets=["embed_tokens", "q_proj"])
    randomize(model)
    expected, head = model(ids).logits, model.lm_head.weight.clone()
    adapters.merge_lora(model)
    assert torch.equal(model.lm_head.weight, head)
    assert not torch.equal(model.model.embed_tokens.weight, head)
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype, ulps", [(torch.bfloat16, 0.51), (torch.float32, 4)])
def test_merging_rounds_once(dtype: torch.dtype, ulps: float) -> None:
    """Sums are computed in fp32: in bf16, the result is the nearest number."""
    model = mixtral().to(dtype)
    adapters.add_lora(model, rank=4, targets=["q_proj", "experts", "lm_head", "embed_tokens", "gate"])
    randomize(model)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoRALayer)}
    exact = {}
    for name, layer in layers.items():
        for parameter in layer.lora:
            prefix = f"{parameter}_" if parameter != "weight" else ""
            p = {key: value.double() for key, value in layer.update_parameters().items()}
            if "embed" in name:
                product = (p["lora_embedding_B"] @ p["lora_embedding_A"]).T
            else:
                product = p[f"{prefix}lora_B"] @ p[f"{prefix}lora_A"]
            exact[f"{name}.{parameter}"] = getattr(layer, parameter).double() + 8 * product
    assert sorted(adapters.merge_lora(model)) == sorted(exact)
    for name, value in exact.items():
        ulp = torch.finfo(dtype).eps * value.abs().clamp(min=1e-2)
        assert ((model.get_parameter(name).double() - value).abs() <= ulps * ulp + 1e-7).all(), name


def test_adapters_disabled_computes_the_base_model() -> None:
    model, ids = mixtral(), token_ids()
    base = model(ids).logits
    adapters.add_lora(model, targets=["self_attn", "experts", "lm_head", "embed_tokens"])
    randomize(model)
    adapted = model(ids).logits
    with adapters.adapters_disabled(model):
        torch.testing.assert_close(model(ids).logits, base)
    assert torch.equal(model(ids).logits, adapted)
    assert not torch.allclose(adapted, base, atol=0.1)


def test_removing_restores_the_base_model() -> None:
    model, ids = mixtral(), token_ids()
    expected, classes = model(ids).logits, [type(module) for module in model.modules()]
    adapters.add_lora(model)
    randomize(model)
    adapters.remove_lora(model)
    assert torch.equal(model(ids).logits, expected)
    assert [type(module) for module in model.modules()] == classes


def test_rslora_scales_by_the_root_of_the_rank() -> None:
    layer = adapt(Linear(8, 8, bias=False), LoRAOptions(rank=16, alpha=8, use_rslora=True))
    nn.init.normal_(layer.lora_B)
    expected = layer.weight + 2 * layer.lora_B @ layer.lora_A
    torch.testing.assert_close(layer.merged_weight("weight"), expected)


def test_dropout_changes_training_only() -> None:
    model, ids = llama(), token_ids()
    adapters.add_lora(model, dropout=0.5, targets=["self_attn", "mlp", "lm_head"])
    randomize(model)
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)
    mean = torch.stack([model.model.layers[0].self_attn.q_proj(torch.ones(4000, 32)).mean(0)]).mean(0)
    model.eval()
    torch.testing.assert_close(mean, model.model.layers[0].self_attn.q_proj(torch.ones(32)), rtol=0.2, atol=0.2)


def saved_sizes(function: Any, *without: Tensor) -> list[tuple[int, ...]]:
    """Returns the shapes of the tensors that a forward saves, each memory once, without parameters."""
    parameters = {t.untyped_storage().data_ptr() for t in without}
    saved: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.untyped_storage().data_ptr(), t), id):
        function()
    return sorted(tuple(t.shape) for memory, t in saved.items() if memory not in parameters)


def test_frozen_weights_save_no_input() -> None:
    """A linear layer whose weight is frozen saves nothing, and one with an update its input and A x."""
    model = llama()
    adapters.add_lora(model, rank=4, targets=["q_proj", "v_proj"])
    attention, x = model.model.layers[0].self_attn, torch.randn(2, 50, 32, requires_grad=True)
    parameters = [*model.parameters(), x]

    def project() -> Any:
        return project_jointly(x, attention.q_proj, attention.k_proj, attention.v_proj)

    assert all(shape[-1] == 4 or 4 in shape for shape in saved_sizes(project, *parameters))
    y = torch.randn(2, 50, 32, requires_grad=True)
    assert saved_sizes(lambda: attention.o_proj(y), *parameters) == []


def test_a_frozen_block_saves_less_than_a_trained_one() -> None:
    def saved_elements(model: Any) -> int:
        ids = token_ids(2, 50)
        parameters = list(model.parameters())
        return sum(
            torch.Size(shape).numel()
            for shape in saved_sizes(lambda: model(inputs_embeds=embed(ids), labels=ids), *parameters)
        )

    embed = llama().model.embed_tokens
    trained, adapted = llama(), llama()
    adapters.add_lora(adapted, rank=1, targets="q_proj")
    inputs_of_frozen_layers = 2 * 50 * 2 * (32 + 32 + 48)  # o_proj, the MLP's norm output and its product, of 2 layers
    assert saved_elements(trained) - saved_elements(adapted) >= inputs_of_frozen_layers - 50 * 2 * 32


@every_model
def test_activation_checkpointing_gives_the_same_gradients(name: str) -> None:
    model, ids = MODELS[name](), token_ids()
    adapters.add_lora(model, targets=names_of(name)[:-1])  # the input of the first block needs no gradient
    randomize(model)
    model.train()
    expected = gradients(model, ids)
    model.gradient_checkpointing_enable()
    actual = gradients(model, ids)
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value)


def test_autocast_and_bf16() -> None:
    model, ids = mixtral(), token_ids()
    adapters.add_lora(model, rank=4, targets=["self_attn", "experts", "lm_head", "embed_tokens"])
    randomize(model, 0.05)
    expected = gradients(model, ids)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    autocast = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    plain = gradients(copy.deepcopy(model).bfloat16(), ids)
    mixed = copy.deepcopy(model)
    for parameter in mixed.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    for actual in (autocast, plain, gradients(mixed, ids)):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert (actual[key] - value).norm() <= 0.15 * value.norm() + 1e-5, key
    assert {g.dtype for g in gradients(mixed, ids).values()} == {torch.float32}


@pytest.mark.parametrize("case", long_cases({"name": ["llama", "mixtral"], "dora": [False, True]}), ids=str)
@every_backend
def test_compiled_training(case: dict[str, Any], backend: str) -> None:
    torch._dynamo.reset()
    name, dora = case["name"], case["dora"]
    model, ids = MODELS[name](), token_ids()
    targets = ["self_attn", "lm_head", "embed_tokens"] + ([] if dora or name == "llama" else ["experts"])
    adapters.add_lora(model, targets=targets, dora=dora)
    randomize(model)
    expected = gradients(model, ids)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    compiled(ids, labels=ids).loss.backward()
    for key, value in expected.items():
        torch.testing.assert_close(model.get_parameter(key).grad, value, rtol=1e-4, atol=1e-6)


def test_the_state_dict_saves_and_loads() -> None:
    model, ids = mixtral(), token_ids()
    adapters.add_lora(model)
    randomize(model)
    other = mixtral()
    adapters.add_lora(other)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(ids).logits, model(ids).logits)
    base = mixtral().state_dict()
    missing, unexpected = model.load_state_dict(base, strict=False)
    assert not unexpected
    assert all("lora_" in name for name in missing)


def test_saving_a_model_with_adapters_is_refused(tmp_path: Any) -> None:
    model = llama()
    adapters.add_lora(model)
    with pytest.raises(LigerzooError, match="Merge adapters into the weights"):
        model.save_pretrained(tmp_path)


def test_a_gated_mlp_saves_no_product_of_gate_and_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """`glu_linear` gets the update of the down projection, whose kernel recomputes its input in backward."""
    import ligerzoo.layers.projection as file

    updates = []
    original = file.compute_glu_linear

    def recording(*args: Any) -> Any:
        updates.append(args[4])
        return original(*args)

    monkeypatch.setattr(file, "compute_glu_linear", recording)
    mlp = GatedMLP(8, 16)
    mlp(torch.randn(3, 8))
    adapt(mlp.down_proj, LoRAOptions(rank=2))
    mlp(torch.randn(3, 8))
    assert updates[0] is None
    assert updates[1].a is mlp.down_proj.lora_A


def test_decoding_is_captured_only_while_adapters_are_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    from ligerzoo.layers import capture

    model = llama()
    adapters.add_lora(model, dropout=0.1)
    can_decode = partial(capture._can_decode, device=torch.device("cpu"))
    assert all(map(can_decode, model.modules()))
    with adapters.adapters_disabled(model):
        assert not all(map(can_decode, model.modules()))
    assert not all(map(can_decode, model.train().modules()))
    assert not can_capture(model)  # on a CPU
