"""The methods of `ligerzoo train`: the options and the recipe of each. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from ligerzoo.errors import ConfigError
from ligerzoo.mesh_sizes import MeshSizes
from ligerzoo.train.data_options import EncodingOptions, Packing, TooLong, TrainAnswers
from ligerzoo.train.options import (
    Budget,
    Count,
    Fraction,
    Location,
    NotNegative,
    Positive,
    PositiveFraction,
    changeable,
    option,
)
from ligerzoo.train.run_options import BatchOptions, RunOptions, refuse_options

if TYPE_CHECKING:
    from ligerzoo.losses import GRPO, ContrastiveLoss, Distillation, HeadLoss
    from ligerzoo.models.embedding import EmbeddingSettings
    from ligerzoo.models.language_model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class SFTRunOptions(BatchOptions):
    """Pretraining and supervised fine-tuning."""

    model: Location = option(
        "checkpoint in Hugging Face format: a directory or a hub id; with --method pretrain also a config.json, or a "
        "directory without weights, for random weights"
    )
    method: Literal["sft", "pretrain"] = option(
        "sft trains completions and assistant turns, pretrain all tokens of texts", "sft"
    )
    packing: Packing = option(
        "auto: samples share rows without attending to each other, texts as with concatenate; concatenate: texts "
        "attend to those before them in the row; separate: texts attend to themselves only; whole: texts are packed "
        "like samples; none: one sample in a row",
        "auto",
    )
    train_answers: TrainAnswers = option("answers of a conversation that are trained", "all")
    train_on_prompt: bool = option("also train the prompts of completions", False)
    capture: Literal["auto", "on", "off"] = changeable(
        "run steps of small models as CUDA graphs; on: of large ones too, or stop; off: run eagerly", "auto"
    )

    def check_device(self, device_type: str) -> None:
        wrong = self.capture == "on" and device_type != "cuda"
        refuse_options((wrong, "option capture", "needs a GPU", f"device {device_type}"))

    def encoding(self, embedding_rows: int) -> EncodingOptions:
        encoding = super().encoding(embedding_rows)
        return replace(encoding, train_answers=self.train_answers, train_on_prompt=self.train_on_prompt)


def _given(options: RunOptions, names: Sequence[str]) -> dict[str, Any]:
    """Returns the options of a loss that are not None."""
    return {name: value for name in names if (value := getattr(options, name)) is not None}


@dataclass(frozen=True, kw_only=True)
class PreferenceRunOptions(BatchOptions):
    """Preferences."""

    data: tuple[Location, ...] = option(
        "data as for sft, with pairs (prompt, chosen, rejected) or, for kto, with prompt, completion and label"
    )
    method: Literal["dpo", "kto", "orpo", "simpo", "cpo"] = option(
        "the loss, see docs/losses.md; dpo and kto compare with a reference: MODEL before training", "dpo"
    )
    variant: str | None = option(
        "variant of the loss of dpo, kto or cpo, such as ipo (default: sigmoid; for kto: kto)", None
    )
    beta: NotNegative | None = option(
        "strength of the regularization of dpo and kto, weight of the odds ratio of orpo, scale of the rewards of "
        "simpo and cpo (default: 0.1; for simpo: 2)",
        None,
    )
    gamma: NotNegative | None = option("target margin of simpo (default: 1)", None)
    label_smoothing: Fraction | None = option(
        "probability that the labels of a pair are swapped, for dpo, simpo and cpo (default: 0)", None
    )
    nll_weight: NotNegative | None = option(
        "weight of the cross entropy of the chosen completions (default: 0; for orpo and cpo: 1)", None
    )
    desirable_weight: NotNegative | None = option("weight of the desirable completions of kto (default: 1)", None)
    undesirable_weight: NotNegative | None = option("weight of the undesirable completions of kto (default: 1)", None)
    precompute_reference: bool = changeable(
        "compute the reference's log-probabilities of all data before the first step, instead of keeping the reference "
        "in memory",
        False,
    )
    seq_length: Count = option(
        "tokens in a row; both sequences of a pair share a row, with other pairs if they fit", 2048
    )
    lr: Positive = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        needs_reference = self.loss().needs_reference({})
        if self.precompute_reference and (not needs_reference or self.needs_kl):
            reason = "pairs other prompts and completions in each step" if self.needs_kl else "has no reference"
            raise ConfigError(f"method {self.method} {reason}", where="option precompute_reference")

    @property
    def needs_kl(self) -> bool:
        """Whether the loss needs an estimate of the KL divergence from the reference."""
        return self.method == "kto" and self.variant in (None, "kto")

    def loss(self) -> HeadLoss:
        """Returns the loss. Raises ConfigError if an option is out of range, or is not an option of the method."""
        from ligerzoo.losses import CPO, DPO, KTO, ORPO, SimPO

        losses: dict[str, type[HeadLoss]] = {"dpo": DPO, "kto": KTO, "orpo": ORPO, "simpo": SimPO, "cpo": CPO}
        names = ("variant", "beta", "gamma", "label_smoothing", "nll_weight", "desirable_weight", "undesirable_weight")
        try:
            return losses[self.method](**_given(self, names))
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error), where=f"options of method {self.method}") from error


@dataclass(frozen=True, kw_only=True)
class TeacherRunOptions(RunOptions):
    """Teacher."""

    loss_options: ClassVar[tuple[str, ...]] = ("divergence", "beta", "temperature")

    teacher: Location = option("checkpoint of the teacher, with the same tokenizer")
    divergence: Literal["forward_kl", "reverse_kl", "jsd", "tvd", "cosine"] = option(
        "divergence of the student from the teacher: forward_kl covers the teacher's modes, reverse_kl seeks them, jsd "
        "is between",
        "jsd",
    )
    beta: Fraction | None = option("share of the teacher in the mixture of jsd (default: 0.5)", None)
    temperature: Positive | None = option("divides the logits of both models (default: 1)", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.loss()

    def loss(self) -> Distillation:
        """Returns the loss. Raises ConfigError for an option that the divergence does not use."""
        from ligerzoo.losses import Distillation

        try:
            return Distillation(**_given(self, self.loss_options))
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error), where="option divergence") from None


@dataclass(frozen=True, kw_only=True)
class DistillRunOptions(BatchOptions, TeacherRunOptions):
    """Distillation."""

    loss_options: ClassVar[tuple[str, ...]] = (*TeacherRunOptions.loss_options, "hard_weight")

    model: Location = option(
        "checkpoint of the student in Hugging Face format: a directory or a hub id; also a config.json, or a directory "
        "without weights, for random weights"
    )
    method: Literal["distill"] = option(
        "learns from a teacher, on completions, assistant turns or all tokens of texts", "distill"
    )
    hard_weight: NotNegative = option("weight of the cross entropy with the data's tokens, which is added", 0.0)


@dataclass(frozen=True, kw_only=True)
class RolloutRunOptions(RunOptions):
    """Sampling."""

    data: tuple[Location, ...] = option("data as for sft, with prompts")
    prompts: Count = option("prompts in a step, of all processes", 8)
    num_samples: Count = option("completions that are sampled of each prompt", 8)
    max_new_tokens: Count = option("largest number of tokens of a completion", 512)
    temperature: Positive = option("temperature of sampling, which the loss takes into account", 1.0)
    sampling_batch: Count = option("largest number of completions that a process samples at the same time", 256)
    exact: Literal["auto", "on", "off"] = option(
        "whether sampling computes the log-probabilities of training bit for bit; auto: where the model supports it",
        "auto",
    )
    sample_every: Count = changeable(
        "steps between samples in samples.jsonl; those of the first step are always there", 10
    )
    lr: Positive = 1e-6
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    save_every: Count = 100
    activation_budget: Budget = changeable(
        "memory of an update in GiB, within which activations are kept; auto: what the GPU has; none: all are kept",
        "none",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = MeshSizes.parse(self.mesh or "")
        what = "processes that share experts cannot sample different prompts; needs expert=1"
        refuse_options((sizes.expert > 1, "option mesh", what, sizes))
        if self.max_new_tokens + 2 > self.seq_length:
            expected = f"at least {self.max_new_tokens + 2}, for prompts and max_new_tokens={self.max_new_tokens}"
            raise ConfigError("too small", where="option seq_length", got=self.seq_length, expected=expected)

    def encoding(self, embedding_rows: int) -> EncodingOptions:
        return replace(super().encoding(embedding_rows), seq_length=self.seq_length - self.max_new_tokens)


@dataclass(frozen=True, kw_only=True)
class OPDRunOptions(RolloutRunOptions, TeacherRunOptions):
    """On-policy distillation."""

    model: Location = option("checkpoint of the student in Hugging Face format: a directory or a hub id")
    method: Literal["opd"] = option("learns from a teacher, on completions that the student samples", "opd")
    divergence: Literal["reverse_kl", "forward_kl", "jsd", "tvd"] = "reverse_kl"
    temperature: Positive = option("temperature of sampling; also divides the logits of both models in the loss", 1.0)


@dataclass(frozen=True, kw_only=True)
class GRPORunOptions(RolloutRunOptions):
    """Group relative policy optimization."""

    reward: Location = option(
        "Python file with a function `reward`, or FILE.py:NAME, see ligerzoo.train.rewards; or the directory of a "
        "reward model, as --method reward trains it"
    )
    method: Literal["grpo"] = option("name of the recipe", "grpo")
    num_samples: Count = option("completions that are sampled of each prompt, at least 2", 8)
    old_logps: Literal["sampler", "recomputed"] = option(
        "log-probabilities that ratios refer to: those of sampling, or a forward before the update, with truncated "
        "importance weights for the difference",
        "sampler",
    )
    loss_type: Literal["dapo", "grpo", "bnpo", "dr_grpo", "gspo", "luspo", "cispo", "sapo", "vespo"] = option(
        "variant of the loss, see ligerzoo.losses.grpo", "dapo"
    )
    epsilon: Fraction = option("clips ratios below 1 - epsilon", 0.2)
    epsilon_high: Positive | None = option("clips ratios above 1 + epsilon_high (default: epsilon; 4 for cispo)", None)
    beta: NotNegative = option(
        "weight of the KL divergence from the model before training, which is multiplied by the ratio as in TRL", 0.0
    )
    scale_rewards: Literal["group", "batch", "none"] = option(
        "advantages are divided by the standard deviation of the rewards of a group, or of all completions of the step",
        "group",
    )
    mask_truncated: bool = option("do not train completions that reach --max-new-tokens", False)
    iterations: Count = option("updates with the completions of a step", 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_samples < 2:
            remedy = "An advantage compares the completions of a prompt."
            raise ConfigError("too few", where="option num_samples", got=1, expected="at least 2", remedy=remedy)
        self.loss()

    def loss(self) -> GRPO:
        """Returns the loss. Raises ConfigError for an option that the variant does not use."""
        from ligerzoo.losses import GRPO

        given = _given(self, ("temperature", "epsilon", "epsilon_high", "beta"))
        if self.loss_type == "cispo":
            given = {"epsilon_high": 4.0, **given}
        if self.loss_type == "dr_grpo":
            given["max_length"] = self.max_new_tokens
        try:
            return GRPO(variant=self.loss_type, is_kl_corrected=self.beta > 0, **given)
        except ValueError as error:
            raise ConfigError(str(error), where="option loss_type") from None


@dataclass(frozen=True, kw_only=True)
class RewardRunOptions(BatchOptions):
    """Reward models."""

    model: str = option(
        "checkpoint in Hugging Face format: a directory or a hub id, of a language model, which gets a head, or of a "
        "sequence classifier with one label"
    )
    data: tuple[str, ...] = option(
        "file with pairs (prompt, chosen, rejected, and optionally margin); several are one data set"
    )
    method: Literal["reward"] = option("learns which of two completions is preferred, as a reward model", "reward")
    center_weight: NotNegative = option("weight of the squared sum of a pair's rewards, which keeps them near 0", 0.0)
    seq_length: Count = option(
        "tokens in a row; both sequences of a pair share a row, with other pairs if they fit", 2048
    )
    activation_budget: Budget = changeable("none: the memory of a step is not predicted", "none")

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = MeshSizes.parse(self.mesh or "")
        is_divided = max(sizes.context, sizes.tensor, sizes.expert) > 1
        refuse_options((is_divided, "option mesh", "of reward models has the axes replicate and shard only", sizes))

    @property
    def model_class(self) -> type[LanguageModel]:
        from ligerzoo.models import SequenceClassifier

        return SequenceClassifier

    @property
    def model_arguments(self) -> dict[str, Any]:
        return {"num_labels": 1}

    @property
    def new_modules(self) -> tuple[str, ...]:
        return ("score",)


@dataclass(frozen=True, kw_only=True)
class MLMRunOptions(BatchOptions):
    """Masked tokens."""

    model: Location = option(
        "checkpoint of an encoder in Hugging Face format: a directory or a hub id; also a config.json, or a directory "
        "without weights, for random weights"
    )
    method: Literal["mlm"] = option("predicts masked tokens of texts, with an encoder", "mlm")
    data: tuple[Location, ...] = option("data as for sft, with texts")
    mask_fraction: PositiveFraction = option(
        "probability that a token is predicted, at least one in a row; ModernBERT was trained with 0.3", 0.15
    )
    mask_share: Fraction = option("share of the predicted tokens that the model sees as the mask token", 0.8)
    random_share: Fraction = option("share of them that it sees as a random token; others stay unchanged", 0.1)
    seq_length: Count = option("tokens in a row; texts share rows, and longer ones become several", 512)
    batch_size: Count = option("rows in a micro-batch of a process, which are computed as one without padding", 32)

    def __post_init__(self) -> None:
        super().__post_init__()
        both = self.mask_share + self.random_share
        refuse_options((both > 1, "options mask_share and random_share", "are at most 1 together", both))

    @property
    def model_class(self) -> type[LanguageModel]:
        from ligerzoo.models import MaskedLM

        return MaskedLM


_CONTRASTIVE_LOSSES: dict[str, dict[str, object]] = {
    "infonce": {},
    "symmetric": {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
    "gte": {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")},
    "qwen3": {"directions": ("query_to_doc", "query_to_query", "doc_to_doc"), "margin": 0.1},
}


@dataclass(frozen=True, kw_only=True)
class ContrastiveRunOptions(RunOptions):
    """Contrastive learning of embeddings."""

    data: tuple[Location, ...] = option(
        "data as for sft, with pairs (query or anchor, positive) and optional hard negatives (negative, negative_1, "
        "..., negatives)"
    )
    method: Literal["contrastive"] = option("name of the recipe", "contrastive")
    pairs: Count = option("pairs in a step, of all processes; the documents of all are candidates of each query", 128)
    loss_type: Literal["infonce", "symmetric", "gte", "qwen3"] = option(
        "which texts are compared with which: queries with documents; also documents with queries, as CLIP does; all "
        "with all; or as Qwen3-Embedding does",
        "infonce",
    )
    loss_temperature: Positive = option("divides the similarities", 0.05)
    margin: NotNegative | None = option(
        "leave out negatives whose similarity exceeds that of the positive by more: they may be positives (default: "
        "keep all; for qwen3: 0.1)",
        None,
    )
    dims: tuple[Count, ...] | None = option(
        "also train the first N features as embeddings (Matryoshka); give the full size too", None
    )
    pooling: Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"] | None = option(
        "how the hidden states of a text become its embedding (default: as modules.json of MODEL says)", None
    )
    query_prompt: str | None = option("text before each query (default: MODEL's prompt named query)", None)
    document_prompt: str | None = option(
        "text before each document (default: MODEL's prompt named document or passage)", None
    )
    seq_length: Count = option("tokens of a text, at most as many as MODEL takes", 512)
    batch_size: Count = option("texts of --seq-length tokens whose activations exist at a time, in each process", 32)
    too_long: TooLong = option("what happens to texts of more than --seq-length tokens", "truncate")
    special_tokens: Literal["control"] = option("special tokens in texts are control tokens, as in `encode`", "control")
    lora_dropout: Fraction = option("dropout of the updates' inputs", 0.0)
    lr: Positive = 2e-5
    activation_budget: Budget = changeable("none: the memory of a step is not predicted", "none")

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = MeshSizes.parse(self.mesh or "")
        is_divided = max(sizes.context, sizes.tensor, sizes.expert) > 1
        refuse_options((is_divided, "option mesh", "of embedding models has the axes replicate and shard only", sizes))
        self.loss()

    @property
    def model_class(self) -> type[LanguageModel]:
        from ligerzoo.models.embedding import EmbeddingModel

        return EmbeddingModel

    @property
    def model_arguments(self) -> dict[str, Any]:
        return {"pooling": self.pooling}

    @property
    def adapter_dropout(self) -> float:
        return self.lora_dropout

    def encoding(self, embedding_rows: int) -> EncodingOptions:
        return replace(super().encoding(embedding_rows), too_long=self.too_long)

    def prompts_of(self, settings: EmbeddingSettings) -> tuple[str, str]:
        """Returns the prompts of queries and documents, given those of the model."""
        query, document = self.query_prompt, self.document_prompt
        if document is None:
            document = settings.prompts.get("document") or settings.prompts.get("passage")
        return settings.prompts.get("query", "") if query is None else query, document or ""

    def loss(self) -> ContrastiveLoss:
        """Returns the loss. Raises ConfigError for an invalid option."""
        from ligerzoo.losses import ContrastiveLoss

        given = {**_CONTRASTIVE_LOSSES[self.loss_type], "temperature": self.loss_temperature}
        given |= _given(self, ("margin", "dims"))
        return ContrastiveLoss(**given)


class Method(NamedTuple):
    """A method of `ligerzoo train`.

    Attributes:
        module: the module of its recipe, which has a function `main(options)`.
        options: the class of its options.
        records: the kind of records that it trains, if their completions are not all examples to imitate.
    """

    module: str
    options: type[RunOptions]
    records: str | None = None


_PREFERENCE = Method("ligerzoo.train.recipes.preference", PreferenceRunOptions, "preference")
_SFT = Method("ligerzoo.train.recipes.sft", SFTRunOptions)

METHODS = {
    "sft": _SFT,
    "pretrain": _SFT,
    "dpo": _PREFERENCE,
    "kto": _PREFERENCE._replace(records="labelled"),
    **dict.fromkeys(("orpo", "simpo", "cpo"), _PREFERENCE),
    "distill": Method("ligerzoo.train.recipes.distill", DistillRunOptions),
    "grpo": Method("ligerzoo.train.recipes.grpo", GRPORunOptions, "prompt"),
    "opd": Method("ligerzoo.train.recipes.opd", OPDRunOptions, "prompt"),
    "reward": Method("ligerzoo.train.recipes.reward", RewardRunOptions, "preference"),
    "mlm": Method("ligerzoo.train.recipes.mlm", MLMRunOptions),
    "contrastive": Method("ligerzoo.train.recipes.contrastive", ContrastiveRunOptions, "pair"),
}


def methods_for(records: str) -> list[str]:
    """The methods that train this kind of records, if their completions are not all examples to imitate."""
    return [name for name, method in METHODS.items() if method.records == records]


_NO_DEFAULTS = "DEFAULTS: dict[str, Any] = {}\n"


def printed_recipe(method: str, options: Mapping[str, Any]) -> str:
    """Returns the source of a method's recipe with options as its defaults, without importing it."""
    name = METHODS[method].module.rpartition(".")[2]
    source = (Path(__file__).parent / "recipes" / f"{name}.py").read_text(encoding="utf-8")
    lines = "".join(f"    {name!r}: {value!r},\n" for name, value in options.items())
    assert _NO_DEFAULTS in source
    return source.replace(_NO_DEFAULTS, f"DEFAULTS: dict[str, Any] = {{\n{lines}}}\n")
