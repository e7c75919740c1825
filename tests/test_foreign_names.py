"""Names of other libraries get an answer: from packages, from functions and layers, and on docs/coming-from.md."""

import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import ligerzoo
from ligerzoo import adapters, foreign_names, kernels, layers, losses, models
from ligerzoo.errors import LigerzooError, WrongTypeError
from tests.liger_kernel import NAMES

PAGE = (Path(__file__).parent.parent / "docs" / "coming-from.md").read_text(encoding="utf-8")
LIGER_KERNEL = NAMES.read_text().split()
"""tests/real/test_liger_kernel.py compares them with the wheel."""
CONFIG: Any = models.LlamaConfig(vocab_size=9, hidden_size=8, num_attention_heads=2)
X, TARGET = torch.randn(5, 8), torch.randint(8, (5,))


def named(dotted: str) -> Any:
    """Imports what a dotted name of ligerzoo names."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if importlib.util.find_spec(name) is not None:
            found: Any = importlib.import_module(name)
            for part in parts[length:]:
                found = getattr(found, part)
            return found
    raise AssertionError(dotted)


@pytest.mark.parametrize("name", LIGER_KERNEL)
def test_every_name_of_liger_kernel_has_an_answer_and_is_on_the_page(name: str) -> None:
    family = name.removeprefix("apply_liger_kernel_to_")
    lines = [line for line in PAGE.splitlines() if re.search(rf"`({family}|{name})\b", line)]
    assert lines, name
    if name in kernels.__all__:
        return
    answer = foreign_names.our_public_name(name)
    assert answer is not None
    ours = [one.group() for one in re.finditer(r"ligerzoo\.[a-z_]+(\.\w+)*", answer.split(" instead of ")[0])]
    assert all(map(named, ours))
    said = ours[0].rsplit(".", 1)[1] if ours else foreign_names.MISSING[name]
    assert any(line.startswith("|") and said in line for line in lines), answer


def test_answers_name_what_ligerzoo_has() -> None:
    for answer in foreign_names.NAMES.values():
        for dotted in re.findall(r"ligerzoo\.[a-z_]+(?:\.\w+)*", answer):
            named(dotted)
    options = {
        name for package in (kernels, losses, layers) for one in package.__all__
        if callable(function := getattr(package, one)) for name in inspect.signature(function).parameters
    }  # fmt: skip
    options |= {name for one in losses.__all__ for name in getattr(getattr(losses, one), "options_type", HEAD).accepted}
    for function in (named("ligerzoo.integrations.apply"), adapters.add_lora):
        options |= set(inspect.signature(function).parameters)
    assert set(foreign_names._LAYER_OPTIONS) <= options
    for theirs, answer in foreign_names.OURS.items():
        assert re.split(r"\W", answer)[0] in options | {*losses.__all__}, theirs


HEAD = losses.HeadOptions


@pytest.mark.parametrize("package, name, answer", [
    ("ligerzoo.integrations", "apply_liger_kernel_to_llama", r"ligerzoo.integrations.apply\(model\)"),
    ("ligerzoo.integrations", "AutoLigerKernelForCausalLM", "ligerzoo.integrations.AutoKernelModelForCausalLM"),
    ("ligerzoo", "AutoModelForCausalLM", "ligerzoo.AutoModel"),
    ("ligerzoo", "GRPOTrainer", "`ligerzoo train`"),
    ("ligerzoo", "chunked_loss", "ligerzoo.losses"),
    ("ligerzoo.layers", "LlamaRMSNorm", "ligerzoo.layers.RMSNorm instead"),
    ("ligerzoo.layers", "SwiGLUMLP", "ligerzoo.layers.GatedMLP instead"),
    ("ligerzoo.layers", "LigerRMSNorm", "ligerzoo.layers.RMSNorm"),
    ("ligerzoo.losses", "LigerFusedLinearCrossEntropyLoss", "ligerzoo.losses.LinearCrossEntropyLoss"),
    ("ligerzoo.kernels", "liger_rms_norm", "ligerzoo.kernels.rms_norm"),
    ("ligerzoo.layers", "TransformerDecoder", "ligerzoo.layers.Decoder"),
    ("ligerzoo.models", "LlamaForCausalLM", "ligerzoo.AutoModel"),
    ("ligerzoo.adapters", "LoraConfig", "ligerzoo.adapters.add_lora"),
    ("ligerzoo.hub", "Origin", "LoadedFrom"),
    ("ligerzoo", "pipeline", r"ligerzoo.AutoModel and its generate, or the pipeline itself with .*wrap\(model\)"),
    ("ligerzoo", "TextStreamer", "It is in ligerzoo.generate$"),
    ("ligerzoo", "shard_model", "It is in ligerzoo.parallel$"),
    ("ligerzoo.losses", "cross_entropy", "It is in ligerzoo.kernels$"),
    ("ligerzoo.train", "SFTConfig", "`ligerzoo train`"),
    ("ligerzoo.train", "Muon", "It is in ligerzoo.train.optimizers$"),
    ("ligerzoo.integrations.transformers", "AutoModelForSeq2SeqLM", "ligerzoo has causal language models"),
    ("ligerzoo.models", "LlamaModel", "ligerzoo.AutoModel"),
])  # fmt: skip
def test_packages_answer_as_attributes_and_in_imports(package: str, name: str, answer: str) -> None:
    module = importlib.import_module(package)
    with pytest.raises(AttributeError, match=f"^module '{package}' has no attribute '{name}'. .*{answer}"):
        getattr(module, name)
    assert not hasattr(module, name)
    with pytest.raises(ImportError, match=f"^module '{package}' has no attribute '{name}'. .*{answer}"):
        exec(f"from {package} import {name}", {})  # noqa: S102
    with pytest.raises(ImportError, match=f"^cannot import name 'missing' from '{package}'"):
        exec(f"from {package} import missing", {})  # noqa: S102


@pytest.mark.parametrize("module, name, answer", [
    ("transformers", "apply_liger_kernel_to_llama", r"Use ligerzoo.integrations.apply\(model\) instead"),
    ("transformers.rms_norm", "LigerRMSNorm", "Use ligerzoo.layers.RMSNorm instead"),
    ("ops", "LigerSiLUMulFunction", "Use ligerzoo.kernels.swiglu instead"),
    ("chunked_loss", "LigerFusedLinearDPOLoss", "Use ligerzoo.losses.DPO or dpo_loss instead"),
    ("nn", "LigerRMSNorm", "Use ligerzoo.layers.RMSNorm instead"),
    ("transformers", "missing", "ligerzoo has no such module, which is of liger-kernel"),
])  # fmt: skip
def test_modules_of_liger_kernel_answer_with_our_names(module: str, name: str, answer: str) -> None:
    with pytest.raises(ImportError, match=f"{answer}.*. docs/coming-from.md has all names of liger-kernel$"):
        exec(f"from ligerzoo.{module} import {name}", {})  # noqa: S102
    assert not hasattr(ligerzoo, module)
    assert "coming-from.md" in (sys.modules[f"ligerzoo.{module}"].__doc__ or "")


def test_a_name_without_a_counterpart_says_why() -> None:
    with pytest.raises(AttributeError, match="'LigerDyT' is not supported: no architecture of ligerzoo has it"):
        layers.LigerDyT  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("call, message", [
    (lambda: kernels.cross_entropy(X, TARGET, lse_square_scale=0.1),
     "^cross_entropy: unknown option lse_square_scale=0.1; expected an option of cross_entropy. Use z_loss instead"),
    (lambda: kernels.linear_cross_entropy(X, X, TARGET, ce_weight=X), "ce_weight=a tensor .* Use class_weight instead"),
    (lambda: kernels.rms_norm(X, offset=1.0), "^rms_norm: .* Use weight_offset instead of 'offset'"),
    (lambda: kernels.rms_norm(X, in_place=True), "'in_place' .* is not supported: no kernel overwrites"),
    (lambda: kernels.rope(X, X, X, X, unsqueeze_dim=1), "is not supported: cosines and sines have shape"),
    (lambda: kernels.jsd(X, X, shift_labels=TARGET), "Use target instead"),
    (lambda: kernels.linear_jsd(X, X, X, X, jsd_beta=0.5), "^linear_jsd: .* Use beta instead"),
    (lambda: losses.KLDivLoss(reduction="batchmean")(X, X), "Use reduction='mean', over tokens, instead"),
    (lambda: kernels.softmax(X, impl="nvidia-triton"), "Use backend instead"),
    (lambda: kernels.layer_norm(X, X[0], epss=1e-6), "^layer_norm: unknown option epss=1e-06; .* Did you mean 'eps'?"),
    (lambda: layers.RMSNorm(8, casting_mode="gemma"), "^RMSNorm: .* Use round_before_scale .*False for 'gemma'"),
    (lambda: layers.RMSNorm(8, init_fn="zeros"), "'init_fn' .* is not supported: the scale is 1 at first"),
    (lambda: layers.RMSNorm(8, offset=1.0, casting_mode="gemma"),
     "unknown options offset=1.0, casting_mode='gemma'; .* Use weight_offset .* Use round_before_scale"),
    (lambda: layers.GatedMLP(8, 16, hidden_act="silu"), "^GatedMLP: .* Use activation instead of 'hidden_act'"),
    (lambda: adapters.add_lora(nn.Linear(2, 2), r=8, target_modules=["q_proj"]),
     "^add_lora: .* Use rank instead of 'r' .* Use targets instead of 'target_modules'"),
    (lambda: losses.DPO(compute_nll_loss=True, loss_type="ipo"), "Use nll_weight instead .* Use variant instead"),
    (lambda: losses.Distillation(compute_ce_loss=True, return_soft_hard_loss=True),
     "Use hard_weight instead .* is not supported: the metrics always have soft_loss"),
    (lambda: kernels.jsd(log_q=X, log_p=X), "Use student instead of 'log_q' .* Use teacher instead of 'log_p'"),
    (lambda: losses.JSDLoss(jsd_beta=0.5), "^JSDLoss: .* Use beta instead of 'jsd_beta'"),
    (lambda: layers.Attention(32, 4, num_key_value_heads=1), "^Attention: .* Use num_kv_heads instead"),
    (lambda: layers.Attention(32, 4, sliding_window=8, attention_bias=True),
     "Use window instead of 'sliding_window' .* Use qkv_bias and output_bias instead of 'attention_bias'"),
    (lambda: layers.Router(8, 4, top_k=2), "^Router: .* Use num_experts_per_token instead"),
    (lambda: layers.LogitRouter(8, 4, num_experts_per_tok=2), "^LogitRouter: .* Use num_experts_per_token instead"),
    (lambda: layers.RotaryEmbedding(16, base=1e6), "^RotaryEmbedding: .* Use theta instead"),
    (lambda: layers.GatedDeltaNet(8, num_heads=2), "^GatedDeltaNet: .* Use num_key_heads and num_value_heads instead"),
    (lambda: layers.LMHead(8, 9)(X, labels=TARGET), "^LMHead: unknown option labels=.* Use target instead"),
    (lambda: losses.LinearCrossEntropyLoss()(weight=X, _input=X, labels=TARGET),
     "Use hidden instead of '_input' .* Use target instead of 'labels'"),
    (lambda: losses.LinearCrossEntropyLoss()(torch.randn(9, 8), X, TARGET), "The hidden states come first"),
    (lambda: losses.DPO()(torch.randn(9, 8), torch.randn(2, 3, 8), torch.ones(2, 3, dtype=torch.long)),
     "^dpo_loss: .* The hidden states come first"),
    (lambda: layers.RMSNorm(CONFIG), "^RMSNorm: got a LlamaConfig; .* Layers take numbers, such as config.hidden_size"),
    (lambda: layers.GatedMLP(CONFIG), "^GatedMLP: got a LlamaConfig; expected hidden_size, intermediate_size"),
    (lambda: layers.RotaryEmbedding(CONFIG), "^RotaryEmbedding: got a LlamaConfig"),
    (lambda: layers.Attention(CONFIG, layer_idx=0), "^Attention: got a LlamaConfig"),
    (lambda: layers.RotaryEmbedding(config=CONFIG), "layers take numbers, such as config.hidden_size"),
    (lambda: losses.CrossEntropyLoss(logits=X), "^CrossEntropyLoss: unknown option logits=a tensor"),
])  # fmt: skip
def test_options_of_liger_kernel_are_refused_with_ours(call: Callable[[], object], message: str) -> None:
    with pytest.raises(LigerzooError, match=message):
        call()


def test_other_type_errors_are_not_changed() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'intermediate_size'"):
        layers.GatedMLP(8)  # type: ignore[call-arg]
    with pytest.raises(WrongTypeError, match="cross_entropy: target is 3"):
        kernels.cross_entropy(X, 3)  # type: ignore[call-overload]


def test_functions_keep_their_signatures_and_compile() -> None:
    assert "weight_offset" in inspect.signature(kernels.rms_norm).parameters
    assert "weight_offset" in inspect.signature(layers.RMSNorm).parameters
    compiled = torch.compile(lambda x: kernels.cross_entropy(x, TARGET, z_loss=0.1), backend="eager", fullgraph=True)
    assert "z_loss" in inspect.signature(losses.LinearCrossEntropyLoss.forward).parameters
    assert torch.equal(compiled(X), kernels.cross_entropy(X, TARGET, z_loss=0.1))


@pytest.mark.parametrize("package", [ligerzoo, models, importlib.import_module("ligerzoo.integrations")])
def test_dir_of_lazy_packages_has_their_names(package: ModuleType) -> None:
    assert set(package.__all__) <= set(dir(package))
    assert all(getattr(package, name) is not None for name in package.__all__)


def test_importing_a_submodule_does_not_look_for_its_name_elsewhere() -> None:
    code = "import sys; from ligerzoo.train import run_options; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_packages_are_attributes_after_import_ligerzoo() -> None:
    code = (
        "import ligerzoo, sys; assert 'torch' not in sys.modules; ligerzoo.layers.RMSNorm(8); "
        "assert {'layers', 'losses'} <= set(dir(ligerzoo)); assert 'transformers' in dir(ligerzoo.integrations)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


LOSSES = {
    losses.CrossEntropyLoss: (kernels.cross_entropy, (X, TARGET), {"z_loss": 0.1, "class_weight": torch.rand(8)}),
    losses.LinearCrossEntropyLoss: (kernels.linear_cross_entropy, (X, X, TARGET % 5), {"softcap": 2.0}),
    losses.KLDivLoss: (kernels.kl_div, (X, X + 1, TARGET), {"temperature": 2.0}),
    losses.JSDLoss: (kernels.jsd, (X, X.flip(0), TARGET), {"beta": 0.3}),
    losses.TVDLoss: (kernels.tvd, (X, X.flip(0)), {"reduction": "none"}),
    losses.LinearKLDivLoss: (kernels.linear_kl_div, (X, X, X, X.flip(0)), {"reverse": True}),
    losses.LinearJSDLoss: (kernels.linear_jsd, (X, X, X, X.flip(0)), {"beta": 0.3}),
    losses.LinearTVDLoss: (kernels.linear_tvd, (X, X, X, X.flip(0)), {"num_items": 3}),
}


@pytest.mark.parametrize("module", LOSSES, ids=lambda module: module.__name__)
def test_losses_over_tokens_are_modules(module: type[losses.TokenLoss]) -> None:
    function, inputs, options = LOSSES[module]
    loss = module(**options)
    assert isinstance(loss, nn.Module)
    assert torch.equal(loss(*inputs), function(*inputs, **options))
    assert torch.equal(loss(*inputs, ignore_index=3), function(*inputs, **options, ignore_index=3))
    assert loss.state_dict() == {}


def test_tensors_of_a_loss_move_with_it() -> None:
    loss = losses.CrossEntropyLoss(class_weight=torch.rand(8), z_loss=0.1)
    assert loss.double().class_weight.dtype == torch.float64
    assert repr(loss) == "CrossEntropyLoss(z_loss=0.1)"
