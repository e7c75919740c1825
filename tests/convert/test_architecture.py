import dataclasses

import pytest

from ligerzoo import convert, models
from ligerzoo.convert import MODEL_TYPES, architecture_for, architecture_of
from ligerzoo.convert.architecture import Architecture, is_beyond_last_layer, is_rotary_buffer
from ligerzoo.convert.layout import Layout, Rename
from ligerzoo.errors import ConfigError
from ligerzoo.models import CausalLM, Llama, LlamaConfig
from ligerzoo.models.config import field_types

ROUTER = (Rename("mlp.router", "mlp.gate"),)
TEXT, BARE = (("model.", "model."),), (("model.", ""),)


def test_each_model_type_has_a_converter() -> None:
    for model_type in MODEL_TYPES:
        architecture = architecture_of(model_type)
        assert architecture.model_type == model_type
        assert architecture_for(architecture.model_class) is architecture


def test_each_architecture_is_exported() -> None:
    classes = {cls for model_type in MODEL_TYPES for cls in classes_of(architecture_of(model_type))}
    missing = {cls.__name__ for cls in classes} - {*models.__all__}
    assert not missing, f"add these to _MODULES in ligerzoo/models/__init__.py: {sorted(missing)}"
    assert all(getattr(models, cls.__name__) is cls for cls in classes)


def classes_of(architecture: Architecture) -> list[type]:
    """The model class, its config class and the classes of nested configs."""
    config_class = architecture.config_class
    nested = [hint for hint in field_types(config_class).values() if dataclasses.is_dataclass(hint)]
    return [architecture.model_class, config_class, *nested]


@pytest.mark.parametrize("model_type", ["gpt2", "", None, 5, ["llama"], "../llama", "fields"])
def test_unknown_model_types(model_type: object) -> None:
    with pytest.raises(ConfigError, match=r"model_type: no such architecture.*llama"):
        architecture_of(model_type)


def test_subclasses_of_users() -> None:
    class Tuned(Llama):
        pass

    assert architecture_for(Tuned).model_class is Llama
    with pytest.raises(ConfigError, match=r"CausalLM: the class is not registered.*Call AutoModel.register"):
        architecture_for(CausalLM)


def test_nearest_registered_base_class(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sibling(Llama):
        pass

    class Tuned(Sibling):
        pass

    sibling = dataclasses.replace(architecture_of("llama"), model_type="sibling", classes=(Sibling, LlamaConfig))
    monkeypatch.setitem(convert._REGISTERED, "sibling", sibling)
    assert architecture_for(Tuned) is architecture_for(Sibling) is sibling
    assert architecture_for(Llama) is architecture_of("llama")


SHAPES = {"model.norm.weight": (8,), "model.mlp.gate.weight": (4, 8), "lm_head.weight": (9, 8)}


@pytest.mark.parametrize(
    "stored, prefixes",
    [
        (["model.norm.weight", "lm_head.weight"], TEXT),
        (["model.x", "lm_head.weight"], TEXT),
        (["norm.weight", "lm_head.weight"], BARE),
    ],
)
def test_names_with_and_without_prefix(stored: list[str], prefixes: tuple[tuple[str, str], ...]) -> None:
    assert architecture_of("llama").layout_of(None, dict.fromkeys(stored, ()), SHAPES) == Layout(prefixes=prefixes)


@pytest.mark.parametrize(
    "stored, prefixes",
    [
        (["model.norm.weight", "lm_head.weight"], ("model.", "lm_head.")),
        (["text.norm.weight", "lm_head.weight"], ("text.", "lm_head.")),
        (["model.norm.weight", "head.weight"], ("model.", "head.")),
        (["text.norm.weight", "head.weight"], ("text.", "head.")),
    ],
)
def test_each_part_has_its_prefix(stored: list[str], prefixes: tuple[str, str]) -> None:
    layouts = (Layout(prefixes=(("model.", "model.", "text."), ("lm_head.", "lm_head.", "head."))),)
    architecture = dataclasses.replace(architecture_of("llama"), layouts=lambda config: layouts)
    layout = architecture.layout_of(None, dict.fromkeys(stored, ()), SHAPES)
    assert layout == Layout(prefixes=tuple(zip(("model.", "lm_head."), prefixes, strict=True)))
    names = [part.stored_name for part in layout.slices(SHAPES)]
    assert [name for name in names if "mlp" not in name] == stored


def test_the_first_prefix_applies() -> None:
    layout = Layout(prefixes=(("model.", "text.", "model."), ("lm_head.", "lm_head.", "head.")))
    names = [part.stored_name for part in layout.slices(SHAPES)]
    assert names == ["text.norm.weight", "text.mlp.gate.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    "name, is_extra",
    [
        ("vision_tower.vision_model.head.probe", True),
        ("model.vision_tower.head.mlp.fc1.bias", True),
        ("vision_tower.head", False),
        ("vision_tower.vision_model.encoder.head.probe", False),
        ("language_model.head.probe", False),
    ],
)
def test_extra_tensors_of_gemma3(name: str, is_extra: bool) -> None:
    assert architecture_of("gemma3").is_extra_tensor(name) == is_extra
    assert not architecture_of("llama").is_extra_tensor(name)


@pytest.mark.parametrize(
    "stored, expected",
    [
        (["model.norm.weight", "model.mlp.gate.weight"], Layout((), TEXT)),
        (["model.norm.weight", "model.mlp.router.weight"], Layout(ROUTER, TEXT)),
        (["norm.weight", "mlp.router.weight"], Layout(ROUTER, BARE)),
        (["model.mlp.router.weight", "model.mlp.gate.weight"], Layout(ROUTER, TEXT)),  # the first of equals
        (["visual.patch"], Layout(ROUTER, TEXT)),
    ],
)
def test_layout_with_most_stored_parameters(stored: list[str], expected: Layout) -> None:
    architecture = dataclasses.replace(architecture_of("llama"), layouts=lambda config: (Layout(ROUTER), Layout()))
    assert architecture.layout_of(None, dict.fromkeys(stored, ()), SHAPES) == expected


@pytest.mark.parametrize(
    "name, is_buffer",
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", True),
        ("rotary_emb.inv_freq", True),
        ("model.layers.0.self_attn.inv_freq", False),
        ("model.rotary_emb.inv_freq.weight", False),
        ("model.xrotary_emb.inv_freq", False),
    ],
)
def test_rotary_buffers(name: str, is_buffer: bool) -> None:
    assert is_rotary_buffer(name) == is_buffer


@pytest.mark.parametrize(
    "name, beyond",
    [
        ("model.layers.2.mlp.up_proj.weight", True),
        ("layers.10.mlp.up_proj.weight", True),
        ("model.language_model.layers.2.mlp.up_proj.weight", True),
        ("language_model.model.layers.1.mlp.up_proj.weight", False),
        ("model.layers.1.mlp.up_proj.weight", False),
        ("model.layers.2", False),
        ("vision.layers.5.weight", False),
        ("model.layers.-1.weight", False),
        ("model.layers." + "9" * 5000 + ".weight", False),  # Python would not even parse it
    ],
)
def test_layers_beyond_the_last(name: str, beyond: bool) -> None:
    assert is_beyond_last_layer(name, 2) == beyond
