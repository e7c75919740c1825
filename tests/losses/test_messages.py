"""Error messages of the losses: what is wrong, where, what was given and expected, and what to do.

Each case has one mistake, and the whole message, as a pattern.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ligerzoo import losses
from ligerzoo.losses import model_sequence_logps
from tests.losses.test_models import batch_of, tiny

B, T, H, V = 4, 5, 3, 11


def refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        call()


# Options, at construction

MODULES = [losses.DPO, losses.CPO, losses.SimPO, losses.ORPO, losses.KTO, losses.GRPO, losses.PPOClip,
           losses.Distillation]  # fmt: skip
FUNCTIONS = {module: module.function for module in MODULES}


@pytest.mark.parametrize("module, options, message", [
    (losses.DPO, {"variant": "sigmod"}, r"DPO: variant='sigmod'; expected one of .*\. Did you mean 'sigmoid'\?"),
    (losses.KTO, {"variant": "ktoo"}, r"KTO: variant='ktoo'; expected one of 'kto', .*\. Did you mean 'kto'\?"),
    (losses.CPO, {"variant": "hing"}, r"CPO: variant='hing'; expected one of .*\. Did you mean 'hinge'\?"),
    (losses.GRPO, {"variant": "dpao"}, r"GRPO: variant='dpao'; expected one of 'grpo', .*\. Did you mean 'dapo'\?"),
    (losses.GRPO, {"level": "tokens"}, r"GRPO: level='tokens'; expected one of .*\. Did you mean 'token'\?"),
    (losses.Distillation, {"divergence": "revers_kl"}, r"Distillation: divergence='revers_kl'; .* 'reverse_kl'\?"),
    (losses.GRPO, {"beta": -1.0}, r"GRPO: beta=-1\.0; expected 0 or a positive number"),
    (losses.GRPO, {"epsilon": 1.5}, r"GRPO: epsilon=1\.5; expected 0 <= epsilon < 1"),
    (losses.GRPO, {"epsilon_high": -0.1}, r"GRPO: epsilon_high=-0\.1; expected 0 or a positive number, or None"),
    (losses.GRPO, {"delta": 1.1}, r"GRPO: delta=1\.1; expected more than 1 \+ epsilon_high = 1\.2"),
    (losses.GRPO, {"variant": "cispo"}, r"GRPO: epsilon_high=None; variant='cispo' requires it, such as 4"),
    (losses.GRPO, {"variant": "dr_grpo"}, r"GRPO: max_length=None; variant='dr_grpo' requires it: the longest .*"),
    (losses.GRPO, {"max_length": 0, "variant": "dr_grpo"}, r"GRPO: max_length=0; expected an integer, 1 or more, .*"),
    (losses.GRPO, {"variant": "sapo", "sapo_temperatures": (1.0, 0.0)},
     r"GRPO: sapo_temperatures\[1\]=0\.0; expected a positive number"),
    (losses.PPOClip, {"epsilon": -0.1}, r"PPOClip: epsilon=-0\.1; expected 0 <= epsilon < 1"),
    (losses.DPO, {"beta": 0.0}, r"DPO: beta=0\.0; expected a positive number"),
    (losses.DPO, {"beta": float("nan")}, r"DPO: beta=nan; expected a positive number"),
    (losses.DPO, {"label_smoothing": 0.7}, r"DPO: label_smoothing=0\.7 with variant='sigmoid'; expected 0 .* 0\.5"),
    (losses.DPO, {"nll_weight": -1}, r"DPO: nll_weight=-1; expected 0 or a positive number"),
    (losses.DPO, {"temperature": 0}, r"DPO: temperature=0; expected a positive number"),
    (losses.DPO, {"softcap": -5.0}, r"DPO: softcap=-5\.0; expected a positive number, or None"),
    (losses.DPO, {"logits_budget": -1}, r"DPO: logits_budget=-1; expected an integer of MiB, 0 or more, or None"),
    (losses.DPO, {"backend": "tritn"}, r"DPO: backend='tritn'; expected one of .*\. Did you mean 'triton'\?"),
    (losses.DPO, {"num_items": 0}, r"DPO: num_items=0; expected a positive number or a 0-d tensor"),
    (losses.SimPO, {"beta": 0}, r"SimPO: beta=0; expected a positive number"),
    (losses.ORPO, {"beta": -0.1}, r"ORPO: beta=-0\.1; expected 0 or a positive number"),
    (losses.KTO, {"desirable_weight": -1.0}, r"KTO: desirable_weight=-1\.0; expected 0 or a positive number"),
    (losses.Distillation, {"beta": 1.5}, r"Distillation: beta=1\.5; expected a number from 0 to 1"),
    (losses.Distillation, {"temperature": 0.0}, r"Distillation: temperature=0\.0; expected a positive number"),
])  # fmt: skip
def test_values_at_construction(module: type[losses.HeadLoss], options: dict[str, Any], message: str) -> None:
    """Calls of the function refuse them too, under its name."""
    refused(lambda: module(**options), ValueError, message)
    refused(lambda: call(module, **options), ValueError, message.replace(module.__name__, FUNCTIONS[module].__name__))


def call(module: type[losses.HeadLoss], **options: Any) -> Any:
    """Calls a loss function with valid arguments, of which `options` replaces some."""
    names = [parameter.name for parameter in inspect.signature(FUNCTIONS[module]).parameters.values()
             if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD]  # fmt: skip
    values = {
        "hidden": torch.randn(B, T, H), "weight": torch.randn(V, H), "target": torch.randint(V, (B, T)),
        "advantages": torch.randn(B), "old_logps": torch.randn(B, T), "desirable": torch.rand(B) < 0.5,
    }  # fmt: skip
    arguments = {name: values[name] for name in names}
    if module is losses.Distillation:
        arguments["teacher_logits"] = torch.randn(B, T, V)
    return FUNCTIONS[module](**(arguments | options))


@pytest.mark.parametrize("option, value, expected", [
    ("beta", "0.1", "a positive number"), ("beta", None, "a positive number"), ("beta", True, "a positive number"),
    ("average_log_prob", 1, "True or False"), ("temperature", "1", "a positive number"),
    ("ignore_index", -100.0, "an integer"), ("logits_budget", "256", "an integer of MiB, 0 or more, or None"),
    ("num_items", "all", "a positive number or a 0-d tensor"), ("num_items", [3], "a positive number or a 0-d tensor"),
])  # fmt: skip
def test_options_of_another_type(option: str, value: object, expected: str) -> None:
    got = re.escape(f"{option}={value!r}")
    refused(lambda: losses.DPO(**{option: value}), TypeError, f"DPO: {got}; expected {expected}")
    refused(lambda: call(losses.DPO, **{option: value}), TypeError, f"dpo_loss: {got}; expected {expected}")


@pytest.mark.parametrize("options, unused", [
    ({"variant": "cispo", "epsilon_high": 4.0, "epsilon": 0.1}, "epsilon"),
    ({"variant": "sapo", "epsilon_high": 0.3}, "epsilon_high"), ({"variant": "vespo", "delta": 2.0}, "delta"),
    ({"variant": "grpo", "max_length": 8}, "max_length"), ({"sapo_temperatures": (1.0, 2.0)}, "sapo_temperatures"),
    ({"vespo_shapes": ((1.0, 1.0), (1.0, 1.0))}, "vespo_shapes"),
])  # fmt: skip
def test_options_that_a_variant_does_not_use(options: dict[str, Any], unused: str) -> None:
    variant, value = options.get("variant", "grpo"), re.escape(f"{unused}={options[unused]!r}")
    message = f"GRPO: {value} with variant='{variant}', which does not use it; leave out {unused}"
    refused(lambda: losses.GRPO(**options), ValueError, message)
    default = {**options, unused: inspect.signature(losses.grpo_loss).parameters[unused].default}
    losses.GRPO(**default)


@pytest.mark.parametrize("num_tokens", [5, torch.tensor(5)])
def test_a_divisor_of_the_entropy_needs_an_entropy_term(num_tokens: Any) -> None:
    got = re.escape(f"num_tokens={num_tokens!r}")
    message = rf"{got} with entropy_coef=0 \(no entropy term\), which does not use it; leave out num_tokens"
    refused(lambda: losses.GRPO(num_tokens=num_tokens), ValueError, f"GRPO: {message}")
    refused(lambda: call(losses.GRPO, num_tokens=num_tokens), ValueError, f"grpo_loss: {message}")
    losses.GRPO(num_tokens=num_tokens, entropy_coef=0.1)


def test_a_correction_of_the_kl_term_needs_a_reference() -> None:
    message = "grpo_loss: is_kl_corrected=True with ref_logps=None, which does not use it; leave out is_kl_corrected"
    refused(lambda: call(losses.GRPO, is_kl_corrected=True), ValueError, message)
    call(losses.GRPO, is_kl_corrected=True, ref_logps=torch.zeros(B, T))


def test_options_that_other_losses_do_not_use() -> None:
    refused(lambda: losses.DPO(discopop_tau=0.1), ValueError, r"DPO: discopop_tau=0\.1 with variant='sigmoid', .*")
    message = r"Distillation: beta=0\.1 with divergence='tvd', which does not use it; leave out beta"
    refused(lambda: losses.Distillation(divergence="tvd", beta=0.1), ValueError, message)
    message = r"Distillation: temperature=2\.0 with divergence='cosine', which does not use it; leave out temperature"
    refused(lambda: losses.Distillation(divergence="cosine", temperature=2.0), ValueError, message)


@pytest.mark.parametrize("module", MODULES)
def test_functions_document_every_option_once(module: type[losses.HeadLoss]) -> None:
    function, options = FUNCTIONS[module], module.options_type
    names = list(inspect.signature(function).parameters)
    assert names[:3] == ["hidden", "weight", "target"]
    assert {*names[3:]} == {*options.accepted}
    documented = re.findall(r"^    (\w+): ", inspect.getdoc(function).split("Returns:")[0], re.MULTILINE)
    assert {*documented} == {*names}
    assert sorted(documented) == sorted(names)
    for required in options.required:
        refused(lambda: function(torch.randn(B, T, H), None, torch.zeros(B, T)), TypeError, rf".*'{required}'.*")


# Names


@pytest.mark.parametrize("module", MODULES)
def test_misspelt_options(module: type[losses.HeadLoss]) -> None:
    nearest = r"\. Did you mean 'temperature'\?"
    name = module.__name__
    message = rf"{name}: unknown option temprature=2\.0; expected an option of {name}{nearest}"
    refused(lambda: module(temprature=2.0), TypeError, message)
    refused(lambda: call(module, temprature=2.0), TypeError, message.replace(name, FUNCTIONS[module].__name__))
    assert "Did you mean" not in message_of(lambda: module(xyzzy=1))


def message_of(call: Callable[[], Any]) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    return str(caught.value)


def test_misspelt_arguments_of_a_model_s_loss() -> None:
    model, (input_ids, labels) = tiny(layers=1), batch_of()
    of, ones = losses.DPO().of, torch.ones_like(input_ids)
    message = r"DPO: unknown option refrence=a Llama; expected an option of DPO\. Did you mean 'reference'\?"
    refused(lambda: of(model, input_ids, labels, refrence=model), TypeError, message)
    message = r"DPO: unknown option betta=0\.1; expected an option of DPO\. Did you mean 'beta'\?"
    refused(lambda: of(model, input_ids, labels, betta=0.1), TypeError, message)
    message = r"DPO: unknown option position_ids=.*\. Other inputs of the model go into model_inputs=\{\.\.\.\}"
    refused(lambda: of(model, input_ids, labels, position_ids=ones), TypeError, message)
    message = r"DPO\.of: got 4 positional arguments; expected model, input_ids, labels\. Pass the others by name, .*"
    refused(lambda: of(model, input_ids, labels, ones), TypeError, message)
    message = r"GRPO\.of: advantages is missing; expected a tensor, after labels or by name"
    refused(lambda: losses.GRPO().of(model, input_ids, labels), TypeError, message)
    of_teacher = losses.Distillation().of_teacher
    message = r"Distillation: unknown option atention_mask=.*\. Did you mean 'attention_mask'\?"
    refused(lambda: of_teacher(model, model, input_ids, labels, atention_mask=ones), TypeError, message)


# References


def test_a_reference_is_required() -> None:
    model, (input_ids, labels) = tiny(layers=1), batch_of()
    desirable, advantages = input_ids[:, 0] > 15, torch.ones(len(labels))
    for call in (
        lambda: losses.DPO().of(model, input_ids, labels),
        lambda: losses.KTO().of(model, input_ids, labels, desirable),
        lambda: losses.GRPO(beta=0.1).of(model, input_ids, labels, advantages),
    ):
        message = r"\w+\.of: got neither reference nor ref_logps; expected one of them\. Pass reference=\.\.\., .*"
        refused(call, ValueError, message)
    for loss in (losses.SimPO(), losses.CPO(), losses.ORPO()):
        assert loss.of(model, input_ids, labels).loss.isfinite()
    assert losses.GRPO().of(model, input_ids, labels, advantages).loss.isfinite()
    assert losses.DPO().of(model, input_ids, labels, ref_logps=torch.zeros(len(labels))).loss.isfinite()
    message = r"DPO: got 'Llama' for a model; expected a ligerzoo\.models\.CausalLM"
    refused(lambda: losses.DPO().of(model, input_ids, labels, reference="Llama"), TypeError, message)  # type: ignore[arg-type]


# Labels


@pytest.mark.parametrize("wrong", [31, -1, 2**40])
def test_a_label_is_named_by_its_own_position(wrong: int) -> None:
    model, (input_ids, labels) = tiny(layers=1), batch_of()
    labels[2, 5] = wrong
    expected = rf"label outside the vocabulary; got {wrong}; expected 0 to 30, or -100 for an ignored token\. Use .*"
    for call in (
        lambda **labels: model(input_ids, **labels),
        lambda labels: losses.SimPO().of(model, input_ids, labels),
        lambda labels: losses.GRPO().of(model, input_ids, labels, torch.ones(4)),
        lambda labels: losses.Distillation().of_teacher(model, model, input_ids, labels),
        lambda labels: model_sequence_logps(model, input_ids, labels),
    ):
        refused(lambda call=call: call(labels=labels), ValueError, rf"labels\[2, 5\]: {expected}")  # type: ignore[misc]
    refused(lambda: model(input_ids, shift_labels=labels), ValueError, rf"shift_labels\[2, 5\]: {expected}")
    labels[2, 5], labels[2, 0] = 3, wrong  # the label of the first token is never read
    assert model(input_ids, labels=labels).loss.isfinite()


@pytest.mark.parametrize("labels, error, message", [
    ([[1, 2]], TypeError, r"Llama: labels is a list; expected an integer tensor of shape \(4, 7\)\. .*torch\.tensor"),
    (np.zeros((4, 7)), TypeError, r"Llama: labels is a ndarray; .*\. Convert it with torch\.from_numpy"),
    (torch.zeros(4, 7), ValueError, r"Llama: labels has dtype torch\.float32; expected an integer dtype"),
    (torch.zeros(4, 6).long(), ValueError, r"Llama: labels has shape \(4, 6\); expected \(4, 7\)\. Pass labels of .*"),
])  # fmt: skip
def test_labels_of_another_type(labels: Any, error: type[Exception], message: str) -> None:
    model, (input_ids, _) = tiny(layers=1), batch_of()
    refused(lambda: model(input_ids, labels=labels), error, message)


@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("with_weight", [False, True])
@pytest.mark.parametrize("budget", [None, 0])
def test_a_target_of_a_function_is_named_with_the_function(
    budget: int | None, with_weight: bool, with_gradient: bool
) -> None:
    """In one sweep, and where backward computes the logits again."""
    hidden = torch.randn(B, T, H if with_weight else V, requires_grad=with_gradient)
    weight = torch.randn(V, H) if with_weight else None
    target = torch.randint(V, (B, T))
    target[1, 2] = 99
    advantages, old_logps = torch.ones(B), torch.zeros(B, T)
    options = {"logits_budget": budget}
    for call in (
        lambda: losses.dpo_loss(hidden, weight, target, **options),  # type: ignore[arg-type]
        lambda: losses.kto_loss(hidden, weight, target, advantages > 0, **options),  # type: ignore[arg-type]
        lambda: losses.grpo_loss(hidden, weight, target, advantages, entropy_coef=0.1, **options),  # type: ignore[arg-type]
        lambda: losses.ppo_clip_loss(hidden, weight, target, advantages, old_logps, **options),  # type: ignore[arg-type]
        lambda: losses.sequence_logps(hidden, weight, target, **options),  # type: ignore[arg-type]
        lambda: losses.distillation_loss(
            hidden, weight, target, teacher_logits=torch.randn(B, T, V), hard_weight=1.0, **options,  # type: ignore[arg-type]
        ),
    ):  # fmt: skip
        name = r"(dpo_loss|kto_loss|grpo_loss|ppo_clip_loss|sequence_logps|distillation_loss)"
        refused(call, ValueError, rf"{name}: target\[1, 2\] is 99; expected 0 to 10, or ignore_index=-100")


def test_a_target_of_the_nll() -> None:
    target = torch.randint(V, (B, T))
    nll_target = target.clone()
    nll_target[1, 3] = V
    message = rf"orpo_loss: nll_target\[1, 3\] is {V}; expected 0 to 10, or ignore_index=-100"
    refused(lambda: call(losses.ORPO, target=target, nll_target=nll_target), ValueError, message)


# Tensors

FLOAT_ARGUMENTS: list[tuple[type[losses.HeadLoss], str, tuple[int, ...]]] = [
    (losses.DPO, "ref_logps", (B,)), (losses.DPO, "weights", (B // 2,)), (losses.KTO, "ref_logps", (B,)),
    (losses.KTO, "weights", (B,)), (losses.GRPO, "advantages", (B,)), (losses.GRPO, "old_logps", (B, T)),
    (losses.GRPO, "ref_logps", (B, T)), (losses.GRPO, "correction", (B, T)), (losses.PPOClip, "advantages", (B, T)),
    (losses.PPOClip, "old_logps", (B, T)), (losses.SimPO, "weights", (B // 2,)), (losses.CPO, "weights", (B // 2,)),
    (losses.ORPO, "weights", (B // 2,)),
]  # fmt: skip


@pytest.mark.parametrize("module, argument, shape", FLOAT_ARGUMENTS)
def test_tensors_of_sequences_and_tokens(
    module: type[losses.HeadLoss], argument: str, shape: tuple[int, ...]
) -> None:  # fmt: skip
    """Also those that would broadcast."""
    where, valid = f"{FUNCTIONS[module].__name__}: {argument}", torch.rand(shape)
    call(module, **{argument: valid})
    for wrong, error, message in (
        (valid.tolist(), TypeError, r" is a list; expected a floating-point tensor.*\. Convert it with torch\.tensor"),
        (valid.numpy(), TypeError, r" is a ndarray; expected a floating-point.*\. Convert it with torch\.from_numpy"),
        (0.5, TypeError, r" is 0\.5; expected a floating-point tensor.*"),
        (valid.long(), ValueError, r" has dtype torch\.int64; expected a floating-point dtype"),
        (valid > 0, ValueError, r" has dtype torch\.bool; expected a floating-point dtype"),
        (valid[..., None], ValueError, r" has shape \(.*, 1\); expected \(.*\)"),
        (valid[:1], ValueError, r" has shape \(1,.*\); expected \(.*\)"),
        (valid.to("meta"), ValueError, " is on meta; expected cpu, the device of the other tensors"),
    ):
        refused(lambda wrong=wrong: call(module, **{argument: wrong}), error, where + message)  # type: ignore[misc]


@pytest.mark.parametrize("module", MODULES)
def test_hidden_states_weight_and_target(module: type[losses.HeadLoss]) -> None:
    name, hidden, weight = FUNCTIONS[module].__name__, torch.randn(B, T, H), torch.randn(V, H)
    target = torch.randint(V, (B, T))
    for arguments, error, message in (
        ({"hidden": hidden.tolist()}, TypeError, "hidden is a list; expected a floating-point tensor.*"),
        ({"weight": weight.numpy()}, TypeError, "weight is a ndarray; expected a floating-point tensor.*"),
        ({"target": target.tolist()}, TypeError, r"target is a list; expected a tensor of integers\. Convert .*"),
        ({"target": target.numpy()}, TypeError, "target is a ndarray; expected a tensor of integers.*"),
        (
            {"target": target.float()},
            ValueError,
            r"target has dtype torch\.float32; expected token ids of an integer .*",
        ),
        ({"target": target > 3}, ValueError, r"target has dtype torch\.bool; expected token ids of an integer dtype"),
        ({"hidden": hidden.long()}, ValueError, r"hidden has dtype torch\.int64; expected a floating-point dtype"),
        ({"target": target[:, :3]}, ValueError, r".*target.*\(4, 3\).*expected.*"),
        ({"weight": weight[:, :2]}, ValueError, r"hidden \(4, 5, 3\) .*, weight \(11, 2\) .*; expected .*"),
        ({"weight": weight.to("meta")}, ValueError, "weight is on meta; expected cpu, as hidden"),
    ):
        if module is losses.Distillation and arguments.get("target") is not None and "(4, 3)" in message:
            continue
        refused(lambda arguments=arguments: call(module, **arguments), error, f"{name}: {message}")  # type: ignore[misc]


def test_other_tensors() -> None:
    logps, mask = torch.rand(B, T), torch.ones(B, T) > 0
    message = r"kto_loss: desirable has dtype torch\.int64; expected torch\.bool"
    refused(lambda: call(losses.KTO, desirable=torch.ones(B).long()), ValueError, message)
    message = r"kto_loss: desirable is a list; expected a bool tensor of shape \(4,\)\. Convert it with torch\.tensor"
    refused(lambda: call(losses.KTO, desirable=[True] * B), TypeError, message)
    message = r"kto_kl: logps is a list; expected a floating-point tensor\. Convert it with torch\.tensor"
    refused(lambda: losses.kto_kl([0.5], torch.ones(1)), TypeError, message)  # type: ignore[arg-type]
    message = r"kto_kl: got logps \(4,\) and ref_logps \(4, 1\); expected \(B,\) for both"
    refused(lambda: losses.kto_kl(torch.ones(B), torch.ones(B, 1)), ValueError, message)
    message = r"sampler_correction: got old_logps \(4, 5\), sampler_logps \(4, 1\) and mask \(4, 5\); expected .*"
    refused(lambda: losses.sampler_correction(logps, logps[:, :1], mask), ValueError, message)
    message = r"sampler_correction: sampler_logps has dtype torch\.int64; expected a floating-point dtype"
    refused(lambda: losses.sampler_correction(logps, logps.long(), mask), ValueError, message)
    message = r"sampler_correction: mask has dtype torch\.float32; expected torch\.bool"
    refused(lambda: losses.sampler_correction(logps, logps, mask.float()), ValueError, message)
    message = r"dpo_loss: bias is a list; expected a floating-point tensor\. Convert it with torch\.tensor"
    refused(lambda: call(losses.DPO, bias=[0.0] * V), TypeError, message)
    message = r"distillation_loss: teacher_logits is a list; expected a floating-point tensor\. Convert .*"
    refused(lambda: call(losses.Distillation, teacher_logits=[1.0]), TypeError, message)
    message = r"distillation_loss: hidden \(4, 5, 3\) torch\.float32, weight \(11, 2\) .*; expected .*"
    refused(lambda: call(losses.Distillation, weight=torch.randn(V, 2)), ValueError, message)
    message = r"ppo_clip_loss: old_logps is None; expected a floating-point tensor"
    refused(lambda: call(losses.PPOClip, old_logps=None), TypeError, message)


@pytest.mark.parametrize(
    "lengths", [(T,), pytest.param((T, 3, 4), marks=pytest.mark.thorough)], ids=["one length", "others"]
)
def test_checks_compile(lengths: tuple[int, ...]) -> None:
    """Every loss compiles to one graph, also where the number of tokens changes."""
    torch._dynamo.reset()
    hidden, weight = torch.randn(B, T, H, requires_grad=True), torch.randn(V, H)
    target, advantages, old_logps = torch.randint(V, (B, T)), torch.ones(B), torch.zeros(B, T)

    def losses_of(hidden: Tensor, target: Tensor, old_logps: Tensor, beta: float) -> Tensor:
        logits = hidden @ weight.T
        return (
            losses.dpo_loss(hidden, weight, target, beta=beta, ref_logps=old_logps.sum(-1)).loss
            + losses.kto_loss(hidden, weight, target, advantages > 0, beta=beta).loss
            + losses.orpo_loss(logits, None, target, beta=beta).loss
            + losses.grpo_loss(hidden, weight, target, advantages, old_logps=old_logps, variant="gspo").loss
            + losses.ppo_clip_loss(hidden, weight, target, advantages, old_logps).loss
            + losses.distillation_loss(hidden, weight, target, teacher_logits=logits.detach(), beta=beta).loss
        )

    compiled = torch.compile(losses_of, backend="eager", fullgraph=True)
    for length in lengths:
        for beta in (0.1, 0.2)[: len(lengths)]:
            arguments = hidden[:, :length], target[:, :length], old_logps[:, :length], beta
            loss = compiled(*arguments)
            loss.backward()
            torch.testing.assert_close(loss, losses_of(*arguments))
