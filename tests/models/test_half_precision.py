"""bf16 on a CPU: as close to fp32 as transformers' fused attention, and the same text in a batch with longer rows."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from ligerzoo import AutoModel
from ligerzoo.layers.attention_paths import attend
from ligerzoo.layers.masks import Mask
from ligerzoo.models import CausalLM, Gemma3Text, Gemma3TextConfig, GptOss, GptOssConfig, Llama, LlamaConfig

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of a CPU")
SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def with_large_biases(model: Any, std: float) -> Any:
    """Draws weights, and biases of queries and keys that are large in slowly rotating features, as in Qwen2.5."""
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.08)
        elif name.endswith(("q_proj.bias", "k_proj.bias")):
            features = torch.nn.init.normal_(weight, std=0.3).detach().unflatten(0, (-1, 32))
            features[:, [13, 14, 15, 29, 30, 31]] += std * torch.randn(6)
    return model


@torch.no_grad()
@pytest.mark.parametrize("std", [0.0, 20.0])
def test_errors_are_those_of_fused_attention(std: float, tmp_path: Any) -> None:
    errors = torch.zeros(3)
    for seed in range(3):
        torch.manual_seed(seed)
        with_large_biases(Qwen2ForCausalLM(Qwen2Config(**SIZES)), std).save_pretrained(tmp_path)
        tokens = torch.randint(300, (2, 100))
        truth = AutoModel.from_pretrained(tmp_path, dtype="float32")(tokens).logits
        models = [AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)]
        models += [
            AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation=name)
            for name in ("sdpa", "eager")
        ]
        errors += torch.stack([(model(tokens).logits.float() - truth).norm() / truth.norm() for model in models])
    ours, fused, eager = errors.tolist()
    assert ours <= 1.1 * fused
    assert std < 20 or 1.1 * ours < eager  # the case separates them


def models() -> list[CausalLM]:
    built: list[CausalLM] = [
        Llama(LlamaConfig(**SIZES)),
        Gemma3Text(Gemma3TextConfig(**SIZES, head_dim=32, sliding_window=8)),
        GptOss(GptOssConfig(**SIZES, head_dim=32, sliding_window=8, num_experts=4, num_experts_per_tok=2)),
    ]
    for model in built:
        model.init_weights(0.12)
    return built


@torch.no_grad()
@pytest.mark.parametrize("index", range(3), ids=["llama", "gemma3", "gpt_oss"])
def test_padding_on_the_left_has_no_effect(index: int) -> None:
    """Bit by bit, in a forward and in generated text."""
    model = models()[index].to(torch.bfloat16).eval()
    rows = [torch.randint(300, (n,)) for n in (29, 20, 13, 3)]
    tokens, mask = padded_left(rows)
    logits = model(tokens, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    texts = model.generate(tokens, mask, max_new_tokens=5, eos_token_id=[])
    for row, got, text in zip(rows, logits, texts, strict=True):
        assert torch.equal(got[-len(row) :], model(row[None]).logits[0])
        assert torch.equal(text[-len(row) - 5 :], model.generate(row[None], max_new_tokens=5, eos_token_id=[])[0])


def test_padding_compiles_for_all_sizes_at_once() -> None:
    def attended(x: Tensor, padding_mask: Tensor) -> Tensor:
        query = torch.arange(x.shape[1])[None]
        return attend(x, x, x, Mask(query, torch.zeros_like(query), query, x.shape[1], padding_mask))

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(attended, backend=counter, fullgraph=True, dynamic=True)
    for batch, tokens in ((3, 9), (2, 14), (5, 6)):
        x = torch.randn(batch, tokens, 4, 16, dtype=torch.bfloat16)
        _, padding_mask = padded_left([torch.zeros(n) for n in range(tokens, tokens - batch, -1)])
        assert torch.equal(compiled(x, padding_mask == 1), attended(x, padding_mask == 1))
    assert counter.frame_count == 1


def padded_left(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns tokens and padding mask."""
    longest = max(map(len, rows))
    tokens = torch.stack([torch.cat([row.new_zeros(longest - len(row)), row]) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return tokens, (torch.arange(longest) >= longest - lengths[:, None]).long()
