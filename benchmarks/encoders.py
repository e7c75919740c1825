"""Training steps of encoders on texts of many lengths, and embeddings of short texts, against transformers.

    python -m benchmarks.encoders --workloads modernbert_large_mlm
    python -m benchmarks.encoders --workloads 'bert_base_*' --providers ligerzoo 'transformers, sdpa'

A step trains on 64 texts of 64 to 512 tokens with torch's fused AdamW: on the loss of masked tokens (30 %), or on the
contrastive loss of 32 pairs of embeddings, the means of hidden states. All load the same random bf16 weights, without
dropout. ligerzoo packs the texts into a row; if their boundaries are on the GPU, its attention is FlexAttention.
transformers pads the texts to 512 tokens, or gets the packed row with the masks of FlexAttention made before the step;
its ModernBERT computes the head of masked tokens only. "compiled" compiles each layer. Encoding has 4096 texts of 4 to
60 words, and each provider the faster of two batch sizes.

All measurements run in one process after another, in the order of the file. A provider that fails or takes longer than
`--limit` ends its process, and its error is a result. Nothing starts after `--seconds`. The file is written after each
measurement, and keeps earlier ones.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.decoding import DEVICE, clean_up
from benchmarks.measure import compact_json, seconds_per_call
from benchmarks.processes import Json, measured_apart
from benchmarks.row import OURS
from benchmarks.workloads import WorkloadResults, select
from ligerzoo import AutoModelForEmbedding, AutoModelForMaskedLM, models
from ligerzoo.losses import contrastive_loss

GIB, TEMPERATURE, MASKED = 2**30, 0.05, 0.3
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SENTENCE_TRANSFORMERS = "sentence-transformers"

CONFIGS: dict[str, Any] = {
    "modernbert_large": models.ModernBertConfig(
        hidden_size=1024, intermediate_size=2624, num_hidden_layers=28, num_attention_heads=16
    ),
    "bert_base": models.BertConfig(),
    "tiny_modernbert": models.ModernBertConfig(
        vocab_size=96, hidden_size=32, intermediate_size=40, num_hidden_layers=4, num_attention_heads=2,
        sliding_window=8, max_position_embeddings=64, initializer_range=0.2,
    ),
    "tiny_bert": models.BertConfig(
        vocab_size=96, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, initializer_range=0.2,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """Texts, and what is measured with them.

    Attributes:
        model: name of a config in `CONFIGS`.
        task: "mlm" or "embedding", whose steps train, or "encoding".
        texts: their number.
        shortest, longest: tokens of a text, or words.
    """

    model: str
    task: str
    texts: int
    shortest: int
    longest: int

    def lengths(self) -> list[int]:
        draw = random.Random(0)
        return [self.longest, *(draw.randint(self.shortest, self.longest) for _ in range(self.texts - 1))]

    @property
    def tokens(self) -> int:
        """Tokens of all texts, with the two special ones around the words of a text."""
        return sum(self.lengths()) + (2 * self.texts if self.task == "encoding" else 0)


def workloads_of(model: str, batch: tuple[int, int, int], texts: tuple[int, int, int]) -> dict[str, Workload]:
    steps = {f"{model}_{task}": Workload(model, task, *batch) for task in ("mlm", "embedding")}
    return {**steps, f"{model}_encoding": Workload(model, "encoding", *texts)}


WORKLOADS = {
    name: workload
    for model in CONFIGS
    for name, workload in workloads_of(
        model,
        (8, 4, 40) if "tiny" in model else (64, 64, 512),
        (20, 1, 30) if "tiny" in model else (4096, 4, 60),
    ).items()
}


@dataclass(frozen=True)
class Batch:
    """Random texts in a packed row.

    Attributes:
        lengths: tokens of each text.
        ids: (1, n).
        labels: (1, n), -100 for tokens that are not masked.
    """

    lengths: list[int]
    ids: Tensor
    labels: Tensor

    @classmethod
    def of(cls, workload: Workload) -> Batch:
        torch.manual_seed(0)
        lengths = workload.lengths()
        ids = torch.randint(len(SPECIAL), CONFIGS[workload.model].vocab_size, (1, sum(lengths)))
        labels = ids.masked_fill(torch.rand(ids.shape) > MASKED, -100)
        return cls(lengths, ids.to(DEVICE), labels.to(DEVICE))

    @property
    def cu_seqlens(self) -> Tensor:
        """(texts + 1,) boundaries of the texts, on the CPU."""
        return torch.tensor([0, *self.lengths]).cumsum(0)

    def texts(self) -> Tensor:
        """The text of each token, (n,)."""
        return torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths)).to(DEVICE)

    def padded(self, packed: Tensor, value: int) -> Tensor:
        """(1, n) -> (texts, longest)."""
        rows = list(packed[0].split(self.lengths))
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


# Providers of training steps

Loss = Callable[[], Tensor]


def train_ours(checkpoint: Path, workload: Workload, bounds_on: str = "cpu") -> tuple[nn.Module, Loss]:
    batch = Batch.of(workload)
    inputs: dict[str, Any] = {"input_ids": batch.ids, "cu_seqlens": batch.cu_seqlens.to(bounds_on)}
    if workload.task == "mlm":
        masked_lm = AutoModelForMaskedLM.from_pretrained(checkpoint, device=DEVICE)
        return masked_lm, lambda: masked_lm(**inputs, labels=batch.labels).loss
    model = AutoModelForEmbedding.from_pretrained(checkpoint, device=DEVICE)
    return model, lambda: contrastive_loss(*model(**inputs).chunk(2), temperature=TEMPERATURE).loss


@dataclass(frozen=True)
class Transformers:
    """A way to train with transformers.

    Attributes:
        attention: name of its attention.
        packed: whether it gets a packed row, with the masks of texts and windows.
        compiled: whether each layer is compiled.
    """

    attention: str
    packed: bool = False
    compiled: bool = False

    def __call__(self, checkpoint: Path, workload: Workload) -> tuple[nn.Module, Loss]:
        from transformers import AutoModel, AutoModelForMaskedLM

        is_bert = isinstance(CONFIGS[workload.model], models.BertConfig)
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        options: Any = dropout if is_bert else {"sparse_prediction": workload.task == "mlm"}
        if is_bert and workload.task == "embedding":
            options["add_pooling_layer"] = False
        load: Any = (AutoModelForMaskedLM if workload.task == "mlm" else AutoModel).from_pretrained
        model = load(checkpoint, attn_implementation=self.attention, dtype=torch.bfloat16, **options).to(DEVICE)
        if self.compiled:
            torch._dynamo.reset()
            for layer in layers_of(model):
                layer.compile(backend="inductor" if DEVICE == "cuda" else "aot_eager")
        batch = Batch.of(workload)
        inputs = packed_inputs(batch, model.config) if self.packed else padded_inputs(batch)
        if workload.task == "mlm":
            labels = batch.labels if self.packed else batch.padded(batch.labels, -100)
            return model, lambda: model(**inputs, labels=labels).loss
        mean = mean_of_packed(batch) if self.packed else mean_of_padded(inputs["attention_mask"])
        return model, lambda: infonce(mean(model(**inputs).last_hidden_state))


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The layers of an encoder."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return next(layers for layers in lists if len(layers) == model.config.num_hidden_layers)  # type: ignore[union-attr]


def padded_inputs(batch: Batch) -> dict[str, Any]:
    return {
        "input_ids": batch.padded(batch.ids, SPECIAL.index("[PAD]")),
        "attention_mask": batch.padded(torch.ones_like(batch.ids), 0),
    }


def packed_inputs(batch: Batch, config: Any) -> dict[str, Any]:
    """The inputs of a packed row, with the masks of FlexAttention."""
    from torch.nn.attention.flex_attention import create_block_mask

    text, window = batch.texts(), getattr(config, "sliding_window", None)
    positions = torch.cat([torch.arange(length) for length in batch.lengths])[None].to(DEVICE)

    def shares_text(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return text[query] == text[key]

    def is_near(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return shares_text(row, head, query, key) & ((query - key).abs() <= window)

    def block_mask(allowed: Callable[..., Tensor]) -> Any:
        return create_block_mask(allowed, None, None, len(text), len(text), device=DEVICE)

    mask = block_mask(shares_text)
    if window is not None:
        mask = {"full_attention": mask, "sliding_attention": block_mask(is_near)}
    return {"input_ids": batch.ids, "position_ids": positions, "attention_mask": mask}


Pooling = Callable[[Tensor], Tensor]


def mean_of_padded(attention_mask: Tensor) -> Pooling:
    weight = attention_mask[..., None] / attention_mask.sum(1)[:, None, None]
    return lambda hidden: (hidden * weight).sum(1)


def mean_of_packed(batch: Batch) -> Pooling:
    text, lengths = batch.texts(), torch.tensor(batch.lengths, device=DEVICE)[:, None]

    def mean(hidden: Tensor) -> Tensor:
        sums = hidden.new_zeros(len(lengths), hidden.shape[-1], dtype=torch.float32)
        return sums.index_add(0, text, hidden[0].float()) / lengths

    return mean


def infonce(embeddings: Tensor) -> Tensor:
    queries, positives = F.normalize(embeddings, dim=-1).chunk(2)
    return F.cross_entropy(queries @ positives.T / TEMPERATURE, torch.arange(len(queries), device=queries.device))


TRAINERS: dict[str, Callable[[Path, Workload], tuple[nn.Module, Loss]]] = {
    OURS: train_ours,
    "transformers, sdpa": Transformers("sdpa"),
    "transformers, sdpa, compiled": Transformers("sdpa", compiled=True),
    "transformers, flex_attention, packed": Transformers("flex_attention", packed=True),
    "transformers, flex_attention, packed, compiled": Transformers("flex_attention", packed=True, compiled=True),
    f"{OURS}, flex_attention": partial(train_ours, bounds_on=DEVICE),
    "transformers, flex_attention": Transformers("flex_attention"),
    "transformers, eager": Transformers("eager"),
}


def measure_steps(load: Callable[[Path, Workload], tuple[nn.Module, Loss]], checkpoint: Path, of: Workload) -> Json:
    """Measures training steps.

    Returns:
        ms, tokens_per_s: of the median step; padding does not count.
        peak_gib: peak memory, weights and optimizer states included.
        first_loss: the loss before the first step.
    """
    model, loss_of = load(checkpoint, of)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-5, fused=True)

    def step() -> Tensor:
        loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    first_loss = float(step())
    rounds, calls = (3, 4) if DEVICE == "cuda" else (1, 1)
    seconds = seconds_per_call(step, device=DEVICE, warmup=3, rounds=rounds, calls=calls)
    return {"ms": 1e3 * seconds, "tokens_per_s": of.tokens / seconds, **peak(), "first_loss": first_loss}


def peak() -> Json:
    return {"peak_gib": torch.cuda.max_memory_allocated() / GIB if DEVICE == "cuda" else 0.0}


# Providers of embeddings

Encode = Callable[[list[str], int], Tensor]
"""(texts, batch size) -> embeddings."""


def encode_ours(checkpoint: Path) -> Encode:
    model = AutoModelForEmbedding.from_pretrained(checkpoint, device=DEVICE)
    return lambda texts, batch_size: model.encode(texts, batch_size=batch_size)


def encode_theirs(checkpoint: Path) -> Encode:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(checkpoint), device=DEVICE, model_kwargs={"dtype": torch.bfloat16})
    options: dict[str, Any] = {"convert_to_tensor": True, "show_progress_bar": False}
    return lambda texts, batch_size: model.encode(texts, batch_size=batch_size, **options)


ENCODERS: dict[str, Callable[[Path], Encode]] = {OURS: encode_ours, SENTENCE_TRANSFORMERS: encode_theirs}


def measure_encoding(load: Callable[[Path], Encode], checkpoint: Path, workload: Workload) -> Json:
    """Measures embedding of all texts.

    Returns:
        tokens_per_s, texts_per_s: with the faster of the batch sizes.
        batch_size: that one.
        peak_gib: peak memory, weights included.
    """
    encode, draw = load(checkpoint), random.Random(0)
    words = words_of(CONFIGS[workload.model].vocab_size)
    texts = [" ".join(draw.choices(words, k=length)) for length in workload.lengths()]
    seconds = {
        size: seconds_per_call(lambda size=size: encode(texts, size), device=DEVICE, warmup=1, rounds=3, calls=1)  # type: ignore[misc]
        for size in (32, 256)
    }
    fastest = min(seconds, key=lambda size: seconds[size])
    speeds = {"tokens_per_s": workload.tokens / seconds[fastest], "texts_per_s": workload.texts / seconds[fastest]}
    return {**speeds, "batch_size": fastest, **peak()}


# Checkpoints


def words_of(vocab_size: int) -> list[str]:
    return [f"w{number}" for number in range(vocab_size - len(SPECIAL))]


def write_tokenizer(directory: Path, vocab_size: int, max_length: int) -> None:
    """Writes a tokenizer with a token for each word, and [CLS] and [SEP] around a text."""
    from tokenizers import Tokenizer, pre_tokenizers, processors
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {name: number for number, name in enumerate([*SPECIAL, *words_of(vocab_size)])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    around = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=max_length, **names)
    tokenizer.save_pretrained(directory)


def checkpoint_for(workload: Workload, directory: Path) -> Path:
    """Writes random weights, and for embeddings a tokenizer, unless an earlier measurement did."""
    kind = "mlm" if workload.task == "mlm" else "embedding"
    checkpoint, config = directory / f"{workload.model}_{kind}", CONFIGS[workload.model]
    if not checkpoint.exists():
        torch.manual_seed(0)
        auto: Any = AutoModelForMaskedLM if kind == "mlm" else AutoModelForEmbedding
        partial_checkpoint = checkpoint.with_suffix(".partial")
        auto.from_config(config, device=DEVICE, dtype=torch.bfloat16).save_pretrained(partial_checkpoint)
        write_tokenizer(partial_checkpoint, config.vocab_size, config.max_position_embeddings)
        partial_checkpoint.rename(checkpoint)
    return checkpoint


# Measuring


def providers_of(workload: Workload) -> Sequence[str]:
    return tuple(ENCODERS if workload.task == "encoding" else TRAINERS)


@dataclass(frozen=True)
class Start:
    """Measures in a new process, with checkpoints in a directory; see `benchmarks.processes.measured_apart`."""

    directory: Path

    def __call__(self) -> Callable[[tuple[str, str]], Json]:
        return self.measure

    def measure(self, item: tuple[str, str]) -> Json:
        """Measures a workload, by name, with a provider."""
        name, provider = item
        workload = WORKLOADS[name]
        checkpoint = checkpoint_for(workload, self.directory)
        clean_up()
        if workload.task == "encoding":
            return measure_encoding(ENCODERS[provider], checkpoint, workload)
        return measure_steps(TRAINERS[provider], checkpoint, workload)


def measured(
    names: Sequence[str], providers: Sequence[str], seconds: float, limit: float
) -> Iterator[tuple[str, str, Json]]:
    """Yields (workload, provider, result)."""
    items = [(name, one) for name in names for one in providers_of(WORKLOADS[name]) if one in providers]
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as directory:
        for (name, provider), result in measured_apart(Start(Path(directory)), items, limit):
            yield name, provider, result
            if time.monotonic() > deadline:
                return


def facts(workload: str) -> Json:
    """What the report needs to know about a workload."""
    return asdict(WORKLOADS[workload]) | {"tokens": WORKLOADS[workload].tokens}


PROVIDERS = (*TRAINERS, SENTENCE_TRANSFORMERS)
Results = partial(WorkloadResults, workloads=tuple(WORKLOADS), providers=PROVIDERS, facts=facts)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workloads", nargs="+", metavar="NAME", default=[], help=f"names or patterns of {', '.join(WORKLOADS)}"
    )
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=PROVIDERS, help="default: all")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/encoders.json"))
    parser.add_argument("--seconds", type=float, default=90.0, help="nothing starts after this time; default: 90")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of a measurement; default: 60")
    arguments = parser.parse_args(argv)

    results, names = Results(arguments.out), select(arguments.workloads, tuple(WORKLOADS))
    found = measured(names, arguments.providers, arguments.seconds, arguments.limit)
    for workload, provider, result in tqdm(found, unit="measurement"):
        results.add(workload, provider, result)
        tqdm.write(f"{workload}, {provider}: {compact_json(result, 0)}")


if __name__ == "__main__":
    main()
