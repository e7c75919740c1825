from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ligerzoo.convert.fields import (
    first_given,
    flag_entry,
    object_entry,
    parse_dtype,
    partial_rotary_factor,
    refuse,
    rope_fields,
    shared_fields,
    stored_dtype,
    written_fields,
)
from ligerzoo.errors import ConfigError
from ligerzoo.models.config import DecoderConfig

LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    "raw, theta, scaling",
    [
        ({}, 10000.0, None),
        ({"rope_theta": 500000}, 500000, None),
        ({"rope_scaling": None, "rope_theta": None}, 10000.0, None),
        ({"rope_scaling": {}, "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, 7.0, None),
        ({"rope_scaling": LINEAR}, 10000.0, LINEAR),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 10000.0, LINEAR),
        ({"rope_scaling": {**LINEAR, "type": "dynamic"}}, 10000.0, LINEAR),
        ({"rope_parameters": {**LINEAR, "rope_theta": 7.0}, "rope_theta": 8.0}, 7.0, LINEAR),
        ({"rope_parameters": {"rope_type": "yarn"}, "rope_scaling": LINEAR}, 10000.0, LINEAR),
        (
            {"rope_scaling": {**LINEAR, "original_max_position_embeddings": 5}, "original_max_position_embeddings": 9},
            10000.0,
            {**LINEAR, "original_max_position_embeddings": 9},
        ),
        ({"rope_scaling": {**LINEAR, "partial_rotary_factor": 0.5}}, 10000.0, LINEAR),
        ({"rope_scaling": {"rope_type": "unheard of"}}, 10000.0, {"rope_type": "unheard of"}),
    ],
)
def test_rope_fields(raw: dict[str, Any], theta: float, scaling: object) -> None:
    before = repr(raw)
    assert rope_fields(raw) == {"rope_theta": theta, "rope_scaling": scaling}
    assert repr(raw) == before


@pytest.mark.parametrize(
    "raw, factor",
    [
        ({}, 0.5),
        ({"partial_rotary_factor": None, "rope_parameters": {"partial_rotary_factor": None}}, 0.5),
        ({"partial_rotary_factor": 0.25, "rope_scaling": LINEAR}, 0.25),
        ({"partial_rotary_factor": 0, "rope_scaling": None}, 0),
        ({"partial_rotary_factor": 0.25, "rope_parameters": {"partial_rotary_factor": 0.75}}, 0.75),
    ],
)
def test_partial_rotary_factor(raw: dict[str, Any], factor: float) -> None:
    assert partial_rotary_factor(raw, 0.5) == factor


@pytest.mark.parametrize("wrong", ["linear", 3, ["linear"], "", 0, [], False])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_entries_that_are_not_objects(key: str, wrong: object) -> None:
    with pytest.raises(ConfigError, match=f"{key}: not an object"):
        rope_fields({key: wrong})


def test_rope_parameters_of_each_type_of_layer() -> None:
    with pytest.raises(ConfigError, match=r"rope_parameters: not supported; got an object with 'full_attention'; exp"):
        rope_fields({"rope_parameters": {"full_attention": LINEAR}})


@pytest.mark.parametrize(
    "raw, dtype",
    [
        ({}, None),
        ({"dtype": None, "torch_dtype": None}, None),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, torch.bfloat16),
        ({"dtype": None, "torch_dtype": "float32"}, torch.float32),
        ({"torch_dtype": "torch.float64"}, torch.float64),
    ],
)
def test_stored_dtype(raw: dict[str, Any], dtype: torch.dtype | None) -> None:
    assert stored_dtype(raw) == dtype


@pytest.mark.parametrize("wrong", ["", "7.0", [], {}, False, [7.0]])
def test_spellings_of_one_value_have_one_type(wrong: object) -> None:
    for name, function in (
        ("rope_theta", rope_fields),
        ("original_max_position_embeddings", rope_fields),
        ("partial_rotary_factor", lambda raw: partial_rotary_factor(raw, 0.5)),
    ):
        for outer, inner in ((wrong, 7.0), (7, wrong)):
            with pytest.raises(
                ConfigError, match=f"{name}: invalid value; got .*; expected no entry or .*, as in {name}"
            ):
                function({name: outer, "rope_scaling": {**LINEAR, name: inner}})
        function({name: 7, "rope_scaling": {**LINEAR, name: 7.0}})
    for key in ("rope_scaling", "rope_parameters"):
        if wrong != {}:
            with pytest.raises(ConfigError, match=f"{key}: not an object"):
                rope_fields({"rope_scaling": LINEAR, "rope_parameters": LINEAR, key: wrong})
    if not isinstance(wrong, str):
        with pytest.raises(
            ConfigError, match=r"torch_dtype: invalid value; got .*; expected no entry or a string, as in dtype"
        ):
            stored_dtype({"dtype": "float32", "torch_dtype": wrong})


@pytest.mark.parametrize("wrong", ["int8", "float8_e4m3fn", "", "nonsense", 16, ["float16"], None, torch.int64])
def test_dtypes_that_are_not_of_weights(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"here: not a dtype of weights.*float32 or float16 or bfloat16 or float64"):
        parse_dtype(wrong, where="here")


def test_shared_fields() -> None:
    @dataclass
    class Config:
        size: int = 1
        heads: int | None = 2

    assert shared_fields({"size": 5, "heads": None, "unknown": 7}, Config) == {"size": 5, "heads": None}
    assert shared_fields({"size": None}, Config) == {}


def test_written_fields() -> None:
    """None is omitted if the default is None, and written as the resulting number otherwise."""

    @dataclass(frozen=True, kw_only=True)
    class Wide(DecoderConfig):
        head_dim: int | None = 256
        num_key_value_heads: int | None = 4

    assert written_fields(Wide())["head_dim"] == 256
    resolved = written_fields(Wide(hidden_size=64, num_attention_heads=8, head_dim=None, num_key_value_heads=None))
    assert (resolved["head_dim"], resolved["num_key_value_heads"]) == (8, 8)
    assert written_fields(DecoderConfig()).keys().isdisjoint({"head_dim", "num_key_value_heads"})
    assert written_fields(DecoderConfig(head_dim=12))["head_dim"] == 12


def test_first_given() -> None:
    assert first_given({"a": None, "b": 0, "c": 1}, "z", "a", "b", "c") == 0
    assert first_given({"a": None}, "a", "b") is None


def test_object_entry() -> None:
    assert object_entry({"a": {"b": 1}}, "a") == {"b": 1}
    assert object_entry({"a": None}, "a") == object_entry({}, "a") == {}
    with pytest.raises(ConfigError, match="a: not an object; got 'b'"):
        object_entry({"a": "b"}, "a")


def test_flag_entry() -> None:
    assert flag_entry({"a": True}, "a")
    assert not any(flag_entry(raw, "a") for raw in ({"a": False}, {"a": None}, {}))
    for wrong in (0, 1, "", "true", [], {}):
        with pytest.raises(ConfigError, match=r"a: invalid value; got .*; expected true or false"):
            flag_entry({"a": wrong}, "a")


def test_refuse_distinguishes_numbers_from_booleans() -> None:
    refuse({"theta": 10000}, "theta", unless=(None, 10000.0))
    for value, unless in ((0, False), (0.0, False), (1, True), (False, 0)):
        with pytest.raises(ConfigError, match="a: not supported"):
            refuse({"a": value}, "a", unless=(None, unless))


def test_refuse() -> None:
    refuse({"act": "silu"}, "act", unless=(None, "silu"))
    refuse({}, "act", unless=(None, "silu"))
    with pytest.raises(ConfigError, match=r"act: not supported; got 'gelu'; expected no entry or 'silu'. Do this."):
        refuse({"act": "gelu"}, "act", unless=(None, "silu"), remedy="Do this.")
    with pytest.raises(ConfigError, match="got an object with 'bits', 'method'"):
        refuse({"act": {"bits": 4, "method": "x" * 10**6}}, "act", unless=(None,))
