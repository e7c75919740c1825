"""Captured training steps: the bits of an eager loop, and what cannot be captured. Graphs are a stand-in on a CPU."""

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ligerzoo.adapters import add_lora
from ligerzoo.errors import LigerzooError
from ligerzoo.kernels import dispatch
from ligerzoo.layers.context import Context
from ligerzoo.models import CausalLM, Llama, LlamaConfig, Mixtral, MixtralConfig, Qwen3_5Text, Qwen3_5TextConfig
from ligerzoo.train import captured_step
from ligerzoo.train.captured_step import CapturedStep
from ligerzoo.train.optimizers import (
    SkipNonFinite,
    StepInBackward,
    clip_grad_norm,
    clipped_step,
    make_optimizer,
    schedule,
    set_lr,
)
from ligerzoo.train.optimizers.clipped_step import ClippedStep
from tests.covering import representatives
from tests.train.graphs import RecordedGraph, replace_graphs

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
STEPS = 20

Inputs = dict[str, Tensor]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    return replace_graphs(monkeypatch)


def new_model(dtype: torch.dtype = torch.float32, **changes: Any) -> CausalLM:
    torch.manual_seed(0)
    return Llama(LlamaConfig(**{**SIZES, **changes}), dtype=dtype).train()


def random_batches(count: int, rows: int = 2, length: int = 12, *, segments: int = 1) -> list[Inputs]:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(count):
        ids = torch.randint(SIZES["vocab_size"], (rows, length), generator=generator)
        batches.append({"input_ids": ids, "labels": ids})
        if (
            segments > 1
        ):  # boundaries differ, their number does not: torch's CPU head selects valid rows by their number
            bounds = torch.randperm(length - 1, generator=generator)[: segments - 1] + 1
            starts = torch.zeros(length, dtype=torch.int64).index_fill(0, bounds, 1)
            index = torch.arange(length)
            positions = index - (index * starts).cummax(0).values
            batches[-1]["position_ids"] = positions.expand(rows, -1)
    return batches


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_same_weights(model: nn.Module, expected: nn.Module) -> None:
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, other), name


def train_by_hand(
    model: CausalLM, optimizer: torch.optim.Optimizer, steps: Sequence[Sequence[Inputs]], **options: Any
) -> list[tuple[float, float]]:
    """A plain loop with the learning rate in fp32, and the divisor as a tensor."""
    factor = schedule("cosine", STEPS, warmup_steps=3)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    results = []
    for index, micro_batches in enumerate(steps):
        loss = torch.zeros(())
        for inputs in micro_batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=options.get("autocast") is not None):
                part = model(**inputs, num_items_in_batch=torch.tensor(30 + index)).loss
            part.backward()
            loss += part.detach()
        norm = clip_grad_norm(model, 0.5)
        if "skip" in options:
            options["skip"](norm)
        set_lr(optimizer, factor(index))
        optimizer.step()
        optimizer.zero_grad()
        results.append((float(loss), float(norm)))
    return results


def train_captured(
    step: CapturedStep, optimizer: torch.optim.Optimizer, steps: Sequence[Sequence[Inputs]]
) -> list[tuple[float, float]]:
    factor = schedule("cosine", STEPS, warmup_steps=3)
    results = []
    for index, micro_batches in enumerate(steps):
        set_lr(optimizer, factor(index))
        results.append(step(micro_batches, 30 + index))
    return [(float(loss), float(norm)) for loss, norm in results]  # read at the end: later steps do not overwrite them


def in_steps(batches: list[Inputs], accumulate: int) -> list[list[Inputs]]:
    return [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)]


CASES: dict[str, dict[str, Any]] = {
    "one micro-batch": {},
    "accumulated": {"accumulate": 3},
    "packed": {"accumulate": 2, "segments": 3},
    "checkpointed": {"checkpointing": True},
    "autocast": {"autocast": torch.bfloat16},
    "bf16 with stochastic rounding": {"dtype": torch.bfloat16, "optimizer": {"stochastic_rounding": True}},
    "muon": {"optimizer": {"name": "muon"}, "accumulate": 2},
    "skip": {"skip": True},
}


@pytest.mark.parametrize("case", representatives(CASES, "packed", "checkpointed", "skip"))
def test_captured_steps_have_the_bits_of_a_plain_loop(case: str, graphs: list[RecordedGraph]) -> None:
    given = CASES[case]
    accumulate = given.get("accumulate", 1)
    steps = in_steps(random_batches(STEPS * accumulate, segments=given.get("segments", 1)), accumulate)
    trained = []
    for is_captured in (False, True):
        model = new_model(given.get("dtype", torch.float32))
        if given.get("checkpointing"):
            model.gradient_checkpointing_enable()
        optimizer = make_optimizer(model, lr=1e-2, weight_decay=0.1, **given.get("optimizer", {}))
        options: dict[str, Any] = {"skip": SkipNonFinite(optimizer)} if given.get("skip") else {}
        options["autocast"] = given.get("autocast")
        if is_captured:
            step = CapturedStep(model, optimizer, max_norm=0.5, **options)
            results = train_captured(step, optimizer, steps)
            assert step.reason is None
        else:
            results = train_by_hand(model, optimizer, steps, **options)
        trained.append((model, results))
    assert len(graphs) == (3 if accumulate > 1 else 2)
    assert trained[0][1] == trained[1][1]
    assert_same_weights(trained[1][0], trained[0][0])
    assert all(parameter.grad is None for parameter in trained[1][0].parameters())


def test_what_follows_an_update_runs_once_a_step(graphs: list[RecordedGraph]) -> None:
    """Also in the step that captures the update, and in those that replay it."""
    finished: list[Tensor] = []

    class Finished(ClippedStep):
        def finish(self) -> None:
            finished.append(next(model.parameters()).detach().clone())

    model = new_model()
    optimizer = make_optimizer(model, lr=1e-2)
    step = CapturedStep(model, Finished(model, optimizer, 0.5, SkipNonFinite(optimizer)))
    train_captured(step, optimizer, in_steps(random_batches(5), 1))
    assert len(graphs) == 2
    assert len(finished) == 5
    assert not any(torch.equal(one, other) for one, other in itertools.pairwise(finished))
    with pytest.raises(ValueError, match="CapturedStep: got max_norm or skip; expected None"):
        CapturedStep(model, Finished(model, optimizer, 0.5, None), max_norm=1.0)


def train_both(
    new: Callable[[], nn.Module], steps: Sequence[Sequence[Inputs]], **options: Any
) -> tuple[CapturedStep, nn.Module, list[str | None]]:
    """Trains with capture off and auto, compares losses and weights, and returns the reasons of all steps."""
    trained: list[tuple[nn.Module, list[Any]]] = []
    for capture in ("off", "auto"):
        model = new()
        make = options.get("make", lambda model: make_optimizer(model, lr=1e-2))
        optimizer = make(model)
        step = CapturedStep(model, optimizer, max_norm=0.5, capture=capture, **options.get("step", {}))  # type: ignore[arg-type]
        results, reasons = [], []
        for index, micro_batches in enumerate(steps):
            if "before" in options:
                options["before"](index, model, optimizer)
            results.append([float(value) for value in step(micro_batches, 40)])
            reasons.append(step.reason)
        trained.append((model, results))
    assert trained[0][1] == trained[1][1]
    assert_same_weights(trained[1][0], trained[0][0])
    return step, model, reasons


def test_the_load_balancing_loss_is_the_mean_of_the_micro_batches(
    graphs: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, experts group tokens on the host, so the step is not captured."""
    config = MixtralConfig(**SIZES, num_experts=4, output_router_logits=True, router_aux_loss_coef=10.0)

    def new() -> nn.Module:
        torch.manual_seed(0)
        return Mixtral(config).train()

    batches = random_batches(4, rows=1)
    _, _, reasons = train_both(new, [batches])
    assert reasons[0] is not None
    assert "mlp.experts (Experts) groups tokens by expert on the host" in reasons[0]
    losses = []
    for micro_batches in (batches, [{name: torch.cat([b[name] for b in batches]) for name in batches[0]}]):
        model = new()
        loss, _ = CapturedStep(model, make_optimizer(model, lr=1e-3))(micro_batches, 44)
        losses.append(float(loss))
    assert losses[0] > 20
    assert losses[0] == pytest.approx(losses[1], rel=0.1)


@pytest.mark.parametrize("segments", [1, 3])
def test_recurrent_layers_are_captured(segments: int, graphs: list[RecordedGraph]) -> None:
    heads = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 6,
    }
    layers = ["linear_attention", "full_attention"]
    config = Qwen3_5TextConfig(**{**SIZES, **heads, "head_dim": 8}, layer_types=layers)

    def new() -> nn.Module:
        torch.manual_seed(0)
        return Qwen3_5Text(config).train()

    _, _, reasons = train_both(new, [[inputs] for inputs in random_batches(5, segments=segments)])
    assert [reason is None for reason in reasons] == [False, False, True, True, True]
    assert len(graphs) == 2


# Changes between steps


def test_shapes_that_change(graphs: list[RecordedGraph]) -> None:
    batches = [b for length in (8, 10, 12) for b in random_batches(4, length=length)]
    steps = [[batch] for batch in batches * 2]
    _, _, reasons = train_both(new_model, steps, step={"max_shapes": 2})
    eager = "steps of 2 other shapes are captured already (max_shapes)"
    assert [reason is None for reason in reasons[:8]] == [False, False, True, True] * 2
    assert reasons[8:12] == [eager] * 4
    assert reasons[12:20] == [None] * 8
    assert len(graphs) == 4


def test_micro_batches_of_different_shapes_run_eagerly(graphs: list[RecordedGraph]) -> None:
    short, long = random_batches(4, length=8), random_batches(4, length=12)
    _, _, reasons = train_both(new_model, list(zip(short, long, strict=True)))
    assert reasons == ["the micro-batches of the step have different shapes"] * 4


def test_the_number_of_segments_selects_the_graph(graphs: list[RecordedGraph]) -> None:
    """Rows with one segment run without a mask, as they do eagerly."""
    packed, plain = random_batches(4, segments=3), random_batches(4)
    for inputs in plain:
        inputs["position_ids"] = torch.arange(12).expand(2, -1)
    steps = [[inputs] for pair in zip(packed, plain, strict=True) for inputs in pair]
    _, _, reasons = train_both(new_model, steps)
    assert [reason is None for reason in reasons] == [False] * 4 + [True] * 4
    assert len(graphs) == 4


def test_padding_selects_the_graph(graphs: list[RecordedGraph]) -> None:
    steps = []
    for index, inputs in enumerate(random_batches(8)):
        mask = torch.ones(2, 12, dtype=torch.int64)
        mask[:, 10:] = index % 2
        labels = inputs["labels"].where(mask.bool(), -100)
        steps.append([{"input_ids": inputs["input_ids"], "labels": labels, "attention_mask": mask}])
    _, _, reasons = train_both(new_model, steps)
    assert [reason is None for reason in reasons] == [False] * 4 + [True] * 4


def test_saving_and_loading_in_between(graphs: list[RecordedGraph]) -> None:
    """A state that is loaded has other memory and a learning rate that is a number, and training continues with it."""

    def save_and_load(index: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        set_lr(optimizer, schedule("linear", 12)(index))
        if index == 6:
            model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
            state = copy.deepcopy(optimizer.state_dict())
            for group in state["param_groups"]:
                group["lr"] = float(group["lr"])
            optimizer.load_state_dict(state)

    _, _, reasons = train_both(new_model, [[b] for b in random_batches(12)], before=save_and_load)
    assert [reason is None for reason in reasons] == ([False] * 2 + [True] * 4) * 2


@pytest.mark.parametrize("change", ["weight decay", "frozen", "replaced", "checkpointing", "evaluation"])
def test_changes_of_model_and_optimizer_are_noticed(change: str, graphs: list[RecordedGraph]) -> None:
    def apply(index: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
        if index != 4:
            return
        match change:
            case "weight decay":
                optimizer.param_groups[0]["weight_decay"] = 0.5
            case "frozen":
                model.model.embed_tokens.weight.requires_grad_(False)
            case "replaced":
                model.lm_head.weight.data = model.lm_head.weight.data * 2
            case "checkpointing":
                model.gradient_checkpointing_enable()
            case "evaluation":
                model.eval()

    _, _, reasons = train_both(new_model, [[b] for b in random_batches(8)], before=apply)
    assert [reason is None for reason in reasons] == [False, False, True, True] * 2
    assert len(graphs) == 4


class KnownDocuments:
    """A loss that records, of each forward, the documents that attention knows."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def __call__(self, model: nn.Module, inputs: Any, num_items: Tensor | None, micro_batches: int) -> Tensor:
        context = Context(inputs["input_ids"], position_ids=inputs["position_ids"])
        self.found.append(None if context.documents is None else context.documents.rows)
        return model(**inputs, num_items_in_batch=num_items).loss


@pytest.mark.parametrize("capture", ["auto", "off"])
def test_steps_that_are_never_captured_know_their_documents(capture: Any) -> None:
    """Each micro-batch its own, so that attention runs the faster way for them."""
    model, loss = new_model(), KnownDocuments()
    step = CapturedStep(model, make_optimizer(model, lr=1e-3), compute_loss=loss, capture=capture)
    first, second = random_batches(2, segments=3)
    step([first, second], 30)
    assert [len(found) for found in loss.found] == [2, 2]
    for inputs, found in zip((first, second), loss.found, strict=True):
        starts = [index for index, position in enumerate(inputs["position_ids"][0].tolist()) if position == 0]
        assert [start for start, _ in found[0]] == starts
    whole = random_batches(1)[0] | {"position_ids": torch.arange(12)[None]}
    step(whole)
    assert loss.found[-1] is None


@pytest.mark.parametrize("capture", ["auto", "off"])
def test_steps_that_may_be_captured_do_not_depend_on_documents(graphs: list[RecordedGraph], capture: Any) -> None:
    """Nor with capture="off": a run has the same bits with it."""
    model, loss = new_model(), KnownDocuments()
    step = CapturedStep(model, make_optimizer(model, lr=1e-3), compute_loss=loss, capture=capture)
    for inputs in random_batches(4, segments=3):
        step(inputs)
    assert loss.found == [None] * (3 if capture == "auto" else 4)


def test_large_steps_know_their_documents(graphs: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_step, "_MAX_OPERATIONS", 1)
    model, loss = new_model(), KnownDocuments()
    step = CapturedStep(model, make_optimizer(model, lr=1e-3), compute_loss=loss)
    for inputs in random_batches(4, segments=3):
        step(inputs)
    assert len(graphs) == 0
    assert None not in loss.found


def test_released_graphs_are_captured_again(graphs: list[RecordedGraph]) -> None:
    model = new_model()
    step = CapturedStep(model, make_optimizer(model, lr=1e-3))
    for index, inputs in enumerate(random_batches(6)):
        if index == 3:
            step.release()
        step(inputs)
        assert (step.reason is None) == (index in (2, 5))


def test_an_update_that_cannot_be_captured_runs_eagerly(graphs: list[RecordedGraph]) -> None:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=True)

    _, _, reasons = train_both(new_model, in_steps(random_batches(12), 2), make=sgd)
    assert reasons[2:5] == [reasons[2]] * 3
    assert str(reasons[2]).startswith("the update runs eagerly: SGD may read values on the host; one of make_optimizer")
    assert len(graphs) == 2


def test_dropout_of_lora(graphs: list[RecordedGraph]) -> None:
    def adapted() -> nn.Module:
        model = new_model()
        add_lora(model, rank=2, dropout=0.5)
        return model

    steps = [[batch] for batch in random_batches(6)]
    _, _, reasons = train_both(adapted, steps)
    assert reasons[2:] == [None] * 4

    def checkpointed() -> nn.Module:
        model: Any = adapted()
        model.gradient_checkpointing_enable()
        return model  # type: ignore[no-any-return]

    _, _, reasons = train_both(checkpointed, steps[:1])
    assert reasons == ["activation checkpointing restores the random numbers of dropout from the host"]


# Errors


def test_a_failed_capture_continues_eagerly(graphs: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: Callable[[], Any], pool: Any = None) -> None:
        function()
        raise RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors ...")

    model = new_model()
    batches = random_batches(4)
    step = CapturedStep(model, make_optimizer(model, lr=1e-3))
    for inputs in batches[:2]:
        step(inputs)
    monkeypatch.setattr(captured_step, "capture_graph", fail)
    reason = "capturing failed: operation not permitted when stream is capturing"
    with pytest.warns(UserWarning, match=f"CapturedStep: {reason}; .* eagerly"):
        step(batches[2])
    assert step.reason == reason
    step(batches[3])
    assert step.reason == reason
    assert all(parameter.grad is None for parameter in model.parameters())
    step = CapturedStep(model, make_optimizer(model, lr=1e-3), capture="on")
    step(batches[0])
    step(batches[1])
    with pytest.raises(RuntimeError, match="operation not permitted"):
        step(batches[2])


def test_ctrl_c_in_a_capture_leaves_the_model_usable(
    graphs: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model()
    batches = random_batches(5)
    step = CapturedStep(model, make_optimizer(model, lr=1e-3))
    for inputs in batches[:2]:
        step(inputs)
    before = weights(model)

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(clipped_step, "clip_grad_norm", interrupt)
        with pytest.raises(KeyboardInterrupt):
            step(batches[2])
    assert all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    step(batches[2])
    assert step.reason is None


# What cannot be captured


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def compiled(model: nn.Module, optimizer: Any) -> None:
    model.compile()


def hooked(model: nn.Module, optimizer: Any) -> None:
    model.get_submodule("model.norm").register_forward_hook(lambda module, inputs, output: output)


def foreign(model: nn.Module, optimizer: Any) -> None:
    model.extra = Doubled()


def in_backward(model: nn.Module, optimizer: Any) -> None:
    StepInBackward(optimizer)


@pytest.mark.parametrize(
    "prepare, reason",
    [
        (compiled, "the model is compiled"),
        (hooked, r"model.norm \(RMSNorm\) has hooks"),
        (foreign, r"extra \(Doubled\) is not a layer of ligerzoo or torch"),
        (in_backward, "parameters have hooks, such as those of an optimizer in backward"),
    ],
)
def test_what_cannot_be_captured_is_named(prepare: Any, reason: str, graphs: list[RecordedGraph]) -> None:
    model = new_model()
    optimizer = make_optimizer(model, lr=1e-3)
    prepare(model, optimizer)
    strict = CapturedStep(model, optimizer, capture="on")
    (inputs,) = random_batches(1)
    if prepare is foreign:
        strict(inputs)
        assert strict.reason == "eager step 1 of 2 before steps of this shape are captured"
    else:
        with pytest.raises(LigerzooError, match=f"CapturedStep: the step cannot be captured; got {reason}.*auto"):
            strict(inputs)


def test_the_device_debug_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model()
    step = CapturedStep(model, make_optimizer(model, lr=1e-3))
    (inputs,) = random_batches(1)
    step(inputs)
    assert step.reason == "the model is not on one GPU"
    replace_graphs(monkeypatch)
    monkeypatch.setattr(captured_step, "_MAX_OPERATIONS", 1e5)
    step = CapturedStep(model, make_optimizer(model, lr=1e-3))
    step(inputs)
    assert step.reason == "the micro-batches are so large that launching takes little of their time"
    with torch.autocast("cpu", torch.bfloat16):
        step(inputs)
    assert step.reason == "autocast is enabled around the step; pass the dtype as `autocast`"
    monkeypatch.setattr("ligerzoo.layers.capture.DEBUG", True)
    step = CapturedStep(model, make_optimizer(model, lr=1e-3))
    step(inputs)
    assert step.reason == "LIGERZOO_DEBUG=1 reads values on the host"
    assert not dispatch.DEBUG


def test_inputs_that_cannot_be_captured(graphs: list[RecordedGraph]) -> None:
    model = new_model()
    step = CapturedStep(model, make_optimizer(model, lr=1e-3))
    (inputs,) = random_batches(1)
    step({**inputs, "use_cache": True})
    assert step.reason == "the inputs have a KV cache"


def test_an_optimizer_in_backward_runs_eagerly(graphs: list[RecordedGraph]) -> None:
    (inputs,) = random_batches(1)
    by_hand, model = new_model(), new_model()
    optimizer = make_optimizer(by_hand, lr=2**-10)
    by_hand(**inputs).loss.backward()
    optimizer.step()
    optimizer = make_optimizer(model, lr=2**-10)
    StepInBackward(optimizer)
    step = CapturedStep(model, optimizer)
    assert step(inputs)[1] is None
    assert step.reason == "parameters have hooks, such as those of an optimizer in backward"
    assert_same_weights(model, by_hand)


@pytest.mark.parametrize(
    "batches, num_items, expected",
    [([], 3, "got 0 micro-batches"), (2, None, "got 2 micro-batches and num_items=None"), (1, 0, "num_items=0")],
)
def test_invalid_steps(batches: Any, num_items: Any, expected: str) -> None:
    model = new_model()
    step = CapturedStep(model, make_optimizer(model, lr=1e-3))
    with pytest.raises(ValueError, match=expected):
        step(random_batches(batches) if batches else [], num_items)


def test_invalid_options() -> None:
    model = new_model()
    with pytest.raises(ValueError, match="capture='always'; expected one of 'auto', 'on', 'off'"):
        CapturedStep(model, make_optimizer(model, lr=1e-3), capture="always")  # type: ignore[arg-type]
