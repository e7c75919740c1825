"""The options that recipes have in common, in groups. This module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ligerzoo.checks import one_of
from ligerzoo.errors import ConfigError, raise_all
from ligerzoo.mesh_sizes import MeshSizes
from ligerzoo.optimizer_table import OPTIMIZER_NAMES
from ligerzoo.train.data_options import EncodingOptions, TooLong
from ligerzoo.train.options import (
    Budget,
    Count,
    Fraction,
    Location,
    NotNegative,
    Positive,
    Seed,
    changeable,
    check_options,
    option,
)

if TYPE_CHECKING:
    from ligerzoo.models.language_model import LanguageModel

LARGEST_WARMUP_OF_WSD = 0.9
"""The decay takes the last tenth of the steps."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Model."""

    model: Location = option("checkpoint in Hugging Face format: a directory or a hub id")
    import_: tuple[Location, ...] | None = changeable(
        "Python file or module that is imported first, which may register own model classes; may be repeated",
        None,
    )
    tokenizer: Location | None = option("checkpoint of the tokenizer (default: MODEL)", None)
    chat_template: Location | None = option(
        "jinja file with the chat template, instead of the tokenizer's; it is saved with the tokenizer", None
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option("dtype of the weights (default: as stored)", "auto")
    mixed_precision: bool = option("compute in bfloat16 with weights in float32", False)
    device: str | None = changeable("cpu, cuda or cuda:1 (default: the first GPU, else cpu)", None)
    mesh: str | None = changeable(
        'processes along each axis of parallelism, such as "replicate=2 shard=4" (default: shard = all processes)', None
    )


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Data."""

    data: tuple[Location, ...] = option(
        "training data: a file, directory or pattern, a saved dataset, or org/name:split of the hub, see docs/data.md; "
        "several are one data set, or have weights: a.jsonl:0.7 b.csv:0.3"
    )
    map: tuple[str, ...] | None = option("columns by our names of fields, such as prompt=question", None)
    eval_data: tuple[Location, ...] | None = changeable("evaluation data", None)
    eval_every: Count = changeable("steps between evaluations", 100)
    seq_length: Count = option("tokens in a row", 2048)
    batch_size: Count = option("rows in a micro-batch of a process", 4)
    special_tokens: Literal["text", "control"] = option(
        "what special tokens mean that are written in texts and messages: their characters, or control tokens", "text"
    )
    seed: Seed = option("seed of the order of the data and of random weights", 0)


@dataclass(frozen=True, kw_only=True)
class ParameterOptions:
    """Adapters, and which parameters train."""

    lora_rank: Count | None = option(
        "train low-rank updates of this rank (LoRA) of the frozen weights; --output is a PEFT adapter", None
    )
    lora_alpha: Positive | None = option("the updates are scaled by this number / rank (default: twice the rank)", None)
    lora_targets: tuple[str, ...] | None = option(
        "part of the names of the weights to update, such as q_proj (default: all linear layers of the language "
        "model's blocks)",
        None,
    )
    dora: bool = option("also train the norms of the updated weights' rows (DoRA)", False)
    train_only: tuple[str, ...] | None = option(
        "part of the names of the parameters to train, such as layers.3, lm_head or visual; others are frozen "
        "(default: all train, vision towers too)",
        None,
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """Optimizer."""

    optimizer: Annotated[str, one_of(OPTIMIZER_NAMES)] = option("name of the optimizer", "adamw")
    stochastic_rounding: Literal["auto", "on", "off"] = option(
        "round bfloat16 weights stochastically, so that no update is lost (default: on for such weights)", "auto"
    )
    lr: Positive = option("peak learning rate", 1e-5)
    schedule: Literal["constant", "linear", "cosine", "wsd"] = option("learning rate after the warmup", "cosine")
    warmup: Fraction = option("share of the steps in which the learning rate rises", 0.03)
    weight_decay: NotNegative = option("decoupled weight decay", 0.0)
    max_grad_norm: NotNegative = option("norm to which the gradients of a step are clipped; 0 clips nothing", 1.0)
    ema: Fraction | None = option("decay of averaged weights, which are evaluated, and saved at the end", None)


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Memory."""

    activation_budget: Budget = changeable(
        "memory of a step in GiB, within which activations are kept; auto: what the GPU has; none: all are kept", "auto"
    )
    activation_checkpointing: bool = changeable(
        "recompute each block in backward instead of keeping its activations: less memory, more time", False
    )


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Steps, checkpoints and the log."""

    output: Location = changeable("directory for checkpoints, the log and the trained model or adapter")
    max_steps: Count | None = changeable("number of steps; the data is repeated as needed (default: as --epochs)", None)
    epochs: Count | None = changeable("times that the data is read, without --max-steps (default: 1)", None)
    save_every: Count = changeable("steps between checkpoints; the last step is always saved", 500)
    keep: Count = changeable("number of checkpoints to keep", 2)
    resume: bool = changeable("continue the run in the output directory, if any, bit for bit", False)
    tracker: Literal["tensorboard", "trackio", "wandb"] | None = changeable(
        "also send the log to TensorBoard, Trackio or Weights & Biases", None
    )
    dry_run: bool = changeable(
        "read all data, print the plan and three samples with the trained tokens in colour, and train nothing", False
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions(StepOptions, MemoryOptions, OptimizerOptions, ParameterOptions, DataOptions, ModelOptions):
    """Options of all recipes."""

    def __post_init__(self) -> None:
        check_options(self)
        MeshSizes.parse(self.mesh or "")
        recomputes = self.mixed_precision or self.activation_checkpointing
        adapter_options = self.lora_alpha, self.adapter_dropout, self.lora_targets, self.dora
        refuse_options(
            (self.max_steps and self.epochs, "options max_steps and epochs", "only one of them may be given", None),
            (self.mixed_precision and self.dtype != "float32", "option mixed_precision", "needs dtype=float32",
             f"dtype={self.dtype}"),
            (any(adapter_options) and not self.lora_rank, "option lora_rank",
             "is needed by the other options of adapters", None),
            (self.lora_rank and self.train_only, "options lora_rank and train_only", "only one of them may be given",
             None),
            (self.device == "meta", "option device", "has no memory for weights", self.device),
            (self.ema == 1, "option ema", "is the decay of averaged weights, which would never change", self.ema),
            (recomputes and self.activation_budget not in ("auto", "none"), "option activation_budget",
             "excludes mixed_precision and activation_checkpointing", self.activation_budget),
            (self.schedule == "wsd" and self.warmup > LARGEST_WARMUP_OF_WSD, "option warmup",
             f"leaves no steps for the decay of schedule wsd; at most {LARGEST_WARMUP_OF_WSD} does", self.warmup),
        )  # fmt: skip

    def check_device(self, device_type: str) -> None:
        """Raises ConfigError if an option needs another type of device."""

    @property
    def model_arguments(self) -> dict[str, Any]:
        """Arguments of its `from_pretrained`."""
        return {}

    def rows_of_step(self, data_ranks: int) -> int | None:
        """Returns the rows of a step in all processes; None if they depend on the completions."""
        return None

    def micro_batches(self, rows: int, data_ranks: int) -> int | None:
        """Returns the gradient accumulation that gives a step this many rows; None if they depend on the completions.

        Raises:
            ConfigError: None does.
        """
        return None

    @property
    def model_class(self) -> type[LanguageModel]:
        """The class of the model that trains."""
        from ligerzoo.models import CausalLM

        return CausalLM

    @property
    def new_modules(self) -> tuple[str, ...]:
        """Modules that MODEL may lack, which get random weights. With adapters they train in full."""
        return ()

    @property
    def adapter_dropout(self) -> float:
        """Dropout of the inputs of adapters."""
        return 0.0

    @property
    def updates_in_backward(self) -> bool:
        """Whether weights are updated in backward."""
        return False

    def encoding(self, embedding_rows: int) -> EncodingOptions:
        """Returns how records become samples, for a model with this many tokens."""
        return EncodingOptions(
            seq_length=self.seq_length, special_tokens=self.special_tokens, embedding_rows=embedding_rows
        )


@dataclass(frozen=True, kw_only=True)
class BatchOptions(RunOptions):
    """Batches."""

    too_long: TooLong = option("what happens to samples of more than --seq-length tokens", "error")
    accumulate: Count = option("micro-batches in a step, to train large batches in little memory", 1)
    lora_dropout: Fraction = option("dropout of the updates' inputs", 0.0)
    optimizer_in_backward: bool = option(
        "update each weight in backward and free its gradient; needs --max-grad-norm 0", False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        where = "option optimizer_in_backward"
        refuse_options(
            (self.optimizer_in_backward and self.max_grad_norm, where,
             "needs max_grad_norm=0, since gradients do not exist at one time", f"max_grad_norm={self.max_grad_norm}"),
            (self.optimizer_in_backward and self.accumulate > 1, where, "needs accumulate=1",
             f"accumulate={self.accumulate}"),
        )  # fmt: skip

    def rows_of_step(self, data_ranks: int) -> int | None:
        return data_ranks * self.batch_size * self.accumulate

    def micro_batches(self, rows: int, data_ranks: int) -> int:
        accumulate, rest = divmod(rows, data_ranks * self.batch_size)
        if not accumulate or rest:
            what = "the rows of a step do not divide among the processes"
            got = f"{rows} rows, and {data_ranks} processes of {self.batch_size} rows"
            remedy = f"Choose a number of processes and a --batch-size whose product divides {rows}."
            raise ConfigError(what, where="option batch_size", got=got, remedy=remedy)
        return replace(self, accumulate=accumulate).accumulate  # refused by an optimizer in backward

    @property
    def adapter_dropout(self) -> float:
        return self.lora_dropout

    @property
    def updates_in_backward(self) -> bool:
        return self.optimizer_in_backward

    def encoding(self, embedding_rows: int) -> EncodingOptions:
        return replace(super().encoding(embedding_rows), too_long=self.too_long)


def refuse_options(*cases: tuple[Any, str, str, Any]) -> None:
    """Raises ConfigError for each case that is wrong: (whether it is wrong, where, what, got)."""
    raise_all(ConfigError(what, where=where, got=got) for is_wrong, where, what, got in cases if is_wrong)


def given_options(options: RunOptions, names: Sequence[str]) -> dict[str, Any]:
    """Returns the options with these names that are not None, such as those of a loss."""
    return {name: value for name in names if (value := getattr(options, name)) is not None}
