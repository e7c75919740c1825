"""Memory of training: activation plans that fit a budget, and the prediction of a step's memory and work."""

from ligerzoo.exports import renamed
from ligerzoo.kernels.recompute import Recompute
from ligerzoo.memory.plan import ActivationPlan, apply_activation_plan, plan_activations
from ligerzoo.memory.prediction import predict_training
from ligerzoo.memory.simulation import StepMemory, on_meta, simulate_step
from ligerzoo.training_setting import TrainingSetting

__all__ = [
    "ActivationPlan",
    "Recompute",
    "StepMemory",
    "TrainingSetting",
    "apply_activation_plan",
    "on_meta",
    "plan_activations",
    "predict_training",
    "simulate_step",
]

__getattr__ = renamed(
    __name__, {name: f"ligerzoo.optimizer_table.{name}" for name in ("LOW_BIT", "OPTIMIZERS", "check_optimizer")}
)
