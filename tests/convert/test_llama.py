"""config.json of a Llama: what absence means, what comes back, and what is refused."""

import contextlib
import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ligerzoo.convert.llama import config_from_hf, config_to_hf
from ligerzoo.errors import ConfigError
from ligerzoo.models import Llama, LlamaConfig
from tests.models.tiny import Tiny
from tests.models.tiny_llama import CHECKPOINTS, LLAMA, LLAMA3_SCALING, LONGROPE, YARN

LLAMAS = CHECKPOINTS


def test_an_absent_entry_means_what_it_means_in_transformers() -> None:
    ours, theirs = config_from_hf({}), transformers.LlamaConfig()
    for field in dataclasses.fields(ours):
        if field.name.startswith("rope_"):
            continue
        # Explicit token ids alone count: transformers' generate does not use its own defaults either.
        expected = None if field.name.endswith("_token_id") else getattr(theirs, field.name)
        derived = {"num_key_value_heads": ours.kv_heads, "head_dim": ours.head_size}
        assert derived.get(field.name, getattr(ours, field.name)) == expected, field.name
    assert {"rope_theta": ours.rope_theta, "rope_type": "default"} == theirs.rope_parameters


@pytest.mark.parametrize("row", LLAMAS, ids=str)
def test_there_and_back(row: Tiny, tmp_path: Path) -> None:
    config = config_from_hf(row.config)
    written = {"model_type": "llama", **config_to_hf(config)}
    assert config_from_hf(json.loads(json.dumps(written))) == config

    (tmp_path / "config.json").write_text(json.dumps(written))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    its_own = copy.deepcopy({key: value for key, value in row.config.items() if key != "model_type"})
    meant = transformers.LlamaConfig(**its_own)
    for name in dataclasses.asdict(config).keys() - {"rope_theta", "rope_scaling"}:
        expected = row.config.get(name) if name.endswith("_token_id") else getattr(meant, name)
        assert getattr(theirs, name) == expected, name
    assert theirs.rope_parameters["rope_theta"] == meant.rope_parameters["rope_theta"]
    assert theirs.rope_parameters["rope_type"] == meant.rope_parameters["rope_type"]


NONSENSE = [-1, 0, True, "8", 1.5, math.nan, math.inf, 10**400, 2**31, [], [1], ["a"], {"a": 1}, "x" * 10**5]


def try_out(raw: dict[str, Any]) -> None:
    """Gives a model that runs, or a ConfigError, and nothing else."""
    with contextlib.suppress(ConfigError), torch.device("meta"):
        model = Llama(config_from_hf({**raw, "num_hidden_layers": 1}))
        assert model(torch.empty(1, 40, dtype=torch.int64)).logits.shape == (1, 40, model.config.vocab_size)
        with torch.device("cpu"):
            model.model.layers[0].self_attn.rotary(torch.arange(40)[None], torch.float32)


@pytest.mark.parametrize("name", [*sorted(LLAMA.keys() - {"architectures", "model_type"}), "head_dim", "pad_token_id"])
def test_nonsense_in_an_entry(name: str) -> None:
    for value in NONSENSE:
        try_out({**LLAMA, name: value})


@pytest.mark.parametrize("scaling", [LLAMA3_SCALING, YARN, LONGROPE, {"rope_type": "dynamic", "factor": 2.0}])
def test_nonsense_in_a_rope_scaling(scaling: dict[str, Any]) -> None:
    optional = (
        "rope_theta",
        "type",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "factor",
    )
    for key in {*scaling, *optional}:
        for value in (*NONSENSE, 1e-300, 1e300, None):
            try_out({**LLAMA, "rope_scaling": {**scaling, key: value}})


@pytest.mark.parametrize(
    "entry, named",
    [
        ({"vocab_size": 0}, "vocab_size: not a possible value; got 0; expected a positive whole number"),
        ({"hidden_size": -32}, "hidden_size"),
        ({"hidden_size": 32.0}, "hidden_size"),
        ({"intermediate_size": "56"}, "intermediate_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_attention_heads": 3}, "num_key_value_heads: .* got 2; expected a divisor of num_attention_heads, 3"),
        ({"num_attention_heads": 64}, "head_dim"),
        ({"head_dim": 7}, "head_dim: .* got 7; expected even"),
        ({"head_dim": 2**31 - 2}, "head_dim"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps: .* got nan"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: .* expected true or false"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
        ({"bos_token_id": [1]}, "bos_token_id"),
        ({"pad_token_id": 10**30}, "pad_token_id"),
        ({"hidden_act": "gelu"}, "hidden_act: not supported; got 'gelu'"),
        ({"rope_scaling": {"type": "mrope"}}, "rope_scaling: unknown rope type; got 'mrope'; expected one of default"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling of type yarn, factor"),
    ],
)
def test_refusals(entry: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config_from_hf({**LLAMA, **entry})


def test_a_config_is_frozen_and_named() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LlamaConfig().hidden_size = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        LlamaConfig(32000)  # type: ignore[call-arg]
