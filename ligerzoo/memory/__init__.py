"""Memory of training: activation plans that fit a budget, and the prediction of a step's memory and work."""

from ligerzoo.kernels.recompute import Recompute
from ligerzoo.memory.plan import ActivationPlan, apply_activation_plan, plan_activations
from ligerzoo.memory.prediction import predict_training
from ligerzoo.memory.simulation import StepMemory, on_meta, simulate_step
from ligerzoo.optimizer_table import LOW_BIT, OPTIMIZERS, check_optimizer
from ligerzoo.training_setting import TrainingSetting

__all__ = [
    "LOW_BIT",
    "OPTIMIZERS",
    "ActivationPlan",
    "Recompute",
    "StepMemory",
    "TrainingSetting",
    "apply_activation_plan",
    "check_optimizer",
    "on_meta",
    "plan_activations",
    "predict_training",
    "simulate_step",
]
