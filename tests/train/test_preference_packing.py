"""Packed rows give the loss and gradients of the sequences by themselves: every method, every text architecture."""

import copy
import math
import random
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo import AutoModel
from ligerzoo.losses import CPO, DPO, GRPO, KTO, ORPO, Distillation, SimPO, model_sequence_logps
from ligerzoo.losses.dpo import VARIANTS
from ligerzoo.losses.grpo import VARIANTS as POLICY_VARIANTS
from ligerzoo.models import CausalLM
from ligerzoo.train.completion_batches import completion_logps, completion_loss, pack_completions
from ligerzoo.train.completions import SampledCompletion
from ligerzoo.train.data import LabelledSample, PreferenceSample, PromptSample, Sample, Source
from ligerzoo.train.data.batches import Batch, collate
from ligerzoo.train.preferences import desirable_of, mismatched, sequences_of
from tests.covering import representatives
from tests.models.tiny import Tiny
from tests.models.zoo import TEXT_CHECKPOINTS, model_of

LENGTH = 64
SHAPES = [(5, 9, 4), (3, 2, 7), (1, 6, 1), (8, 3, 12), (2, 5, 5)]
"""Tokens of the prompt, the chosen and the rejected completion of each pair."""

NO_ROUTER_LOSS = {"output_router_logits": False}
"""Padding tokens are routed too, so the load-balancing loss, a statistic of the batch, differs."""


def pairs(vocab_size: int) -> list[PreferenceSample]:
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(5, min(vocab_size, 60), (count,), generator=generator).tolist()

    samples = []
    for line, (prompt, *completions) in enumerate(SHAPES):
        source, start = Source("pairs", line, "row"), tokens(prompt)
        parts = [Sample(start + (end := tokens(n)), [-100] * prompt + end, source) for n in completions]
        samples.append(PreferenceSample(*parts))
    return samples


def batch_of(rows: list[list[Any]]) -> Batch:
    """Packs the samples of each row into one row."""
    return collate(rows, [[one for sample in row for one in sample.segments] for row in rows], LENGTH, 0)


def padded(batch: Batch) -> dict[str, Tensor]:
    """Returns the sequences of a batch in a row each, the chosen ones first, with an attention mask."""
    samples = [sample for row in batch.rows for sample in row]
    segments = [one for part in zip(*(sample.segments for sample in samples), strict=True) for one in part]
    length = max(len(one.input_ids) for one in segments)
    alone = collate([[one] for one in segments], [[one] for one in segments], length, 0).inputs
    mask = torch.tensor([[1] * len(one.input_ids) + [0] * (length - len(one.input_ids)) for one in segments])
    return {"input_ids": alone["input_ids"], "labels": alone["labels"], "attention_mask": mask}


def packed(batch: Batch, *, sequences: bool = True) -> dict[str, Any]:
    inputs: dict[str, Any] = dict(batch.inputs)
    model_inputs = {"position_ids": inputs.pop("position_ids"), **NO_ROUTER_LOSS}
    return {**inputs, "model_inputs": model_inputs, **({"sequences": sequences_of(batch)} if sequences else {})}


def unpacked(batch: Batch) -> dict[str, Any]:
    return {**padded(batch), "model_inputs": NO_ROUTER_LOSS}


Losses = tuple[Tensor, Tensor]
"""The loss of packed and of unpacked rows."""


def pair_losses(loss: Any, uses_reference: bool, model: CausalLM, other: CausalLM) -> Losses:
    first, second, *rest = pairs(model.config.vocab_size)
    batch = batch_of([[first], rest, [second]])
    reference = {"reference": other} if uses_reference else {}
    results = [loss.of(model, **inputs, **reference) for inputs in (packed(batch), unpacked(batch))]
    for name, value in results[0].metrics.items():
        torch.testing.assert_close(value, results[1].metrics[name], rtol=1e-5, atol=1e-5)
    return results[0].loss, results[1].loss


def kto_losses(variant: str, model: CausalLM, other: CausalLM) -> Losses:
    chosen_and_rejected = pairs(model.config.vocab_size)
    samples = [LabelledSample(pair.chosen, True) for pair in chosen_and_rejected[:3]]
    samples += [LabelledSample(pair.rejected, False) for pair in chosen_and_rejected]
    batches = [batch_of([samples[:2], samples[2:5]]), batch_of([samples[5:]])]
    kl = []
    for arrange in (packed, unpacked):
        crossed = [torch.cat([_logps(one, arrange(batch)) for batch in mismatched(batches)]) for one in (model, other)]
        kl.append((crossed[0] - crossed[1]).mean())  # without the minimum of 0, which would hide a difference
    assert kl[0] != 0
    torch.testing.assert_close(kl[0], kl[1], rtol=1e-5, atol=1e-5)
    totals = [torch.zeros_like(kl[0]), torch.zeros_like(kl[0])]
    for batch in batches:
        for index, arrange in enumerate((packed, unpacked)):
            given = {"kl": kl[index]} if variant == "kto" else {}
            out = KTO(variant=variant).of(
                model, **arrange(batch), reference=other, desirable=desirable_of(batch), num_items=8, **given
            )
            totals[index] = totals[index] + out.loss
    return totals[0], totals[1]


def _logps(model: CausalLM, inputs: dict[str, Any]) -> Tensor:
    others = inputs.pop("model_inputs")
    with torch.no_grad():
        return model_sequence_logps(model, **inputs, **others)


def distillation_losses(options: dict[str, Any], model: CausalLM, other: CausalLM) -> Losses:
    first, second, *rest = pairs(model.config.vocab_size)
    batch, loss = batch_of([[first], rest, [second]]), Distillation(**options)
    a, b = (
        loss.of_teacher(model, other, **inputs).loss for inputs in (packed(batch, sequences=False), unpacked(batch))
    )
    return a, b


def sft_losses(model: CausalLM, _: CausalLM) -> Losses:
    first, second, *rest = pairs(model.config.vocab_size)
    batch = batch_of([[first], rest, [second]])
    a, b = (model(**inputs, **NO_ROUTER_LOSS).loss for inputs in (batch.inputs, padded(batch)))
    return a, b


def grpo_losses(variant: str, model: CausalLM, other: CausalLM) -> Losses:
    """Ratios, and so the weights of tokens, differ from 1; completions of a prompt have different lengths."""
    source, vocab_size = random.Random(0), min(model.config.vocab_size, 60)
    completions = []
    for line, (prompt, *lengths) in enumerate(SHAPES):
        ids = [source.randrange(5, vocab_size) for _ in range(prompt)]
        asked = PromptSample(ids, {"prompt": "?"}, Source("prompts", line, "row"))
        for length in lengths:
            new = [source.randrange(5, vocab_size) for _ in range(length)]
            completions.append(
                SampledCompletion(
                    input_ids=ids + new, labels=[-100] * prompt + new, source=asked.source, prompt=asked, text="",
                    logps=[0.0] * length, finish_reason="stop", reward=0.0, advantage=source.gauss(0, 1),
                )
            )  # fmt: skip
    options = {"cispo": {"epsilon_high": 4.0}, "dr_grpo": {"max_length": 12}}.get(variant, {})
    loss = GRPO(variant=variant, beta=0.05, is_kl_corrected=True, **options)
    noise = torch.Generator().manual_seed(0)
    shifts = {id(one): 0.1 * torch.randn(len(one.tokens), generator=noise) for one in completions}
    rows = {"seq_length": LENGTH, "pad_token_id": 0}
    packed = pack_completions(completions, batch_size=2, **rows)
    alone = [pack_completions([one], batch_size=1, **rows)[0] for one in completions]
    assert len(packed) == 1 < len(packed[0].completions)
    totals = []
    for batches in (packed, alone):
        total = torch.zeros((), dtype=model.dtype)
        for batch in batches:
            old = completion_logps(model, batch).detach()
            for row, one in enumerate(batch.completions):
                old[row, : len(one.tokens)] += shifts[id(one)]
            with torch.no_grad():
                given = {"old_logps": old, "ref_logps": completion_logps(other, batch)}
            advantages = batch.advantages.to(model.dtype)
            out = completion_loss(
                model, batch, loss, num_items=len(completions), aux_loss_share=0.0, advantages=advantages, **given
            )
            total = total + out.loss
        totals.append(total)
    return totals[0], totals[1]


def _pair_case(loss: Any, uses_reference: bool = False) -> Callable[[CausalLM, CausalLM], Losses]:
    return lambda model, other: pair_losses(loss, uses_reference, model, other)


METHODS: dict[str, Callable[[CausalLM, CausalLM], Losses]] = {
    "sft": sft_losses,
    **{
        f"dpo {variant}": _pair_case(
            DPO(variant=variant, **({"label_smoothing": 0.1} if variant == "exo_pair" else {})), uses_reference=True
        )
        for variant in VARIANTS
    },
    "dpo, average and nll": _pair_case(DPO(average_log_prob=True, nll_weight=0.5), uses_reference=True),
    "kto": lambda *models: kto_losses("kto", *models),
    "kto apo_zero_unpaired": lambda *models: kto_losses("apo_zero_unpaired", *models),
    "orpo": _pair_case(ORPO()),
    "simpo": _pair_case(SimPO()),
    "cpo": _pair_case(CPO()),
    **{f"grpo {variant}": partial(grpo_losses, variant) for variant in POLICY_VARIANTS},
    "distill": lambda *models: distillation_losses({}, *models),
    "distill hard": lambda *models: distillation_losses({"divergence": "forward_kl", "hard_weight": 0.5}, *models),
}

ARCHITECTURES = {row.config["model_type"]: row for row in reversed(TEXT_CHECKPOINTS)}
"""One checkpoint of each architecture."""

FAST = ("llama", "mixtral", "gemma2", "phi3", "qwen3")
FAST_METHODS = ("sft", "dpo sigmoid", "dpo, average and nll", "kto", "simpo", "grpo dapo", "grpo gspo", "distill hard")
"""One of each kind of formula over log-probabilities."""

FAST_ROWS = [ARCHITECTURES[model_type] for model_type in FAST]

OTHERS = [row for row in {model_of(row): row for row in TEXT_CHECKPOINTS}.values() if row not in ARCHITECTURES.values()]


def models_of(row: Tiny, directory: Path, dtype: str) -> tuple[CausalLM, CausalLM]:
    """Returns a model and a reference with other weights."""
    row.write(directory)
    model = AutoModel.from_pretrained(directory, dtype=dtype).eval()  # without the random noise of some routers
    other = copy.deepcopy(model).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.1 * parameter * torch.randn(parameter.shape, generator=generator).to(parameter)
    return model, other


def gradients(model: CausalLM, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_packing_is_exact(method: str, models: tuple[CausalLM, CausalLM], tolerance: float) -> list[Tensor]:
    """Returns the gradients of the unpacked rows."""
    losses = METHODS[method](*models)
    torch.testing.assert_close(losses[0], losses[1], rtol=tolerance, atol=tolerance, check_dtype=False)
    a, b = (gradients(models[0], loss) for loss in losses)
    scale = max(one.abs().max().item() for one in b)
    assert scale > 0
    worst = max((one - other).abs().max().item() for one, other in zip(a, b, strict=True))
    assert worst <= tolerance * max(1.0, scale), f"{method}: gradients differ by {worst}, the largest is {scale}"
    return b


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_load_balancing_loss_is_shared_by_micro_batches(share: float, tmp_path: Path) -> None:
    model, other = models_of(ARCHITECTURES["mixtral"], tmp_path, "float64")
    batch = batch_of([[pair] for pair in pairs(model.config.vocab_size)])
    plain, inputs = packed(batch), packed(batch)
    inputs["model_inputs"] = {**inputs["model_inputs"], "output_router_logits": True}
    without = DPO().of(model, **plain, reference=other).loss
    result = DPO().of(model, **inputs, reference=other, aux_loss_share=share)
    expected = without + share * model.aux_loss_weight * result.metrics["aux_loss"]
    torch.testing.assert_close(result.loss, expected, rtol=1e-9, atol=1e-9)
    router = next(p for name, p in model.named_parameters() if name.endswith("mlp.gate.weight"))
    (shared,) = torch.autograd.grad(result.loss, router)
    (whole,) = torch.autograd.grad(DPO().of(model, **inputs, reference=other).loss, router)
    (own,) = torch.autograd.grad(DPO().of(model, **plain, reference=other).loss, router)
    torch.testing.assert_close(shared, own + share * (whole - own), rtol=1e-6, atol=1e-9)


AMPLIFIES_ROUNDING = "dpo discopop"
"""Divides the difference of log-ratios by 0.05, within a logistic function: its rounding in fp32 is multiplied by 20.
Packed and unpacked gradients in fp32 differ by up to 3e-5, and each as much from fp64, in which they agree."""


def relative_error(got: list[Tensor], expected: list[Tensor]) -> float:
    """Returns the norm of the difference of gradients, divided by their norm."""
    error = sum((one - other).double().square().sum().item() for one, other in zip(got, expected, strict=True))
    return math.sqrt(error / sum(one.double().square().sum().item() for one in expected))


def check_packing(row: Tiny, directory: Path, methods: Iterable[str]) -> None:
    """In fp64, packed gradients are the unpacked ones to 1e-9. In fp32 they differ by at most the rounding of fp32.

    That is 1e-6 of their norm, or twice the largest error of the unpacked gradients of any method, compared with fp64.
    It exceeds 1e-6 where terms of opposite signs cancel (GRPO, KTO, DPO's sppo_hard), and in architectures whose tiny
    checkpoints have large activations, which scale embeddings and add 1 to the weights of norms. Largest difference of
    packed and unpacked gradients, and error of the unpacked ones: Gemma 3 6e-6 (1.6e-5), Gemma and Gemma 2 2e-6
    (1.6e-5), GLM-4 and SmolLM3 1.4e-6 (1.6e-6), others 1.8e-6 (1.9e-6), for sppo_hard. Qwen3.5 normalizes keys, of
    which those of one token almost vanish in a tiny checkpoint: 4e-4 (7e-4) for GRPO, in either arrangement.
    """
    models = models_of(row, directory, "float32")
    first, second = (copy.deepcopy(model).double() for model in models)
    differences, rounding = {}, 0.0
    for method in methods:
        exact = assert_packing_is_exact(method, (first, second), 1e-9)
        if method != AMPLIFIES_ROUNDING:
            packed, alone = (gradients(models[0], loss) for loss in METHODS[method](*models))
            differences[method] = relative_error(packed, alone)
            rounding = max(rounding, relative_error(alone, exact))
    for method, error in differences.items():
        assert error <= max(1e-6, 2 * rounding), f"{method}: {error:.1e} between both, {rounding:.1e} unpacked"
        assert error < max(1e-5, rounding), f"{method}: {error:.1e}"


@pytest.mark.long
@pytest.mark.parametrize("method", representatives(METHODS, *FAST_METHODS))
@pytest.mark.parametrize("model_type", FAST)
def test_every_method(model_type: str, method: str, tmp_path: Path) -> None:
    check_packing(ARCHITECTURES[model_type], tmp_path, [method])


@pytest.mark.thorough
@pytest.mark.parametrize("row", [row for row in [*ARCHITECTURES.values(), *OTHERS] if row not in FAST_ROWS], ids=str)
def test_every_checkpoint(row: Tiny, tmp_path: Path) -> None:
    check_packing(row, tmp_path, METHODS)
