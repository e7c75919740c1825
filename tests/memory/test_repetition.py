"""Steps of which equal blocks do not run count the same as whole ones."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import nn

from ligerzoo.adapters import add_lora
from ligerzoo.kernels.recompute import Recompute
from ligerzoo.memory import TrainingSetting, simulation
from ligerzoo.memory.divided import divided
from ligerzoo.memory.repetition import Gap, find_gaps, kinds_of
from ligerzoo.memory.simulation import count_step, on_meta
from ligerzoo.mesh_sizes import MeshSizes
from ligerzoo.models import Gemma2, Gemma2Config, Llama, LlamaConfig, Qwen3Moe, Qwen3MoeConfig
from ligerzoo.models.causal_lm import CausalLM

NOTHING, MLP, BLOCK = Recompute.NOTHING, Recompute.MLP, Recompute.BLOCK
SIZES = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
LLAMA = LlamaConfig(**SIZES, num_hidden_layers=11)
MODELS = {
    "llama": (Llama, LLAMA),
    "a dense layer among experts": (
        Qwen3Moe,
        Qwen3MoeConfig(
            **SIZES, num_hidden_layers=11, mlp_only_layers=[0], num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=32,
        ),
    ),
    "two windows": (Gemma2, Gemma2Config(**SIZES, num_hidden_layers=12, sliding_window=16)),
}  # fmt: skip


def counted(
    model: CausalLM, setting: TrainingSetting, levels: Sequence[Recompute], monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Checks the counts of a step against those of all blocks. Returns the numbers of blocks that ran."""
    ran: list[int] = []
    run_step = simulation._run_step

    def recorded(model: CausalLM, *arguments: object) -> object:
        ran.append(len(model.model.layers))
        return run_step(model, *arguments)  # type: ignore[arg-type]

    count_step(model, setting, levels)  # a model's first step also computes frequencies
    with monkeypatch.context() as patch:
        patch.setattr(simulation, "_run_step", recorded)
        got = count_step(model, setting, levels)
        blocks = len(model.model.layers)
        assert got == count_step(model, setting, levels, list(range(blocks)))
        assert ran.pop() == blocks
    return ran


@pytest.mark.parametrize("name, method", [*((name, "full") for name in MODELS), ("llama", "lora")])
def test_equal_blocks_count_the_same(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model_class, config = MODELS[name]
    model = on_meta(model_class(config, device="meta"))
    if method == "lora":
        add_lora(model, 4)
    blocks = len(model.model.layers)
    setting = TrainingSetting(batch_size=2, seq_length=32, gpus=2, accumulate=method == "full")
    for levels in ([NOTHING] * blocks, [BLOCK] * 6 + [MLP] * (blocks - 6)):
        [ran] = counted(model, setting, levels, monkeypatch)
        assert ran < blocks or (levels[0] == BLOCK and name == "two windows")


@pytest.mark.parametrize("sizes", [MeshSizes(tensor=2), MeshSizes(context=2), MeshSizes(expert=2)], ids=str)
def test_divided_blocks_count_the_same(sizes: MeshSizes, monkeypatch: pytest.MonkeyPatch) -> None:
    model_class, config = MODELS["a dense layer among experts" if sizes.expert > 1 else "llama"]
    with divided(model_class(config, device="meta"), sizes) as one:
        setting = TrainingSetting(batch_size=2, seq_length=32, mesh=str(replace(sizes, shard=2)))
        assert counted(one.model, setting, [NOTHING] * 11, monkeypatch) == [4 + (sizes.expert > 1)]


def test_all_blocks_run_whose_repeats_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    model, setting = on_meta(Llama(LLAMA, device="meta")), TrainingSetting(batch_size=2, seq_length=32)
    model.model.layers[5].self_attn.window = 8
    model.model.layers[7].mlp.requires_grad_(False)
    kinds = kinds_of(list(model.model.layers))
    assert kinds == [0, 0, 0, 0, 0, 1, 0, 2, 0, 0, 0]
    assert find_gaps(kinds, [NOTHING] * 11) == [Gap(3, 1, 1)]
    assert counted(model, setting, [NOTHING] * 11, monkeypatch) == [10]
    shared = nn.ModuleList([model.model.layers[0]] * 6)
    assert kinds_of(list(shared)) == list(range(6))
    # said to be equal, blocks that are not are found out, and all run
    frozen = Llama(LLAMA, device="meta")
    frozen.model.layers[1].self_attn.requires_grad_(False)
    monkeypatch.setattr(simulation, "kinds_of", lambda blocks: [0] * len(blocks))
    assert counted(on_meta(frozen), TrainingSetting(batch_size=2, seq_length=32), [NOTHING] * 11, monkeypatch) == [
        4,
        11,
    ]
