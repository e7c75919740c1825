"""What blocks keep for backward with the fused kernels: as many bytes as simulated, with the same gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ligerzoo.adapters import add_lora
from ligerzoo.kernels.dispatch import INTERPRETING
from ligerzoo.kernels.recompute import Recompute, recomputing
from ligerzoo.layers import Context
from ligerzoo.memory import on_meta, simulate_step
from ligerzoo.memory.tracker import allocated_bytes
from ligerzoo.models import (
    CausalLM,
    Llama,
    LlamaConfig,
    Mixtral,
    MixtralConfig,
    Qwen3_5Text,
    Qwen3_5TextConfig,
    Qwen3Moe,
    Qwen3MoeConfig,
)

pytestmark = pytest.mark.skipif(not (INTERPRETING or torch.cuda.is_available()), reason="needs the kernels")

T = 40
SEED_BYTES = 16
"""Size of the seed and offset of dropout, which the fused attention kernels of GPUs keep without dropout, too."""
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
MODELS = {
    "dense": lambda device: Llama(LlamaConfig(**SIZES), device=device),
    "mixture": lambda device: Mixtral(MixtralConfig(**SIZES, num_experts=4, sliding_window=None), device=device),
    "mixture with normalized heads": lambda device: Qwen3Moe(
        Qwen3MoeConfig(**SIZES, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
        device=device,
    ),
    "linear attention": lambda device: Qwen3_5Text(
        Qwen3_5TextConfig(
            **SIZES,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            layer_types=["linear_attention"] * 3,
        ),
        device=device,
    ),
}


LORA = {"LoRA": {}, "LoRA with dropout": {"dropout": 0.2}, "DoRA": {"dora": True}}
TARGETS = ["self_attn", "gate_proj", "up_proj", "down_proj"]


def build(kind: str, device: str, dtype: torch.dtype = torch.float32) -> CausalLM:
    """Returns one of `MODELS`, or after a comma with an entry of `LORA`; experts have plain LoRA."""
    torch.manual_seed(0)
    name, *lora = kind.split(", ")
    model: CausalLM = MODELS[name](device).to(dtype)
    if lora:
        add_lora(model, 4, targets=TARGETS if name == "dense" else None, **LORA[lora[0]])  # type: ignore[arg-type]
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    return model


KINDS = [*MODELS, *(f"dense, {lora}" for lora in LORA), "mixture, LoRA"]


@pytest.fixture
def device() -> str:
    return "cpu" if INTERPRETING else "cuda"


def run_block(model: CausalLM, x: Tensor, level: Recompute) -> tuple[dict[int, Any], Tensor]:
    """Returns the storages that backward keeps of the second block, and its output."""
    storages: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor.detach()

    context = Context(x)
    context.router_logits = None
    model.model.layers[0](x, context)  # creates the rotary angles
    shared = [*model.parameters(), *(t for pair in context._rotations.values() for t in pair)]
    excluded = {tensor.untyped_storage()._cdata for tensor in shared}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), recomputing(level):
        y = model.model.layers[1](x, context)
    return {address: storage for address, storage in storages.items() if address not in excluded}, y


@pytest.mark.long
@pytest.mark.parametrize("level", [Recompute.NOTHING, Recompute.ELEMENTWISE, Recompute.MLP])
@pytest.mark.parametrize("kind", KINDS)
def test_kept_bytes_are_as_simulated(kind: str, level: Recompute, device: str) -> None:
    # torch's fused kernels for shared key heads run in fp32 on a CPU, and in half precision on a GPU. In fp32 on a GPU
    # torch keeps the probabilities, and keys and values of each query head.
    dtype = torch.float32 if INTERPRETING else torch.bfloat16
    model = build(kind, device, dtype)
    x = torch.randn(1, T, 64, device=device, dtype=dtype, requires_grad=True)
    storages, _ = run_block(model, x, level)
    sizes = [storage.nbytes() for storage in storages.values()]
    kept = sum(allocated_bytes(size) for size in sizes if size > SEED_BYTES)
    assert kept == simulate_step(on_meta(model), 1, T, [level] * 3).kept[1]


@pytest.mark.long
@pytest.mark.parametrize("level", [Recompute.ELEMENTWISE, Recompute.MLP])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_have_the_same_bits(kind: str, level: Recompute, dtype: torch.dtype, device: str) -> None:
    model = build(kind, device).to(dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    data = torch.randn(2, 7, 64, device=device, dtype=dtype)
    gradients = []
    for one in (Recompute.NOTHING, level):
        x = data.clone().requires_grad_()
        model.zero_grad()
        torch.manual_seed(1)
        run_block(model, x, one)[1].float().square().mean().backward()
        trained = [p for p in model.model.layers[1].parameters() if p.requires_grad]
        gradients.append([x.grad, *(p.grad for p in trained)])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
