"""The prediction of a training step's memory and work."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ligerzoo import cli, info, memory
from ligerzoo.adapters import add_lora
from ligerzoo.errors import LigerzooError
from ligerzoo.hub.saving import save
from ligerzoo.memory import Recompute, TrainingSetting, predict_training, simulate_step
from ligerzoo.memory.simulation import CUBLAS_WORKSPACE, optimizer_bytes
from ligerzoo.models import CausalLM, Llama, LlamaConfig, Qwen3Moe, Qwen3MoeConfig

GIB = 2**30
LLAMA_1B: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
}  # fmt: skip
LLAMA_8B = LLAMA_1B | {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
    "tie_word_embeddings": False,
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 65, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip


def llama(**config: Any) -> Llama:
    return Llama(LlamaConfig(**config), device="meta", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "config, batch_size, seq_length, level, gpus, measured",
    [
        (LLAMA_1B, 8, 2048, Recompute.NOTHING, 1, 23.1),
        (LLAMA_1B, 4, 8192, Recompute.NOTHING, 1, 38.7),
        (LLAMA_8B, 1, 8192, Recompute.NOTHING, 1, 74.1),
        (LLAMA_8B, 2, 8192, Recompute.NOTHING, 1, 101.9),
        (LLAMA_8B, 1, 8192, Recompute.BLOCK, 1, 60.3),
        (LLAMA_8B, 4, 8192, Recompute.BLOCK, 1, 65.6),
        (LLAMA_8B, 1, 8192, Recompute.NOTHING, 2, 54.06),
        (LLAMA_8B, 1, 8192, Recompute.BLOCK, 2, 32.19),
    ],
)
def test_peaks_measured_on_gpus(
    config: dict[str, Any], batch_size: int, seq_length: int, level: Recompute, gpus: int, measured: float
) -> None:
    """Steps with AdamW in bf16; GiB of `torch.cuda.max_memory_allocated`."""
    levels = [level] * config["num_hidden_layers"]
    step = simulate_step(llama(**config), batch_size, seq_length, levels, gpus=gpus)
    assert abs(step.peak / GIB / measured - 1) < 0.03


def test_the_peak_measured_on_two_gpus_that_keep_weights_gathered() -> None:
    step = simulate_step(llama(**LLAMA_8B), 1, 8192, gpus=2, keeps_gathered=True)
    assert abs(step.peak / GIB / 66.65 - 1) < 0.03


def test_a_block_of_llama_3_8b_keeps_what_its_layers_save() -> None:
    hidden, intermediate, heads, kv_heads, head_dim = 4096, 14336, 32, 8, 128
    residual, rstd, norm, logsumexp = 2 * 2 * hidden, 2 * 4, 2 * 2 * hidden, 4 * heads
    heads_and_output = 2 * (2 * heads + 2 * kv_heads) * head_dim
    gate_and_up = 2 * 2 * intermediate
    always = residual + rstd + heads_and_output + logsumexp
    expected = {
        Recompute.NOTHING: always + norm + gate_and_up, Recompute.ELEMENTWISE: always + gate_and_up,
        Recompute.MLP: always, Recompute.BLOCK: 2 * hidden,
    }  # fmt: skip
    for level, per_token in expected.items():
        step = simulate_step(llama(**LLAMA_8B | {"num_hidden_layers": 3}), 2, 4096, [level] * 3)
        assert step.kept[1] == 2 * 4096 * per_token


def test_flops_are_those_of_the_products() -> None:
    model, tokens = llama(**LLAMA_1B), 4096
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2)  # with the tied head
    attention = 4 * 16 * 2048 * (tokens * (tokens + 1) // 2)
    assert simulate_step(model, 1, tokens).flops == 6 * tokens * matrices + attention * 7 // 2
    block = simulate_step(model, 1, tokens, [Recompute.BLOCK] * 16).flops - simulate_step(model, 1, tokens).flops
    down = 16 * 2048 * 8192
    assert block == 2 * tokens * (matrices - 128256 * 2048 - down) + attention  # the down projections do not run again
    mlp = simulate_step(model, 1, tokens, [Recompute.MLP] * 16).flops - simulate_step(model, 1, tokens).flops
    assert mlp == 2 * tokens * 2 * down


def test_experts_recompute_their_gate_and_up_features_only() -> None:
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_experts=8,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    model = Qwen3Moe(config, device="meta", dtype=torch.bfloat16)
    tokens = 512
    whole, mlp = (simulate_step(model, 1, tokens, [level] * 2) for level in (Recompute.ELEMENTWISE, Recompute.MLP))
    assert mlp.flops - whole.flops == 2 * 2 * tokens * 2 * 2 * 32 * 64
    assert whole.kept[1] - mlp.kept[1] == 2 * tokens * 2 * 2 * 32


def adapted_llama(**options: Any) -> Llama:
    model = llama(**LLAMA_1B)
    add_lora(model, **options)
    return model


def test_flops_of_updates_are_those_of_their_products() -> None:
    model, tokens, rank = adapted_llama(rank=16), 4096, 16
    frozen = sum(p.numel() for p in model.parameters() if p.ndim == 2 and not p.requires_grad)  # with the tied head
    updates = sum(p.numel() for p in model.parameters() if p.requires_grad)
    attention = 16 * 4 * 2048 * (tokens * (tokens + 1) // 2)
    first = 2 * tokens * 2048 * (2048 + 2 * 512 + 3 * rank)  # dx of the first block's q, k and v
    flops = simulate_step(model, 1, tokens).flops
    assert flops == tokens * (4 * frozen + 6 * updates) + attention * 7 // 2 - first


def test_recomputed_blocks_with_updates_run_each_product_once() -> None:
    """But for the products of A in attention, which a recomputed block runs twice, and no down projection."""
    model, tokens, blocks, rank = adapted_llama(rank=16), 4096, 16, 16
    whole, mlp, block = (
        simulate_step(model, 1, tokens, [level] * 16).flops
        for level in (Recompute.NOTHING, Recompute.MLP, Recompute.BLOCK)
    )
    gate_and_up = blocks * 2 * 2048 * 8192  # the products of A are kept, those of B are never written
    assert mlp - whole == 2 * tokens * gate_and_up
    qkv, o = 2048 * (2048 + 2 * 512) + rank * (3 * 2048 + 2048 + 2 * 512), 2048 * 2048 + rank * (2048 + 2048)
    attention = blocks * 4 * 2048 * (tokens * (tokens + 1) // 2)
    updates_of_mlp = rank * (2 * (2048 + 8192) + 8192)
    repeated = rank * (3 + 1) * 2048
    assert block - whole == 2 * tokens * (gate_and_up + blocks * (qkv + o + updates_of_mlp + repeated)) + attention


@pytest.mark.parametrize("options", [{}, {"dropout": 0.1}, {"dora": True}])
def test_plans_save_gate_and_up_features_of_updated_layers(options: dict[str, Any]) -> None:
    model, tokens = adapted_llama(**options), 4096
    before, mlp = (simulate_step(model, 1, tokens, [level] * 16) for level in (Recompute.ELEMENTWISE, Recompute.MLP))
    features = 2 if not options.get("dora") else 4  # before and after DoRA's factors
    assert before.kept[1] - mlp.kept[1] == 2 * tokens * features * 8192


def test_frozen_weights_have_neither_gradients_nor_states() -> None:
    model = llama(**TINY).requires_grad_(False)
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_()
    step = simulate_step(model, 2, 32)
    trained = 2 * 16 * 16
    assert (step.optimizer_states, step.gradients) in [(2 * trained, 0), (2 * trained, trained)]
    assert all(p.grad is None for p in model.parameters())


def test_accumulated_gradients_exist_throughout() -> None:
    once, accumulated = (simulate_step(llama(**LLAMA_1B), 8, 2048, accumulate=flag) for flag in (False, True))
    assert accumulated.gradients == once.weights > once.gradients
    assert accumulated.peak > once.peak


@pytest.mark.parametrize("optimizer, per_number", [("adamw", 4), ("sgd", 0), ("adamw-8bit", 2 * (1 + 4 / 256))])
def test_optimizer_states(optimizer: str, per_number: float) -> None:
    model = llama(**TINY)
    assert optimizer_bytes(model, optimizer) == round(per_number * sum(p.numel() for p in model.parameters()))


def test_the_step_of_a_low_bit_optimizer_may_be_the_peak() -> None:
    """gpt-oss-20b with 8192 tokens: 121.88 GiB were measured on an H200, of which 4.3 were temporary tensors."""
    model = llama(**LLAMA_1B)
    weights = sum(p.numel() for p in model.parameters())
    largest = max(p.numel() for p in model.parameters())
    step = simulate_step(model, 1, 64, optimizer="adamw-8bit")
    assert step.gradients == pytest.approx(2 * weights, rel=1e-5)
    assert step.activations == 0
    assert step.workspace == 2 * 4 * largest + CUBLAS_WORKSPACE
    assert simulate_step(model, 8, 2048, optimizer="adamw-8bit").activations > 0


def test_muon_has_one_state_for_the_matrices_of_blocks() -> None:
    model = llama(**TINY)
    matrices = sum(p.numel() for p in model.model.layers.parameters() if p.ndim > 1)
    assert optimizer_bytes(model, "muon") == optimizer_bytes(model, "adamw") - 2 * matrices


def test_muon_has_both_moments_of_patch_projections() -> None:
    model = llama(**TINY)
    before = optimizer_bytes(model, "muon")
    model.patches = torch.nn.Conv2d(3, 8, 4, bias=False, device="meta", dtype=torch.float32)
    assert optimizer_bytes(model, "muon") == before + 2 * 4 * 3 * 8 * 4 * 4


def test_names_of_the_optimizer_table_have_moved() -> None:
    with pytest.raises(AttributeError, match=r"'LOW_BIT'. It is ligerzoo.optimizer_table.LOW_BIT now"):
        _ = memory.LOW_BIT


def test_an_unknown_optimizer() -> None:
    with pytest.raises(LigerzooError, match=r"^optimizer: unknown optimizer; got 'adam'; expected adamw, "):
        simulate_step(llama(**TINY), 1, 8, optimizer="adam")


def test_a_page_names_a_batch_that_fits() -> None:
    setting, config = TrainingSetting(batch_size=8, seq_length=8192), llama(**LLAMA_1B | {"num_hidden_layers": 4})
    page = predict_training(config, setting, gpu_memory=8)
    assert "505,956,352 (506 M)" in page
    assert "nothing recomputed" in page
    assert "everything recomputed" in page
    assert "GFLOP" in page
    line = next(line for line in page.splitlines() if "fits" in line)
    assert line.startswith("batch size 8 needs at least ")
    assert line.endswith("with activation budget 8:")
    assert "does not fit 2 GiB" in predict_training(config, setting, gpu_memory=2)


def test_adapters_train_less(tmp_path: Path) -> None:
    full, lora = (
        predict_training(llama(**TINY), TrainingSetting(seq_length=32, method=method, lora_rank=2))  # type: ignore[arg-type]
        for method in ("full", "lora")
    )
    count = 3 * 2 * (4 * (16 + 16) + 3 * (16 + 24))
    assert f"  {count:,} (" not in full
    assert f"{count:,} (" in lora
    with pytest.raises(LigerzooError, match=r"^method: unknown method; got 'all'"):
        predict_training(llama(**TINY), TrainingSetting(method="all"))  # type: ignore[arg-type]


def test_the_command_reads_only_the_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(Llama(LlamaConfig(**TINY)), tmp_path / "model")
    for weights in (tmp_path / "model").glob("*.safetensors"):
        weights.unlink()
    command = ["info", str(tmp_path / "model"), "--train", "--batch", "3", "--seq", "32", "--gpu-memory", "1"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "training with 3 x 32 tokens per GPU, 1 GPU, full, adamw, float32" in out
    assert "batch size 3 fits 1 GiB with activation budget 1:" in out
    assert max(map(len, out.splitlines())) <= 160
    assert cli.main([*command, "--lora-rank", "2"]) == 0  # means LoRA, as in `train`
    assert "1 GPU, lora" in capsys.readouterr().out
    assert info.plan_checkpoint(tmp_path / "model", dtype="bfloat16").dtypes == ("bfloat16",)


@pytest.mark.parametrize("arguments, message", [
    (["model", "--batch", "2"], "argument --batch: only allowed with --train"),
    (["--architectures", "--train"], "argument --train: only allowed with MODEL"),
    (["model", "--train", "--method", "full", "--lora-rank", "8"], "--lora-rank: only allowed with --method lora"),
])  # fmt: skip
def test_training_options_belong_together(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["info", *arguments])
    assert message in capsys.readouterr().err


def test_other_models_are_refused() -> None:
    with pytest.raises(LigerzooError, match=r"^model: not a language model; got Linear"):
        predict_training(torch.nn.Linear(2, 2), TrainingSetting())  # type: ignore[arg-type]


@pytest.mark.every_layer
def test_every_architecture_is_predicted(tiny_model: CausalLM) -> None:
    page = predict_training(tiny_model, TrainingSetting(batch_size=2, seq_length=24))
    assert "nothing recomputed" in page
