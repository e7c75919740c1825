"""Classes of a user's own: registered, saved, loaded, described, extended; and config fields changed while loading."""

import copy
import dataclasses
import json
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from ligerzoo import AutoModel, AutoModelForSequenceClassification, cli, convert, info
from ligerzoo.convert.layout import Fused, Rename, Transposed
from ligerzoo.errors import CheckpointError, ConfigError, LigerzooError
from ligerzoo.layers import Attention, Context, Decoder, GatedMLP, LMHead, PreNormBlock, RMSNorm, RotaryEmbedding
from ligerzoo.models import CausalLM, Llama, LlamaConfig, Mixtral, MixtralConfig, Phi3, Phi3Config
from ligerzoo.models.config import DecoderConfig, WindowedConfig
from tests.models.tiny import write_shards
from tests.models.zoo import CHECKPOINTS, COMPARED_TYPES

ROOT = Path(__file__).parent.parent
SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2
}  # fmt: skip
TOKENS = torch.arange(10)[None]


@pytest.fixture(autouse=True)
def _restored_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as context:
        context.setattr(convert, "_REGISTERED", {})
        yield


@dataclass(frozen=True, kw_only=True)
class ScaledConfig(LlamaConfig):
    """Llama's config with one more field."""

    scale: float = 2.0


class Scaled(Llama):
    """Llama with one more parameter on the model."""

    config: ScaledConfig

    def __init__(self, config: ScaledConfig, **factory_kwargs: Any) -> None:
        super().__init__(config, **factory_kwargs)
        self.scale = nn.Parameter(torch.full((config.hidden_size,), config.scale, **factory_kwargs))

    def embed(self, x: Tensor, context: Context) -> Tensor:
        return self.model.embed_tokens(x) * self.scale


def same(a: CausalLM, b: CausalLM) -> bool:
    ours, others = a.state_dict(), b.state_dict()
    return ours.keys() == others.keys() and all(torch.equal(ours[name], others[name]) for name in ours)


def logits(model: CausalLM) -> Tensor:
    with torch.no_grad():
        got = model(TOKENS).logits
    assert got is not None
    return got


def config_json(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return content


# Registered classes

SCRIPT = """
import sys
from dataclasses import dataclass
import torch
from torch import nn
from ligerzoo import AutoModel
from ligerzoo.info import describe
from ligerzoo.layers import Attention, Decoder, GatedMLP, LMHead, PreNormBlock, RMSNorm, RotaryEmbedding
from ligerzoo.models import CausalLM
from ligerzoo.models.config import DecoderConfig, WindowedConfig
from tests.models.tiny import write_shards
from tests.models.zoo import CHECKPOINTS

@dataclass(frozen=True, kw_only=True)
class MyConfig(DecoderConfig):
    window: int | None = 32

class ScaledMLP(nn.Module):
    def __init__(self, hidden_size, intermediate_size, **factory_kwargs):
        super().__init__()
        self.mlp = GatedMLP(hidden_size, intermediate_size, **factory_kwargs)
        self.scale = nn.Parameter(torch.ones(hidden_size, **factory_kwargs))

    def forward(self, x, context=None):
        return self.mlp(x, context) * self.scale

class MyModel(CausalLM):
    def __init__(self, config, **factory_kwargs):
        c = config
        rotary = RotaryEmbedding(c.head_size)

        def block(i):
            attention = Attention(c.hidden_size, 4, num_kv_heads=1, rotary=rotary, window=None if i % 2 else c.window,
                                  **factory_kwargs)
            mlp = ScaledMLP(c.hidden_size, c.intermediate_size, **factory_kwargs)
            return PreNormBlock(RMSNorm(c.hidden_size, **factory_kwargs), attention,
                                RMSNorm(c.hidden_size, **factory_kwargs), mlp)

        embedding = nn.Embedding(c.vocab_size, c.hidden_size, **factory_kwargs)
        decoder = Decoder(embedding, [block(i) for i in range(c.num_hidden_layers)],
                          RMSNorm(c.hidden_size, **factory_kwargs))
        super().__init__(config, decoder, LMHead(c.hidden_size, c.vocab_size, **factory_kwargs))
        self.embedding_scale = nn.Parameter(torch.ones(c.hidden_size, **factory_kwargs))

    def embed(self, x, context):
        return self.model.embed_tokens(x) * self.embedding_scale

AutoModel.register(MyConfig, MyModel, model_type="mine")
config = MyConfig(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
torch.manual_seed(0)
model = AutoModel.from_config(config)
assert type(model) is MyModel

tokens = torch.randint(100, (2, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
for _ in range(5):
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
own = [model.embedding_scale, *(layer.mlp.scale for layer in model.model.layers)]
assert all(not torch.equal(weight, torch.ones_like(weight)) for weight in own)

model.eval().save_pretrained(sys.argv[1])
expected = model.generate(tokens[:, :8], max_new_tokens=8)
for again in (MyModel.from_pretrained(sys.argv[1]), AutoModel.from_pretrained(sys.argv[1])):
    assert type(again) is MyModel and again.config == config
    assert all(torch.equal(again.state_dict()[name], value) for name, value in model.state_dict().items())
    assert torch.equal(again.generate(tokens[:, :8], max_new_tokens=8), expected)
page = describe(sys.argv[1])
assert "MyModel (MyModel)" in page and "4 layers, hidden 32" in page, page
"""


def test_a_model_of_a_script_trains_saves_loads_and_generates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "script.py", "saved"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    raw = config_json(tmp_path / "saved")
    assert (raw["model_type"], raw["architectures"], raw["window"]) == ("mine", ["MyModel"], 32)

    saved = str(tmp_path / "saved")
    assert cli.main(["info", saved]) == 0  # in this process, the class is not registered
    page = capsys.readouterr().out
    assert "model_type 'mine', neither in ligerzoo.models nor registered" in page
    assert "parameters" in page
    assert "model.safetensors" in page
    assert cli.main(["generate", saved, "--prompt", "x"]) == 1


def test_a_subclass_of_llama(tmp_path: Path) -> None:
    AutoModel.register(ScaledConfig, Scaled, model_type="scaled")
    model = AutoModel.from_config(ScaledConfig(**SIZES, scale=3.0), dtype=torch.bfloat16)
    assert isinstance(model, Scaled)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    model.save_pretrained(tmp_path)
    raw = config_json(tmp_path)
    assert (raw["model_type"], raw["architectures"], raw["scale"]) == ("scaled", ["Scaled"], 3.0)
    for load in (Scaled.from_pretrained, Llama.from_pretrained, AutoModel.from_pretrained):
        again = load(tmp_path)
        assert type(again) is Scaled
        assert again.config == model.config
        assert same(again, model)
    assert "Scaled (Scaled)" in info.describe(tmp_path)


def test_a_subclass_keeps_the_converter_of_its_base(tmp_path: Path) -> None:
    """Phi-3 stores fused projections and reads its rope entries in another way than Llama."""

    @dataclass(frozen=True, kw_only=True)
    class MyPhiConfig(Phi3Config):
        pass

    class MyPhi(Phi3):
        pass

    AutoModel.register(MyPhiConfig, MyPhi, model_type="my-phi")
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = MyPhi(MyPhiConfig(**SIZES, rope_scaling=scaling))
    model.save_pretrained(tmp_path)
    assert "model.layers.0.self_attn.qkv_proj.weight" in load_file(tmp_path / "model.safetensors")
    again = AutoModel.from_pretrained(tmp_path)
    assert type(again) is MyPhi
    assert again.config == model.config
    assert same(again, model)


@dataclass(frozen=True)
class Tower:
    depth: int = 1
    sizes: tuple[int, ...] = (1, 2)


@dataclass(frozen=True, kw_only=True)
class PlainConfig:
    """A config that extends nothing, with nested values and a field without default."""

    vocab_size: int
    layers: int = 2
    tower: Tower = Tower()
    names: tuple[str, ...] | None = None
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02


class Plain(CausalLM):
    """A model with a buffer that is not saved, and a tensor that is not a buffer."""

    def __init__(self, config: PlainConfig) -> None:
        rotary = RotaryEmbedding(8)

        def block() -> PreNormBlock:
            return PreNormBlock(RMSNorm(16), Attention(16, 2, rotary=rotary), RMSNorm(16), GatedMLP(16, 24))

        decoder = Decoder(nn.Embedding(config.vocab_size, 16), [block() for _ in range(config.layers)], RMSNorm(16))
        super().__init__(config, decoder, LMHead(16, config.vocab_size))
        self.register_buffer("bias", torch.linspace(0, 1, 16), persistent=False)
        self.offset = torch.tensor(0.5)

    def embed(self, x: Tensor, context: Context) -> Tensor:
        return self.model.embed_tokens(x) + self.bias + self.offset


def test_a_config_that_is_a_plain_dataclass(tmp_path: Path) -> None:
    AutoModel.register(PlainConfig, Plain, model_type="plain")
    model = Plain(PlainConfig(vocab_size=50, tower=Tower(depth=3, sizes=(4,)), names=("a", "b")))
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert again.config == model.config
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(logits(again), logits(model))
    assert "Plain (Plain)" in info.describe(tmp_path)
    assert Plain.from_pretrained(tmp_path, device="meta").device.type == "meta"

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "plain"}))
    with pytest.raises(ConfigError, match=r"config.json, vocab_size: missing; expected .* PlainConfig has no default"):
        Plain.from_pretrained(tmp_path)
    assert same(Plain.from_pretrained(tmp_path, vocab_size=50), model)


def test_a_layout_of_one_s_own(tmp_path: Path) -> None:
    qkv = Fused("self_attn.qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
    AutoModel.register(ScaledConfig, Scaled, model_type="scaled", layout=(qkv, Rename("factor", "scale")))
    model = Scaled(ScaledConfig(**SIZES))
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {"model.layers.0.self_attn.qkv.weight", "factor"} <= stored.keys()
    assert "scale" not in stored
    assert same(AutoModel.from_pretrained(tmp_path), model)


GPT2_NAMES = (
    Rename("transformer.wte", "model.embed_tokens"),
    Rename("transformer.ln_f", "model.norm"),
    Rename("transformer.h", "model.layers"),
    Rename("ln_1", "input_layernorm"),
    Rename("ln_2", "post_attention_layernorm"),
    Fused("attn.c_attn", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    Rename("attn.c_proj", "self_attn.o_proj"),
    Rename("c_fc", "up_proj"),
    Transposed("mlp.down_proj"),
    Rename("mlp.c_proj", "mlp.down_proj"),
)
GPT2_STORED = [
    "transformer.wte.weight", "transformer.ln_f.weight", "lm_head.weight", "factor",
    *(f"transformer.h.{i}.{name}.weight" for i in range(2) for name in (
        "ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.gate_proj", "mlp.c_proj",
    )),
]  # fmt: skip


@pytest.mark.parametrize("order", [1, -1])
def test_rules_combine(tmp_path: Path, order: int) -> None:
    AutoModel.register(
        ScaledConfig, Scaled, model_type="scaled", layout=(Rename("factor", "scale"), *GPT2_NAMES)[::order]
    )
    model = Scaled(ScaledConfig(**SIZES))
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert sorted(stored) == sorted(GPT2_STORED)
    if order == 1:
        down = model.state_dict()["model.layers.1.mlp.down_proj.weight"]
        assert torch.equal(stored["transformer.h.1.mlp.c_proj.weight"], down.mT)
    again = AutoModel.from_pretrained(tmp_path)
    assert same(again, model)
    again.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    load_state = {name: torch.zeros_like(tensor) for name, tensor in model.hf_state_dict().items()}
    again.load_hf_state_dict(load_state)
    assert not any(tensor.any() for tensor in again.state_dict().values())


@pytest.mark.parametrize(
    "layout, unused",
    [
        ((*GPT2_NAMES, Rename("x", "no_such_module")), r"Rename\(stored_path='x', path='no_such_module'\); expected"),
        ((Rename("self_attn", "attn"),), r"Rename\(stored_path='self_attn', path='attn'\)"),
        ((Rename("h", "layers"), Rename("transformer.h", "model.layers")), r"got Rename\(stored_path='transformer.h'"),
        ((Transposed("scale.x"),), "got Transposed"),
    ],
)
def test_rules_without_effect(tmp_path: Path, layout: tuple[Any, ...], unused: str) -> None:
    AutoModel.register(ScaledConfig, Scaled, model_type="scaled")
    Scaled(ScaledConfig(**SIZES)).save_pretrained(tmp_path)
    AutoModel.register(ScaledConfig, Scaled, model_type="scaled", layout=layout)
    for use in (
        lambda: Scaled(ScaledConfig(**SIZES)).save_pretrained(tmp_path),
        lambda: Scaled.from_pretrained(tmp_path),
    ):
        with pytest.raises(ConfigError, match=f"layout of model_type 'scaled': rules without effect; .*{unused}"):
            use()


def test_a_layout_that_is_not_one_to_one(tmp_path: Path) -> None:
    clash = Rename("model.norm.weight", "scale")
    AutoModel.register(ScaledConfig, Scaled, model_type="scaled", layout=(clash,))
    with pytest.raises(ConfigError, match="layout: the weight layout is not one to one"):
        Scaled(ScaledConfig(**SIZES)).save_pretrained(tmp_path)


def test_a_value_that_json_cannot_represent(tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class TypedConfig(LlamaConfig):
        kind: Any = torch.float32

    class Typed(Llama):
        pass

    AutoModel.register(TypedConfig, Typed, model_type="typed")
    with pytest.raises(ConfigError, match=r"kind: cannot be written to config.json; got torch.float32 \(dtype\)"):
        Typed(TypedConfig(**SIZES)).save_pretrained(tmp_path)


def test_a_class_that_is_defined_again_replaces_the_first() -> None:
    def define() -> tuple[type, type[CausalLM]]:
        @dataclass(frozen=True, kw_only=True)
        class CellConfig(LlamaConfig):
            pass

        class Cell(Llama):
            pass

        return CellConfig, Cell

    for _ in range(2):  # as by running a notebook's cell twice
        config_class, model_class = define()
        AutoModel.register(config_class, model_class, model_type="cell")
        assert type(AutoModel.from_config(config_class(**SIZES))) is model_class
    AutoModel.register(config_class, model_class, model_type="cell")


@dataclass
class NotFrozen(LlamaConfig.__base__.__base__):  # type: ignore[misc, name-defined]
    vocab_size: int = 1


class NotADataclass:
    vocab_size = 1


class NotDecorated(LlamaConfig):
    scale: float = 2.0


@dataclass(frozen=True)
class TooFewFields:
    vocab_size: int = 1


class Another(Llama):
    pass


@dataclass(frozen=True, kw_only=True)
class AnotherConfig(LlamaConfig):
    pass


@pytest.mark.parametrize(
    "change, message",
    [
        ({"config_class": NotFrozen}, r"config_class: not a config class; .*NotFrozen.*frozen dataclass. Decorate"),
        ({"config_class": NotADataclass}, "config_class: not a config class; .*NotADataclass"),
        ({"config_class": ScaledConfig()}, "config_class: not a config class"),
        ({"config_class": NotDecorated}, "config_class NotDecorated: attributes are not fields; got scale. Decorate"),
        (
            {"config_class": TooFewFields},
            "config_class TooFewFields: fields are missing; got no tie_word_embeddings, initializer_range. Extend",
        ),
        ({"config_class": LlamaConfig}, "config_class: the class belongs to model_type 'llama'; got LlamaConfig"),
        ({"model_class": Llama}, "model_class: the class belongs to model_type 'llama'; got Llama. Register a sub"),
        ({"model_class": nn.Linear}, "model_class: not a model class; .*Linear.*; expected a subclass of CausalLM"),
        ({"model_class": None}, "model_class: not a model class; expected a subclass"),
        ({"model_type": "llama"}, "model_type: the name belongs to an architecture of ligerzoo.models; got 'llama'"),
        ({"model_type": ""}, "model_type: not a name; got ''; expected a non-empty string"),
        ({"model_type": None}, "model_type: not a name; got None"),
        ({"layout": Rename("a", "b")}, r"layout: not a tuple of rules; got Rename\(.*; expected a tuple of Rename"),
        ({"layout": ("q_proj", "k_proj")}, "layout: not a tuple of rules; got"),
        ({"layout": (Rename,)}, "layout: not a tuple of rules"),
        ({"layout": None}, "layout: not a tuple of rules; got None"),
    ],
)
def test_what_cannot_be_registered(change: dict[str, Any], message: str) -> None:
    arguments = {"config_class": ScaledConfig, "model_class": Scaled, "model_type": "scaled", **change}
    with pytest.raises(ConfigError, match=message):
        AutoModel.register(**arguments)
    assert not convert._REGISTERED


@pytest.mark.parametrize(
    "arguments, got",
    [
        ((Scaled, ScaledConfig, "scaled"), "model_class, config_class, model_type"),
        (("scaled", ScaledConfig, Scaled), "model_type, config_class, model_class"),
    ],
)
def test_arguments_of_register_in_another_order(arguments: tuple[Any, ...], got: str) -> None:
    message = (
        rf"^AutoModel.register: the arguments are in another order; got {got}; expected config_class, model_class, "
        r"model_type. Call AutoModel.register\(ScaledConfig, Scaled, model_type='scaled'\).$"
    )
    with pytest.raises(ConfigError, match=message):
        AutoModel.register(*arguments)
    assert not convert._REGISTERED


def test_a_name_or_class_that_is_registered_already() -> None:
    AutoModel.register(ScaledConfig, Scaled, "scaled")  # also by position
    with pytest.raises(
        ConfigError, match="model_class: model_type 'scaled' is registered with another class; got Another"
    ):
        AutoModel.register(AnotherConfig, Another, model_type="scaled")
    with pytest.raises(ConfigError, match="config_class: model_type 'scaled' is registered with another class"):
        AutoModel.register(AnotherConfig, Scaled, model_type="scaled")
    with pytest.raises(ConfigError, match="model_class: the class belongs to model_type 'scaled'; got Scaled"):
        AutoModel.register(AnotherConfig, Scaled, model_type="other")
    with pytest.raises(ConfigError, match="config_class: the class belongs to model_type 'scaled'; got ScaledConfig"):
        AutoModel.register(ScaledConfig, Another, model_type="other")


@pytest.mark.parametrize(
    "config, message",
    [
        ({"vocab_size": 50}, r"got a dict; expected ScaledConfig. .* dict: Scaled\(ScaledConfig\(\*\*values\)\).$"),
        (
            ScaledConfig,
            r"got the class ScaledConfig; expected ScaledConfig. Create one: Scaled\(ScaledConfig\(...\)\).$",
        ),
        ("org/name", r"got 'org/name'; expected ScaledConfig. To load a checkpoint, call Scaled.from_pretrained.$"),
        (None, "got None; expected ScaledConfig$"),
        (Tower(), "got a Tower; expected ScaledConfig$"),
    ],
)
def test_something_else_than_a_config(config: Any, message: str) -> None:
    for build in (Scaled, lambda config: Scaled(config=config)):
        with pytest.raises(ConfigError, match=f"^argument config of Scaled: not a config; {message}"):
            build(config)


def test_a_model_is_copied_and_pickled() -> None:
    model = Llama(LlamaConfig(**SIZES))
    assert same(copy.deepcopy(model), model)
    assert same(pickle.loads(pickle.dumps(model)), model)  # noqa: S301


@dataclass(frozen=True, kw_only=True)
class UncheckedConfig(WindowedConfig):
    """Its `__post_init__` does not call that of the base class."""

    gain: float = 1.0

    def __post_init__(self) -> None:
        if self.gain > self.hidden_size:
            raise ConfigError("too large", where="gain")


@dataclass(frozen=True, kw_only=True)
class DerivedConfig(UncheckedConfig):
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gain == 3:
            raise ConfigError("three", where="gain")


@pytest.mark.parametrize("config_class", [UncheckedConfig, DerivedConfig])
def test_the_base_s_checks_run_even_if_a_config_does_not_call_them(config_class: type[UncheckedConfig]) -> None:
    config_class(**SIZES)
    for wrong, message in (
        ({"hidden_size": "16"}, "hidden_size: invalid value; got '16'; expected an integer"),
        ({"gain": "2"}, "gain: invalid value; got '2'"),
        ({"layer_types": ["full"] * 2}, "layer_types: invalid layer types"),
        ({"gain": 17.0}, "gain: too large"),
    ):
        with pytest.raises(ConfigError, match=f"^{message}"):
            config_class(**{**SIZES, **wrong})
    if config_class is DerivedConfig:
        with pytest.raises(ConfigError, match=r"^gain: three"):
            config_class(**SIZES, gain=3)


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", torch.bfloat16])
def test_from_config_takes_dtypes_as_from_pretrained_does(dtype: str | torch.dtype) -> None:
    model = AutoModel.from_config(LlamaConfig(**SIZES), dtype=dtype, device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dtype": "bf16"}, "argument dtype: not a dtype of weights; got 'bf16'; .* Did you mean 'bfloat16'"),
        ({"dtype": "fp32"}, "got 'fp32'; expected float32 or .* Did you mean 'float32'"),
        ({"dtype": "int8"}, "got 'int8'; expected float32 or float16 or bfloat16 or float64$"),
        ({"dtype": torch.int8}, "argument dtype: not a dtype of weights; got torch.int8"),
        ({"device": "gpu"}, "argument device: no such device; got gpu; expected cpu"),
    ],
)
def test_from_config_with_an_invalid_dtype_or_device(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AutoModel.from_config(LlamaConfig(**SIZES), **options)


def test_a_constructor_refuses_the_name_of_a_dtype() -> None:
    with pytest.raises(LigerzooError, match=r"dtype of Llama: not a dtype; got 'bfloat16'; .*torch\.bfloat16, or"):
        Llama(LlamaConfig(**SIZES), dtype="bfloat16")  # type: ignore[arg-type]


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForSequenceClassification])
def test_from_config_refuses_names_classes_and_models(auto: Any) -> None:
    for wrong, message in (
        ("meta-llama/Llama-3.2-1B", "got 'meta-llama/Llama-3.2-1B'; .* To load a checkpoint, call from_pretrained"),
        (LlamaConfig, "got <class .*LlamaConfig'>; expected a config of ligerzoo.models"),
        (Llama(LlamaConfig(**SIZES)), "got Llama; expected .* Pass model.config"),
    ):
        with pytest.raises(ConfigError, match=f"config: not a config; {message}"):
            auto.from_config(wrong)


def test_every_architecture_passes_the_dtype_on() -> None:
    configs = {checkpoint.config["model_type"]: checkpoint.config for checkpoint in CHECKPOINTS}
    assert configs.keys() == {*COMPARED_TYPES}
    for model_type, raw in configs.items():
        config = convert.architecture_of(model_type).config_from_hf(raw)
        model = AutoModel.from_config(config, dtype="bfloat16", device="meta")
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_layers_of_own_classes_get_device_and_dtype() -> None:
    @dataclass(frozen=True, kw_only=True)
    class MixedConfig(LlamaConfig):
        adapter_dtype: torch.dtype | None = None

    class Mixed(Llama):
        def __init__(self, config: MixedConfig) -> None:
            super().__init__(config)
            self.adapter = nn.Linear(16, 16, dtype=config.adapter_dtype)

    AutoModel.register(MixedConfig, Mixed, model_type="mixed")
    AutoModel.register(PlainConfig, Plain, model_type="plain")
    for config in (MixedConfig(**SIZES), PlainConfig(vocab_size=50)):
        model = AutoModel.from_config(config, dtype="bfloat16", device="meta")
        assert {(tensor.dtype, tensor.device.type) for tensor in model.parameters()} == {(torch.bfloat16, "meta")}
        assert {tensor.dtype for tensor in AutoModel.from_config(config).parameters()} == {torch.float32}
    assert torch.get_default_dtype() == torch.float32
    message = (
        "^Mixed: parameters that do not have the given dtype; got torch.float32 in 'adapter.weight', 'adapter.bias'"
    )
    with pytest.raises(ConfigError, match=message):
        AutoModel.from_config(MixedConfig(**SIZES, adapter_dtype=torch.float32), dtype="bfloat16")


def test_classes_that_are_not_registered(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"Plain: the class is not registered.*AutoModel.register\(<config class>, Pl"
    ):
        Plain(PlainConfig(vocab_size=50)).save_pretrained(tmp_path / "plain")
    with pytest.raises(
        ConfigError,
        match=r"ScaledConfig: the config has other fields than LlamaConfig; got 'scale'. Call AutoModel.register\(Sc",
    ):
        Scaled(ScaledConfig(**SIZES)).save_pretrained(tmp_path / "scaled")
    with pytest.raises(ConfigError, match=r"ScaledConfig: no model class is known for this config class.*register"):
        AutoModel.from_config(ScaledConfig(**SIZES))
    with pytest.raises(ConfigError, match=r"^LlamaConfig: .*ligerzoo.from_transformers\(model\)"):
        AutoModel.from_config(transformers.LlamaConfig())
    assert not list(tmp_path.iterdir())
    assert type(AutoModel.from_config(LlamaConfig(**SIZES))) is Llama


def test_the_card_imports_the_class_from_its_module() -> None:
    from ligerzoo.hub.uploading import _model_card

    assert f"from {__name__} import Scaled\n" in _model_card(Scaled(ScaledConfig(**SIZES)), None, "me/scaled")


# Config fields that are changed while loading


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    Llama(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize(
    "entries",
    [
        {"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 9.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 9.0, "rope_theta": 7.0}},
    ],
    ids=["transformers 4", "transformers 5"],
)
def test_overrides_take_precedence_over_either_spelling(llama: Path, tmp_path: Path, entries: dict[str, Any]) -> None:
    raw = {name: value for name, value in config_json(llama).items() if not name.startswith("rope")}
    (llama / "config.json").write_text(json.dumps(raw | entries | {"unknown": "kept"}))
    scaling = {"rope_type": "linear", "factor": 2.0}
    changes = {"rope_theta": 5e5, "rope_scaling": scaling, "max_position_embeddings": 99}
    read = Llama.from_pretrained(llama).config
    for load in (Llama.from_pretrained, AutoModel.from_pretrained):
        model = load(llama, **changes)
        assert model.config == dataclasses.replace(read, **changes)
        assert model.model.layers[0].self_attn.rotary.theta == 5e5
        model.save_pretrained(tmp_path / "saved")
        assert config_json(tmp_path / "saved")["unknown"] == "kept"
        assert "rope_parameters" not in config_json(tmp_path / "saved")
        assert AutoModel.from_pretrained(tmp_path / "saved").config == model.config
    assert Llama.from_pretrained(llama, rope_scaling=None).config.rope_scaling is None


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"rope_teta": 1.0}, "^argument rope_teta: unknown; expected .* a field of LlamaConfig. Did you mean 'rope_th"),
        ({"devise": "cpu"}, "^argument devise: unknown; .* Did you mean 'device'"),
        ({"device_mapp": "auto"}, "^argument device_mapp: unknown"),
        ({"xyzzy": 1}, "^argument xyzzy: unknown; expected an option of from_pretrained or a field of LlamaConfig$"),
        ({"rope_theta": "1e6"}, "^argument rope_theta: .*; got '1e6'"),
        (
            {"max_position_embeddings": 1.5},
            "^argument max_position_embeddings: .*; got 1.5; expected an integer, 1 or more",
        ),
        ({"tie_word_embeddings": None}, "^argument tie_word_embeddings: .*; got None; expected true or false"),
        ({"rope_scaling": {"rope_type": "unheard of"}}, "^argument rope_scaling: unknown rope type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "^argument rope_scaling: invalid factor"),
    ],
)
def test_overrides_that_are_refused(llama: Path, overrides: dict[str, Any], message: str) -> None:
    for load in (Llama.from_pretrained, AutoModel.from_pretrained):
        with pytest.raises(ConfigError, match=message):
            load(llama, **overrides)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            {"vocab_size": 60},
            r"argument vocab_size=60, .*safetensors, tensor '[\w.]+': wrong shape; got \(50, 16\); expected \(60, 16\)"
            r". The files have vocab_size=50, as config.json says. Leave out the argument.$",
        ),
        (
            {"num_hidden_layers": 3},
            "argument num_hidden_layers=3, .*: tensors are missing; got no 'model.layers.2.* "
            "The files have num_hidden_layers=2, .* Leave out the argument, or load with strict=False",
        ),
        ({"num_hidden_layers": 1}, "argument num_hidden_layers=1, .*: unexpected tensor. The files have .*=2, as"),
        ({"num_hidden_layers": 10**6}, "argument num_hidden_layers=1000000, .*: fewer tensors than layers; got"),
        (
            {"num_hidden_layers": 3, "rope_theta": 10000.0, "attention_bias": True},
            "^argument num_hidden_layers=3, attention_bias=True, .* have num_hidden_layers=2, attention_bias=False, as",
        ),
    ],
)
def test_an_override_that_contradicts_the_files(llama: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Llama.from_pretrained(llama, **overrides)


def test_an_override_is_not_blamed_for_damaged_files(llama: Path) -> None:
    stored = load_file(llama / "model.safetensors")
    del stored["model.norm.weight"]
    (llama / "model.safetensors").unlink()
    write_shards(llama, stored)
    with pytest.raises(CheckpointError, match=r"^(?!argument).*: tensors are missing; got no 'model.norm.weight'"):
        Llama.from_pretrained(llama, rope_theta=5e5)


def test_an_override_is_applied_before_the_config_is_checked(llama: Path) -> None:
    (llama / "config.json").write_text(json.dumps({**config_json(llama), "rope_scaling": {"type": "unheard of"}}))
    assert Llama.from_pretrained(llama, rope_scaling=None).config.rope_scaling is None


# Extended classes


def test_a_checkpoint_is_loaded_into_an_extended_class(llama: Path, tmp_path: Path) -> None:
    AutoModel.register(ScaledConfig, Scaled, model_type="scaled")
    with pytest.raises(CheckpointError, match=r"tensors are missing; got no 'scale'.*load with strict=False"):
        Scaled.from_pretrained(llama)
    with pytest.warns(UserWarning, match=r"llama: missing parameters, which keep .*: 'scale'\.") as caught:
        model = Scaled.from_pretrained(llama, strict=False, scale=1.5, dtype="bfloat16")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert type(model.config) is ScaledConfig
    assert (model.origin.missing, model.origin.unexpected) == (("scale",), ())  # type: ignore[union-attr]
    assert torch.equal(model.scale, torch.full((16,), 1.5, dtype=torch.bfloat16))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(parameter.requires_grad for parameter in model.parameters())
    expected = Llama.from_pretrained(llama, dtype="bfloat16").state_dict()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())

    model.save_pretrained(tmp_path / "scaled")  # as its own class
    raw = config_json(tmp_path / "scaled")
    assert (raw["model_type"], raw["architectures"], raw["scale"]) == ("scaled", ["Scaled"], 1.5)
    again = AutoModel.from_pretrained(tmp_path / "scaled")
    assert type(again) is Scaled
    assert same(again, model)
    with pytest.warns(UserWarning, match="'scale'"):
        assert Scaled.from_pretrained(llama, strict=False, device="meta").device.type == "meta"


def test_tensors_that_the_class_lacks_are_left_out(tmp_path: Path) -> None:
    biased = Llama(LlamaConfig(**SIZES, attention_bias=True))
    biased.save_pretrained(tmp_path / "biased")
    biases = [name for name in biased.state_dict() if name.endswith(".bias")]
    with pytest.raises(CheckpointError, match=r"q_proj.bias': unexpected tensor.*strict=False"):
        Llama.from_pretrained(tmp_path / "biased", attention_bias=False)
    with pytest.warns(UserWarning, match=r"biased: tensors that Llama lacks, which are left out: .*_proj\.bias"):
        model = Llama.from_pretrained(tmp_path / "biased", attention_bias=False, strict=False)
    assert (model.origin.missing, sorted(model.origin.unexpected)) == ((), sorted(biases))  # type: ignore[union-attr]
    model.save_pretrained(tmp_path / "plain")
    assert same(Llama.from_pretrained(tmp_path / "plain"), model)


def test_what_is_missing_is_initialized(llama: Path) -> None:
    """By the constructor, with random numbers where it draws some."""
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="6 more"):
        model = Llama.from_pretrained(llama, attention_bias=True, mlp_bias=True, strict=False)
    assert all(torch.equal(model.state_dict()[name], torch.zeros_like(model.state_dict()[name]))
               for name in model.origin.missing)  # type: ignore[union-attr]  # fmt: skip
    stored = load_file(llama / "model.safetensors")
    del stored["model.layers.0.mlp.up_proj.weight"], stored["lm_head.weight"]
    (llama / "model.safetensors").unlink()
    write_shards(llama, stored)
    with pytest.warns(UserWarning, match="missing parameters"):
        model = Llama.from_pretrained(llama, strict=False)
    for weight in (model.model.layers[0].mlp.up_proj.weight, model.lm_head.weight):
        assert 0.01 < weight.std().item() < 0.04
    assert logits(model).isfinite().all()


def test_a_complete_checkpoint_warns_of_nothing(llama: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = Llama.from_pretrained(llama, strict=False)
    assert (model.origin.missing, model.origin.unexpected) == ((), ())  # type: ignore[union-attr]


def test_a_wrong_shape_stays_an_error(llama: Path) -> None:
    with pytest.raises(CheckpointError, match=r"wrong shape; got \(24, 16\); expected \(25, 16\)"):
        Llama.from_pretrained(llama, intermediate_size=25, strict=False)


@pytest.mark.parametrize("number", [5, 10**9])
def test_missing_experts_of_a_stored_stack_stay_an_error(tmp_path: Path, number: int) -> None:
    sizes = {**SIZES, "num_key_value_heads": 1}
    Mixtral(MixtralConfig(**sizes, num_experts=4)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"tensors are missing; got no '.*experts.4.w1.weight'"):
        Mixtral.from_pretrained(tmp_path, num_experts=number, strict=False)


def test_generation_and_training_of_an_extended_class(llama: Path) -> None:
    AutoModel.register(ScaledConfig, Scaled, model_type="scaled")
    with pytest.warns(UserWarning, match="scale"):
        model = Scaled.from_pretrained(llama, strict=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        loss = model(TOKENS, labels=TOKENS).loss
        assert loss is not None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert model.generate(TOKENS, max_new_tokens=3).shape == (1, 13)


def test_a_class_of_another_family(llama: Path) -> None:
    AutoModel.register(PlainConfig, Plain, model_type="plain")
    with pytest.raises(ConfigError, match="another architecture; got 'llama'; expected Plain"):
        Plain.from_pretrained(llama, strict=False)

    @dataclass(frozen=True, kw_only=True)
    class LooseConfig(DecoderConfig):
        attention_bias: bool = False
        mlp_bias: bool = False

    class Loose(Llama):
        pass

    AutoModel.register(LooseConfig, Loose, model_type="loose")
    with pytest.raises(ConfigError, match="another architecture"):
        Loose.from_pretrained(llama)


def test_an_override_does_not_drop_layers_silently(tmp_path: Path) -> None:
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
    Llama(LlamaConfig(**sizes, num_hidden_layers=2)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="unexpected tensor"):
        Llama.from_pretrained(tmp_path, num_hidden_layers=1)
    with pytest.warns(UserWarning, match=r"model\.layers\.1\."):
        model = Llama.from_pretrained(tmp_path, num_hidden_layers=1, strict=False)
    assert len(model.origin.unexpected) == 9  # type: ignore[union-attr]
