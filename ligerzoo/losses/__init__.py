"""Post-training losses: preference optimization, policy gradients and distillation.

Every loss takes hidden states and the weight of the LM head, and never holds all logits at once. Given logits work too.

Each family of losses has its file, with the formulas and their papers: `dpo`, `reference_free` (CPO, SimPO, ORPO),
`kto`, `grpo` (with PPO) and `distillation`. `objective` evaluates a loss over log-probabilities chunk by chunk;
`modules` wraps the functions as modules that take a model, and `token_losses` those of `ligerzoo.kernels` over tokens.

`contrastive` has the loss of embeddings, without a head. It never holds all similarities at once. `reward` has that of
reward models, over numbers.
"""

from typing import TYPE_CHECKING

from ligerzoo.exports import renamed
from ligerzoo.losses.contrastive import ContrastiveLoss, contrastive_loss
from ligerzoo.losses.distillation import distillation_loss
from ligerzoo.losses.dpo import dpo_loss
from ligerzoo.losses.grpo import grpo_loss, ppo_clip_loss
from ligerzoo.losses.kto import kto_kl, kto_loss
from ligerzoo.losses.logps import sequence_logps
from ligerzoo.losses.modules import (
    CPO,
    DPO,
    GRPO,
    KTO,
    ORPO,
    Distillation,
    HeadLoss,
    PPOClip,
    SimPO,
    model_sequence_logps,
    model_token_logps,
)
from ligerzoo.losses.objective import LossOutput
from ligerzoo.losses.options import HeadOptions, LogpOptions
from ligerzoo.losses.reference_free import cpo_loss, orpo_loss, simpo_loss
from ligerzoo.losses.reward import reward_loss
from ligerzoo.losses.sampler_ratios import sampler_correction
from ligerzoo.losses.token_losses import (
    CrossEntropyLoss,
    JSDLoss,
    KLDivLoss,
    LinearCrossEntropyLoss,
    LinearJSDLoss,
    LinearKLDivLoss,
    LinearTVDLoss,
    TokenLoss,
    TVDLoss,
)

__all__ = [
    "CPO",
    "DPO",
    "GRPO",
    "KTO",
    "ORPO",
    "ContrastiveLoss",
    "CrossEntropyLoss",
    "Distillation",
    "HeadLoss",
    "HeadOptions",
    "JSDLoss",
    "KLDivLoss",
    "LinearCrossEntropyLoss",
    "LinearJSDLoss",
    "LinearKLDivLoss",
    "LinearTVDLoss",
    "LogpOptions",
    "LossOutput",
    "PPOClip",
    "SimPO",
    "TVDLoss",
    "TokenLoss",
    "contrastive_loss",
    "cpo_loss",
    "distillation_loss",
    "dpo_loss",
    "grpo_loss",
    "kto_kl",
    "kto_loss",
    "model_sequence_logps",
    "model_token_logps",
    "orpo_loss",
    "ppo_clip_loss",
    "reward_loss",
    "sampler_correction",
    "sequence_logps",
    "simpo_loss",
]

if not TYPE_CHECKING:  # a type checker reports a missing name itself
    __getattr__ = renamed(__name__)
