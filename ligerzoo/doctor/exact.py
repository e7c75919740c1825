"""Whether sampled log-probabilities have the bits that training computes, and what that rests on."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ligerzoo.doctor.findings import Finding
from ligerzoo.doctor.texts import ROW, longest_text, random_tokens
from ligerzoo.kernels.exact_attention import HEAD_SIZES
from ligerzoo.layers import Attention
from ligerzoo.layers.exactness import check_exact, mixtures, obstacles
from ligerzoo.layers.invariance import Count, HeadShape, count_attention, count_experts, count_products
from ligerzoo.models import CausalLM
from ligerzoo.train.completion_batches import completion_logps, pack_completions
from ligerzoo.train.completions import SampledCompletion
from ligerzoo.train.data.samples import UNTRAINED, PromptSample, Source

CHECKS = ("products", "attention", "experts", "packed rows", "sampling")
LONGEST_PROMPT, MOST_NEW_TOKENS = 300, 40


def exact_findings(model: CausalLM, placements: int, chance: random.Random) -> Iterator[Finding]:
    """Yields a finding for each of `CHECKS`; for experts only if the model has some."""
    reason = next(obstacles(model), None)
    experts = {repr(layer): layer for layer in mixtures(model)}
    if reason is not None:
        name, expected, got = reason
        for check in CHECKS if experts else (check for check in CHECKS if check != "experts"):
            yield Finding("exact", check, "not covered", f"{name} {got}; expected {expected}")
        return
    yield _finding("products", count_products(weights_by_shape(model), chance))
    yield _finding("attention", *(count_attention(model.lm_head.weight, one, chance) for one in head_shapes(model)))
    if experts:
        yield _finding("experts", count_experts(experts.values(), chance))
    yield _finding("packed rows", count_packed(model, chance))
    try:
        check_exact(model)
    except ValueError as error:
        yield Finding("exact", "sampling", "not covered", str(error))
        return
    yield _finding("sampling", count_placements(model, placements, chance))


def _finding(name: str, *counts: Count) -> Finding:
    fails = any(count.differing for count in counts)
    return Finding("exact", name, "fails" if fails else "holds", "; ".join(map(str, counts)))


def weights_by_shape(model: CausalLM) -> Iterable[Tensor]:
    """Returns a weight of a linear layer, or the head, of each shape."""
    matrices = (weight for name, weight in model.named_parameters() if weight.dim() == 2 and "embed" not in name)
    return {weight.shape: weight for weight in (model.lm_head.weight, *matrices)}.values()


def head_shapes(model: CausalLM) -> list[HeadShape]:
    """Returns the shapes of the model's attention."""
    found = (
        HeadShape(
            part.q_proj.out_features // part.head_dim,
            part.k_proj.out_features // part.head_dim,
            part.head_dim,
            part.scale,
            part.window,
            hasattr(part, "sinks"),
        )
        for part in model.modules()
        if isinstance(part, Attention) and part.head_dim in HEAD_SIZES and part.key_projections
    )
    return list(dict.fromkeys(found))


@torch.no_grad()
def count_packed(model: CausalLM, chance: random.Random, rows: int = 4) -> Count:
    """Compares the logits of packed rows with those of each document alone."""
    differing, total, longest = 0, 0, longest_text(model)
    for _ in range(rows):
        lengths = [1, chance.randint(1, longest)]
        while (left := ROW - sum(lengths)) > 0:
            most = min(left, longest)
            lengths.append(min(most, chance.choice([1, chance.randint(1, 200), chance.randint(1, most)])))
        texts = [random_tokens(model, chance, 1, length).to(model.device) for length in lengths]
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        packed = model(torch.cat(texts, 1), position_ids=positions.to(model.device), exact=True).logits
        for part, text in zip(packed.split(lengths, 1), texts, strict=True):
            total += 1
            differing += not torch.equal(part, model(text, exact=True).logits)
    return Count(differing, total, "documents in packed rows")


@torch.no_grad()
def count_placements(model: CausalLM, placements: int, chance: random.Random) -> Count:
    """Compares log-probabilities of sampled tokens with those that training computes, in random packed rows."""
    differing, tokens, longest = 0, 0, min(LONGEST_PROMPT, longest_text(model) - MOST_NEW_TOKENS)
    completions: list[SampledCompletion] = []
    while len(completions) < placements:
        count = min(placements - len(completions), chance.choice([1, 3, 8, 32]))
        lengths = [chance.randint(1, longest) for _ in range(count)]
        prompts = [random_tokens(model, chance, 1, length)[0].tolist() for length in lengths]
        options = {"max_new_tokens": chance.randint(1, MOST_NEW_TOKENS), "do_sample": True, "use_model_defaults": False}
        found = model.generate_many(prompts, batch_size=chance.randint(1, count), exact=True, **options)
        for one in found:
            prompt, source = prompts[one.index], Source("doctor", len(completions), "row")
            completions.append(
                SampledCompletion(
                    input_ids=prompt + one.tokens,
                    labels=[UNTRAINED] * len(prompt) + one.tokens,
                    source=source,
                    prompt=PromptSample(prompt, {}, source),
                    text="",
                    logps=one.logps,
                    finish_reason=one.finish_reason,
                    advantage=0.0,
                    is_exact=True,
                )
            )
    chance.shuffle(completions)
    rows, length = chance.randint(1, 4), chance.randint(LONGEST_PROMPT + MOST_NEW_TOKENS, ROW)
    for batch in pack_completions(completions, batch_size=rows, seq_length=length, pad_token_id=0):
        logps = completion_logps(model, batch).cpu()
        trained = batch.targets != UNTRAINED
        tokens += int(trained.sum())
        differing += int(((logps != batch.sampler_logps) & trained).sum())
    return Count(differing, tokens, f"log-probabilities of {placements} sampled texts")
