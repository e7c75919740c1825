"""Models and tokenizers for tests of generation."""

from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor

from ligerzoo.models import Llama, LlamaConfig

VOCAB = 97


NO_END: list[int] = []


TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


HYBRID: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 24,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
"""Sizes of a tiny Qwen3-Next, in addition to those of `TINY`."""


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


VARIANTS: dict[str, dict[str, Any]] = {
    "llama2": {},
    "llama3.2": {"num_key_value_heads": 2, "rope_scaling": LLAMA3, "rope_theta": 500000.0, "tie_word_embeddings": True},
    "odd": {"num_key_value_heads": 1, "head_dim": 10, "attention_bias": True, "mlp_bias": True, "num_hidden_layers": 3},
}


def tiny_llama(device: str, variant: str = "llama2", std: float = 0.15) -> Llama:
    torch.manual_seed(0)
    return Llama(LlamaConfig(**TINY | VARIANTS[variant], initializer_range=std), device=device)


def oracle(model: Llama, variant: str) -> Any:
    """Returns transformers' model with the same weights."""
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = transformers.LlamaConfig(**TINY | VARIANTS[variant] | ids)
    theirs = transformers.LlamaForCausalLM(config).to(model.device).eval()
    theirs.load_state_dict(model.state_dict())
    return theirs


def prompts(device: str, rows: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed)).to(device)


def mask_of(rows: list[str], device: str) -> Tensor:
    """Returns an attention mask from rows of # (token) and . (padding)."""
    return torch.tensor([[character == "#" for character in row] for row in rows], dtype=torch.long, device=device)


LEFT = ["....#############", "#################", ".......##########"]


RIGHT = [row[::-1] for row in LEFT]


PROMPT = torch.tensor([[1, 2], [3, 4]])


class Recorder:
    """A model that records its inputs and logits."""

    def __init__(self, model: Llama) -> None:
        self.model, self.config, self.generation_config = model, model.config, model.generation_config
        self.read: list[Tensor] = []
        self.positions: list[Tensor | None] = []
        self.logits: list[Tensor] = []

    def __call__(self, input_ids: Tensor, mask: Tensor | None, position_ids: Tensor | None, **options: Any) -> Any:
        output = self.model(input_ids, mask, position_ids, **options)
        self.read.append(input_ids)
        self.positions.append(position_ids)
        self.logits.append(output.logits)
        return output


class Scripted:
    """A model whose most likely tokens follow a script: row r continues with script[r]."""

    def __init__(self, script: list[list[int]], **config: Any) -> None:
        self.config = SimpleNamespace(vocab_size=VOCAB, **config)
        self.generation_config: dict[str, Any] = {}
        self.script = torch.tensor(script)
        self.calls = 0

    def __call__(self, input_ids: Tensor, *args: Any, **options: Any) -> Any:
        logits = torch.nn.functional.one_hot(self.script[:, self.calls], VOCAB)[:, None].float()
        self.calls += 1
        return SimpleNamespace(logits=logits, past_key_values=None)


class Letters:
    """A tokenizer whose token i is the text PIECES[i]."""

    PIECES = ("a", "b", "c", "ab", "ST", "OP", "xSTO", "P!", "\n", "<end>")

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(self.PIECES[i] for i in ids)


class LetterStream:
    """Holds back one piece."""

    def __init__(self, hides: bool) -> None:
        self.hides, self.held = hides, ""

    def push(self, token_id: int) -> str:
        text, self.held = self.held, "" if self.hides and token_id == 9 else Letters.PIECES[token_id]
        return text

    def flush(self) -> str:
        text, self.held = self.held, ""
        return text


class StreamingLetters:
    def stream(self, *, skip_special_tokens: bool) -> LetterStream:
        return LetterStream(skip_special_tokens)
