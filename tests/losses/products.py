"""Each loss with any combination of its options, and its naive formula.

`OPTIONS` holds the values of the options of each loss. `build_case` draws tensors and returns a loss and its oracle.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo import losses
from ligerzoo.kernels.loss.token_divergence import Divergence
from ligerzoo.losses import LossOutput, dpo, grpo, kto, reference_free
from tests.kernels.oracles import transformed
from tests.losses import oracles
from tests.losses.oracles import IGNORED

Choice = dict[str, Any]
Metrics = dict[str, Tensor]

BOOLEAN = [False, True]
HEAD_OPTIONS: dict[str, list[Any]] = {
    "form": ["function", "module"],
    "input": ["hidden", "logits"],
    "dtype": [torch.float64, torch.float32],
    "backend": ["auto", "torch"],
    "shape": [(6, 5, 4, 13), (2, 1, 3, 2), (4, 9, 16, 300), (8, 3, 5, 7)],  # sequences, tokens, features, classes
    "ignored": ["none", "prompts", "scattered"],
    "tokens_per_chunk": [None, 1, 7, 18],
    "gradients": ["both", "hidden", "weight", "none"],
    "bias": BOOLEAN,
    "softcap": [None, 3.0],
    "logit_scale": [1.0, 0.7],
    "ignore_index": [IGNORED, -1],
    "num_items": [None, 7, 2.5, "tensor"],
}
LOGP_OPTIONS = {**HEAD_OPTIONS, "temperature": [1.0, 1.3]}
PAIR_OPTIONS = {**LOGP_OPTIONS, "beta": [0.1, 0.7], "weights": BOOLEAN, "nll_weight": [0.0, 0.6]}

OPTIONS: dict[str, dict[str, list[Any]]] = {
    "dpo": {
        **PAIR_OPTIONS, "variant": list(dpo.VARIANTS), "is_smoothed": BOOLEAN, "average_log_prob": BOOLEAN,
        "reference": BOOLEAN, "discopop_tau": [0.05, 1.5],
    },
    "cpo": {**PAIR_OPTIONS, "variant": list(reference_free.CPO_VARIANTS), "is_smoothed": BOOLEAN},
    "simpo": {**PAIR_OPTIONS, "gamma": [1.0, 0.3], "is_smoothed": BOOLEAN},
    "orpo": {**PAIR_OPTIONS, "nll_target": BOOLEAN},
    "kto": {
        **LOGP_OPTIONS, "variant": list(kto.VARIANTS), "beta": [0.1, 0.7], "average_log_prob": BOOLEAN,
        "reference": BOOLEAN, "kl": BOOLEAN, "weights": BOOLEAN, "desirable_weight": [1.0, 1.4],
        "undesirable_weight": [1.0, 0.6],
    },
    "grpo": {
        **LOGP_OPTIONS, "variant": list(grpo.VARIANTS), "level": [None, "token", "sequence"], "old": BOOLEAN,
        "reference": [None, "metrics", "loss"], "correction": BOOLEAN, "epsilon": [0.2, 0.05],
        "epsilon_high": [None, 0.4], "delta": BOOLEAN, "is_kl_corrected": BOOLEAN, "entropy": [None, "metrics", 0.3],
        "token_advantages": BOOLEAN, "sapo_temperatures": [(1.0, 1.05), (0.7, 2.0)],
        "vespo_shapes": [((2.0, 3.0), (3.0, 2.0)), ((1.0, 1.5), (2.0, 0.5))],
    },
    "ppo": {**LOGP_OPTIONS, "epsilon": [0.2, 0.05], "entropy": [None, 0.3]},
    "distillation": {
        **HEAD_OPTIONS, "divergence": list(get_args(Divergence)), "beta": [0.5, 0.2, 0.0, 1.0],
        "temperature": [1.0, 1.7], "teacher": ["hidden", "logits"], "teacher_bias": BOOLEAN,
        "teacher_softcap": [None, 2.0], "teacher_logit_scale": [1.0, 1.2], "soft_weight": [1.0, 0.4],
        "hard_weight": [0.0, 0.5],
    },
}  # fmt: skip


@dataclass
class ProductCase:
    """A loss, its inputs and its oracle.

    Attributes:
        loss: takes hidden states (or logits), weight and optionally bias, on the device.
        inputs: these tensors; the weight is None with logits.
        oracle: takes such inputs on the CPU in any dtype, returns loss and metrics.
    """

    loss: Callable[..., LossOutput]
    inputs: list[Tensor | None]
    oracle: Callable[..., tuple[Tensor, Metrics]]


@dataclass
class Draw:
    """Random numbers from a seed: fp64 on the CPU, rounded to the dtype of the choice."""

    choice: Choice
    seed: int
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.batch, self.length, self.features, self.classes = self.choice["shape"]
        self.target = torch.randint(self.classes, (self.batch, self.length), generator=self.generator)
        if self.choice["ignored"] == "prompts":
            for i in range(self.batch):
                self.target[i, : i % self.length] = IGNORED
        elif self.choice["ignored"] == "scattered":
            self.target[self.uniform(self.batch, self.length) < 0.4] = IGNORED

    def normal(self, *shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return drawn.to(self.choice["dtype"]).double()

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64).to(self.choice["dtype"]).double()


def build_case(name: str, choice: Choice, seed: int, device: str) -> ProductCase:
    draw = Draw(choice, seed)
    hidden, weight = draw.normal(draw.batch, draw.length, draw.features), draw.normal(draw.classes, draw.features)
    weight = 1.5 * weight / draw.features**0.5
    inputs: list[Tensor | None] = [hidden, weight.to(choice["dtype"]).double()]
    if choice["input"] == "logits":
        inputs = [(hidden @ weight.T).to(choice["dtype"]).double(), None]
    elif choice["bias"]:
        inputs.append(draw.normal(draw.classes))
    transform = {option: choice[option] for option in ("softcap", "logit_scale")}
    options, formula = BUILDERS[name](draw, choice)
    options |= {**transform, "backend": choice["backend"], "ignore_index": choice["ignore_index"]}
    if name != "distillation":
        options["temperature"] = choice["temperature"]
    target = draw.target.where(draw.target != IGNORED, choice["ignore_index"])
    options = {option: _to_device(value, choice["dtype"], device) for option, value in options.items()}
    if "nll_target" in options:
        options["nll_target"] = options["nll_target"].where(options["nll_target"] != IGNORED, choice["ignore_index"])
    function = getattr(losses, f"{name}_loss" if name != "ppo" else "ppo_clip_loss")
    if choice["form"] == "module":
        module = {"dpo": losses.DPO, "cpo": losses.CPO, "simpo": losses.SimPO, "orpo": losses.ORPO, "kto": losses.KTO,
                  "grpo": losses.GRPO, "ppo": losses.PPOClip, "distillation": losses.Distillation}[name]  # fmt: skip
        loss: Callable[..., LossOutput] = module(**options)
    else:
        loss = partial(function, **options)

    def call(hidden: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> LossOutput:
        biased = {} if bias is None else {"bias": bias}
        return loss(hidden, weight, target.to(device), **biased)

    def oracle(hidden: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> tuple[Tensor, Metrics]:
        logits = transformed(hidden if weight is None else F.linear(hidden, weight, bias), **transform)
        value, metrics = formula(logits)
        if choice["softcap"] is not None:
            metrics = {metric: m for metric, m in metrics.items() if not metric.startswith("logits/")}
        return value, metrics

    requires_grad = {"both": (0, 1, 2), "hidden": (0,), "weight": (1, 2), "none": ()}[choice["gradients"]]
    leaves = [_to_device(t, choice["dtype"], device) for t in inputs]
    for i, tensor in enumerate(leaves):
        if tensor is not None and i in requires_grad:
            tensor.requires_grad_()
    return ProductCase(call, leaves, oracle)


def _to_device(value: Any, dtype: torch.dtype, device: str) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(device, dtype if value.is_floating_point() else None)


Formula = Callable[[Tensor], tuple[Tensor, Metrics]]
"""An oracle that takes scaled and capped logits."""


def _items(choice: Choice) -> Any:
    return torch.tensor(11) if choice["num_items"] == "tensor" else choice["num_items"]


def _like(value: Tensor | None, like: Tensor) -> Tensor | None:
    return None if value is None else value.to(like.dtype)


def _pairs(
    draw: Draw, choice: Choice, formula: Callable[[Tensor, Tensor], Tensor], average: bool, average_rewards: bool,
    options: Choice,
) -> tuple[Choice, Formula]:  # fmt: skip
    """Adds the options and the oracle that all losses of pairs share."""
    n, items, nll_items = draw.batch // 2, _items(choice), None
    weights = draw.uniform(n) + 0.5 if choice["weights"] else None
    reference = 3 * draw.normal(draw.batch) - 8 if choice.get("reference") else None
    nll_target = None
    if choice.get("nll_target"):
        nll_target = draw.target.where(draw.target != IGNORED, draw.uniform(*draw.target.shape).lt(0.5).long() - 1)
        nll_target = nll_target.where(nll_target >= 0, IGNORED)
    if items is not None and choice["nll_weight"]:
        nll_items = 5
    options |= {"beta": choice["beta"], "nll_weight": choice["nll_weight"], "num_items": items}
    optional = {"weights": weights, "ref_logps": reference, "num_nll_items": nll_items, "nll_target": nll_target}
    options |= {option: value for option, value in optional.items() if value is not None}

    def oracle(logits: Tensor) -> tuple[Tensor, Metrics]:
        scaled, ref_logps = logits / choice["temperature"], _like(reference, logits)
        logps, _ = oracles.logps_of_logits(scaled, draw.target)
        nll_targets = draw.target if nll_target is None else nll_target
        nll = oracles.logps_of_logits(scaled, nll_targets)[0], nll_targets
        value = oracles.pairs(
            logps, draw.target, formula, average=average, ref_logps=ref_logps, weights=_like(weights, logits),
            nll_weight=choice["nll_weight"], nll=nll, num_items=items, num_nll_items=nll_items,
        )  # fmt: skip
        metrics = oracles.pair_metrics(
            logps, logits, draw.target, choice["beta"], average=average_rewards, ref_logps=ref_logps
        )
        if choice["nll_weight"]:
            metrics["nll_loss"] = -nll[0][:n].sum() / (nll_targets[:n] != IGNORED).sum().clamp(min=1)
        return value, metrics

    return options, oracle


def _dpo(draw: Draw, choice: Choice) -> tuple[Choice, Formula]:
    variant, e = choice["variant"], 0.0
    if variant == "exo_pair" or (choice["is_smoothed"] and variant in ("sigmoid", "robust")):
        e = 0.1
    formula = partial(oracles.DPO[variant], b=choice["beta"], e=e)
    if variant == "discopop":
        formula = partial(oracles.discopop, b=choice["beta"], tau=choice["discopop_tau"])
    options = {option: choice[option] for option in ("variant", "average_log_prob")}
    if variant == "discopop":
        options["discopop_tau"] = choice["discopop_tau"]
    average = choice["average_log_prob"] or variant == "ipo"
    return _pairs(draw, choice, formula, average, False, {**options, "label_smoothing": e})


def _cpo(draw: Draw, choice: Choice) -> tuple[Choice, Formula]:
    variant = choice["variant"]
    e = 0.1 if choice["is_smoothed"] and variant == "sigmoid" else 0.0
    formula, average = partial(oracles.DPO[variant], b=choice["beta"], e=e), variant == "ipo"
    return _pairs(draw, choice, formula, average, average, {"variant": variant, "label_smoothing": e})


def _simpo(draw: Draw, choice: Choice) -> tuple[Choice, Formula]:
    e, gamma = 0.1 if choice["is_smoothed"] else 0.0, choice["gamma"]

    def formula(c: Tensor, r: Tensor) -> Tensor:
        return oracles.DPO["sigmoid"](c - gamma / choice["beta"], r, choice["beta"], e)

    return _pairs(draw, choice, formula, True, True, {"gamma": gamma, "label_smoothing": e})


def _orpo(draw: Draw, choice: Choice) -> tuple[Choice, Formula]:
    draw.target[:, -1] = draw.target[:, -1].clamp(min=0)  # a completion without tokens has infinite odds
    options, pair_oracle = _pairs(draw, choice, oracles.orpo_formula(choice["beta"]), True, True, {})

    def oracle(logits: Tensor) -> tuple[Tensor, Metrics]:
        value, metrics = pair_oracle(logits)
        logps = oracles.logps_of_logits(logits / choice["temperature"], draw.target)[0]
        p = (logps.sum(-1) / (draw.target != IGNORED).sum(-1)).exp()
        log_odds = (p / (1 - p)).log()
        difference = log_odds[: draw.batch // 2] - log_odds[draw.batch // 2 :]
        metrics["log_odds_chosen"] = difference.mean()
        metrics["log_odds_ratio"] = oracles.log_sigmoid(difference).mean()
        return value, metrics

    return options, oracle


def _kto(draw: Draw, choice: Choice) -> tuple[Choice, Formula]:
    desirable = draw.uniform(draw.batch) < 0.5
    reference = 3 * draw.normal(draw.batch) - 8 if choice["reference"] else None
    weights = draw.uniform(draw.batch) + 0.5 if choice["weights"] else None
    kl = torch.tensor(0.4, dtype=torch.float64) if choice["kl"] and choice["variant"] == "kto" else None
    items = _items(choice)
    names = ("variant", "beta", "average_log_prob", "desirable_weight", "undesirable_weight")
    options = {option: choice[option] for option in names}
    optional = {"ref_logps": reference, "weights": weights, "kl": kl, "num_items": items}
    options |= {"desirable": desirable, **{option: value for option, value in optional.items() if value is not None}}

    def oracle(logits: Tensor) -> tuple[Tensor, Metrics]:
        logps, _ = oracles.logps_of_logits(logits / choice["temperature"], draw.target)
        ref_logps = logits.new_zeros(draw.batch) if reference is None else reference.to(logits.dtype)
        lengths = (draw.target != IGNORED).sum(-1) if choice["average_log_prob"] else None
        z = logits.new_zeros(()) if kl is None else kl.to(logits.dtype)
        sequence_losses = oracles.kto(
            logps, desirable, ref_logps, z, choice["beta"], choice["desirable_weight"], choice["undesirable_weight"],
            lengths,
        )  # fmt: skip
        weighted = sequence_losses if weights is None else sequence_losses * weights.to(logits.dtype)
        value = weighted.sum() / (items or draw.batch)
        return value, {
            **oracles.kto_metrics(logps, logits, draw.target, desirable, ref_logps, choice["beta"]), "kl": z,
        }  # fmt: skip

    return options, oracle


_POLICY_OPTIONS = ("epsilon", "epsilon_high", "delta", "sapo_temperatures", "vespo_shapes", "max_length")
"""Options that only some variants of GRPO use, and refuse elsewhere; below, which."""

_CLIPPED = ("epsilon", "epsilon_high", "delta")
_USED_OPTIONS = {
    "grpo": _CLIPPED, "bnpo": _CLIPPED, "dapo": _CLIPPED, "dr_grpo": (*_CLIPPED, "max_length"), "gspo": _CLIPPED,
    "luspo": _CLIPPED, "cispo": ("epsilon_high",), "sapo": ("sapo_temperatures",), "vespo": ("vespo_shapes",),
}  # fmt: skip


def _grpo(draw: Draw, choice: Choice) -> tuple[Choice, Formula]:
    shape, variant, items = draw.target.shape, choice["variant"], _items(choice)
    advantages = draw.normal(*(shape if choice["token_advantages"] else shape[:1]))
    old = draw.normal(*shape) - 2 if choice["old"] else None
    reference = draw.normal(*shape) - 2 if choice["reference"] else None
    correction = (0.3 * draw.normal(*shape)).exp() if choice["correction"] else None
    epsilon, high = choice["epsilon"], choice["epsilon_high"]
    if variant == "cispo" and high is None:
        high = 0.6
    entropy_coef = choice["entropy"] if isinstance(choice["entropy"], float) else 0.0
    is_kl_corrected = choice["is_kl_corrected"] and choice["reference"] is not None
    scalars: Choice = {
        "variant": variant, "level": choice["level"], "epsilon": epsilon, "epsilon_high": high,
        "delta": 1.7 if choice["delta"] else None, "beta": 0.2 if choice["reference"] == "loss" else 0.0,
        "is_kl_corrected": is_kl_corrected, "max_length": 50, "num_items": items, "entropy_coef": entropy_coef,
        "num_tokens": 9 if items is not None and entropy_coef else None,
        "sapo_temperatures": choice["sapo_temperatures"], "vespo_shapes": choice["vespo_shapes"],
    }  # fmt: skip
    for option in _POLICY_OPTIONS:
        if option not in _USED_OPTIONS[variant]:
            del scalars[option]
    tensors = {"advantages": advantages, "old_logps": old, "ref_logps": reference, "correction": correction}
    options = {**scalars, **tensors, "with_entropy": choice["entropy"] == "metrics"}

    def oracle(logits: Tensor) -> tuple[Tensor, Metrics]:
        logps, entropy = oracles.logps_of_logits(logits / choice["temperature"], draw.target)
        converted: Choice = {name: _like(value, logits) for name, value in tensors.items()}
        value = oracles.grpo(logps, entropy, draw.target, **scalars, **converted)
        metrics = oracles.grpo_metrics(
            logps, entropy, draw.target, converted["advantages"], variant=variant, level=choice["level"],
            old_logps=converted["old_logps"], ref_logps=converted["ref_logps"], epsilon=epsilon,
            epsilon_high=epsilon if high is None else high, is_kl_corrected=is_kl_corrected,
        )  # fmt: skip
        if choice["entropy"] is None:
            del metrics["entropy"]
        return value, metrics

    return options, oracle


def _ppo(draw: Draw, choice: Choice) -> tuple[Choice, Formula]:
    """The case of GRPO, restricted to the options of PPO."""
    fixed = {
        "variant": "bnpo", "level": None, "old": True, "reference": None, "correction": False, "epsilon_high": None,
        "delta": False, "is_kl_corrected": False, "token_advantages": True, "sapo_temperatures": (1.0, 1.05),
        "vespo_shapes": ((2.0, 3.0), (3.0, 2.0)),
    }  # fmt: skip
    grpo_choice = {**choice, **fixed}
    options, oracle = _grpo(draw, grpo_choice)
    names = ("advantages", "old_logps", "epsilon", "entropy_coef", "num_items")
    if options["num_items"] is not None:  # PPO divides the entropy by it too
        items = options["num_items"]
        tensors = {name: options[name] for name in ("advantages", "old_logps")}

        def oracle(logits: Tensor, grpo_oracle: Formula = oracle) -> tuple[Tensor, Metrics]:
            logps, entropy = oracles.logps_of_logits(logits / choice["temperature"], draw.target)
            converted: Choice = {name: _like(value, logits) for name, value in tensors.items()}
            value = oracles.grpo(
                logps, entropy, draw.target, **converted, variant="bnpo", epsilon=choice["epsilon"], num_items=items,
                num_tokens=items, entropy_coef=options["entropy_coef"],
            )  # fmt: skip
            return value, grpo_oracle(logits)[1]

    return {name: options[name] for name in names}, oracle


def _distillation(draw: Draw, choice: Choice) -> tuple[Choice, Formula]:
    teacher_transform = {"softcap": choice["teacher_softcap"], "logit_scale": choice["teacher_logit_scale"]}
    hidden = draw.normal(draw.batch, draw.length, 3)
    weight, bias = draw.normal(draw.classes, 3), draw.normal(draw.classes) if choice["teacher_bias"] else None
    teacher_logits = F.linear(hidden, weight, bias).to(choice["dtype"]).double()
    options: Choice = {
        "teacher_softcap": choice["teacher_softcap"],
        "teacher_logit_scale": teacher_transform["logit_scale"],
    }
    if choice["teacher"] == "logits":
        options |= {"teacher_logits": teacher_logits}
    else:
        options |= {"teacher_hidden": hidden, "teacher_weight": weight, "teacher_bias": bias}
    names = ["divergence", "soft_weight", "hard_weight"]
    names += ["beta"] if choice["divergence"] == "jsd" else []
    names += ["temperature"] if choice["divergence"] != "cosine" else []
    items = _items(choice)
    options |= {**{name: choice[name] for name in names}, "num_items": items}
    mask, divergence = draw.target != IGNORED, choice["divergence"]
    if divergence == "jsd":
        divergence = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(choice["beta"], "jsd")  # the rescaled limits

    def oracle(student: Tensor) -> tuple[Tensor, Metrics]:
        teacher = teacher_logits if choice["teacher"] == "logits" else F.linear(hidden, weight, bias)
        teacher = transformed(teacher.to(student.dtype), **teacher_transform)
        token_losses = oracles.distance(divergence, student, teacher, choice["beta"], choice["temperature"])
        tokens = max(1, int(mask.sum()))
        soft = torch.where(mask, token_losses, 0.0).sum()
        hard = -oracles.logps_of_logits(student, draw.target)[0].sum()
        metrics = {"soft_loss": soft / tokens, "hard_loss": hard / tokens}
        if not choice["hard_weight"]:
            del metrics["hard_loss"]
        return (choice["soft_weight"] * soft + choice["hard_weight"] * hard) / (items or tokens), metrics

    return options, oracle


BUILDERS = {
    "dpo": _dpo, "cpo": _cpo, "simpo": _simpo, "orpo": _orpo, "kto": _kto, "grpo": _grpo, "ppo": _ppo,
    "distillation": _distillation,
}  # fmt: skip
