"""Scores of a model on held-out data: loss, perplexity, accuracy, bits per byte.

The scores are sums over the predicted tokens of each sequence, divided at the end. So they do not depend on how
sequences are packed into rows and batches. The fused head computes them without holding all logits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.linear_cross_entropy import token_statistics
from ligerzoo.models import CausalLM
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.train.data import (
    Batch,
    Kind,
    LabelledSample,
    PackedBatches,
    PreferenceSample,
    Sample,
    open_data,
)
from ligerzoo.train.data.samples import UNTRAINED, TrainedSample
from ligerzoo.train.data.stream import no_samples
from ligerzoo.train.evaluation import evaluating


@dataclass(frozen=True)
class TokenScores:
    """Scores of the predicted tokens of some sequences.

    Attributes:
        sequences: number of sequences.
        tokens: number of predicted tokens: those with a label, except for the first token of a sequence.
        bytes: bytes of the text of these tokens in UTF-8. Special tokens have none.
        loss: mean over the tokens of -log p(token | earlier tokens of the sequence), in nats.
        perplexity: exp(loss).
        token_accuracy: share of the tokens that the model finds the most likely.
        bits_per_byte: loss of all tokens in bits, divided by `bytes`; None without text. Comparable between tokenizers.
    """

    sequences: int
    tokens: int
    bytes: int
    loss: float
    perplexity: float
    token_accuracy: float
    bits_per_byte: float | None


@dataclass(frozen=True)
class PairScores:
    """Scores of preference pairs, by the log-probabilities of the chosen and the rejected completion.

    Attributes:
        pairs: number of pairs.
        accuracy: share of the pairs whose chosen completion has the larger log-probability; a tie counts half.
        accuracy_per_token: the same with log-probabilities divided by the number of tokens.
        margin: mean difference of the log-probabilities, in nats.
    """

    pairs: int
    accuracy: float
    accuracy_per_token: float
    margin: float


@dataclass(frozen=True)
class DataScores:
    """Scores of a model on a data set. `str` gives a table.

    Attributes:
        kind: the kind of the data.
        tokens: token scores by group: "all"; for preference pairs "chosen" and "rejected"; for labelled completions
            "desirable" and "undesirable", without a group that has no sequence.
        pairs: for preference pairs, the scores of pairs.
        dropped: number of records that are not scored: blank lines, and those that are too long.
    """

    kind: Kind
    tokens: dict[str, TokenScores]
    pairs: PairScores | None = None
    dropped: int = 0

    def as_json(self) -> dict[str, Any]:
        """Returns the scores as JSON values: those of the group "all" at the top, others by the name of the group."""
        groups = {name: asdict(scores) for name, scores in self.tokens.items()}
        pairs = {} if self.pairs is None else asdict(self.pairs)
        return {"kind": self.kind, "dropped": self.dropped, **pairs, **groups.pop("all", {}), **groups}

    def __str__(self) -> str:
        lines = [f"records not scored   {self.dropped:,}   too long, or blank"] if self.dropped else []
        if self.pairs is not None:
            lines += [
                f"pairs                {self.pairs.pairs:,}",
                f"accuracy             {self.pairs.accuracy:.4f}   chosen more likely than rejected",
                f"accuracy per token   {self.pairs.accuracy_per_token:.4f}   of mean log-probabilities",
                f"margin               {self.pairs.margin:.4f}   nats, mean difference of log-probabilities",
            ]
        for name, scores in self.tokens.items():
            lines += [] if name == "all" else [f"{name}:"]
            bits = "-" if scores.bits_per_byte is None else f"{scores.bits_per_byte:.4f}"
            lines += [
                f"sequences            {scores.sequences:,}",
                f"predicted tokens     {scores.tokens:,}",
                f"loss                 {scores.loss:.4f}   nats a token",
                f"perplexity           {scores.perplexity:.4f}",
                f"token accuracy       {scores.token_accuracy:.4f}",
                f"bits per byte        {bits}   {scores.bytes:,} bytes of text",
            ]
        return "\n".join(lines)


def score_data(
    model: CausalLM,
    tokenizer: Tokenizer,
    data: Any,
    kind: Kind | str = "auto",
    *,
    seq_length: int,
    batch_size: int = 8,
    progress: bool | None = None,
    **options: Any,
) -> DataScores:
    """Scores a model on held-out data of any kind but "prompt".

    Each sample is scored alone, given its own earlier tokens only. Documents of more than `seq_length` tokens are cut
    into pieces; each begins with the last token of the piece before, so that all tokens are predicted.

    Args:
        model: the model. Evaluated without gradients.
        tokenizer: its tokenizer.
        data: see `ligerzoo.train.data.open_data`.
        kind: see `open_data`.
        seq_length: the most tokens of a sequence, or of the two of a pair together.
        batch_size: rows of `seq_length` tokens in a batch. Changes the time and the memory only.
        progress: whether to show a progress bar on stderr; None if stderr is a terminal.
        options: further options of `open_data`, such as `train_on_prompt=True`, which scores prompts too.

    Raises:
        DataError: as `open_data`, or the data consists of prompts, or no record has a sample.
        LigerzooError: a loss is not a finite number.
    """
    options = {**options, "shuffle": False, "epochs": 1, "embedding_rows": model.input_vocab_size}
    stream = open_data(data, kind, tokenizer, seq_length=seq_length, **options)  # type: ignore[arg-type]
    batches = PackedBatches(stream, batch_size=batch_size, seq_length=seq_length, pad_token_id=0, documents="whole")
    lengths = torch.zeros(model.config.vocab_size, dtype=torch.float64)
    own = torch.tensor(tokenizer.bytes_per_token(), dtype=torch.float64)[: len(lengths)]
    lengths[: len(own)] = own
    lengths = lengths.to(model.device)
    sums: dict[str, Sums] = {}
    pairs: list[tuple[Sums, Sums]] = []
    is_hidden = None if progress is None else not progress
    with evaluating(model), tqdm(desc="evaluating", unit=" tokens", unit_scale=True, disable=is_hidden) as bar:
        for batch in batches:
            scores = iter(_score_segments(model, batch, lengths))
            for sample in itertools.chain.from_iterable(batch.rows):
                named = {group: np.array([1, *next(scores)]) for group in _groups(sample)}
                for group, found in named.items():
                    _refuse_non_finite(found, sample)
                    sums[group] = sums.get(group, np.zeros(5)) + found
                if isinstance(sample, PreferenceSample):
                    pairs.append((named["chosen"], named["rejected"]))
            bar.update(batch.tokens)
    if not sums:
        raise no_samples("option data")
    scored = {group: _token_scores(found) for group, found in sorted(sums.items())}
    return DataScores(stream.kind, scored, _pair_scores(pairs), stream.dropped)


Sums = NDArray[np.float64]
"""(5,): number of sequences, and sums over their predicted tokens: log-probability, correct tokens, tokens, bytes."""


def _token_scores(sums: Sums) -> TokenScores:
    sequences, logp, correct, tokens, nbytes = sums.tolist()
    loss = -logp / max(1.0, tokens)
    perplexity, accuracy = math.exp(min(loss, 700.0)), correct / max(1.0, tokens)
    bits = -logp / math.log(2) / nbytes if nbytes else None
    return TokenScores(int(sequences), int(tokens), int(nbytes), loss, perplexity, accuracy, bits)


def _groups(sample: TrainedSample) -> tuple[str, ...]:
    """Returns the group of each segment of a sample."""
    match sample:
        case Sample():
            return ("all",)
        case PreferenceSample():
            return "chosen", "rejected"
        case LabelledSample():
            return ("desirable" if sample.is_desirable else "undesirable",)


def _score_segments(model: CausalLM, batch: Batch, lengths: Tensor) -> NDArray[np.float64]:
    """Returns (n, 4): log-probability, correct tokens, tokens and bytes of each segment of a batch, in order.

    Args:
        model: the model.
        batch: the batch.
        lengths: (V,) bytes of each token.
    """

    def scores(hidden: Tensor, weight: Tensor, target: Tensor, **head: Any) -> tuple[None, Tensor]:
        found = token_statistics(hidden, weight, target, **head)
        is_predicted = target != UNTRAINED
        is_correct, sizes = (found.argmax == target) & is_predicted, lengths[target.clamp(min=0)] * is_predicted
        columns = (found.logps, is_correct, is_predicted, sizes)
        return None, torch.stack([column.double() for column in columns], -1)

    inputs = {name: tensor.to(model.device, non_blocking=True) for name, tensor in batch.inputs.items()}
    out = model(**inputs, objective=scores, output_router_logits=False)
    per_token: NDArray[np.float64] = out.details.flatten(0, 1).cpu().numpy()
    # Index t scores the prediction of token t + 1, so the last index of a segment is 0; padding is 0, too.
    return np.add.reduceat(per_token, [first for first, _ in batch.segments()])


def _refuse_non_finite(sums: Sums, sample: TrainedSample) -> None:
    if not math.isfinite(sums[1]):
        remedy = "Try --dtype float32; the weights may be damaged."
        raise LigerzooError("the loss is not a finite number", where=sample.source, got=float(-sums[1]), remedy=remedy)


def _pair_scores(pairs: Sequence[tuple[Sums, Sums]]) -> PairScores | None:
    if not pairs:
        return None
    logps, tokens = np.array(pairs)[:, :, 1], np.array(pairs)[:, :, 3]
    differences = np.stack([one[:, 0] - one[:, 1] for one in (logps, logps / tokens)], 1)
    accuracy, per_token = ((np.sign(differences) + 1) / 2).mean(0).tolist()
    return PairScores(len(pairs), accuracy, per_token, float(differences[:, 0].mean()))
