"""Cases: each loss with each of named options, and named oracle over all logits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ligerzoo import losses
from ligerzoo.losses import LossOutput, grpo
from tests.losses import oracles

BATCH, LENGTH, FEATURES, CLASSES = 6, 5, 4, 13
IGNORED = oracles.IGNORED


@dataclass(frozen=True)
class Case:
    """`loss` and `oracle` take hidden states, weight, target, bias, and options of the LM head."""

    name: str
    loss: Callable[..., LossOutput]
    oracle: Callable[..., Tensor]
    divided_by: str = "pairs"
    """What `num_items` counts: pairs, sequences or tokens."""

    def __str__(self) -> str:
        return self.name


def constants(dtype: torch.dtype = torch.float64, device: str = "cpu") -> dict[str, Tensor]:
    """Random constants of sequences and tokens, the same in every call."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    return {
        "ref_logps": 2 * normal(BATCH) - 10,
        "weights": normal(BATCH // 2).abs() + 0.5,
        "sequence_weights": normal(BATCH).abs() + 0.5,
        "desirable": torch.tensor([True, False, True, True, False, False], device=device),
        "advantages": normal(BATCH),
        "token_advantages": normal(BATCH, LENGTH),
        "old": 0.5 * normal(BATCH, LENGTH) - 2.5,
        "ref": 0.5 * normal(BATCH, LENGTH) - 2.5,
        "correction": (0.3 * normal(BATCH, LENGTH)).exp(),
    }


def random_inputs(dtype: torch.dtype = torch.float64, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, bias, target: prompts of several lengths, and one sequence with a single non-ignored token."""
    hidden = torch.randn(BATCH, LENGTH, FEATURES, dtype=torch.float64).to(device, dtype).requires_grad_()
    weight = torch.randn(CLASSES, FEATURES, dtype=torch.float64).to(device, dtype).requires_grad_()
    bias = torch.randn(CLASSES, dtype=torch.float64).to(device, dtype).requires_grad_()
    target = torch.randint(CLASSES, (BATCH, LENGTH), device=device)
    for i, prompt_length in enumerate((1, 0, 3, 2, 1, 4)):
        target[i, :prompt_length] = IGNORED
    target[1, 4] = IGNORED
    return hidden, weight, bias, target


def _oracle_of_logps(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An oracle from a formula of log-probabilities, entropies and targets."""

    def oracle(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **head: Any) -> Tensor:
        return formula(*oracles.logps_of(hidden, weight, target, bias, **head), target)

    return oracle


def _pair_case(
    name: str, function: Callable[..., LossOutput], formula: Callable[[Tensor, Tensor], Tensor],
    arguments: dict[str, Any], average: bool, **options: Any,
) -> Case:  # fmt: skip
    oracle = partial(oracles.pairs, formula=formula, average=average, **arguments)
    return Case(
        name,
        partial(function, **options, **arguments),
        _oracle_of_logps(lambda logps, _, target: oracle(logps, target)),
    )


def _dpo_cases(c: dict[str, Tensor]) -> Iterator[Case]:
    reference = {"ref_logps": c["ref_logps"]}
    for variant, pair_formula in oracles.DPO.items():
        e = {"exo_pair": 0.01, "robust": 0.1}.get(variant, 0.0)
        formula = partial(pair_formula, b=0.3, e=e)
        loss = partial(losses.dpo_loss, variant=variant, beta=0.3, label_smoothing=e)
        yield _pair_case(f"dpo {variant}", loss, formula, reference, variant == "ipo")
    all_arguments = {**reference, "weights": c["weights"], "nll_weight": 0.7}
    smoothed = partial(oracles.DPO["sigmoid"], b=0.2, e=0.1)
    loss = partial(losses.dpo_loss, beta=0.2, label_smoothing=0.1, average_log_prob=True)
    yield _pair_case("dpo with all options", loss, smoothed, all_arguments, True)
    yield _pair_case("dpo without reference", losses.dpo_loss, partial(oracles.DPO["sigmoid"], b=0.1, e=0.0), {}, False)


def _reference_free_cases(c: dict[str, Tensor]) -> Iterator[Case]:
    nll, weights = {"nll_weight": 1.0}, {"weights": c["weights"]}
    for variant in ("sigmoid", "hinge", "ipo"):
        loss = partial(losses.cpo_loss, variant=variant, beta=0.4)
        formula = partial(oracles.DPO[variant], b=0.4, e=0.0)
        yield _pair_case(f"cpo {variant}", loss, formula, nll, variant == "ipo")
    smoothed = partial(oracles.DPO["sigmoid"], b=0.4, e=0.2)
    loss = partial(losses.cpo_loss, beta=0.4, label_smoothing=0.2)
    yield _pair_case("cpo smoothed", loss, smoothed, {"nll_weight": 0.0, **weights}, False)

    def simpo(c: Tensor, r: Tensor, e: float) -> Tensor:
        margin = 2.0 * (c - r) - 0.6
        return -(1 - e) * oracles.log_sigmoid(margin) - e * oracles.log_sigmoid(-margin)

    yield _pair_case("simpo", partial(losses.simpo_loss, gamma=0.6), partial(simpo, e=0.0), {}, True)
    loss = partial(losses.simpo_loss, gamma=0.6, label_smoothing=0.1)
    yield _pair_case("simpo smoothed", loss, partial(simpo, e=0.1), {**weights, "nll_weight": 0.5}, True)
    loss = partial(losses.orpo_loss, beta=0.5)
    yield _pair_case("orpo", loss, oracles.orpo_formula(0.5), nll, True)
    yield _pair_case("orpo without nll", loss, oracles.orpo_formula(0.5), {"nll_weight": 0.0, **weights}, True)


def _kto_cases(c: dict[str, Tensor]) -> Iterator[Case]:
    kl = c["ref_logps"].new_tensor(0.4)
    for variant, kl_argument, z in (("kto", kl, kl), ("kto", None, 0.0), ("apo_zero_unpaired", None, 0.0)):

        def oracle(logps: Tensor, _: Tensor, __: Tensor, z: Any = z) -> Tensor:
            return oracles.kto(logps, c["desirable"], c["ref_logps"], z, 0.3, 1.2, 0.7).mean()

        loss = partial(
            losses.kto_loss, desirable=c["desirable"], ref_logps=c["ref_logps"], kl=kl_argument, variant=variant,
            beta=0.3, desirable_weight=1.2, undesirable_weight=0.7,
        )  # fmt: skip
        name = f"{variant}{'' if kl_argument is None else ' with kl'}"
        yield Case(name, loss, _oracle_of_logps(oracle), "sequences")


def _grpo_cases(c: dict[str, Tensor]) -> Iterator[Case]:
    old, ref = {"old_logps": c["old"]}, {"ref_logps": c["ref"], "beta": 0.2}
    variants = {
        variant: {"variant": variant, **{"cispo": {"epsilon_high": 0.3}, "dr_grpo": {"max_length": 9}}.get(variant, {})}
        for variant in grpo.VARIANTS
    }
    options: list[dict[str, Any]] = [{**variant, **old} for variant in variants.values()]
    options += [{**variant, **ref, "correction": c["correction"]} for variant in variants.values()]
    options += [
        {},
        {**old, "epsilon": 0.1, "epsilon_high": 0.4, "delta": 1.5},
        {**old, **ref, "is_kl_corrected": True},
        {**old, **ref, "is_kl_corrected": True, "variant": "gspo", "delta": 1.4},
        {**old, "entropy_coef": 0.3},
        {**old, "entropy_coef": 0.3, "variant": "gspo"},
        {**old, "level": "sequence", "variant": "dapo"},
        {**old, "level": "token", "variant": "luspo"},
        {**old, "advantages": c["token_advantages"]},
        {**old, "advantages": c["token_advantages"], "variant": "gspo"},
    ]
    for overrides in options:
        arguments = {"advantages": c["advantages"], **overrides}
        named = {k: v for k, v in arguments.items() if k != "advantages"}

        def oracle(
            logps: Tensor, entropy: Tensor, target: Tensor, arguments: dict[str, Any] = arguments
        ) -> Tensor:  # fmt: skip
            return oracles.grpo(logps, entropy, target, **arguments)

        names = [v if isinstance(v, str) else k for k, v in named.items() if k not in ("max_length",)]
        variant = grpo.VARIANTS[named.get("variant", "grpo")]
        loss = partial(losses.grpo_loss, **arguments)
        divided_by = "tokens" if variant.divided_by == "tokens" else "sequences"
        yield Case(f"grpo {' '.join(names)}", loss, _oracle_of_logps(oracle), divided_by)

    def clip(logps: Tensor, entropy: Tensor, target: Tensor) -> Tensor:
        return oracles.grpo(logps, entropy, target, c["token_advantages"], variant="bnpo", entropy_coef=0.1, **old)

    loss = partial(losses.ppo_clip_loss, advantages=c["token_advantages"], entropy_coef=0.1, **old)
    yield Case("ppo", loss, _oracle_of_logps(clip), "tokens")


def cases(dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Case]:
    c = constants(dtype, device)
    return [*_dpo_cases(c), *_reference_free_cases(c), *_kto_cases(c), *_grpo_cases(c)]
