"""Every optimizer against plain fp64 formulas, interrupted runs, and what `torch.optim.Optimizer` promises."""

import copy
import io
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ligerzoo.train.optimizers import (
    OPTIMIZER_NAMES,
    Muon,
    SkipNonFinite,
    StochasticAdamW,
    clip_grad_norm,
    make_optimizer,
    muon_groups,
    parameter_groups,
    set_lr,
)
from tests.covering import covering, long_cases
from tests.train.optimizer_cases import (
    adamw_rule,
    parameters_of,
    reference_run,
    set_gradients,
    tensors_in,
    tiny_llama,
    tiny_moe,
    train,
)

BF16 = torch.bfloat16
LOW_BIT = [name for name in OPTIMIZER_NAMES if name not in ("adamw", "muon")]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("adamw", {}),
    "stochastic": ("adamw", {"stochastic_rounding": True}),
    "stochastic, fp32 states": ("adamw", {"stochastic_rounding": True, "state_dtype": torch.float32, "seed": 7}),
    "muon": ("muon", {}),
    "stochastic muon": ("muon", {"stochastic_rounding": True, "seed": 3}),
    **{name: (name, {}) for name in LOW_BIT},
    "stochastic 8-bit": ("adamw-8bit", {"stochastic_rounding": True}),
    "fp8 to the nearest": ("adamw-fp8", {"stochastic_rounding": False, "seed": 2}),
}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def _uncompiled(request: pytest.FixtureRequest) -> Any:
    """torchao compiles its update; run it eagerly, which needs no C++ compiler."""
    kind = str(getattr(request.node, "callspec", None) and request.node.callspec.params)
    if "bit" in kind:
        pytest.importorskip("torchao")
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def build(kind: str, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    name, of_kind = KINDS[kind]
    return make_optimizer(model, name, **{"lr": 0.01, **of_kind, **options})


class _RefusesReading(TorchDispatchMode):
    """Raises if a value of a tensor is read, for which the host waits for a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "bit" not in kind])
def test_updates_read_no_value(kind: str, skips: bool) -> None:
    model = tiny_llama(dtype=BF16)
    optimizer = build(kind, model)
    skip = SkipNonFinite(optimizer) if skips else None
    set_gradients(parameters_of(optimizer), 0)
    norm = clip_grad_norm(model, 1.0)
    with _RefusesReading():
        for _ in range(2):
            if skip is not None:
                skip(norm)
            optimizer.step()


def wide_model(dtype: torch.dtype) -> nn.Module:
    """A model with a matrix that torchao quantizes, of 4096 elements or more."""
    return tiny_llama(dtype=dtype, intermediate_size=256)


# Formulas

ADAMW: dict[str, list[Any]] = {
    "stochastic": [False, True],
    "dtype": [torch.float32, BF16],
    "betas": [(0.9, 0.999), (0.5, 0.95)],
    "eps": [1e-8, 1e-3],
    "weight_decay": [0.0, 0.3],
    "lr": [1e-3, 0.03],
}


@pytest.mark.parametrize("case", covering(ADAMW), ids=str)
def test_adamw_computes_its_formula(case: dict[str, Any]) -> None:
    options = {name: case[name] for name in ("betas", "eps", "lr")}
    parameters = [nn.Parameter(torch.randn(shape).to(case["dtype"])) for shape in ((40, 50), (7,), (3, 4, 5))]
    rule = adamw_rule(**options, weight_decay=case["weight_decay"])
    expected = reference_run(parameters, [rule] * 3, range(5))
    states = {"state_dtype": torch.float32} if case["stochastic"] else {}
    optimizer = make_optimizer(
        parameters, **options, weight_decay=case["weight_decay"], stochastic_rounding=case["stochastic"], **states
    )
    train(optimizer, parameters, range(5))
    for parameter, truth in zip(parameters, expected, strict=True):
        if case["dtype"] == torch.float32:
            torch.testing.assert_close(parameter.double(), truth, rtol=2e-6, atol=2e-6)
        else:
            errors = ((parameter.double() - truth) / truth.abs().clamp_min(0.1)).abs()
            assert errors.max() < 5 * 2**-7 + 3 * case["lr"]  # an ulp per update
            if parameter.numel() > 1000:
                assert errors.mean() < 2**-7


def test_optimizers_with_quantized_moments_compute_about_the_formula() -> None:
    """Quantized moments change an update by some percent."""
    pytest.importorskip("torchao")
    for name in LOW_BIT:
        parameters = [nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(9))]
        before = parameters[0].detach().double()
        rule = adamw_rule(0.01, (0.9, 0.999), 1e-8, 0.1)
        expected = reference_run(parameters, [rule] * 2, range(4))
        optimizer = make_optimizer(parameters, name, lr=0.01, weight_decay=0.1)
        train(optimizer, parameters, range(4))
        torch.testing.assert_close(parameters[1].double(), expected[1], rtol=1e-5, atol=1e-6)
        change, truth = parameters[0].double() - before, expected[0] - before
        assert 1e-6 < (change - truth).norm() / truth.norm() < 0.5, name
        assert torch.cosine_similarity(change.flatten(), truth.flatten(), 0) > 0.9, name


def test_small_updates_of_bf16_weights_are_kept_in_expectation() -> None:
    """Updates of 1e-6 of weights near 1, whose ulp is 2^-7: rounded to the nearest, 1000 of them change nothing."""
    lr, steps = 1e-6, 300
    for stochastic, expected in ((True, -lr * steps), (False, 0.0)):
        weight = nn.Parameter(torch.linspace(1.01, 1.5, 100_000).to(BF16))
        before = weight.detach().double()
        optimizer = make_optimizer([weight], lr=lr, weight_decay=0.0, stochastic_rounding=stochastic)
        for _ in range(steps):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        change = weight.detach().double() - before
        if stochastic:
            # Each weight has moved by an ulp with probability p = 0.0384: the mean's standard error is
            deviation = (abs(expected) * 2**-7 / weight.numel()) ** 0.5
            assert abs(change.mean().item() - expected) < 5 * deviation < 0.2 * abs(expected)
        else:
            assert not change.any()


def test_every_parameter_and_seed_has_its_own_random_bits() -> None:
    def updated(seed: int) -> list[Tensor]:
        weights = [nn.Parameter(torch.full((5000,), 1.25, dtype=BF16)) for _ in range(3)]
        groups = [{"params": weights[:2]}, {"params": weights[2:]}]
        optimizer = make_optimizer(groups, lr=2**-8, weight_decay=0.0, stochastic_rounding=True, seed=seed)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        return [(weight < 1.25).double().detach() for weight in weights]

    draws = [*updated(0), *updated(1)]
    assert torch.corrcoef(torch.stack(draws)).sub(torch.eye(6)).abs().max() < 0.07
    assert all(map(torch.equal, draws[:3], updated(0)))


def test_the_second_moment_in_bf16_decays_in_expectation_only_if_rounded_stochastically() -> None:
    for stochastic in (True, False):
        weight = nn.Parameter(torch.zeros(20_000, dtype=BF16))
        optimizer = make_optimizer([weight], lr=1e-3, stochastic_rounding=stochastic)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        start = optimizer.state[weight]["exp_avg_sq"].double().mean()
        weight.grad = torch.zeros_like(weight)
        for _ in range(100):
            optimizer.step()
        ratio = (optimizer.state[weight]["exp_avg_sq"].double().mean() / start).item()
        assert ratio == pytest.approx(0.999**100 if stochastic else 1.0, rel=0.005)


# Interrupted runs

INTERRUPTED: dict[str, list[Any]] = {"kind": list(KINDS), "dtype": [torch.float32, BF16], "skips": [False, True]}


@pytest.mark.parametrize("case", long_cases(INTERRUPTED), ids=str)
def test_a_loaded_run_continues_bit_for_bit(case: dict[str, Any]) -> None:
    torch.manual_seed(1)
    start = wide_model(case["dtype"])

    def run(model: nn.Module, steps: range, saved: dict[str, Any] | None) -> dict[str, Any]:
        optimizer = build(case["kind"], model)
        skip = SkipNonFinite(optimizer)
        if saved is not None:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            skip.load_state_dict(saved["skip"])
            torch.set_rng_state(saved["random"])  # of torchao's stochastic rounding
        for step in steps:
            set_lr(optimizer, 1 - step / 10)
            skip(torch.tensor(torch.nan if case["skips"] and step == 1 else 1.0))
            train(optimizer, parameters_of(optimizer), [step])
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "skip": skip.state_dict()}
        buffer = io.BytesIO()
        torch.save({**states, "random": torch.get_rng_state()}, buffer)
        buffer.seek(0)
        loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
        return loaded

    torch.manual_seed(2)
    whole = run(copy.deepcopy(start), range(6), None)
    torch.manual_seed(2)
    half = run(copy.deepcopy(start), range(3), None)
    torch.manual_seed(3)
    resumed = run(copy.deepcopy(start), range(3, 6), half)
    assert whole["optimizer"]["param_groups"] == resumed["optimizer"]["param_groups"]
    expected, actual = tensors_in(whole), tensors_in(resumed)
    assert len(expected) == len(actual) > 50
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert whole["skip"]["count"] == int(case["skips"])
    assert not torch.equal(next(iter(whole["model"].values())), next(iter(half["model"].values())))


def test_states_keep_their_dtype() -> None:
    """torch's `load_state_dict` would cast fp32 moments of bf16 weights to bf16."""
    model = tiny_llama(dtype=BF16)
    optimizer = build("stochastic, fp32 states", model)
    train(optimizer, parameters_of(optimizer), range(2))
    loaded = build("stochastic, fp32 states", model)
    saved = optimizer.state_dict()
    loaded.load_state_dict(saved)
    for parameter in parameters_of(optimizer):
        assert loaded.state[parameter]["exp_avg"].dtype == torch.float32
        assert torch.equal(loaded.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])
        assert loaded.state[parameter]["exp_avg"] is not optimizer.state[parameter]["exp_avg"]


@pytest.mark.parametrize("saved, loading", list(permutations(("adamw", "stochastic", "adamw-fp8"), 2)))
def test_states_of_other_optimizers_are_refused(saved: str, loading: str) -> None:
    groups = [{"params": [nn.Parameter(torch.ones(64, 64))]}]
    optimizer = make_optimizer(copy.deepcopy(groups), KINDS[saved][0], lr=0.1, **KINDS[saved][1])
    train(optimizer, parameters_of(optimizer), range(1))
    other = make_optimizer(groups, KINDS[loading][0], lr=0.1, **KINDS[loading][1])
    with pytest.raises(ValueError, match=r"^load_state_dict: the state is of .*; expected one of"):
        other.load_state_dict(optimizer.state_dict())


@kinds
def test_states_of_other_parameters_are_refused(kind: str) -> None:
    model = tiny_llama()
    optimizer = build(kind, model)
    train(optimizer, parameters_of(optimizer), range(1))
    saved = optimizer.state_dict()
    other = tiny_llama(attention_bias=True)
    with pytest.raises(ValueError, match=r"^load_state_dict: the optimizer's parameter .* has the state of "):
        build(kind, other).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"^load_state_dict: .* has shape .*; expected \("):
        build(kind, tiny_llama(intermediate_size=25)).load_state_dict(saved)


# What torch.optim.Optimizer promises


@kinds
def test_missing_gradients_frozen_parameters_and_new_groups(kind: str) -> None:
    model = tiny_llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    optimizer = build(kind, model)
    trained = parameters_of(optimizer)
    assert len(trained) == 6
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    set_gradients(trained[:2], 0)
    optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name, p in model.named_parameters() if any(p is t for t in trained[:2])}
    assert len(optimizer.state) == 2
    added = nn.Parameter(torch.randn(5, 6))
    optimizer.add_param_group({"params": [("added", added)], "lr": 0.5, "muon": True})
    set_gradients([added], 0)
    optimizer.step()
    assert set(optimizer.state[added]) >= {"step"} if kind == "adamw" else optimizer.state[added]
    empty = nn.Parameter(torch.empty(0, 4))
    optimizer.add_param_group({"params": [("empty", empty)], "muon": False})
    empty.grad = torch.empty(0, 4)
    optimizer.step()


@kinds
def test_tied_weights_are_updated_once(kind: str) -> None:
    model = tiny_llama(tie_word_embeddings=True)
    optimizer = build(kind, model)
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert len(set(names)) == len(names) == len(list(model.parameters()))
    assert "lm_head.weight" not in names
    train(optimizer, parameters_of(optimizer), range(2))
    head: Any = model
    assert head.lm_head.weight is head.model.embed_tokens.weight
    assert optimizer.state[head.lm_head.weight]["step"] == 2


@kinds
def test_closures(kind: str) -> None:
    model = tiny_llama()
    optimizer = build(kind, model)
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        ids = torch.arange(12).view(1, 12)
        loss: Tensor = model(ids, labels=ids).loss
        loss.backward()
        calls.append(loss.item())
        return loss

    losses = [optimizer.step(closure).item() for _ in range(8)]
    assert losses == calls
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("kind", ["stochastic", "muon"])
def test_a_learning_rate_may_be_a_tensor(kind: str) -> None:
    weights = []
    for lr in (0.01, torch.tensor(0.01)):
        torch.manual_seed(0)
        model = tiny_llama()
        optimizer = {"stochastic": StochasticAdamW, "muon": Muon}[kind](muon_groups(model, 0.1), lr=lr)
        for i in range(3):
            set_lr(optimizer, 1 - i / 4)
            train(optimizer, parameters_of(optimizer), [i])
        weights.append(list(model.state_dict().values()))
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)


@kinds
def test_a_skipped_step_changes_nothing(kind: str) -> None:
    model = tiny_llama(intermediate_size=256)
    optimizer = build(kind, model)
    skip = SkipNonFinite(optimizer)
    train(optimizer, parameters_of(optimizer), range(2))
    before = [t.clone() for t in tensors_in([optimizer.state_dict()["state"], model.state_dict()])]
    for norm in (torch.nan, torch.inf):
        skip(torch.tensor(norm))
        for parameter in parameters_of(optimizer):
            parameter.grad = torch.full_like(parameter, torch.nan)
        optimizer.step()
    assert skip.count == 2
    after = tensors_in([optimizer.state_dict()["state"], model.state_dict()])
    assert all(map(torch.equal, before, after))
    skip(torch.tensor(3.0))
    train(optimizer, parameters_of(optimizer), range(1))
    assert skip.count == 2
    assert not torch.equal(after[-1], before[-1])


def test_skipping_needs_support() -> None:
    with pytest.raises(ValueError, match=r"^SkipNonFinite: SGD cannot skip steps on the device; expected"):
        SkipNonFinite(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0))
    with pytest.raises(TypeError, match=r"^SkipNonFinite: norm is 1.0; expected the 0-d tensor"):
        SkipNonFinite(make_optimizer([nn.Parameter(torch.ones(2))], lr=1.0))(1.0)  # type: ignore[arg-type]


@kinds
def test_meta_parameters_are_refused(kind: str) -> None:
    with torch.device("meta"):
        model = tiny_llama()
    with pytest.raises(ValueError, match=r"^make_optimizer: parameter .* is on the meta device and has no data; load"):
        build(kind, model)


@pytest.mark.parametrize("cls", [StochasticAdamW, Muon])
@pytest.mark.parametrize("parameter", [
    nn.Parameter(torch.ones(2, 2, dtype=torch.float16)), nn.Parameter(torch.ones(2, 2).double()),
    nn.Parameter(torch.ones(2, 2, device="meta")),
])  # fmt: skip
def test_other_dtypes_and_devices_are_refused(cls: Any, parameter: nn.Parameter) -> None:
    groups = [{"params": [nn.Parameter(torch.ones(2, 2))], "muon": True}]
    optimizer = cls(groups)
    with pytest.raises(ValueError, match=rf"^{cls.__name__}: parameter 1 is .*; expected torch.float32 or"):
        optimizer.add_param_group({"params": [parameter], "muon": True})
    assert len(optimizer.param_groups) == 1


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"^StochasticAdamW: a gradient is sparse; expected nn.Embedding"):
        make_optimizer(table, lr=0.1, stochastic_rounding=True).step()


@pytest.mark.parametrize("arguments, error, message", [
    ({"name": "adam"}, ValueError, r"make_optimizer: name='adam'; expected one of .*\. Did you mean 'adamw'\?"),
    ({"momentun": 1}, ValueError, r"make_optimizer: 'adamw' has no option 'momentun'; expected seed, state"),
    ({"name": "muon", "momentun": 1}, ValueError, r"make_optimizer: 'muon' has .*\. Did you mean 'momentum'\?"),
    ({"lr": -1.0}, ValueError, "make_optimizer: lr=-1.0; expected 0 or a positive number"),
    ({"lr": "1"}, TypeError, "make_optimizer: lr='1'; expected 0 or a positive number"),
    ({"betas": (0.9, 1.0)}, ValueError, r"make_optimizer: betas\[1\]=1.0; expected a number from 0 to 1, not 1"),
    ({"betas": 0.9}, ValueError, "make_optimizer: betas=0.9; expected two numbers"),
    ({"seed": 3}, ValueError, r'make_optimizer: .* with "adamw"; expected stochastic_rounding=True'),
    ({"stochastic_rounding": True, "seed": -1}, ValueError, "StochasticAdamW: seed=-1; expected an integer from"),
    ({"stochastic_rounding": True, "state_dtype": torch.float16}, ValueError, "StochasticAdamW: state_dtype=tor"),
    ({"name": "muon", "scale": "rms"}, ValueError, "Muon: scale='rms'; expected one of 'match_rms_adamw'"),
    ({"name": "muon", "momentum": 1}, ValueError, "Muon: momentum=1; expected a number from 0 to 1, not 1"),
])  # fmt: skip
def test_arguments_are_checked(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        make_optimizer(tiny_llama(), **{"lr": 0.1, **arguments})


def test_nothing_to_train() -> None:
    with pytest.raises(ValueError, match=r"^the model has no parameter with requires_grad=True"):
        make_optimizer(tiny_llama().requires_grad_(False), lr=0.1)


def test_missing_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao.optim", None)
    from ligerzoo.train.optimizers.low_bit import _skipping_class

    _skipping_class.cache_clear()
    with pytest.raises(ImportError, match=r"^torchao is not installed, whose AdamW8bit is used; pip install 'ligerzoo"):
        make_optimizer(tiny_llama(), "adamw-8bit", lr=0.1)


# Parameter groups


def test_norms_biases_and_embeddings_do_not_decay() -> None:
    model = tiny_llama(attention_bias=True)
    decaying, others = parameter_groups(model, 0.1)
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {name for name, _ in decaying["params"]} == {*linear, "lm_head.weight"}
    assert {name for name, _ in others["params"]} == {name for name, _ in model.named_parameters()} - {
        *linear, "lm_head.weight",
    }  # fmt: skip
    assert any(name.endswith("q_proj.bias") for name, _ in others["params"])


def test_a_tied_head_does_not_decay() -> None:
    decaying, others = parameter_groups(tiny_llama(tie_word_embeddings=True), 0.1)
    assert "model.embed_tokens.weight" in dict(others["params"])
    assert "lm_head.weight" not in dict(decaying["params"])


def test_experts_and_routers_decay_and_muon_splits_gate_and_up() -> None:
    model = tiny_moe()
    decaying, _ = parameter_groups(model, 0.1)
    experts = {name for name, parameter in model.named_parameters() if parameter.dim() == 3}
    assert experts
    assert experts < set(dict(decaying["params"]))
    groups = muon_groups(model, 0.1)
    by_kind = {(g["muon"], g["matrices_per_row_block"], g["weight_decay"]): set(dict(g["params"])) for g in groups}
    assert len(by_kind) == len(groups) == 4
    assert by_kind[True, 2, 0.1] == {name for name in experts if name.endswith("gate_up_proj")}
    assert by_kind[True, 1, 0.1] >= {name for name in experts if name.endswith("down_proj")}
    assert by_kind[False, 1, 0.1] == {"lm_head.weight"}
    assert "model.embed_tokens.weight" in by_kind[False, 1, 0.0]
    names = [name for group in groups for name, _ in group["params"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_groups_of_the_user_keep_their_options() -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    groups = [{"params": [first], "lr": 0.5, "weight_decay": 0.0}, {"params": iter([second])}]
    optimizer = make_optimizer(groups, lr=0.1, weight_decay=0.2)
    options = [(group["lr"], group["weight_decay"], group["initial_lr"]) for group in optimizer.param_groups]
    assert options == [(0.5, 0.0, 0.5), (0.1, 0.2, 0.1)]
