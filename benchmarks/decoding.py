"""Speed of generation: our `generate`, fast and exact, transformers' with and without compilation, our layers compiled.

Weights and prompts are random, without padding. Decoding is greedy and never stops early.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.compiled_decoding import CompiledDecoding
from benchmarks.loading import LLAMA_8B
from benchmarks.measure import synchronize
from benchmarks.row import OURS
from benchmarks.trainer import QWEN3_30B_A3B_4_LAYERS, TINY
from benchmarks.training_step import LLAMA_1B
from ligerzoo import AutoModel, models
from ligerzoo.convert import architecture_for_config
from ligerzoo.layers import Experts
from ligerzoo.models.nemotron_h import MIXER_TYPES

EXACT = f"{OURS} exact"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16
BANDWIDTH = {"NVIDIA H200": 4.27e12}
"""Bytes per second of a large copy, by GPU."""

NEMOTRON_NANO_BLOCKS = [MIXER_TYPES[kind] for kind in "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"]

CONFIGS: dict[str, Any] = {
    "llama_8b": LLAMA_8B,
    "llama_1b": models.LlamaConfig(**LLAMA_1B),
    "qwen3_30b_a3b": models.Qwen3MoeConfig(**{**QWEN3_30B_A3B_4_LAYERS, "num_hidden_layers": 48}),
    "gpt_oss_20b": models.GptOssConfig(num_hidden_layers=24, num_experts=32),
    "qwen3_5_4b": models.Qwen3_5TextConfig(
        hidden_size=2560, intermediate_size=9216, num_hidden_layers=32, tie_word_embeddings=True
    ),
    "gemma4_e4b": models.Gemma4TextConfig(
        hidden_size=2560,
        intermediate_size=10240,
        num_hidden_layers=42,
        num_key_value_heads=2,
        num_kv_shared_layers=18,
        final_logit_softcapping=30.0,
    ),
    "nemotron_nano_30b": models.NemotronHConfig(
        hidden_size=2688,
        num_hidden_layers=52,
        layers_block_type=NEMOTRON_NANO_BLOCKS,
        num_attention_heads=32,
        num_key_value_heads=2,
        mamba_n_heads=64,
        num_experts=128,
        num_experts_per_tok=6,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        routed_scaling_factor=2.5,
    ),
    "tiny_gemma4": models.Gemma4TextConfig(
        **{**TINY, "num_hidden_layers": 4},
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=32,
        num_kv_shared_layers=2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=64,
        final_logit_softcapping=30.0,
    ),
    "tiny_nemotron": models.NemotronHConfig(
        **{**TINY, "num_hidden_layers": 4},
        layers_block_type=[*MIXER_TYPES.values()],
        num_key_value_heads=2,
        head_dim=16,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_n_groups=2,
        mamba_d_state=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=32,
    ),
    "tiny_hybrid": models.Qwen3_5TextConfig(**TINY, head_dim=16, full_attention_interval=2),
    "tiny": models.LlamaConfig(**TINY),
    "tiny_moe": models.Qwen3MoeConfig(**TINY, num_key_value_heads=2, moe_intermediate_size=16, num_experts=8),
}


@dataclass(frozen=True)
class Workload:
    """Prompts, and how many tokens to generate.

    Attributes:
        model: name of a config in `CONFIGS`.
        rows: prompts of a batch.
        prompt: tokens of each prompt.
        new_tokens: tokens that each row is continued by, at least 2.
    """

    model: str
    rows: int
    prompt: int
    new_tokens: int


WORKLOADS = {
    "llama_8b_1": Workload("llama_8b", 1, 512, 256),
    "llama_8b_8": Workload("llama_8b", 8, 512, 256),
    "llama_8b_32": Workload("llama_8b", 32, 512, 256),
    "llama_8b_128": Workload("llama_8b", 128, 1024, 128),
    "llama_1b_1": Workload("llama_1b", 1, 512, 256),
    "llama_1b_32": Workload("llama_1b", 32, 512, 256),
    "qwen3_30b_a3b_1": Workload("qwen3_30b_a3b", 1, 512, 256),
    "qwen3_30b_a3b_32": Workload("qwen3_30b_a3b", 32, 512, 256),
    "tiny": Workload("tiny", 2, 16, 32),
    "tiny_moe": Workload("tiny_moe", 2, 16, 32),
}

Generate = Callable[[Tensor, int], Tensor]
"""(prompts (B, T), new tokens) -> (B, T + new tokens)."""


@dataclass(frozen=True)
class Generator:
    """A model that is ready to generate.

    Attributes:
        generate: see `Generate`.
        release: frees what calls keep for later calls, such as captured graphs and compiled code.
        max_new_tokens: largest number of tokens to generate. The speed of decoding hardly depends on it.
    """

    generate: Generate
    release: Callable[[], None]
    max_new_tokens: int = sys.maxsize


def build(config: Any) -> models.CausalLM:
    """Our model with random weights."""
    return AutoModel.from_config(config, device=DEVICE, dtype=DTYPE)


def with_ligerzoo(config: Any, **options: Any) -> Generator:
    model = build(config)

    def generate(prompts: Tensor, new_tokens: int) -> Tensor:
        return model.generate(prompts, max_new_tokens=new_tokens, eos_token_id=[], **options)

    return Generator(generate, model.release_decode_graphs)


def with_compiled_layers(config: Any) -> Generator:
    decoding = CompiledDecoding(build(config), "inductor" if DEVICE == "cuda" else "aot_eager")

    def release() -> None:
        decoding.release()
        torch._dynamo.reset()

    return Generator(decoding.generate, release)


def build_transformers(config: Any, attention: str = "sdpa") -> Any:
    """transformers' model with random weights and one of its kinds of attention, initialized on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture = architecture_for_config(type(config))
    theirs = AutoConfig.for_model(architecture.model_type, **architecture.config_to_hf(config))
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(theirs, dtype=DTYPE, attn_implementation=attention).eval()
    model.generation_config.eos_token_id = None
    return model


def with_transformers(config: Any, max_new_tokens: int, **options: Any) -> Generator:
    model = build_transformers(config)

    def generate(prompts: Tensor, new_tokens: int) -> Tensor:
        mask = torch.ones_like(prompts)
        tokens: Tensor = model.generate(
            prompts, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **options
        )
        return tokens

    return Generator(generate, torch._dynamo.reset, max_new_tokens)


PROVIDERS: dict[str, Callable[[Any], Generator]] = {
    OURS: with_ligerzoo,
    EXACT: partial(with_ligerzoo, exact=True),
    f"{OURS}, torch.compile": with_compiled_layers,
    # The first call takes 40 ms more per token: cuDNN's attention, it seems, is planned for each length of the cache.
    "transformers": partial(with_transformers, max_new_tokens=32),
    # Compiles the decode step with mode="reduce-overhead". Each call captures it again, for its cache is new.
    "transformers, torch.compile": partial(
        with_transformers, max_new_tokens=sys.maxsize, cache_implementation="static"
    ),
}


@dataclass(frozen=True)
class Start:
    """Builds a provider's model in a new process; see `benchmarks.processes.measured_apart`."""

    provider: str
    model: str
    calls: int

    def __call__(self) -> Callable[[str], dict[str, Any]]:
        begin = time.perf_counter()
        generator = PROVIDERS[self.provider](CONFIGS[self.model])
        synchronize(DEVICE)
        built = {"build_s": time.perf_counter() - begin}
        return lambda name: measure(generator, WORKLOADS[name], self.calls) | built


def measure(generator: Generator, workload: Workload, calls: int) -> dict[str, Any]:
    """Measures one workload, and releases what its calls kept.

    `Start` adds `build_s`, the seconds of the provider's imports and of building the model.

    Returns:
        new_tokens: number of tokens generated per row.
        decode_tokens_per_s: tokens of all rows over the time of decoding, which is that of the fastest call without
            that of a call for one token. Other work on the host halves the speed of some calls of eager providers.
        tokens_per_s: the same with the prefill, for the number of new tokens of the workload.
        prefill_s: seconds of the fastest call for one token.
        peak_gib: peak memory of the calls, weights included.
        first_call_extra_s: seconds that the first call took longer than a later one: it compiles kernels, captures
            graphs and plans attention.
        all_s: seconds of each measured call.
    """
    torch.manual_seed(0)
    shape = workload.rows, workload.prompt
    prompts = torch.randint(CONFIGS[workload.model].vocab_size, shape, device=DEVICE)
    new_tokens = min(workload.new_tokens, generator.max_new_tokens)

    def seconds(new_tokens: int) -> float:
        synchronize(DEVICE)
        begin = time.perf_counter()
        tokens = generator.generate(prompts, new_tokens)
        synchronize(DEVICE)
        elapsed = time.perf_counter() - begin
        if tokens.shape != (workload.rows, workload.prompt + new_tokens):
            raise RuntimeError(f"generated {tuple(tokens.shape)} tokens; expected {new_tokens} after {shape}")
        return elapsed

    clean_up()
    first = seconds(new_tokens)
    whole = [seconds(new_tokens) for _ in range(calls)]
    prefill = min(seconds(1) for _ in range(1 + calls))
    step = (min(whole) - prefill) / (new_tokens - 1)
    generator.release()
    return {
        "new_tokens": new_tokens,
        "decode_tokens_per_s": workload.rows / step,
        "tokens_per_s": workload.rows * workload.new_tokens / (prefill + step * (workload.new_tokens - 1)),
        "prefill_s": prefill,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0,
        "first_call_extra_s": first - min(whole),
        "all_s": whole,
    }


def clean_up() -> None:
    """Returns cached memory to the GPU and starts a new peak."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def limit(workload: Workload) -> dict[str, float]:
    """Bytes that a decode step reads at least, and the tokens per second that the GPU's bandwidth allows.

    A step reads all weights except the embedding, and the keys and values of the prompt and, on average, of half of
    the new tokens. In a mixture of experts it reads the experts that B tokens select, E (1 - (1 - k / E)^B) if each
    selects k of E uniformly at random.
    """
    config = CONFIGS[workload.model]
    model = AutoModel.from_config(config, device="meta", dtype=DTYPE)
    total = sum(weight.nbytes for weight in model.parameters())
    if not config.tie_word_embeddings:
        total -= model.get_input_embeddings().weight.nbytes
    experts = sum(
        weight.nbytes for layer in model.modules() if isinstance(layer, Experts) for weight in layer.parameters()
    )
    if experts:
        total -= experts * (1 - config.num_experts_per_tok / config.num_experts) ** workload.rows
    context = workload.prompt + workload.new_tokens / 2
    per_token = 2 * config.num_hidden_layers * config.kv_heads * config.head_size * DTYPE.itemsize
    total += workload.rows * context * per_token
    gpu = torch.cuda.get_device_name() if DEVICE == "cuda" else "none"
    allowed = {"limit_tokens_per_s": workload.rows * BANDWIDTH[gpu] / total} if gpu in BANDWIDTH else {}
    return {"gb_per_step": total / 1e9, **allowed}
