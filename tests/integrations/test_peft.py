"""PEFT's adapters on wrapped models, compared with those on transformers' own models."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("peft")

from peft import IA3Config, LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model

from ligerzoo import AutoModel
from ligerzoo.errors import LigerzooError
from tests.covering import long_cases
from tests.integrations.clients import COMPARED, ours, theirs
from tests.models.comparing import assert_close, raw_bytes
from tests.models.prompts import PROMPTS, prompt
from tests.models.tiny_qwen2_vl import VISION

pytestmark = [
    # transformers reads config.json of version 4.
    pytest.mark.filterwarnings("ignore:.*rope_scaling.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),  # as it should
    # PEFT 0.21 looks for an expert's matrices in every adapter of Mixtral.
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
    # transformers 5.23 renamed an attribute that PEFT 0.21 reads.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]

TARGETS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj", "qkv_proj", "o_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "head": {"target_modules": ["o_proj", "lm_head"]},
    "embedding": {"target_modules": ["embed_tokens", "down_proj", "o_proj"]},
    "whole modules": {"target_modules": ["o_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "new tokens": {"target_modules": ["o_proj"], "trainable_token_indices": [5, 6]},
    "DoRA": {"target_modules": ["o_proj"], "use_dora": True},
}
TASKS = {"target": tuple(TARGETS), "model_type": COMPARED, "task_type": ("CAUSAL_LM", None)}


def adapted(model: Any, task_type: str | None, **options: Any) -> Any:
    """Returns the model with random adapters, the same ones for the same names and shapes."""
    adapted = get_peft_model(model, LoraConfig(r=4, task_type=task_type, **options)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in sorted(adapted.named_parameters(), key=lambda pair: pair[0]):
            if parameter.requires_grad:
                noise = 0.1 * torch.randn(parameter.shape, generator=generator)
                is_weight = "lora_" in name and "magnitude" not in name  # its initial value depends on the order
                parameter.copy_(noise if is_weight else parameter + noise)
    return adapted


def inputs_of(model_type: str) -> dict[str, Any]:
    if model_type != "qwen2_vl":
        return {"input_ids": torch.randint(3, 89, (2, 14))}
    images = prompt(PROMPTS["images of one size"], VISION)
    return {"input_ids": images.ids, "attention_mask": images.mask, **images.vision, "mm_token_type_ids": images.types}


def compare(checkpoint: Path, directory: Path, **options: Any) -> None:
    """Compares logits, gradients, stored adapters, and models that load the other's adapters."""
    inputs = inputs_of(checkpoint.name)
    models = [adapted(load(checkpoint), **options) for load in (ours, theirs)]
    outputs = [model(**inputs, labels=inputs["input_ids"]) for model in models]
    assert_close(outputs[0].logits, outputs[1].logits, "logits")
    for output in outputs:
        output.loss.backward()
    gradients = [{n: p.grad for n, p in m.named_parameters() if p.requires_grad} for m in models]
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[1].items():
        assert_close(gradients[0][name], expected, name)

    for model, name in zip(models, ("ours", "theirs"), strict=True):
        model.save_pretrained(directory / name)
    stored = [load_file(directory / name / "adapter_model.safetensors") for name in ("ours", "theirs")]
    assert raw_bytes(stored[0]) == raw_bytes(stored[1])
    logits = outputs[1].logits
    for load, name in ((ours, "theirs"), (theirs, "ours")):
        loaded = PeftModel.from_pretrained(load(checkpoint), directory / name).eval()
        assert_close(loaded(**inputs).logits, logits, f"logits with adapters of {name}")

    models[0].merge_and_unload().save_pretrained(directory / "merged")
    for load in (ours, theirs):
        assert_close(load(directory / "merged").eval()(**inputs).logits, logits, "logits of the merged model")


@pytest.mark.parametrize("options", long_cases(TASKS), ids=lambda options: "-".join(map(str, options.values())))
def test_adapters(options: dict[str, Any], checkpoints: dict[str, Path], tmp_path: Path) -> None:
    target = TARGETS[options["target"]]
    compare(checkpoints[options["model_type"]], tmp_path, task_type=options["task_type"], **target)


def test_default_targets(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """PEFT has them for Llama; for Mixtral it has names that neither model has any more."""
    compare(checkpoints["llama"], tmp_path, task_type="CAUSAL_LM")


def test_experts(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    compare(checkpoints["mixtral"], tmp_path, task_type="CAUSAL_LM", target_parameters=experts)


@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")  # `generate` always makes them
@pytest.mark.parametrize("model_type", ["llama", "phi3"])
@pytest.mark.parametrize(
    "method",
    [
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        IA3Config(task_type="CAUSAL_LM", target_modules=["o_proj"], feedforward_modules=[]),
    ],
    ids=lambda method: method.peft_type.value,
)
def test_other_methods(method: Any, model_type: str, checkpoints: dict[str, Path]) -> None:
    inputs = inputs_of(model_type)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    logits, tokens = [], []
    for load in (ours, theirs):
        torch.manual_seed(0)
        model = get_peft_model(load(checkpoints[model_type]), copy.deepcopy(method)).eval()
        logits.append(model(**inputs).logits)
        tokens.append(model.generate(**inputs, max_new_tokens=6, do_sample=True))
    assert_close(*logits, "logits")  # type: ignore[call-arg]
    assert torch.equal(*tokens)


def test_a_model_that_is_not_wrapped_is_refused_for_a_task(checkpoints: dict[str, Path]) -> None:
    model = AutoModel.from_pretrained(checkpoints["llama"])
    with pytest.raises(LigerzooError, match=r"^Llama: .* PEFT's adapters for a task_type. Give it .*wrap\(model\)"):
        get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj"]))


def test_prefix_tuning_is_refused(checkpoints: dict[str, Path]) -> None:
    model = get_peft_model(ours(checkpoints["llama"]), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    inputs = inputs_of("llama")
    with pytest.raises(LigerzooError, match="past_key_values: not a cache of this model; got DynamicCache"):
        model(**inputs, attention_mask=torch.ones_like(inputs["input_ids"]))


@pytest.mark.parametrize("model_type", ["llama", "phi3"])
def test_adapters_of_the_model_itself(model_type: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """transformers' `add_adapter` and `load_adapter`."""
    inputs, model = inputs_of(model_type), ours(checkpoints[model_type]).eval()
    config = LoraConfig(r=4, target_modules=["o_proj"], init_lora_weights=False)
    try:
        theirs(checkpoints[model_type]).add_adapter(config)
    except ValueError as error:  # transformers 5.24 wants a PEFT that is newer than all releases
        with pytest.raises(ValueError, match=re.escape(str(error))):
            model.add_adapter(config)
        return
    model.add_adapter(config)
    expected = model(**inputs).logits
    model.save_pretrained(tmp_path)
    for load in (ours, theirs):
        loaded = load(checkpoints[model_type]).eval()
        loaded.load_adapter(str(tmp_path))
        assert_close(loaded(**inputs).logits, expected, "logits")
