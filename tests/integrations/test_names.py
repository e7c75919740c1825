"""Modules and parameters of wrapped models have the names that they have in transformers."""

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")

from tests.integrations.clients import ours, theirs, write
from tests.models.zoo import every_type

# transformers reads config.json of version 4.
pytestmark = pytest.mark.filterwarnings("ignore:.*rope_(scaling|parameters).*:FutureWarning")


def modules_by_kind(model: torch.nn.Module) -> dict[str, set[str]]:
    """Returns the names of the modules that PEFT chooses by their class, and of the norms."""
    kinds = {
        "linear": lambda module: isinstance(module, torch.nn.Linear),
        "embedding": lambda module: isinstance(module, torch.nn.Embedding),
        "norm": lambda module: (
            re.search("(RMS|Layer)Norm", type(module).__name__) and module._parameters.get("weight") is not None
        ),
    }
    return {kind: {name for name, module in model.named_modules() if has(module)} for kind, has in kinds.items()}


@every_type
def test_names_and_order(model_type: str, tmp_path: Path) -> None:
    directory = write(model_type, tmp_path)
    wrapped, model = ours(directory), theirs(directory)
    if model_type != "qwen3_next":
        expected_kinds = modules_by_kind(model)
        if model_type == "llama4_text":  # its routers are linear layers
            expected_kinds["linear"] = {name for name in expected_kinds["linear"] if not name.endswith(".router")}
        assert modules_by_kind(wrapped) == expected_kinds
    # Parameters whose layouts differ have other names, so that no tensor loads as another.
    parameters, others = dict(wrapped.named_parameters()), dict(model.named_parameters())
    assert [name for name in parameters.keys() & others.keys() if not torch.equal(parameters[name], others[name])] == []
    got, expected = list(parameters), list(others)
    if model_type == "ernie4_5_moe":  # the biases of its routers are buffers of ours
        expected = [name for name in expected if "e_score_correction_bias" not in name]
    if model_type == "qwen3_next":  # its interleaved projections keep our names
        got, expected = ([name for name in names if "in_proj" not in name] for names in (got, expected))
    if model_type in ("gpt_oss", "llama4_text"):  # their experts' weights have another layout, and so other names
        got = [re.sub("_(split|transposed)$", "", name) for name in got]
    assert set(got) == set(expected)
    if not hasattr(model.config, "vision_config"):
        # Qwen3-MoE has its routers after the experts, which no other mixture of transformers has, Granite its experts
        # after the norms. Apertus has the parameters of its activation before or after the projections. Gemma 4 has the
        # norms of queries and keys before the projections, and its table of per-layer embeddings after the blocks.
        moved = (".gate.weight", "mlp.act_fn.", "block_sparse_moe.", "shared_mlp.")
        moved += ("self_attn.", "per_layer") if model_type == "gemma4_text" else ()
        moved += ("_norm.",) if model_type == "lfm3" else ()
        moved += (".router.",) if model_type == "llama4_text" else ()
        moved += ("linear_attn.",) if model_type == "olmo_hybrid" else ()
        moved += (".layers.",) if model_type in ("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h") else ()
        got, expected = ([n for n in names if not any(part in n for part in moved)] for names in (got, expected))
        assert got == expected


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen3_vl", "gemma3"])
def test_copies_and_pickles_of_renamed_parts(model_type: str, tmp_path: Path) -> None:
    model = ours(write(model_type, tmp_path))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert [type(part) for part in other.modules()] == [type(part) for part in model.modules()]
        own, others = dict(model.named_parameters()), dict(other.named_parameters())
        assert all(torch.equal(own[name], others[name]) and own[name] is not others[name] for name in own)


def test_attributes_keep_our_names_as_well(tmp_path: Path) -> None:
    block = ours(write("qwen2_vl", tmp_path)).model.visual.blocks[0]
    assert block.self_attn is block.attn
    block.attn.proj = torch.nn.Identity()
    assert block.attn.o_proj is block.attn.proj
    with pytest.raises(AttributeError, match="another"):
        _ = block.another
