"""`hf_state_dict` and `load_hf_state_dict`: a model's weights in memory, named as in Hugging Face checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ligerzoo import AutoModel
from ligerzoo.errors import CheckpointError, ConfigError
from ligerzoo.models import CausalLM, Llama, LlamaConfig, Mixtral
from tests.models.comparing import raw_bytes, stored_tensors
from tests.models.tiny import EMBEDDING, HEAD, Tiny
from tests.models.tiny_llama import LLAMA
from tests.models.tiny_mixtral import MIXTRAL, ON_THE_HUB
from tests.models.tiny_phi3 import PHI3
from tests.models.zoo import CHECKPOINTS

ONE_PER_ARCHITECTURE = list({row.config["model_type"]: row for row in reversed(CHECKPOINTS)}.values())


def load(tiny: Tiny, directory: Path) -> CausalLM:
    tiny.write(directory)
    return AutoModel.from_pretrained(directory)


def tiny_llama(**entries: Any) -> Llama:
    torch.manual_seed(1)
    return Llama(LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
                             num_attention_heads=2, num_key_value_heads=1, **entries))  # fmt: skip


def randomize(model: CausalLM) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()


def copies(model: CausalLM) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("tiny", CHECKPOINTS, ids=str)
def test_the_state_is_what_save_pretrained_writes(tiny: Tiny, tmp_path: Path) -> None:
    model = load(tiny, tmp_path / "loaded")
    model.save_pretrained(tmp_path / "saved")
    assert raw_bytes(model.hf_state_dict()) == raw_bytes(stored_tensors(tmp_path / "saved"))


@pytest.mark.parametrize("tiny", ONE_PER_ARCHITECTURE, ids=str)
def test_weights_of_the_model_itself_can_be_exchanged(tiny: Tiny, tmp_path: Path) -> None:
    """Such as to reorder layers: the state shares memory with the parameters that are written."""
    model = load(tiny, tmp_path)
    state = model.hf_state_dict()
    by_shape: dict[Any, list[str]] = {}
    for name, tensor in state.items():
        by_shape.setdefault(tensor.shape, []).append(name)
    exchanged = {
        to: state[name] for names in by_shape.values() for name, to in zip(names, reversed(names), strict=True)
    }
    assert exchanged.keys() == state.keys()
    expected = raw_bytes(exchanged)
    model.load_hf_state_dict(exchanged)
    assert raw_bytes(model.hf_state_dict()) == expected


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x: x.to_sparse(), "not a dense tensor; got torch.sparse_coo. Call to_dense"),
        (lambda x: x.to_sparse_csr(), "not a dense tensor; got torch.sparse_csr"),
        (lambda x: torch.nested.nested_tensor([x]), "not a dense tensor; got a nested tensor"),
        (lambda x: x.numpy(), "not a tensor; got ndarray"),
        (lambda x: x.long(), "not a dtype of weights; got torch.int64"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|nested tensors)")
def test_values_that_are_not_dense_weights_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    model = tiny_llama()
    state, before = model.hf_state_dict(), copies(model)
    name = "model.layers.0.mlp.up_proj.weight"
    state[name] = change(state[name])
    with pytest.raises(CheckpointError, match=f"state, tensor '{name}': {message}"):
        model.load_hf_state_dict(state)
    assert raw_bytes(copies(model)) == raw_bytes(before)
    with pytest.raises(CheckpointError, match=f"state_dict, tensor '{name}': {message}"):
        model.save_pretrained(tmp_path / "saved", state_dict={**model.state_dict(), name: state[name]})
    assert not (tmp_path / "saved").exists()


def test_names_that_are_not_strings_are_refused() -> None:
    model = tiny_llama()
    state: Any = {**model.hf_state_dict(), 3: torch.zeros(1)}
    with pytest.raises(CheckpointError, match="state, tensor 3: not a name; got int; expected a string"):
        model.load_hf_state_dict(state)


@pytest.mark.parametrize("tiny", ONE_PER_ARCHITECTURE, ids=str)
def test_a_new_model_has_the_names_of_the_hub(tiny: Tiny, tmp_path: Path) -> None:
    """Loading another model's state makes both equal, in place, and a saved file is the state."""
    model = load(tiny, tmp_path)
    new = AutoModel.from_config(model.config, dtype=model.dtype)
    state = new.hf_state_dict()
    new.save_pretrained(tmp_path / "new")
    assert raw_bytes(state) == raw_bytes(stored_tensors(tmp_path / "new"))
    assert state.keys() == AutoModel.from_pretrained(tmp_path / "new").hf_state_dict().keys()

    before = {name: (id(p), p.data_ptr()) for name, p in new.named_parameters()}
    new.load_hf_state_dict(model.hf_state_dict())  # in any layout that loads
    assert {name: (id(p), p.data_ptr()) for name, p in new.named_parameters()} == before
    assert raw_bytes(dict(new.state_dict())) == raw_bytes(dict(model.state_dict()))


def test_tensors_share_memory_unless_the_layout_fuses(tmp_path: Path) -> None:
    mixtral = load(Tiny("hub", MIXTRAL, ON_THE_HUB), tmp_path / "mixtral")
    assert isinstance(mixtral, Mixtral)
    state = mixtral.hf_state_dict()
    state["model.layers.0.block_sparse_moe.experts.2.w3.weight"].zero_()
    experts = mixtral.state_dict()["model.layers.0.mlp.experts.gate_up_proj"]
    assert not experts[2, experts.shape[1] // 2 :].any()
    assert experts[2, : experts.shape[1] // 2].any()
    assert not any(tensor.requires_grad for tensor in state.values())

    phi3 = load(Tiny("phi3", PHI3), tmp_path / "phi3")
    memory = {tensor.data_ptr() for tensor in phi3.parameters()}
    fused = {name for name, tensor in phi3.hf_state_dict().items() if tensor.data_ptr() not in memory}
    assert fused == {
        f"model.layers.{i}.{name}.weight" for i in range(2) for name in ("self_attn.qkv_proj", "mlp.gate_up_proj")
    }


def test_optimizers_and_compiled_graphs_stay_valid() -> None:
    model, other = tiny_llama(), tiny_llama()
    randomize(other)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.load_hf_state_dict(other.hf_state_dict())
    ids = torch.arange(10)[None]
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        expected = other.state_dict()[name] - parameter.grad
        torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=0)


def test_values_are_cast_to_the_dtype_of_the_parameters() -> None:
    model, other = tiny_llama().bfloat16(), tiny_llama()
    randomize(other)
    model.load_hf_state_dict({name: tensor.double() for name, tensor in other.hf_state_dict().items()})
    assert raw_bytes(dict(model.state_dict())) == raw_bytes(dict(other.bfloat16().state_dict()))


@pytest.mark.parametrize("given", [(EMBEDDING,), (HEAD,), (EMBEDDING, HEAD)])
def test_a_tied_weight_is_given_once_or_twice(given: tuple[str, ...]) -> None:
    model = tiny_llama(tie_word_embeddings=True)
    state = {**model.hf_state_dict(), **{name: torch.ones(11, 8) for name in given}}
    model.load_hf_state_dict({name: tensor for name, tensor in state.items() if name != EMBEDDING or name in given})
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.lm_head.weight == 1).all()


def test_rotary_frequencies_are_ignored() -> None:
    model = tiny_llama()
    model.load_hf_state_dict({**model.hf_state_dict(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})


NORM = "model.norm.weight"
ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({NORM: None}, "state: tensors are missing; got no 'model.norm.weight'. Give all weights"),
    "unexpected": ({"x": torch.ones(2)}, "state, tensor 'x': unexpected tensor. Leave it out"),
    "a later layer": (
        {"model.layers.1.input_layernorm.weight": torch.ones(8)},
        "state, tensor 'model.layers.1.input_layernorm.weight': unexpected tensor",
    ),
    "shape": ({NORM: torch.ones(9)}, r"tensor 'model.norm.weight': wrong shape; got \(9,\); expected \(8,\)"),
    "dtype": ({NORM: torch.ones(8, dtype=torch.int32)}, "not a dtype of weights; got torch.int32; expected"),
    "meta": ({NORM: torch.ones(8, device="meta")}, "state, tensor 'model.norm.weight': a meta tensor has no data"),
    "no tensor": ({NORM: [1.0] * 8}, "tensor 'model.norm.weight': not a tensor; got list; expected a torch.Tensor"),
    "tied": ({HEAD: torch.ones(11, 8)}, f"state, tensors '{EMBEDDING}' and '{HEAD}': tied weights have different"),
}


@pytest.mark.parametrize("change, message", ERRORS.values(), ids=ERRORS)
def test_an_error_leaves_the_model_unchanged(change: dict[str, Any], message: str) -> None:
    model = tiny_llama(tie_word_embeddings=True)
    before = copies(model)
    state = {name: tensor + 1 for name, tensor in model.hf_state_dict().items()} | change
    with pytest.raises(CheckpointError, match=message):
        model.load_hf_state_dict({name: tensor for name, tensor in state.items() if tensor is not None})
    assert raw_bytes(dict(model.state_dict())) == raw_bytes(before)


def test_models_without_a_hub_layout(tmp_path: Path) -> None:
    model = load(Tiny("llama", LLAMA), tmp_path)
    on_meta = Llama.from_pretrained(tmp_path, device="meta")
    with pytest.raises(CheckpointError, match="model: parameters on the meta device hold no data"):
        on_meta.load_hf_state_dict(model.hf_state_dict())
    state = model.hf_state_dict()
    model.model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"^hf_state_dict: tensors differ .* Merge adapters into the weights"):
        model.hf_state_dict()
    with pytest.raises(CheckpointError, match="load_hf_state_dict: tensors differ from those of the architecture"):
        model.load_hf_state_dict(state)

    class Own(CausalLM):
        pass

    with pytest.raises(ConfigError, match="the class is not registered"):
        Own(model.config, model.model, model.lm_head).hf_state_dict()


# `save_pretrained(state_dict=..., is_main_process=...)`, as accelerate and Hugging Face's Trainer call it


@pytest.mark.parametrize("without", [None, HEAD, EMBEDDING])
@pytest.mark.parametrize("stored", [(), (HEAD,), (EMBEDDING,)])
def test_saving_another_state(tmp_path: Path, without: str | None, stored: tuple[str, ...]) -> None:
    """A tied weight may have either name in the state, whichever the files have."""
    model = tiny_llama(tie_word_embeddings=True)
    if stored:
        model.save_pretrained(tmp_path)
        tensors = stored_tensors(tmp_path)
        save_file({**dict.fromkeys(stored, tensors[EMBEDDING]),
                   **{name: tensor for name, tensor in tensors.items() if name != EMBEDDING}},
                  tmp_path / "model.safetensors")  # fmt: skip
        model = AutoModel.from_pretrained(tmp_path)
    state = {name: tensor.bfloat16() + 1 for name, tensor in model.state_dict().items() if name != without}
    model.save_pretrained(tmp_path, True, state, print)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert raw_bytes({name: tensor for name, tensor in loaded.state_dict().items() if name in state}) == raw_bytes(
        state
    )
    assert {HEAD, EMBEDDING} & stored_tensors(tmp_path).keys() == set(stored or (EMBEDDING,))


def test_only_the_main_process_saves(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "none", is_main_process=False, state_dict={})
    tiny_llama().save_pretrained(tmp_path / "none", is_main_process=False)
    assert not (tmp_path / "none").exists()


def test_states_of_other_models_are_refused(tmp_path: Path) -> None:
    model = tiny_llama()
    state = model.state_dict()
    with pytest.raises(CheckpointError, match=r"none: tensors differ .*; got 'x'\. Merge"):
        model.save_pretrained(tmp_path / "none", state_dict={**state, "x": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"'model.norm.weight': wrong shape; got \(9,\); expected \(8,\)"):
        model.save_pretrained(tmp_path / "none", state_dict={**state, NORM: torch.ones(9)})
    assert not (tmp_path / "none").exists()
