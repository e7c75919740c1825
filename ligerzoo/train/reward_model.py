"""Reward models: sequence classifiers with one label, their texts in one row, and as the rewards of GRPO."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from ligerzoo import Tokenizer
from ligerzoo.errors import ConfigError, DataError, LigerzooError
from ligerzoo.hub import AutoModelForSequenceClassification
from ligerzoo.models.encoder import EncoderModel
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.models.sequence_classifier import SequenceClassifier
from ligerzoo.train.completions import SampledCompletion
from ligerzoo.train.data.batches import Batch
from ligerzoo.train.data.records import Record
from ligerzoo.train.data.sample_encoder import SampleEncoder
from ligerzoo.train.data.samples import PreferenceSample
from ligerzoo.train.data_options import EncodingOptions
from ligerzoo.train.preferences import samples_of
from ligerzoo.train.rewards import RewardFunction, Score, completion_of
from ligerzoo.train.run import Run


def reward_model(model: LanguageModel) -> SequenceClassifier:
    """Returns a reward model. Raises ConfigError if it is over an encoder, or has several labels."""
    match model:
        case EncoderModel():
            got = "an encoder"
        case SequenceClassifier(num_labels=1):
            return model
        case _:
            got = f"{getattr(model, 'num_labels', 'no')} labels"
    expected = "a decoder with one label"
    raise ConfigError("not a reward model", where=type(model).__name__, got=got, expected=expected)


def open_reward_model(run: Run) -> SequenceClassifier:
    """Opens the model of a run. Its config gets the padding token of the tokenizer, or else the end of a text, as in
    TRL: transformers finds the end of a padded text by it."""
    model, tokenizer = reward_model(run.open_model()), run.tokenizer
    tokens = (tokenizer.pad_token_id, getattr(model.config, "pad_token_id", None), tokenizer.eos_token_id)
    pad_token_id = next((token for token in tokens if token is not None), None)
    model.config = replace(model.config, pad_token_id=pad_token_id)  # type: ignore[type-var]
    return model


def rewards_of(model: SequenceClassifier, texts: Sequence[Sequence[int]]) -> Tensor:
    """Returns the rewards of texts of token ids, (n,), in one row without padding.

    The reward is read at the last token that is not the padding token, as transformers does.
    """
    pad_token_id = getattr(model.config, "pad_token_id", None)
    ends = [max((i + 1 for i, token in enumerate(text) if token != pad_token_id), default=1) for text in texts]
    kept = [text[:end] for text, end in zip(texts, ends, strict=True)]
    ids = torch.tensor([[*chain.from_iterable(kept)]]).to(model.device, non_blocking=True)
    bounds = torch.tensor([0, *accumulate(map(len, kept))])
    logits: Tensor = model(ids, cu_seqlens=bounds).logits
    return logits[:, 0]


def rewards_of_pairs(model: SequenceClassifier, batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns the rewards of the chosen and of the rejected texts of a batch, (n,) each.

    The model also runs for a batch without pairs: the processes of a sharded model run together.
    """
    segments = [segment.input_ids for _, segment in batch.segments()]
    rewards = rewards_of(model, segments or [[0]])[: len(segments)]
    return rewards[::2], rewards[1::2]


def margins_of(batch: Batch) -> Tensor:
    """Returns the margins of the pairs of a batch, (n,) fp32."""
    return torch.tensor([cast(PreferenceSample, sample).margin for sample in samples_of([batch])])


class RewardModel:
    """A reward model as the reward function of GRPO.

    Each text is encoded as in training: the prompt, the completion, and the end of the text.

    Args:
        directory: its checkpoint, with its tokenizer.
        device: where it runs.
        tokens: largest number of tokens that run at a time.
    """

    def __init__(self, directory: Path, device: torch.device, *, tokens: int = 16384) -> None:
        self._directory, self._tokens = directory, tokens
        model = AutoModelForSequenceClassification.from_pretrained(directory, device=device)
        self._model = reward_model(model).requires_grad_(False).eval()
        self._tokenizer = Tokenizer.from_pretrained(directory)
        longest = getattr(model.config, "max_position_embeddings", None) or tokens
        options = EncodingOptions(seq_length=longest, embedding_rows=model.input_vocab_size)
        self._encoders = {kind: SampleEncoder(kind, self._tokenizer, options) for kind in ("completion", "prompt")}

    def __call__(self, completions: Sequence[SampledCompletion]) -> list[SampledCompletion]:
        """Returns the completions with their rewards.

        Raises:
            LigerzooError: a text is longer than the model's positions, or a reward is not a finite number.
        """
        texts = [self._encode(one) for one in completions]
        rewards: list[float] = []
        with torch.no_grad():
            while len(rewards) < len(texts):
                rest = texts[len(rewards) :]
                fitting = sum(total <= self._tokens for total in accumulate(map(len, rest)))
                rewards += rewards_of(self._model, rest[: max(1, fitting)]).float().tolist()
        for one, reward in zip(completions, rewards, strict=True):
            if not math.isfinite(reward):
                what, where = "the reward is not a finite number", f"{self._directory}, for {one.source}"
                raise LigerzooError(what, where=where, got=reward)
        return [replace(one, reward=reward) for one, reward in zip(completions, rewards, strict=True)]

    def _encode(self, completion: SampledCompletion) -> list[int]:
        fields = {**completion.prompt.record, "completion": completion_of(completion)}
        kind = "completion" if completion.text.strip() else "prompt"  # an empty completion is only the end
        [result] = self._encoders[kind].encode([Record(completion.source, fields, lambda data: data)])
        match result:
            case [sample]:
                ids = [*sample.segments[0].input_ids]
            case error:
                raise cast(DataError, error)
        end = self._tokenizer.eos_token_id
        return ids if kind == "completion" or end is None else [*ids, end]


def open_reward(where: str, device: torch.device) -> Score:
    """Returns what gives rewards: a function of a Python file, or the reward model of a directory.

    Raises:
        ConfigError: see `RewardFunction` and `reward_model`.
    """
    return RewardModel(Path(where), device) if Path(where).is_dir() else RewardFunction(where)
