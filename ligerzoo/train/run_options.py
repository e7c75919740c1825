"""The options that recipes have in common. A field's type is checked, and the text below it is its description."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ligerzoo.train.checks import check_batch_combinations, check_combinations
from ligerzoo.train.options import Budget, Count, Fraction, NotNegative, Number, Positive, check_options
from ligerzoo.train.tracking import check_tracker

MAY_CHANGE = {
    "resume", "dry_run", "output", "max_steps", "epochs", "save_every", "keep", "eval_data", "eval_every", "device",
    "tracker", "activation_checkpointing", "activation_budget",
}  # fmt: skip
"""Options that may differ when a run is resumed, with any recipe."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of all recipes."""

    model: str
    """checkpoint in Hugging Face format: a directory or a hub id"""
    data: tuple[str, ...]
    """file with training data, also with images for --method sft; several are one data set"""
    output: str
    """directory for checkpoints, the log and the trained model or adapter"""
    tokenizer: str | None = None
    """checkpoint of the tokenizer (default: MODEL)"""
    chat_template: str | None = None
    """jinja file with the chat template, instead of the tokenizer's; it is saved with the tokenizer"""
    seq_length: Count = 2048
    """tokens in a row"""
    batch_size: Count = 4
    """rows in a micro-batch of a process"""
    max_steps: Count | None = None
    """number of steps; the data is repeated as needed (default: as --epochs)"""
    epochs: Count | None = None
    """times that the data is read, without --max-steps (default: 1)"""
    lora_rank: Count | None = None
    """train low-rank updates of this rank (LoRA) of the frozen weights; --output is a PEFT adapter"""
    lora_alpha: Positive | None = None
    """the updates are scaled by this number / rank (default: twice the rank)"""
    lora_targets: tuple[str, ...] | None = None
    """part of the names of the weights to update, such as q_proj (default: all linear layers of
    the language model's blocks)"""
    dora: bool = False
    """also train the norms of the updated weights' rows (DoRA)"""
    train_only: tuple[str, ...] | None = None
    """part of the names of the parameters to train, such as layers.3, lm_head or visual; others are
    frozen (default: all train, vision towers too)"""
    optimizer: Literal["adamw", "adamw-8bit", "adamw-4bit", "adamw-fp8", "muon"] = "adamw"
    """name of the optimizer"""
    stochastic_rounding: Literal["auto", "on", "off"] = "auto"
    """round bfloat16 weights stochastically, so that no update is lost (default: on for such weights)"""
    lr: Positive = 1e-5
    """peak learning rate"""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """learning rate after the warmup"""
    warmup: Fraction = 0.03
    """share of the steps in which the learning rate rises"""
    weight_decay: NotNegative = 0.0
    """decoupled weight decay"""
    max_grad_norm: NotNegative = 1.0
    """norm to which the gradients of a step are clipped; 0 clips nothing"""
    ema: Fraction | None = None
    """decay of averaged weights, which are evaluated, and saved at the end"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the weights (default: as stored)"""
    mixed_precision: bool = False
    """compute in bfloat16 with weights in float32"""
    activation_budget: Budget = "auto"
    """memory of a step in GiB, within which activations are kept; auto: what the GPU has; none: all are kept"""
    activation_checkpointing: bool = False
    """recompute each block in backward instead of keeping its activations: less memory, more time"""
    eval_data: tuple[str, ...] | None = None
    """file with evaluation data"""
    eval_every: Count = 100
    """steps between evaluations"""
    save_every: Count = 500
    """steps between checkpoints; the last step is always saved"""
    keep: Count = 2
    """number of checkpoints to keep"""
    resume: bool = False
    """continue the run in the output directory, if any, bit for bit"""
    special_tokens: Literal["text", "control"] = "text"
    """what special tokens mean that are written in texts and messages: their characters, or control tokens"""
    seed: Number = 0
    """seed of the order of the data and of random weights"""
    device: str | None = None
    """cpu, cuda or cuda:1 (default: the first GPU, else cpu)"""
    tracker: Literal["tensorboard", "wandb"] | None = None
    """also send the log to TensorBoard or Weights & Biases"""
    dry_run: bool = False
    """read all data, print the plan and three samples with the trained tokens in colour, and train nothing"""

    def __post_init__(self) -> None:
        check_options(self)
        check_combinations(self)
        check_tracker(self.tracker)


@dataclass(frozen=True, kw_only=True)
class BatchOptions(RunOptions):
    """Options of recipes whose batches come from the data, in a fixed number for each step."""

    too_long: Literal["error", "truncate", "drop"] = "error"
    """what happens to samples of more than --seq-length tokens"""
    accumulate: Count = 1
    """micro-batches in a step, to train large batches in little memory"""
    lora_dropout: Fraction = 0.0
    """dropout of the updates' inputs"""
    optimizer_in_backward: bool = False
    """update each weight in backward and free its gradient; needs --max-grad-norm 0"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_batch_combinations(self)
