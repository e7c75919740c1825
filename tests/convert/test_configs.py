"""Tests of config.json for every architecture: defaults, round trips, and invalid values."""

import contextlib
import copy
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ligerzoo.convert import architecture_of
from ligerzoo.errors import ConfigError
from ligerzoo.hub import LoadedFrom
from ligerzoo.hub.description import read_description
from ligerzoo.hub.saving import config_entries
from ligerzoo.models.state_space import MambaConfig
from tests.models.tiny import Tiny
from tests.models.zoo import CHECKPOINTS, every_type

RENAMED = {"num_experts": ("num_experts", "num_local_experts", "n_routed_experts")}
"""Our fields with other names in some configs of transformers."""


MEANT = {"n_group": 1, "topk_group": 1}
"""What null means in transformers, if not the absence of a number."""

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
NEEDED: dict[str, dict[str, Any]] = {
    "ernie4_5_moe": {"moe_layer_end_index": 27},  # transformers replaces the default, -1, by the last layer
    "gemma3": {"vision_config": {"image_size": 256}},  # the default does not give 256 tokens
    "gemma4": {"vision_config": {}},  # without it, there is no tower
    "gemma4_unified": {"vision_config": {}},
    "glm4_moe": {"head_dim": 128},
    "glm4v": {"text_config": {"partial_rotary_factor": 0.5}},  # the default does not match the sections
    "glm4v_moe": {"text_config": {"head_dim": 128}},
    "ministral": {"head_dim": 128},
    "qwen2_5_vl": {"vision_config": {"out_hidden_size": 8192}},  # the default does not match the decoder
    "qwen2_vl": {"vision_config": {"hidden_size": 8192}},  # likewise
    "qwen3_5": {"vision_config": {"out_hidden_size": 4096}},  # likewise
    "qwen3_5_moe": {"vision_config": {"out_hidden_size": 2048}},  # likewise
    "qwen3_vl": {"vision_config": {"out_hidden_size": 4096}},  # likewise
    "qwen3_vl_moe": {"vision_config": {"out_hidden_size": 2048}, "text_config": {"head_dim": 128}},  # likewise
}
"""Entries that config.json needs, because the defaults of transformers are inconsistent."""


@every_type
def test_class_attributes_are_the_defaults_of_fields(model_type: str) -> None:
    """With two bases, a dataclass takes the default of a field from one, and may find the attribute in the other."""
    config = architecture_of(model_type).config_class
    for field in dataclasses.fields(config):
        if field.default is not dataclasses.MISSING:
            assert getattr(config, field.name) == field.default, field.name


def value_of(config: Any, name: str) -> Any:
    """Returns a field of transformers' config, from the decoder's part or the top level, under its name or another."""
    parts = parts_of(config)
    of_top = config.model_type.startswith(("qwen3", "muse", "mistral3"))
    if name == "tie_word_embeddings" and of_top and parts[0] is not config:
        parts.reverse()  # only the entry of the top level has an effect
    fields = [(part, n) for part in parts for n in RENAMED.get(name, (name,))]
    return next((value for part, n in fields if (value := getattr(part, n, None)) is not None), MEANT.get(name))


def parts_of(config: Any) -> list[Any]:
    """Returns the decoder's part and the whole, with sizes of Gemma 4 that full-attention layers replace."""
    parts = [config.get_text_config(), config]
    for part in parts:
        part.allow_global_per_layer_attribute_access = True
    return parts


def has(config: Any, name: str) -> bool:
    return name in RENAMED or any(hasattr(part, name) for part in parts_of(config))


def with_entries(config: Mapping[str, Any], **entries: Any) -> dict[str, Any]:
    """Returns config.json with other entries for the decoder, at its level."""
    nested = {"text_config": {**config["text_config"], **entries}} if "text_config" in config else entries
    return {**config, **nested}


TOWER_NAMES = {
    "depth": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "temporal_patch_size": "patch_temporal",
    "spatial_merge_size": "merge_size",
    "position_side": "pos_emb_height",
}
"""Our fields of towers with other names in transformers' Muse Glimmer, which has no number of channels."""


def assert_same_vision(ours: Any, theirs: Any) -> None:
    for field in dataclasses.fields(ours):
        name = field.name if hasattr(theirs, field.name) else TOWER_NAMES.get(field.name)
        if name is None or (name == "layer_types" and ours.layer_types is None):
            continue
        expected = getattr(theirs, name)
        expected = list(expected) if isinstance(expected, tuple) else expected
        assert getattr(ours, field.name) == expected, field.name


def windows(ours: Any, theirs: Any) -> tuple[list[int | None], list[int | None]]:
    """Returns the window of each layer in both configs."""
    kinds = (
        getattr(theirs, "layer_types", None)
        or ["sliding_attention" if getattr(theirs, "sliding_window", None) else "full_attention"]
        * ours.num_hidden_layers
    )
    got = [ours.window(i) for i in range(ours.num_hidden_layers)]
    return got, [theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds]


def settled(config: Any) -> Any:
    """Resolves None to numbers, and drops a scaling without effect."""
    scaling = dict(config.rope_scaling or {})
    does_nothing = scaling.get("rope_type", "default") == "default" and not scaling.get("llama_4_scaling_beta")
    return dataclasses.replace(
        config, num_key_value_heads=config.kv_heads, head_dim=config.head_size,
        rope_scaling=None if does_nothing else scaling,
    )  # fmt: skip


@every_type
def test_missing_entries_have_the_defaults_of_transformers(model_type: str) -> None:
    required = NEEDED.get(model_type, {})
    ours = architecture_of(model_type).config_from_hf(required)
    theirs = CONFIG_MAPPING[model_type](**copy.deepcopy(required))
    elsewhere = {
        "sliding_window",
        "layer_types",
        "rope_theta",
        "rope_scaling",
        "rope_local_base_freq",
        "full_attn_idxs",
        "no_rope_layers",
        "layer_rope_theta",
        "mlp_layer_types",
        "moe_layers",
    }
    for field in dataclasses.fields(ours):
        if field.name in elsewhere or not has(theirs, field.name):
            continue
        if field.name == "vision_config":
            assert_same_vision(ours.vision_config, theirs.vision_config)
            continue
        # Only explicit token ids count, as in transformers' generate.
        expected = None if field.name in TOKEN_IDS else value_of(theirs, field.name)
        derived = {"num_key_value_heads": ours.kv_heads, "head_dim": ours.head_size}
        if model_type == "olmo_hybrid":
            names = "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"
            derived |= dict(zip(names, (*ours.linear_heads, *ours.linear_sizes), strict=True))
        if isinstance(ours, MambaConfig):
            derived["mamba_d_head"] = ours.mamba_inner_size // ours.mamba_n_heads
        if getattr(ours, field.name) is None and field.name == "attention_multiplier":
            derived["attention_multiplier"] = ours.head_size**-0.5
        got = derived.get(field.name, getattr(ours, field.name))
        assert got == expected or (expected is None and field.name in ("head_dim", "num_experts_per_tok")), field.name
    if hasattr(ours, "window"):
        got, expected = windows(ours, theirs.get_text_config())
        assert got == expected


@pytest.mark.every_checkpoint
@pytest.mark.parametrize("row", CHECKPOINTS, ids=str)
def test_round_trip(row: Tiny, tmp_path: Path) -> None:
    """A written config.json is read back equally, by us and by transformers."""
    architecture = architecture_of(row.config["model_type"])
    config = architecture.config_from_hf(row.config)
    written = {"model_type": architecture.model_type, **architecture.config_to_hf(config)}
    assert settled(architecture.config_from_hf(json.loads(json.dumps(written)))) == settled(config)

    (tmp_path / "config.json").write_text(json.dumps(written))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    meant = transformers.AutoConfig.for_model(**copy.deepcopy(dict(row.config)))
    for field in dataclasses.fields(config):
        name = field.name
        if name == "vision_config":
            assert_same_vision(config.vision_config, meant.vision_config)
            assert_same_vision(config.vision_config, theirs.vision_config)
        elif not name.startswith("rope_") and has(meant, name):
            entries = {**row.config.get("text_config", {}), **row.config}
            is_explicit = name in TOKEN_IDS and name in {**written.get("text_config", {}), **written}
            expected = entries.get(name) if is_explicit else value_of(meant, name)
            assert value_of(theirs, name) == expected, name
    if hasattr(config, "window"):
        assert value_of(theirs, "sliding_window") == value_of(meant, "sliding_window")
    for name in ("layer_types", "tie_word_embeddings"):
        assert value_of(theirs, name) == value_of(meant, name), name
    kept = {"rope_theta", "rope_type", "factor"}
    if hasattr(config, "partial_rotary_factor"):
        kept.add("partial_rotary_factor")
    whole = {"partial_rotary_factor": 1.0}  # what no entry means to transformers
    rope, meant_rope = (whole | (value_of(one, "rope_parameters") or {}) for one in (theirs, meant))
    if hasattr(config, "mrope_section"):
        kept |= {"mrope_section"} & meant_rope.keys()
    assert {k: rope.get(k) for k in kept} == {k: meant_rope.get(k) for k in kept}


@pytest.mark.every_checkpoint
@pytest.mark.parametrize("row", CHECKPOINTS, ids=str)
def test_changed_fields_replace_inherited_entries(row: Tiny) -> None:
    """Also if a change removes an entry, or the file uses another spelling."""
    architecture = architecture_of(row.config["model_type"])
    config = architecture.config_from_hf(row.config)
    model = architecture.build(config, device="meta")
    model.origin = LoadedFrom(row.config, config, architecture.layouts(config)[0], frozenset())
    others: dict[str, Any] = {
        "num_experts": 7,
        "rope_theta": 77.0,
        "rms_norm_eps": 0.125,
        "max_position_embeddings": 77,
    }
    for field in dataclasses.fields(config):
        for value in () if field.name == "vision_config" else (None, others.get(field.name)):
            with contextlib.suppress(ConfigError):
                changed = dataclasses.replace(config, **{field.name: value})
                model.config = changed
                if changed != config:
                    again = architecture.config_from_hf(config_entries(model, model.origin, model.dtype))
                    assert settled(again) == settled(changed), field.name


NONSENSE = [-1, 0, True, "8", 1.5, math.nan, math.inf, 10**400, 2**31, [], [1], ["a"], {"a": 1}, "x" * 10**5]


@every_type
def test_invalid_values_of_entries(model_type: str) -> None:
    """Each value gives a model that can be built, or a ConfigError."""
    architecture = architecture_of(model_type)
    config = next(row.config for row in CHECKPOINTS if row.config["model_type"] == model_type)
    fields = {field.name for field in dataclasses.fields(architecture.config_from_hf(config))}
    built: set[str] = set()
    for name in sorted((fields | config.keys()) - {"architectures", "model_type", "num_hidden_layers"}):
        for value in NONSENSE:
            with contextlib.suppress(ConfigError):
                read = architecture.config_from_hf(with_entries(config, **{name: value}))
                if name not in ("vocab_size", "hidden_size", "intermediate_size") and repr(read) not in built:
                    built.add(repr(read))
                    architecture.build(read, device="meta")
    for value in NONSENSE:
        with contextlib.suppress(ConfigError):
            architecture.config_from_hf(with_entries(config, num_hidden_layers=value))


FALSY: list[Any] = [[], {}, "", 0, 0.0, False]
POSSIBLE: dict[str, list[Any]] = {
    "pad_token_id": [0],
    "bos_token_id": [0],
    "eos_token_id": [0],
    "attention_multiplier": [0, 0.0],
    "initializer_range": [0, 0.0],
    "embedding_multiplier": [0.0],
    "rope_scaling": [{}],
    "mlp_only_layers": [[]],
    "shared_intermediate_size": [0.0],
}
"""Valid falsy values of another type than that in the tested config.json."""
IGNORED = {
    # Entries without effect: of training, of other software, or of unused parts.
    "cla_share_factor", "embed_dropout", "eod_token_id", "hidden_dropout", "moe_shared_expert_intermediate_size",
    "q_head_dim", "residual_dropout",
    "_name_or_path", "_sliding_window_pattern", "architectures", "attention_dropout", "attn_logit_softcapping",
    "auto_map", "AutoModel", "AutoModelForCausalLM", "cache_implementation", "dropout", "embd_pdrop",
    "final_logit_softcapping", "in_chans", "initializer_range", "mtp_num_hidden_layers", "pretraining_tp",
    "resid_pdrop", "spatial_patch_size", "transformers_version", "use_cache", "vision_use_head", "aux_loss_alpha",
    "attn_rotary_emb", "chunk_size", "embedding_initializer_range", "ep_size", "expand",
    "mamba_chunk_size", "num_nextn_predict_layers", "seq_aux", "audio_config", "boa_token_id", "boi_token_id",
    "default_output_length", "eoa_token_index", "eoi_token_id", "model_patch_size", "num_soft_tokens",
    "vision_soft_tokens_per_image",
    # Entries without effect in some architectures, as in transformers.
    "attention_bias", "experts_per_token", "hidden_act", "hidden_activation", "initial_context_length",
    "max_window_layers", "mrope_interleaved", "mrope_section", "partial_rotary_factor", "rope_theta",
    "sliding_window", "tie_word_embeddings",
    # Entries over which another entry takes precedence.
    "factor", "hidden_size", "high_freq_factor", "image_token_id", "low_freq_factor", "model_type", "n_routed_experts",
    "num_experts", "num_hidden_layers", "num_local_experts", "original_max_position_embeddings", "rope_type",
    "torch_dtype",
}  # fmt: skip
"""Entries whose value has no effect in some tested config.json."""


def entries_in(config: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in config.items():
        yield (*above, name), value
        if isinstance(value, Mapping):
            yield from entries_in(value, (*above, name))


def changed(config: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Returns config.json with another value of an entry, or without the entry if the value is `...`."""
    config = copy.deepcopy(dict(config))
    part = config
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    if value is ...:
        del part[path[-1]]
    return config


@pytest.fixture
def read() -> Callable[[Mapping[str, Any]], Any]:
    """Returns a function that reads config.json as loading does."""

    return lambda raw: read_description(dict(raw), Path("config.json")).config


@every_type
def test_falsy_values_do_not_count_as_missing(model_type: str, read: Callable[[Mapping[str, Any]], Any]) -> None:
    tested: set[object] = set()
    for row in CHECKPOINTS:
        if row.config["model_type"] != model_type:
            continue
        for path, value in entries_in(row.config):
            name = path[-1]
            kind = path, type(value), str(row.config[path[0]]) if path[1:] else None
            if kind in tested:
                continue  # an entry of this name and type, within the same object, in another checkpoint
            tested.add(kind)
            for falsy in FALSY:
                may_be = [type(value)] + [int] * (type(value) is float) + list(map(type, POSSIBLE.get(name, [])))
                if type(falsy) in may_be:
                    continue
                try:
                    got = read(changed(row.config, path, falsy))
                except ConfigError:
                    continue
                assert {name, path[0]} & IGNORED, (path, falsy)
                assert got == read(changed(row.config, path, ...)) == read(row.config), (path, falsy)


SPELLINGS = [
    ("rope_scaling", "rope_parameters"), ("rope_type", "type"), ("num_experts", "num_local_experts"),
    ("image_token_id", "image_token_index"), ("num_attention_heads", "attention_heads"),
]  # fmt: skip
"""Names of one value in config.json, of which some architectures accept either."""


def kind_of(value: Any) -> type:
    return float if type(value) is int else type(value)


@every_type
def test_both_spellings_of_an_entry_must_be_valid(model_type: str, read: Callable[[Mapping[str, Any]], Any]) -> None:
    """Also the one over which the other takes precedence."""

    def config_or_error(raw: Mapping[str, Any]) -> Any:
        try:
            return read(raw)
        except ConfigError:
            return ConfigError

    tested = set()
    for row in (row for row in CHECKPOINTS if row.config["model_type"] == model_type):
        for path, value in entries_in(row.config):
            for names in (names for names in SPELLINGS if path[-1] in names and value is not None):
                first, second = ((*path[:-1], name) for name in names)
                both = changed(changed(row.config, first, value), second, value)
                without = changed(both, first, ...), changed(both, second, ...)
                neither = config_or_error(changed(without[0], second, ...))
                if any(config_or_error(raw) in (ConfigError, neither) for raw in without):
                    continue  # not two spellings in this architecture
                tested.add(names)
                for invalid in (first, second):
                    for wrong in [*FALSY, "x", 3, ["x"], {"x": 3}]:
                        if kind_of(wrong) is not kind_of(value):
                            with pytest.raises(ConfigError):
                                read(changed(both, invalid, wrong))
    assert ("rope_scaling", "rope_parameters") in tested or model_type not in ("llama", "qwen2_vl")


@pytest.mark.parametrize("falsy", FALSY, ids=repr)
def test_falsy_rope_type_is_refused(falsy: object, read: Callable[[Mapping[str, Any]], Any]) -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for name in ("rope_scaling", "rope_parameters"):
        for key in ("rope_type", "type"):
            raw = {"model_type": "llama", name: {**llama3, key: falsy}}
            with pytest.raises(
                ConfigError, match=f"config.json, rope_scaling: unknown rope type; got {re.escape(repr(falsy))}"
            ):
                read(raw)
        if falsy != {}:
            with pytest.raises(ConfigError, match=f"config.json, {name}: not an object; got {re.escape(repr(falsy))}"):
                read({"model_type": "llama", name: falsy})
    assert read({"model_type": "llama", "rope_scaling": {"type": None, "rope_type": None}}).rope_scaling is None


@every_type
def test_numbers_outside_fp32_are_refused_by_name(model_type: str, read: Callable[[Mapping[str, Any]], Any]) -> None:
    """Numbers that are finite in fp64, but 0 or infinite in fp32."""
    config = next(row.config for row in CHECKPOINTS if row.config["model_type"] == model_type)
    ours = read(config)
    hints = get_type_hints(type(ours))
    names = [name for name, hint in hints.items() if float in (hint, *get_args(hint))]
    assert {"rope_theta", "rms_norm_eps"} <= set(names)
    for name in names:
        impossible = [5e-324, 1e-320, 1e-310, 1e-40, 1e39, 1e300, 1.7e308, -1e-320]
        for value in impossible + ([0, 0.0, 0.5, 1.0] if name.startswith("rope_") else []):
            with pytest.raises(ConfigError) as caught:
                dataclasses.replace(ours, **{name: value})
            assert caught.value.where == name
    with pytest.raises(ConfigError, match=r"config.json, rope_theta: invalid value; got 1e-320"):
        read({"model_type": "llama", "rope_theta": 1e-320})


@every_type
def test_other_activations_and_rope_types_are_refused(model_type: str) -> None:
    architecture = architecture_of(model_type)
    config = next(row.config for row in CHECKPOINTS if row.config["model_type"] == model_type)
    with pytest.raises(ConfigError, match="hidden_act"):  # Gemma reads one entry, Gemma 2 the other
        architecture.config_from_hf(with_entries(config, hidden_act="relu6", hidden_activation="relu6"))
    with pytest.raises(ConfigError, match=r"unknown rope type|rope_scaling: not supported"):
        architecture.config_from_hf(with_entries(config, rope_scaling={"rope_type": "unheard of", "factor": 2.0}))
