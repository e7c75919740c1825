"""Post-training losses on log-probabilities: preferences, policy gradients and distillation, of hidden states and the
weight of a head, without ever holding all logits.

A file holds a family: its formulas, small functions over a few numbers a token or a row. `objective` is the one sweep
under those over log-probabilities; `modules` makes losses of whole models out of them all.
"""

from ligerzoo.losses.distillation import distillation_loss
from ligerzoo.losses.dpo import dpo_loss
from ligerzoo.losses.grpo import grpo_loss, ppo_clip_loss, sampler_correction
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
from ligerzoo.losses.objective import HeadOptions, LogpOptions, LossOutput
from ligerzoo.losses.reference_free import cpo_loss, orpo_loss, simpo_loss

__all__ = [
    "CPO",
    "DPO",
    "GRPO",
    "KTO",
    "ORPO",
    "Distillation",
    "HeadLoss",
    "HeadOptions",
    "LogpOptions",
    "LossOutput",
    "PPOClip",
    "SimPO",
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
    "sampler_correction",
    "sequence_logps",
    "simpo_loss",
]
