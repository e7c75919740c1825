"""Recomputation in backward: the same bits, for all architectures and levels."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.adapters import add_lora
from ligerzoo.kernels.recompute import recomputable, recomputing
from ligerzoo.layers import Linear
from ligerzoo.memory import Recompute
from ligerzoo.models import CausalLM
from tests.memory.conftest import build

RECOMPUTING = [level for level in Recompute if level]
T = 24


def inputs(**extra: Tensor) -> dict[str, Tensor]:
    ids = torch.randint(3, 60, (2, T), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids, **extra}


def gradients(model: CausalLM, *levels: Recompute, **extra: Tensor) -> dict[str, Tensor]:
    """Gradients of all trained parameters; the levels repeat."""
    layers = len(model.model.layers)
    model.model.activation_plan = tuple(levels[i % len(levels)] for i in range(layers)) if levels else ()
    model.zero_grad()
    torch.manual_seed(0)
    model(**inputs(**extra)).loss.backward()
    model.model.activation_plan = ()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_bits(model: CausalLM, *levels: Recompute, **extra: Tensor) -> None:
    expected, found = gradients(model, **extra), gradients(model, *levels, **extra)
    assert expected.keys() == found.keys()
    assert expected
    differing = [name for name in expected if not torch.equal(expected[name], found[name])]
    assert not differing, f"{levels}: {differing}"


@pytest.mark.every_layer
@pytest.mark.parametrize("level", RECOMPUTING)
def test_gradients_have_the_same_bits(tiny_model: CausalLM, level: Recompute) -> None:
    assert_same_bits(tiny_model, level)


@pytest.mark.every_layer
def test_levels_mix(tiny_model: CausalLM) -> None:
    assert_same_bits(tiny_model, Recompute.MLP, Recompute.BLOCK, Recompute.ELEMENTWISE)


def frozen(model: CausalLM) -> None:
    """Only norms and the attention of the last block are trained."""
    for name, parameter in model.named_parameters():
        last = f"layers.{len(model.model.layers) - 1}.self_attn"
        parameter.requires_grad_("norm" in name or last in name)


def adapted(model: CausalLM, **options: Any) -> None:
    """Low-rank updates of all linear layers of the blocks; with default options of the experts too."""
    torch.manual_seed(0)
    linears = [name for name, module in model.model.layers.named_modules() if isinstance(module, Linear)]
    add_lora(model, 2, targets=[f"layers.{name}" for name in linears] if options else None, **options)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "magnitude" not in name:
            nn.init.normal_(parameter, std=0.3)


def half(model: CausalLM) -> None:
    model.bfloat16()


TRAINING: dict[str, Callable[[CausalLM], Any]] = {
    "full": lambda model: None, "frozen": frozen, "adapters": adapted, "bf16": half,
    "dropout": partial(adapted, dropout=0.3), "DoRA": partial(adapted, dora=True),
}  # fmt: skip
PACKED = {"position_ids": torch.tensor([[*range(10), *range(14)], [*range(20), *range(4)]])}
PADDED = {"attention_mask": (torch.arange(T) < torch.tensor([[T], [17]])).long()}
INPUTS: dict[str, dict[str, Tensor]] = {"whole rows": {}, "packed": PACKED, "padded": PADDED}


@pytest.mark.parametrize("level", RECOMPUTING)
@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("training", TRAINING)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gemma2"])  # MoE and normalized heads; windows and soft caps
def test_options_in_pairs(model_type: str, training: str, given: str, level: Recompute) -> None:
    model = build(model_type)
    TRAINING[training](model)
    assert_same_bits(model, level, **INPUTS[given])


def kept_bytes(model: CausalLM, level: Recompute) -> int:
    """Bytes that backward keeps of the second block, parameters excluded."""
    storages: dict[int, Any] = {}
    recording = False

    def pack(tensor: Tensor) -> Tensor:
        if recording and not isinstance(tensor, nn.Parameter):
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor.detach()

    def begin(*_: Any) -> None:
        nonlocal recording
        recording = True

    def end(*_: Any) -> None:
        nonlocal recording
        recording = False

    layer = model.model.layers[1]
    model.model.activation_plan = (level,) * len(model.model.layers)
    handles = layer.register_forward_pre_hook(begin), layer.register_forward_hook(end)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**inputs()).loss.backward()
    for handle in handles:
        handle.remove()
    model.model.activation_plan = ()
    return sum(storage.nbytes() for storage in storages.values())


def test_saved_bytes_shrink_by_what_is_recomputed() -> None:
    """Of the reference on a CPU, which keeps more than the kernels; `tests/kernels/test_recompute.py` has those."""
    model = build("llama")
    hidden, intermediate, element = 32, 56, 4
    whole, elementwise, mlp = (kept_bytes(model, level) for level in (Recompute.NOTHING, *RECOMPUTING[:2]))
    norms, product = 2 * hidden, intermediate
    assert whole - elementwise == 2 * T * element * norms
    # Gate and up are recipes, but the reference of SwiGLU also saves silu(gate), and the down projection its input.
    assert elementwise - mlp == 2 * T * element * 2 * intermediate
    assert product < whole


class Counter:
    """Counts the calls of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.function(*args)


def square(x: Tensor) -> Tensor:
    return x * x


def recorded(x: Tensor, function: Callable[..., Any], readers: int) -> Tensor:
    """A loss whose graph reads `function(x)` in several nodes."""
    with recomputing(Recompute.ELEMENTWISE):
        y = square(x)
        recomputable((y,), function, x)
        weights = [torch.full((4, 3), float(i), requires_grad=True) for i in range(readers)]
        return sum(F.linear(y, weight).sum() for weight in weights)  # type: ignore[return-value]


@pytest.mark.parametrize("readers", [1, 3])
def test_several_readers_compute_once_per_backward(readers: int) -> None:
    function = Counter(square)
    loss = recorded(torch.rand(5, 3, requires_grad=True), function, readers)
    assert function.calls == 0
    for backwards in (1, 2):
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        assert function.calls == backwards


def test_outputs_are_freed_after_forward() -> None:
    x = torch.rand(5, 3, requires_grad=True)
    with recomputing(Recompute.ELEMENTWISE):
        y = square(x)
        recomputable((y,), square, x)
        alive = weakref.ref(y.untyped_storage())
        loss = F.linear(y, torch.ones(4, 3, requires_grad=True)).sum()
        del y
    gc.collect()
    assert alive() is None
    loss.backward()


def test_views_are_recomputed_too() -> None:
    results = []
    for level in (Recompute.NOTHING, Recompute.ELEMENTWISE):
        x = torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()
        with recomputing(level):
            y = square(x)
            recomputable((y,), square, x)
            views = y.view(2, 12).T, y[1:, ::2], y.transpose(0, 1)
            loss = sum((view * view.detach().cos()).exp().sum() for view in views)
        loss.backward()  # type: ignore[union-attr]
        results.append(x.grad)
    assert torch.equal(*results)  # type: ignore[arg-type]


def test_a_recipe_may_read_another() -> None:
    x = torch.linspace(0.1, 1, 6).requires_grad_()
    first, second = Counter(square), Counter(torch.exp)
    with recomputing(Recompute.ELEMENTWISE):
        y = square(x)
        recomputable((y,), first, x)
        z = torch.exp(y)
        recomputable((z,), second, y)
        (z * z).sum().backward()
    assert (first.calls, second.calls) == (1, 1)


@pytest.mark.parametrize("modified", ["self_attn.q_proj", "mlp.gate_proj", "input_layernorm"])
@pytest.mark.parametrize("level", [Recompute.ELEMENTWISE, Recompute.MLP])
def test_weights_modified_before_backward_are_an_error(level: Recompute, modified: str) -> None:
    model = build("llama")
    model.model.activation_plan = (level,) * len(model.model.layers)
    loss = model(**inputs()).loss
    with torch.no_grad():
        model.get_parameter(f"model.layers.1.{modified}.weight").mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("level", [Recompute.ELEMENTWISE, Recompute.MLP])
def test_autocast_is_refused(level: Recompute) -> None:
    model = build("llama")
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(RuntimeError, match=r"under torch.autocast"),
    ):
        gradients(model, level)


def test_checkpointing_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(build("llama"), Recompute.BLOCK)


def test_compilation_of_the_model_is_refused() -> None:
    model = build("llama")
    model.model.activation_plan = (Recompute.ELEMENTWISE,) * len(model.model.layers)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"is not supported under torch.compile"):
        compiled(**inputs())
    torch._dynamo.reset()


def test_a_plan_without_gradients_has_no_effect() -> None:
    model = build("llama")
    model.model.activation_plan = (Recompute.MLP, Recompute.BLOCK)
    ids = inputs()["input_ids"]
    with torch.no_grad():
        planned = model(ids).logits
    model.model.activation_plan = ()
    assert torch.equal(planned, model(ids).logits)
    assert model.generate(ids[:, :4], max_new_tokens=2).shape == (2, 6)


def test_a_plan_of_another_length_is_an_error() -> None:
    model = build("llama")
    model.model.activation_plan = (Recompute.MLP,)
    with pytest.raises(ValueError, match="zip"):
        model(**inputs())
