"""Tests of weight layouts: each rule, random layouts, and a toy mixture of experts loaded and saved in each layout."""

import json
import math
import re
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from ligerzoo import AutoModel, convert, hub
from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.layout import Fused, Layout, ModuleRules, PerExpert, Rename, Rule
from ligerzoo.convert.stored_tensors import StoredTensors, assemble
from ligerzoo.convert.tensor_slices import TensorSlice, shapes_of
from ligerzoo.errors import CheckpointError, ConfigError, LigerzooError
from ligerzoo.files.checkpoint import Checkpoint
from ligerzoo.info import describe
from ligerzoo.layers import Attention, Decoder, LMHead, RMSNorm
from ligerzoo.models import CausalLM, LlamaConfig
from tests.models.tiny import EMBEDDING, HEAD, Tensors, write_shards
from tests.models.tiny_llama import LLAMA

BARE = (("model.", ""),)
QKV = Fused("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
SANDWICH = (
    Rename("post_self_attn_layernorm", "post_attention_layernorm"),
    Rename("post_attention_layernorm", "pre_feedforward_layernorm"),
    Rename("post_mlp_layernorm", "post_feedforward_layernorm"),
)
EXPERTS = (
    Rename("block_sparse_moe.gate", "mlp.gate"),
    PerExpert(
        ("block_sparse_moe.experts.{expert}.w1.weight", "block_sparse_moe.experts.{expert}.w3.weight"),
        "mlp.experts.gate_up_proj",
    ),
    PerExpert(("block_sparse_moe.experts.{expert}.w2.weight",), "mlp.experts.down_proj"),
)


def raw_bytes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    return {
        name: (t.dtype, t.shape, t.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for name, t in tensors.items()
    }


def to_disk(layout: Layout, tensors: Tensors) -> StoredTensors:
    return StoredTensors(layout.slices(shapes_of(tensors)), tensors)


def from_disk(layout: Layout, theirs: Mapping[str, Tensor], ours: Tensors, dtype: torch.dtype) -> Tensors:
    def read(piece: TensorSlice) -> Tensor:
        assert theirs[piece.stored_name].shape == piece.stored_shape
        return theirs[piece.stored_name][piece.stored_index]

    shapes = shapes_of(ours)
    return assemble(
        layout.slices(shapes), shapes, read, dtypes=dict.fromkeys(shapes, dtype), device=torch.device("cpu")
    )


# Each rule


def test_module_rules() -> None:
    ours = {name: torch.rand(2) for name in ("visual.norm.weight", "visual.fc.weight", "model.norm.weight")}
    layout = Layout((ModuleRules("visual.", (Rename("ln", "norm"),)),), (("visual.", "model.vision."),))
    assert list(to_disk(layout, ours)) == ["model.vision.ln.weight", "model.vision.fc.weight", "model.norm.weight"]


def test_names_without_a_rule_are_unchanged() -> None:
    ours = {"model.layers.0.mlp.gate_proj.weight": torch.rand(3, 2), "scale": torch.rand(())}
    assert raw_bytes(to_disk(Layout(EXPERTS), ours)) == raw_bytes(ours)
    assert list(to_disk(Layout(EXPERTS, BARE), ours)) == ["layers.0.mlp.gate_proj.weight", "scale"]


def test_permuted_names() -> None:
    names = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
    ours = {f"model.layers.{i}.{name}_layernorm.weight": torch.rand(4) for i in range(2) for name in names}
    disk = to_disk(Layout(SANDWICH), ours)
    swapped = ["input", "post_self_attn", "post_attention", "post_mlp"]
    assert list(disk) == [f"model.layers.{i}.{name}_layernorm.weight" for i in range(2) for name in swapped]
    assert all(torch.equal(a, b) for a, b in zip(disk.values(), ours.values(), strict=True))


@pytest.mark.parametrize(
    "name, renamed",
    [
        ("model.layers.0.mlp.gate.weight", "model.layers.0.block_sparse_moe.gate.weight"),
        ("mlp.gate", "block_sparse_moe.gate"),
        ("mlp.gate.mlp.gate", "block_sparse_moe.gate.mlp.gate"),
        ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.gate_proj.weight"),
        ("model.layers.0.xmlp.gate.weight", "model.layers.0.xmlp.gate.weight"),
    ],
)
def test_path_matches_whole_names(name: str, renamed: str) -> None:
    assert list(to_disk(Layout(EXPERTS), {name: torch.rand(2)})) == [renamed]


def test_prefix_as_path() -> None:
    (piece,) = Layout((Rename("language_model.model", "model"),)).slices({"model.norm.weight": (3,)})
    assert piece == TensorSlice("language_model.model.norm.weight", (3,), "model.norm.weight")


def test_fused_rows() -> None:
    sizes = {"v": 3, "q": 5, "k": 2, "o": 4}  # the order in the model does not matter
    ours = {f"layers.0.self_attn.{name}_proj.weight": torch.rand(rows, 4) for name, rows in sizes.items()}
    ours |= {f"layers.0.self_attn.{name}_proj.bias": torch.rand(sizes[name]) for name in "qkv"}
    disk = to_disk(Layout((QKV,)), ours)
    for kind in ("weight", "bias"):
        q, k, v = (ours[f"layers.0.self_attn.{name}_proj.{kind}"] for name in "qkv")
        assert torch.equal(disk[f"layers.0.self_attn.qkv_proj.{kind}"], torch.cat([q, k, v]))
    assert disk.keys() == {
        f"layers.0.self_attn.{name}" for name in ("qkv_proj.weight", "qkv_proj.bias", "o_proj.weight")
    }
    assert raw_bytes(from_disk(Layout((QKV,)), disk, ours, torch.float32)) == raw_bytes(ours)


def test_parameter_of_only_some_fused_parts_keeps_its_name() -> None:
    ours = {f"self_attn.{name}_proj.weight": torch.rand(2, 2) for name in "qkv"}
    adapter = {"self_attn.q_proj.lora_A.weight": torch.rand(1, 2), "self_attn.v_proj.bias": torch.rand(2)}
    assert to_disk(Layout((QKV,)), ours | adapter).keys() == {"self_attn.qkv_proj.weight", *adapter}


def test_per_expert_tensors() -> None:
    gate_up, down = torch.rand(3, 10, 4), torch.rand(3, 4, 5)
    ours = {"layers.0.mlp.experts.gate_up_proj": gate_up, "layers.0.mlp.experts.down_proj": down}
    expected = {}
    for e in range(3):
        expected[f"layers.0.block_sparse_moe.experts.{e}.w1.weight"] = gate_up[e, :5]
        expected[f"layers.0.block_sparse_moe.experts.{e}.w3.weight"] = gate_up[e, 5:]
        expected[f"layers.0.block_sparse_moe.experts.{e}.w2.weight"] = down[e]
    disk = to_disk(Layout(EXPERTS), ours)
    assert len(disk) == 9
    assert raw_bytes(disk) == raw_bytes(expected)
    assert all(disk[name].data_ptr() == expected[name].data_ptr() for name in expected)  # no copies
    assert raw_bytes(from_disk(Layout(EXPERTS), expected, ours, torch.float32)) == raw_bytes(ours)


def test_fused_tensor_is_built_at_each_access() -> None:
    ours = {f"self_attn.{name}_proj.weight": torch.rand(2, 2) for name in "qkv"}
    disk = to_disk(Layout((QKV,)), ours)
    first = disk["self_attn.qkv_proj.weight"]
    ours["self_attn.k_proj.weight"].zero_()
    assert not torch.equal(disk["self_attn.qkv_proj.weight"], first)


def test_layout_that_is_not_one_to_one() -> None:
    ours = {"a.weight": torch.rand(2), "b.weight": torch.rand(2)}
    with pytest.raises(ConfigError, match="not one to one"):
        to_disk(Layout((Rename("b", "a"),)), ours)


def test_slices_of_experts_are_lazy() -> None:
    pieces = Layout(EXPERTS).slices({"mlp.experts.gate_up_proj": (10**12, 4, 2)})
    assert [piece.stored_name.split(".")[2:4] for piece in islice(pieces, 3)] == [["0", "w1"], ["0", "w3"], ["1", "w1"]]


# Random layouts

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@st.composite
def tables(draw: st.DrawFn) -> tuple[Layout, Tensors]:
    """Draws a layout and tensors: a few layers of modules, each with a random rule."""
    sizes = st.integers(1, 4)
    kinds = draw(st.lists(st.sampled_from(["plain", "renamed", "fused", "stacked"]), min_size=1, max_size=5))
    rules: list[Rule] = []
    shapes: dict[str, tuple[int, ...]] = {}  # of a layer
    for number, kind in enumerate(kinds):
        count, rest = draw(sizes), tuple(draw(st.lists(sizes, max_size=2)))
        if kind == "fused":
            paths = tuple(f"m{number}.part{i}" for i in range(count))
            shapes |= {f"{path}.weight": (draw(sizes), *rest) for path in paths}
            rules.append(Fused(f"m{number}.fused", paths))
        elif kind == "stacked":
            shapes[f"m{number}.stack"] = (draw(sizes), draw(sizes) * count, *rest)
            rules.append(
                PerExpert(tuple(f"x{number}.{{expert}}.p{i}.weight" for i in range(count)), f"m{number}.stack")
            )
        else:
            shapes[f"m{number}.weight"] = (draw(sizes), *rest)
    renamed = [f"m{number}" for number, kind in enumerate(kinds) if kind == "renamed"]
    rules += [Rename(*pair) for pair in zip(draw(st.permutations(renamed)), renamed, strict=True)]
    dtype, generator = draw(st.sampled_from(DTYPES)), torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    names = draw(st.permutations([(layer, name) for layer in range(draw(st.integers(1, 12))) for name in shapes]))

    def random(shape: tuple[int, ...]) -> Tensor:  # any bytes, NaN among them
        n_bytes = math.prod(shape) * dtype.itemsize
        return torch.randint(256, (n_bytes,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)

    tensors = {f"model.layers.{layer}.{name}": random(shapes[name]) for layer, name in names}
    return Layout(tuple(draw(st.permutations(rules))), draw(st.sampled_from([(), BARE]))), tensors


@settings(deadline=None)
@given(tables())
def test_random_layout_round_trip(table: tuple[Layout, Tensors]) -> None:
    layout, ours = table
    disk = to_disk(layout, ours)
    assert len(set(disk)) == len(disk)
    assert all(tensor.is_contiguous() for tensor in disk.values())
    again = from_disk(layout, disk, ours, next(iter(ours.values())).dtype)
    assert raw_bytes(again) == raw_bytes(ours)
    assert raw_bytes(to_disk(layout, again)) == raw_bytes(disk)


@settings(deadline=None)
@given(tables())
def test_slice_is_a_whole_tensor_on_one_side(table: tuple[Layout, Tensors]) -> None:
    """`hub.matching.match_tensors` limits the number of slices by this."""
    layout, ours = table
    pieces = list(layout.slices(shapes_of(ours)))
    whole_of_ours = [piece.name for piece in pieces if not piece.index]
    whole_of_theirs = [piece.stored_name for piece in pieces if not piece.stored_index]
    assert len(set(whole_of_ours)) == len(whole_of_ours)
    assert len(set(whole_of_theirs)) == len(whole_of_theirs)
    assert all(not piece.index or not piece.stored_index for piece in pieces)


# A toy mixture of experts with fused attention and permuted norms


@dataclass(frozen=True, kw_only=True)
class ToyConfig(LlamaConfig):
    num_experts: int = 8


class Experts(nn.Module):
    def __init__(self, c: ToyConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(c.num_experts, 2 * c.intermediate_size, c.hidden_size))
        self.down_proj = nn.Parameter(torch.randn(c.num_experts, c.hidden_size, c.intermediate_size))


class Mixture(nn.Module):
    def __init__(self, c: ToyConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(c.hidden_size, c.num_experts, bias=False)
        self.experts = Experts(c)


class ToyBlock(nn.Module):
    def __init__(self, c: ToyConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size)
        self.self_attn = Attention(
            c.hidden_size, c.num_attention_heads, c.kv_heads, c.head_size, qkv_bias=c.attention_bias
        )
        self.post_attention_layernorm = RMSNorm(c.hidden_size)
        self.pre_feedforward_layernorm = RMSNorm(c.hidden_size)
        self.mlp = Mixture(c)
        self.post_feedforward_layernorm = RMSNorm(c.hidden_size)


class Toy(CausalLM):
    config: ToyConfig

    def __init__(self, config: ToyConfig) -> None:
        c = config
        layers = [ToyBlock(c) for _ in range(c.num_hidden_layers)]
        decoder = Decoder(nn.Embedding(c.vocab_size, c.hidden_size), layers, RMSNorm(c.hidden_size))
        super().__init__(config, decoder, LMHead(c.hidden_size, c.vocab_size))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_()


TOY = Architecture(
    model_type="toy",
    class_name="ToyForCausalLM",
    classes=(Toy, ToyConfig),
    layouts=lambda config: (Layout((QKV, *SANDWICH, *EXPERTS)), Layout()),
)

CONFIG = {**LLAMA, "model_type": "toy", "num_experts": 5, "attention_bias": True}
W2 = "model.layers.1.block_sparse_moe.experts.{}.w2.weight"


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(convert._REGISTERED, "toy", TOY)


def in_the_first_layout(ours: Tensors) -> Tensors:
    """Converts tensors by hand, without the layout."""
    disk = {name: tensor for name, tensor in ours.items() if "layers." not in name}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        its = {name.removeprefix(prefix + "."): t for name, t in ours.items() if name.startswith(prefix)}
        for kind in ("weight", "bias"):
            disk[f"{prefix}.self_attn.qkv_proj.{kind}"] = torch.cat([its[f"self_attn.{n}_proj.{kind}"] for n in "qkv"])
        disk[f"{prefix}.self_attn.o_proj.weight"] = its["self_attn.o_proj.weight"]
        disk[f"{prefix}.input_layernorm.weight"] = its["input_layernorm.weight"]
        disk[f"{prefix}.post_self_attn_layernorm.weight"] = its["post_attention_layernorm.weight"]
        disk[f"{prefix}.post_attention_layernorm.weight"] = its["pre_feedforward_layernorm.weight"]
        disk[f"{prefix}.post_mlp_layernorm.weight"] = its["post_feedforward_layernorm.weight"]
        disk[f"{prefix}.block_sparse_moe.gate.weight"] = its["mlp.gate.weight"]
        for e in range(5):
            gate, up = its["mlp.experts.gate_up_proj"][e].chunk(2)
            down = its["mlp.experts.down_proj"][e]
            for number, tensor in ((1, gate), (2, down), (3, up)):
                disk[f"{prefix}.block_sparse_moe.experts.{e}.w{number}.weight"] = tensor
    return {name: tensor.clone() for name, tensor in disk.items()}


def bare(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


LAYOUTS: dict[str, Callable[[Tensors], Tensors]] = {
    "the first": in_the_first_layout,
    "native": dict,
    "the first, bare": lambda ours: bare(in_the_first_layout(ours)),
    "native, bare": bare,
}


def ours(dtype: torch.dtype = torch.float32) -> Tensors:
    torch.manual_seed(1)
    return dict(Toy(TOY.config_from_hf(CONFIG)).to(dtype).state_dict())


def write(directory: Path, tensors: Tensors, shards: int = 1, **entries: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | entries))
    write_shards(directory, tensors, shards)
    return directory


def stored(directory: Path) -> Tensors:
    return {name: tensor for file in directory.glob("model*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shards", [1, 3])
def test_every_layout_round_trip(tmp_path: Path, layout: str, shards: int) -> None:
    expected = ours()
    disk = LAYOUTS[layout](expected)
    model = AutoModel.from_pretrained(write(tmp_path / "theirs", disk, shards))
    assert type(model) is Toy
    assert raw_bytes(model.state_dict()) == raw_bytes(expected)
    for name, size in (("one", "1GB"), ("many", 30_000)):
        model.save_pretrained(tmp_path / name, max_shard_size=size)
        assert raw_bytes(stored(tmp_path / name)) == raw_bytes(disk)
        assert json.loads((tmp_path / name / "config.json").read_text()) == CONFIG
    hub.save(model, tmp_path / "as a new one", native=True)
    assert raw_bytes(stored(tmp_path / "as a new one")) == raw_bytes(in_the_first_layout(expected))


def test_new_model_is_saved_in_the_first_layout(tmp_path: Path) -> None:
    model = Toy(TOY.config_from_hf(CONFIG))
    model.save_pretrained(tmp_path / "new")
    assert raw_bytes(stored(tmp_path / "new")) == raw_bytes(in_the_first_layout(dict(model.state_dict())))
    again = AutoModel.from_pretrained(tmp_path / "new")
    assert again.config == model.config
    assert raw_bytes(again.state_dict()) == raw_bytes(model.state_dict())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dtype_and_device(tmp_path: Path, device: str, layout: str) -> None:
    write(tmp_path, LAYOUTS[layout](ours()))
    model = Toy.from_pretrained(tmp_path, dtype="bfloat16", device=device)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {(device, torch.bfloat16)}
    assert raw_bytes(model.cpu().state_dict()) == raw_bytes(ours(torch.bfloat16))
    assert Toy.from_pretrained(tmp_path, device="meta").device.type == "meta"


@pytest.mark.parametrize("on_disk", [{EMBEDDING}, {HEAD}, {EMBEDDING, HEAD}])
@pytest.mark.parametrize("layout", ["the first", "native"])
def test_tied_head(tmp_path: Path, layout: str, on_disk: set[str]) -> None:
    tensors = LAYOUTS[layout](ours())
    tensors[HEAD] = tensors[EMBEDDING].clone()
    disk = {name: tensor for name, tensor in tensors.items() if name not in {EMBEDDING, HEAD} - on_disk}
    model = Toy.from_pretrained(write(tmp_path / "tied", disk, tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "saved")
    assert raw_bytes(stored(tmp_path / "saved")) == raw_bytes(disk)


def test_extra_tensors_are_saved_again(tmp_path: Path) -> None:
    disk = in_the_first_layout(ours())
    rotary = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(4)}
    beyond = {"model.layers.2.block_sparse_moe.experts.0.w1.weight": torch.rand(2, 2)}
    model = Toy.from_pretrained(write(tmp_path / "theirs", disk | rotary | beyond))
    model.save_pretrained(tmp_path / "saved")
    assert raw_bytes(stored(tmp_path / "saved")) == raw_bytes(disk | rotary)


def test_added_layer_is_saved_in_the_same_layout(tmp_path: Path) -> None:
    model = Toy.from_pretrained(write(tmp_path / "theirs", bare(in_the_first_layout(ours()))))
    model.model.layers.append(ToyBlock(model.config))
    model.config = ToyConfig(**vars(model.config) | {"num_hidden_layers": 3})
    model.save_pretrained(tmp_path / "saved")
    assert {name.split(".")[0] for name in stored(tmp_path / "saved")} == {"embed_tokens", "layers", "norm", "lm_head"}
    assert raw_bytes(Toy.from_pretrained(tmp_path / "saved").state_dict()) == raw_bytes(model.state_dict())


def test_only_stacked_experts_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped: list[tuple[int, int]] = []
    read = Checkpoint._read_stored

    def noted(*args: Any) -> Tensor:
        tensor = read(*args)
        mapped.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
        return tensor

    monkeypatch.setattr(Checkpoint, "_read_stored", noted)
    model = Toy.from_pretrained(write(tmp_path, in_the_first_layout(ours())))
    copied = {
        re.sub(r"\d", "*", name)
        for name, tensor in model.state_dict().items()
        if not any(first <= tensor.data_ptr() < last for first, last in mapped)
    }
    assert copied == {"model.layers.*.mlp.experts.gate_up_proj", "model.layers.*.mlp.experts.down_proj"}


def test_meta_model_is_not_saved(tmp_path: Path) -> None:
    model = Toy.from_pretrained(write(tmp_path / "theirs", in_the_first_layout(ours())), device="meta")
    model.model.embed_tokens.to_empty(device="cpu")
    with pytest.raises(CheckpointError, match=r"layers.0.input_layernorm.weight'.* not a dense tensor"):
        model.save_pretrained(tmp_path / "saved")


def replaced(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Callable[[Tensors], Any]:
    return lambda disk: disk.update({name: torch.zeros(shape, dtype=dtype)})


QKV_NAME, GATE_UP = "model.layers.1.self_attn.qkv_proj.weight", "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    "layout, change, entries, message",
    [
        ("the first", lambda disk: disk.pop(QKV_NAME), {}, f"tensors are missing; got no '{QKV_NAME}'. Compare"),
        ("the first", lambda disk: disk.pop(W2.format(3)), {}, f"tensors are missing; got no '{W2.format(3)}'. Comp"),
        ("the first, bare", lambda disk: disk.pop(QKV_NAME[6:]), {}, f"got no '{QKV_NAME[6:]}'. Compare"),
        ("native", lambda disk: disk.pop(GATE_UP), {}, f"tensors are missing; got no '{GATE_UP}'. Compare"),
        ("the first", replaced(QKV_NAME, (63, 32)), {}, rf"{QKV_NAME}': .* got \(63, 32\); expected \(64, 32\)"),
        ("the first", replaced(W2.format(0), (9, 9)), {}, r"0.w2.weight': .* got \(9, 9\); expected \(32, 56\)"),
        ("native", replaced(GATE_UP, (5, 9, 9)), {}, rf"{GATE_UP}': .* \(5, 9, 9\); expected \(5, 112, 32\)"),
        ("the first", replaced(QKV_NAME, (64, 32), torch.int8), {}, f"{QKV_NAME}': not a dtype of .* torch.int8"),
        ("the first", replaced("model.layers.0.self_attn.q_proj.weight", (32, 32)), {}, "q_proj.weight': unexpected"),
        ("the first", dict, {"num_key_value_heads": 4}, r"qkv_proj.*got \(64.*; expected \(96"),
        ("native", dict, {"num_key_value_heads": 4}, r"k_proj.bias.*got \(16,\); expected \(32,\)"),
        # Another number of experts than in the files
        ("the first", dict, {"num_experts": 6}, "no 'model.layers.0.block_sparse_moe.experts.5.w1.weight', .*and 1 m"),
        ("the first", dict, {"num_experts": 4}, "'model.layers.0.block_sparse_moe.experts.4.w1.weight': unexpected"),
        ("native", dict, {"num_experts": 6}, r"expected \(6, "),
        ("the first", replaced(W2.format(5), (32, 56)), {}, f"{W2.format(5)}': unexpected tensor"),
        ("the first", replaced(W2.format(10**9 - 1), (32, 56)), {"num_experts": 10**9}, "experts.5.w1.weight', .* mor"),
        # A mixture of two layouts
        ("native", replaced(W2.format(0), (32, 56)), {}, f"{W2.format(0)}': unexpected tensor"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_match_the_layout(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    change: Callable[[Tensors], Any],
    entries: dict[str, Any],
    message: str,
) -> None:
    def read(*_: object) -> Tensor:
        raise AssertionError("a weight was read")

    disk = LAYOUTS[layout](ours())
    change(disk)
    monkeypatch.setattr(hub.loading.Checkpoint, "_read_stored", read)
    with pytest.raises(CheckpointError, match=message) as caught:
        Toy.from_pretrained(write(tmp_path, disk, **entries))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", [10**3, 10**5, 10**9, 2**31 - 1, 2**40])
def test_enormous_numbers_of_experts_are_refused_quickly(tmp_path: Path, layout: str, number: int) -> None:
    write(tmp_path, LAYOUTS[layout](ours()), num_experts=number)
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(LigerzooError) as caught:
        Toy.from_pretrained(tmp_path)
    seconds, (_, most) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(str(caught.value)) < 1000
    assert seconds < 2
    assert most < 40_000_000  # of which reading any JSON file takes 32 MiB


def test_info_counts_experts(tmp_path: Path) -> None:
    for layout, write_out in LAYOUTS.items():
        lines = describe(write(tmp_path / layout, write_out(ours()))).splitlines()
        counted = {line.split()[0]: line.split()[1] for line in lines if line.endswith("%")}
        assert counted.keys() == {"experts", "attention", "router", "norms", "embedding", "head"}
        assert counted["experts"] == f"{2 * 5 * 3 * 56 * 32:,}"
        assert counted["router"] == f"{2 * 5 * 32:,}"
