"""`apply`: ligerzoo's kernels in one instance of a transformers model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from inspect import isclass
from typing import TypeAlias

import transformers
from torch import nn

from ligerzoo import checks
from ligerzoo.errors import LigerzooError, WrongTypeError
from ligerzoo.integrations.kernels.attention import recognize_attention
from ligerzoo.integrations.kernels.compare import difference, signature
from ligerzoo.integrations.kernels.experts import recognize_experts
from ligerzoo.integrations.kernels.head import HEAD
from ligerzoo.integrations.kernels.layers import recognize_layer
from ligerzoo.integrations.kernels.loss import recognize_causal_lm
from ligerzoo.integrations.kernels.mlps import recognize_mlp
from ligerzoo.integrations.kernels.norms import recognize_norm
from ligerzoo.integrations.kernels.promised import MissingKernelWarning, missing_kernels
from ligerzoo.integrations.kernels.replace import KernelModule, Recognized, Replacement, reason_to_keep
from ligerzoo.integrations.kernels.report import ModuleReport, Report
from ligerzoo.integrations.kernels.results import ModelResults, hf_models, run_model
from ligerzoo.tensor_checks import describe_value, explains_options

Recognizer: TypeAlias = Callable[[nn.Module], Recognized]

NO_KERNEL = "no kernel replaces this class"


@explains_options
def apply(
    hf_model: nn.Module = None,  # type: ignore[assignment]  # refused with a hint
    norm: bool = True,
    rope: bool = True,
    mlp: bool = True,
    loss: bool = True,
    experts: bool = True,
    attention: bool = False,
    check: bool = True,
) -> Report:
    """Replaces modules of one transformers model by ligerzoo's kernels, in place.

    Modules are recognized by their structure and class name, so that families that are not listed in
    docs/kernels-in-transformers.md are replaced as far as their modules are recognized. Parameters, their names and
    `state_dict` do not change. Other models and the classes of transformers do not change either. On a CPU the replaced
    modules compute with the references of the kernels, in plain torch.

    In training with labels, a replaced language model returns no logits, unless `logits_to_keep` asks for them.

    Args:
        hf_model: a `PreTrainedModel`, or a module around one such as a `PeftModel`. Its weights are loaded, and not
            yet sharded.
        norm: replace RMSNorm and LayerNorm, and the addition before a norm within a decoder layer.
        rope: replace the rotation of queries and keys.
        mlp: replace MLPs.
        loss: replace the head and the loss of causal and masked language models.
        experts: replace the experts of mixtures.
        attention: replace transformers' "sdpa" attention by `ligerzoo.layers.attend`.
        check: compare the results of each kind of replaced module, on random input, with those of the original module,
            and the logits and the loss of the model, on 16 random tokens, with those before the call. Keep a module
            whose results differ.

    Returns:
        What was replaced, what was kept and why. Its `undo` restores the model.

    Warns:
        MissingKernelWarning: no module uses a kernel that docs/kernels-in-transformers.md promises for this family.

    Raises:
        TypeError: `hf_model` contains no `PreTrainedModel`, or layers of ligerzoo; or another argument is not a bool.
        ValueError: the model is sharded over processes by tensor parallelism, or parameters are on the meta device.
        RuntimeError: the results of the model have changed. All modules have been restored.
    """
    _check_model(hf_model)
    switches = {"norm": norm, "rope": rope, "mlp": mlp, "experts": experts, "loss": loss}
    checks.check("apply", checks.FLAG, **switches, attention=attention, check=check)
    application = _Application(hf_model, check)
    names, models = {module: name for name, module in hf_model.named_modules()}, hf_models(hf_model)

    def recognize_head(module: nn.Module) -> Recognized:
        replaced = (model for model in models if model in application.kernels)
        return HEAD if any(module is model.get_output_embeddings() for model in replaced) else None

    kinds: tuple[tuple[str, bool, Recognizer], ...] = (  # a layer needs its norms, a head its model
        ("norm", norm, _once_per_signature(recognize_norm)),
        ("mlp", mlp, recognize_mlp),
        ("experts", experts, recognize_experts),
        ("rope", rope or attention, lambda part: recognize_attention(part, hf_model, names[part], rope, attention)),
        ("norm", norm, recognize_layer),
        ("loss", loss, recognize_causal_lm),
        ("loss", loss, recognize_head),
    )
    before = run_model(hf_model) if check else ModelResults((), "Not compared with the model before: check=False.")
    try:
        for option, is_enabled, recognize in kinds:
            for module in names:
                application.replace(module, recognize(module), None if is_enabled else f"{option}=False")
    except BaseException:
        application.report("", ()).undo()
        raise
    expected = [kind for kind, is_enabled in {**switches, "add + norm": norm}.items() if is_enabled]
    report = application.report(before.problem or "The results of the model are the same.", expected)
    if before.problem is None and (change := before.change(run_model(hf_model))):
        report.undo()
        raise RuntimeError(
            f"apply: {type(hf_model).__name__}: {change}; expected the same results. All modules have been restored. "
            "Switch parts off one by one (norm=False, rope=False, ...) to find the cause, and report it"
        )
    if report.missing:
        message = (
            f"apply: {report.describe_missing()}: not used, although docs/kernels-in-transformers.md promises it for "
            "this family. The model computes without it as before. print(report) says why each module was kept. "
            f"transformers is {transformers.__version__}; README.md names the tested versions"
        )
        warnings.warn(message, MissingKernelWarning, stacklevel=3)  # of the caller of the decorated function
    return report


def _check_model(model: nn.Module) -> None:
    is_module, what = isinstance(model, nn.Module), f"hf_model is {describe_value(model)}"
    if isclass(model):
        what = f"hf_model is the class {model.__name__}"
    if is_module and any(type(module).__module__.startswith("ligerzoo.layers.") for module in model.modules()):
        what, expected = f"{what} of ligerzoo", "a model that transformers loaded"
        remedy = "The layers of ligerzoo use the kernels already."
        raise WrongTypeError(what, where="apply", expected=expected, remedy=remedy)
    models = hf_models(model) if is_module else []
    if not models:
        expected, remedy = "a transformers model, or one around it", "Load the model first: apply(model)"
        raise WrongTypeError(what, where="apply", expected=expected, remedy=remedy)
    for size in {getattr(module, "_tp_size", None) for module in models} - {None, 1}:
        what = f"the model is sharded over {size} processes (tp_plan)"
        raise LigerzooError(what, where="apply", expected="a whole model")
    if unloaded := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        what = f"{len(unloaded)} parameters are on the meta device ({unloaded[0]}, ...)"
        raise LigerzooError(what, where="apply", expected="weights", remedy="Call apply after loading them.")


def _once_per_signature(recognize: Recognizer) -> Recognizer:
    """Returns a function that recognizes equal modules without submodules once."""
    outcomes: dict[object, Recognized] = {}

    def recognize_once(module: nn.Module) -> Recognized:
        key = signature(module) if next(module.children(), None) is None else module
        if key not in outcomes:
            outcomes[key] = recognize(module)
        return outcomes[key]

    return recognize_once


class _Application:
    """Replaces modules of one model, and records what happened to each."""

    def __init__(self, model: nn.Module, check: bool) -> None:
        self.model = model
        self.check = check
        self.modules = list(model.named_modules())
        self.instances: list[KernelModule] = []
        self.kernels: dict[nn.Module, str] = {}
        self.reasons: dict[nn.Module, str] = {}
        self.differences: dict[object, str | None] = {}

    def replace(self, module: nn.Module, found: Recognized, refusal: str | None) -> None:
        """Replaces a module, or records the reason to keep it, such as the caller's refusal."""
        if found is None or module in self.kernels:
            return
        match refusal or reason_to_keep(module) or found:
            case str(reason):
                self.reasons[module] = reason
            case Replacement() as replacement:
                if (differs := self.difference(module, replacement)) is not None:
                    self.reasons[module] = differs
                    return
                self.instances.append(replacement.replace(module))
                self.kernels[module] = replacement.kernel

    def difference(self, module: nn.Module, found: Replacement) -> str | None:
        """Returns how the replacement differs from the module; compares modules of the same structure once."""
        if not self.check or found.inputs is None:
            return None
        key = signature(module)
        if key not in self.differences:
            self.differences[key] = difference(module, found)
        return self.differences[key]

    def report(self, check: str, expected: Collection[str]) -> Report:
        """Returns the report of all modules; `expected` are the kinds of kernels that the caller wants."""
        entries = []
        for name, module in self.modules:
            kernel = self.kernels.get(module)
            reason = self.reasons.get(module, NO_KERNEL) if kernel is None else None
            entries.append(ModuleReport(name, type(module).__name__, kernel, reason))
        return Report(entries, check, missing_kernels(self.model, expected), self.instances)
