"""Memory and time of training: activation plans that fit a budget, and the prediction of a step on a mesh of GPUs."""

from ligerzoo.exports import renamed
from ligerzoo.kernels.recompute import Recompute
from ligerzoo.memory.plan import ActivationPlan, apply_activation_plan, plan_activations
from ligerzoo.memory.prediction import TrainingPlan, plan_training, predict_training
from ligerzoo.memory.simulation import StepMemory, on_meta, simulate_step
from ligerzoo.training_setting import GPURates, TrainingSetting

__all__ = [
    "ActivationPlan",
    "GPURates",
    "Recompute",
    "StepMemory",
    "TrainingPlan",
    "TrainingSetting",
    "apply_activation_plan",
    "on_meta",
    "plan_activations",
    "plan_training",
    "predict_training",
    "simulate_step",
]

__getattr__ = renamed(
    __name__, {name: f"ligerzoo.optimizer_table.{name}" for name in ("LOW_BIT", "OPTIMIZERS", "check_optimizer")}
)
