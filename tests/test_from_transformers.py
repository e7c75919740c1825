"""`from_transformers`: a model that shares the weights of an instance of transformers' model."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    PreTrainedModel,
)

import ligerzoo
from ligerzoo import AutoModel
from ligerzoo.errors import CheckpointError, ConfigError
from ligerzoo.models import CausalLM
from tests.models import tiny_gemma3, tiny_mistral3
from tests.models.comparing import assert_close, assert_same_gradients, gradients, raw_bytes, under_their_names
from tests.models.prompts import PROMPTS, prompt
from tests.models.test_mllama import prompt_for as mllama_prompt
from tests.models.tiny import EMBEDDING, HEAD, Tiny, random_model
from tests.models.tiny_llama import LLAMA
from tests.models.tiny_phi3 import PHI3
from tests.models.zoo import CHECKPOINTS

pytestmark = pytest.mark.filterwarnings("ignore:.hidden_state. is deprecated:FutureWarning")  # transformers 5.17

ONE_PER_ARCHITECTURE = list({row.config["model_type"]: row for row in reversed(CHECKPOINTS)}.values())

COPIED = {
    "gpt_oss": r"experts.gate_up_proj': cannot be shared: stored in another order",
    "llama4_text": r"experts.gate_up_proj': cannot be shared: not contiguous",
    "qwen3_next": r"in_proj_qkvz.*: cannot be shared: stored in another order",
}
"""Model types whose weights have another layout in transformers: they cannot be shared, and why."""

every_architecture = pytest.mark.parametrize(
    "tiny", [row for row in ONE_PER_ARCHITECTURE if row.config["model_type"] not in COPIED], ids=str
)


def theirs_of(tiny: Tiny) -> PreTrainedModel:
    theirs = random_model(tiny.config)
    theirs.set_attn_implementation("eager")
    return theirs.eval()


def inputs_for(ours: CausalLM, tiny: Tiny) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns inputs of our model, with an image if it accepts images, and further inputs of transformers' model."""
    model_type = tiny.config["model_type"]
    if model_type == "gemma3":
        p = tiny_gemma3.prompt([[5, "image", 24]], ours.config)
        return {"input_ids": p.ids, **p.images}, {"token_type_ids": p.types}
    if model_type == "mistral3":
        m = tiny_mistral3.prompt(tiny_mistral3.PROMPTS["an image"], ours.config)
        return {"input_ids": m.ids, **m.images}, {}
    if model_type == "mllama":
        q = mllama_prompt(ours, [[5, (1, 2), 20]])
        return {"input_ids": q.ids, **q.vision}, {}
    if "vision_config" in tiny.config:
        r = prompt(PROMPTS["images of one size"], tiny.config["vision_config"])
        return {"input_ids": r.ids, **r.vision}, {"mm_token_type_ids": r.types}
    return {"input_ids": torch.randint(tiny.config["vocab_size"], (2, tiny.tokens))}, {}


def labels_for(ours: CausalLM, ids: Tensor) -> Tensor:
    """Labels of some text tokens."""
    return ids.masked_fill((torch.rand(ids.shape) < 0.3) | (ids >= ours.config.vocab_size), -100)


def memory(tensor: Tensor) -> tuple[int, int]:
    """Returns the range of addresses of a contiguous tensor."""
    assert tensor.is_contiguous()
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


@every_architecture
def test_logits_and_gradients_without_copies(tiny: Tiny) -> None:
    theirs = theirs_of(tiny)
    ours = ligerzoo.from_transformers(theirs)
    assert not ours.training
    ranges = [memory(tensor) for tensor in theirs.parameters()]
    for parameter in ours.parameters():
        first, last = memory(parameter)
        assert any(begin <= first and last <= end for begin, end in ranges)
    whole = {id(parameter) for parameter in theirs.parameters()}
    fused = {name.split(".")[-2] for name, parameter in ours.named_parameters() if id(parameter) not in whole}
    qkv, gate_up = {"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}
    expected = {"phi3": qkv | gate_up, **dict.fromkeys(("glm", "glm4", "granitemoehybrid"), gate_up)}
    expected |= dict.fromkeys(["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"], qkv)
    expected |= {"glm4v": qkv | gate_up, "glm4v_moe": qkv}
    assert fused == expected.get(tiny.config["model_type"], set())

    inputs, further = inputs_for(ours, tiny)
    labels = labels_for(ours, inputs["input_ids"])
    expected = theirs(**inputs, **further, labels=labels)
    with torch.no_grad():
        assert_close(ours(**inputs).logits, expected.logits, "logits")
    expected.loss.backward()
    expected_gradients = {name: gradient.clone() for name, gradient in gradients(theirs).items()}
    theirs.zero_grad()
    loss = ours(**inputs, labels=labels).loss
    assert_close(loss.detach(), expected.loss.detach(), "loss")
    loss.backward()
    zero = [name for name in expected_gradients if "vision_tower" in name and name.endswith("k_proj.bias")]
    if tiny.config["model_type"] == "muse_glimmer":  # which rotates keys
        zero = []
    scales = {name: expected_gradients[name.replace("bias", "weight")].abs().max().item() for name in zero}
    assert_same_gradients(ours, expected_gradients, {**inputs, "labels": labels}, scales)


@pytest.mark.every_layer
@every_architecture
def test_training_one_trains_the_other(tiny: Tiny) -> None:
    theirs = theirs_of(tiny)
    ours = ligerzoo.from_transformers(theirs.train())
    assert ours.training
    assert (
        dict(theirs.state_dict()).keys() >= under_their_names(ours, dict(ours.state_dict()), theirs.state_dict()).keys()
    )
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    inputs, further = inputs_for(ours, tiny)
    ours(**inputs, labels=labels_for(ours, inputs["input_ids"])).loss.backward()
    before = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    optimizer.step()
    assert sum(not torch.equal(before[name], tensor) for name, tensor in theirs.state_dict().items()) > len(before) / 2
    with torch.no_grad():
        logits = ours.eval()(**inputs).logits
        assert_close(logits, theirs.eval()(**inputs, **further).logits, "logits")
        for parameter in theirs.parameters():
            parameter.mul_(0.9)
        after = ours(**inputs).logits
        assert not torch.equal(after, logits)
        assert_close(after, theirs(**inputs, **further).logits, "logits")


@pytest.mark.every_layer
@every_architecture
def test_saved_files_load_in_transformers(tiny: Tiny, tmp_path: Path) -> None:
    theirs = theirs_of(tiny)
    theirs.generation_config = GenerationConfig(eos_token_id=[7, 8], temperature=0.5, do_sample=True)
    ours = ligerzoo.from_transformers(theirs)
    assert (ours.generation_config["eos_token_id"], ours.generation_config["temperature"]) == ([7, 8], 0.5)
    ours.save_pretrained(tmp_path)
    auto = AutoModelForImageTextToText if "vision_config" in tiny.config else AutoModelForCausalLM
    loaded, report = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert raw_bytes(dict(loaded.state_dict())) == raw_bytes(dict(theirs.state_dict()))
    assert loaded.generation_config.eos_token_id == [7, 8]
    again = AutoModel.from_pretrained(tmp_path)
    assert again.config == ours.config
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert token_id(loaded, name) == token_id(theirs, name)


def token_id(theirs: PreTrainedModel, name: str) -> Any:
    """Returns an entry of the config, which vision-language models may have at either level."""
    text = getattr(theirs.config.get_text_config(), name, None)
    return getattr(theirs.config, name, None) or text


@pytest.mark.every_layer
@every_architecture
def test_copies_are_independent(tiny: Tiny) -> None:
    theirs = theirs_of(tiny)
    ours = ligerzoo.from_transformers(theirs, copy=True)
    shared = ligerzoo.from_transformers(theirs)
    assert raw_bytes(dict(ours.state_dict())) == raw_bytes(dict(shared.state_dict()))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.zero_()
    assert not any(parameter.any() for parameter in shared.parameters())
    assert all(parameter.any() for parameter in ours.parameters())


@pytest.mark.parametrize("tiny", [row for row in ONE_PER_ARCHITECTURE if row.config["model_type"] in COPIED], ids=str)
def test_weights_in_another_layout(tiny: Tiny, tmp_path: Path) -> None:
    theirs = theirs_of(tiny)
    with pytest.raises(CheckpointError, match=COPIED[tiny.config["model_type"]]):
        ligerzoo.from_transformers(theirs)
    ours = ligerzoo.from_transformers(theirs, copy=True)
    ids = torch.randint(tiny.config["vocab_size"], (2, tiny.tokens))
    assert_close(ours(ids).logits, theirs(ids).logits, "logits")
    ours.save_pretrained(tmp_path)
    assert raw_bytes(dict(type(theirs).from_pretrained(tmp_path).state_dict())) == raw_bytes(dict(theirs.state_dict()))


def test_frozen_parameters_and_gradients_are_shared() -> None:
    theirs = random_model(LLAMA).requires_grad_(False)
    theirs.get_input_embeddings().requires_grad_(True)
    ours = ligerzoo.from_transformers(theirs)
    assert [name for name, p in ours.named_parameters() if p.requires_grad] == [EMBEDDING]
    assert [name for name, p in theirs.named_parameters() if p.requires_grad] == [EMBEDDING]
    ours(torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
    assert theirs.get_input_embeddings().weight.grad is ours.model.embed_tokens.weight.grad
    phi3 = random_model(PHI3).requires_grad_(False)
    assert not any(p.requires_grad for p in ligerzoo.from_transformers(phi3).parameters())
    assert not any(p.requires_grad for p in ligerzoo.from_transformers(phi3, copy=True).parameters())


@pytest.mark.parametrize("copied", [False, True])
def test_tied_weights(copied: bool, tmp_path: Path) -> None:
    theirs = random_model({**LLAMA, "tie_word_embeddings": True})
    ours = ligerzoo.from_transformers(theirs, copy=copied)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    assert (ours.lm_head.weight is theirs.lm_head.weight) != copied
    ours.save_pretrained(tmp_path)
    assert HEAD not in AutoModel.from_pretrained(tmp_path).hf_state_dict()

    theirs.lm_head.weight = nn.Parameter(theirs.lm_head.weight.detach() + 1)
    ours = ligerzoo.from_transformers(theirs, copy=copied)
    assert not ours.config.tie_word_embeddings
    assert torch.equal(ours.lm_head.weight, theirs.lm_head.weight)

    base = LlamaModel(LlamaConfig(**{**LLAMA, "tie_word_embeddings": True}))
    ours = ligerzoo.from_transformers(base, copy=copied)
    assert torch.equal(ours.lm_head.weight, base.embed_tokens.weight)


def test_dtypes_are_kept() -> None:
    theirs = random_model(LLAMA).bfloat16()
    theirs.model.norm.float()
    for copied in (False, True):
        ours = ligerzoo.from_transformers(theirs, copy=copied)
        assert ours.model.norm.weight.dtype == torch.float32
        assert ours.lm_head.weight.dtype == torch.bfloat16


def changed(name: str, change: Any) -> PreTrainedModel:
    theirs = random_model(LLAMA)
    module, _, attribute = name.rpartition(".")
    parameter = theirs.get_parameter(name)
    setattr(theirs.get_submodule(module), attribute, nn.Parameter(change(parameter.detach()), requires_grad=False))
    return theirs


def test_weights_that_cannot_be_shared() -> None:
    theirs = changed(HEAD, lambda weight: weight.T.contiguous().T)
    with pytest.raises(CheckpointError, match=r"'lm_head.weight': cannot be shared: not contiguous. Copy .* copy=True"):
        ligerzoo.from_transformers(theirs)
    ours = ligerzoo.from_transformers(theirs, copy=True)
    assert ours.lm_head.weight.is_contiguous()
    assert torch.equal(ours.lm_head.weight, theirs.lm_head.weight)


def test_models_that_are_refused() -> None:
    base = LlamaModel(LlamaConfig(**LLAMA))
    score = LlamaForSequenceClassification(LlamaConfig(**{**LLAMA, "pad_token_id": 0}))
    quantized = random_model(LLAMA)
    quantized.config.quantization_config = {"quant_method": "bitsandbytes"}
    untyped: Any = nn.Linear(2, 2)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1))
    for theirs, error, message in (
        (base, CheckpointError, "hf_model: tensors are missing; got no 'lm_head.weight'. Pass a LlamaForCausalLM"),
        (score, CheckpointError, "hf_model: tensors are missing; got no 'lm_head.weight'"),
        (gpt2, ConfigError, "hf_model.config, model_type: no such architecture; got 'gpt2'"),
        (quantized, ConfigError, "hf_model.config, quantization_config: .*Load the unquantized model"),
        (untyped, ConfigError, "hf_model: not a model of transformers; got Linear"),
        (changed(HEAD, lambda weight: weight.to("meta")), CheckpointError, "'lm_head.weight': a meta tensor has no"),
        (changed(HEAD, lambda weight: weight.to(torch.int8)), CheckpointError, "not a dtype of weights; got torch.i"),
        (changed(HEAD, lambda weight: weight[:7]), CheckpointError, "'lm_head.weight': wrong shape; got"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            ligerzoo.from_transformers(theirs)


def test_the_instance_is_unchanged() -> None:
    theirs = LlamaForCausalLM(LlamaConfig(**LLAMA))
    before, config = copy.deepcopy(theirs.state_dict()), copy.deepcopy(theirs.config.to_dict())
    ligerzoo.from_transformers(theirs)
    assert raw_bytes(dict(theirs.state_dict())) == raw_bytes(dict(before))
    assert theirs.config.to_dict() == config
    assert all(parameter.requires_grad for parameter in theirs.parameters())
