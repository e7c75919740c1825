"""A step of GRPO as docs/losses.md has it: the seconds of sampling the completions, and of the update.

bf16 weights and AdamW states, random rewards. The update goes through the completions in microbatches whose activations
fit without checkpointing, the fastest way; their gradients add up to that of the whole batch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.decoding import CONFIGS, DEVICE, build, clean_up
from benchmarks.measure import synchronize
from ligerzoo import models
from ligerzoo.generate import GenerateOutput
from ligerzoo.losses import GRPO


@dataclass(frozen=True)
class Workload:
    """A GRPO step.

    Attributes:
        model: name of a config in `benchmarks.decoding.CONFIGS`.
        prompts: number of prompts.
        samples: completions of each prompt.
        prompt: tokens of each prompt.
        new_tokens: tokens of each completion.
        microbatch: rows of a microbatch of the update.
    """

    model: str
    prompts: int
    samples: int
    prompt: int
    new_tokens: int
    microbatch: int


WORKLOADS = {"grpo_8b": Workload("llama_8b", 16, 8, 256, 512, 16), "grpo_tiny": Workload("tiny", 2, 4, 8, 8, 4)}


def sample(model: models.CausalLM, prompts: Tensor, workload: Workload) -> GenerateOutput:
    """Samples completions, (prompts * samples, prompt + new tokens), those of a prompt one after the other."""
    return model.generate(
        prompts, max_new_tokens=workload.new_tokens, do_sample=True, num_return_sequences=workload.samples,
        return_dict_in_generate=True, eos_token_id=[],
    )  # fmt: skip


def update(model: models.CausalLM, optimizer: torch.optim.Optimizer, out: GenerateOutput, workload: Workload) -> float:
    """One step of the optimizer on random rewards. Returns the loss."""
    rewards = torch.rand(workload.prompts, workload.samples, device=DEVICE)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    labels = out.sequences.clone()
    labels[:, : workload.prompt] = -100
    old_logps = F.pad(out.logps, (workload.prompt - 1, 1))  # index t is about the token at t + 1
    grpo = GRPO(variant="dapo", epsilon_high=0.28)
    total = torch.zeros((), device=DEVICE)
    parts = (x.split(workload.microbatch) for x in (out.sequences, labels, advantages, old_logps))
    for *rows, old in zip(*parts, strict=True):
        loss, _ = grpo.of(model, *rows, old_logps=old, num_items=len(labels) * workload.new_tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return float(total)


@dataclass(frozen=True)
class Start:
    """Builds the model in a new process; see `benchmarks.processes.measured_apart`."""

    model: str
    calls: int

    def __call__(self) -> Callable[[str], dict[str, Any]]:
        model = build(CONFIGS[self.model])
        return lambda name: measure(model, WORKLOADS[name], self.calls)


def measure(model: models.CausalLM, workload: Workload, calls: int) -> dict[str, Any]:
    """Measures steps of GRPO after a first one.

    Returns:
        sampling_s, update_s: medians of the seconds.
        optimizer: its name, and the dtype of its states.
        peak_gib: peak memory, weights and optimizer states included.
    """
    torch.manual_seed(0)
    prompts = torch.randint(CONFIGS[workload.model].vocab_size, (workload.prompts, workload.prompt), device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    clean_up()
    steps = []
    for _ in range(1 + calls):
        times = [time.perf_counter()]
        out = sample(model, prompts, workload)
        synchronize(DEVICE)
        times.append(time.perf_counter())
        update(model, optimizer, out, workload)
        synchronize(DEVICE)
        times.append(time.perf_counter())
        steps.append((times[1] - times[0], times[2] - times[1]))
    sampling, updating = (statistics.median(column) for column in zip(*steps[1:], strict=True))
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0
    states = {str(x.dtype) for state in optimizer.state.values() for x in state.values() if x.dim() > 0}
    optimized = f"{type(optimizer).__name__}, {' and '.join(sorted(states))}"
    return {"sampling_s": sampling, "update_s": updating, "peak_gib": peak, "optimizer": optimized}
