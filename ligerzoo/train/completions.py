"""Samples completions of prompts for methods that train the model on its own."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ligerzoo.generate.options import token_ids
from ligerzoo.models import CausalLM
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.train.data.images import SampleImages
from ligerzoo.train.data.samples import UNTRAINED, PromptSample, Sample
from ligerzoo.train.evaluation import evaluating
from ligerzoo.train.run_data import padding_token


@dataclass(frozen=True, kw_only=True)
class SampledCompletion(Sample):
    """A prompt and one of its completions, which has labels.

    Attributes:
        prompt: the prompt.
        text: text of the completion, without special tokens.
        logps: log-probabilities of its tokens under the distribution that they were sampled from.
        finish_reason: "stop" after an end-of-sequence token, "length" after the largest number of new tokens.
        reward: NaN before the reward function has run.
        advantage: what weights the completion in the loss; NaN before it is computed.
        is_exact: whether `logps` are those of the policy in one forward of the whole text, to the bit.
    """

    prompt: PromptSample
    text: str
    logps: list[float]
    finish_reason: str
    reward: float = math.nan
    advantage: float = math.nan
    is_exact: bool = False

    @property
    def tokens(self) -> list[int]:
        """The new tokens, with the end-of-sequence token."""
        return self.input_ids[len(self.prompt.input_ids) :]


def without_labels(completion: SampledCompletion) -> SampledCompletion:
    """Returns a completion that is not trained."""
    return replace(completion, labels=[UNTRAINED] * len(completion.labels))


class CompletionSampler:
    """Samples completions of prompts, `num_samples` of each; they follow each other.

    Completions have the distribution of the policy itself, whatever generation_config.json says. On a GPU, decode steps
    run as captured CUDA graphs, see `ligerzoo.generate.generate`.

    Args:
        tokenizer: decodes the completions. Its end-of-sequence token ends a completion, and so do those of the model.
        num_samples: completions of each prompt.
        max_new_tokens: largest number of tokens of a completion.
        temperature: divides the logits; None for the most likely tokens, with `num_samples=1`.
        batch_size: largest number of completions that are sampled at the same time, but at least `num_samples`.
        exact: see `generate`; not for prompts with images.
        images: reads the images of prompts; None for text only.

    Attributes:
        tokenizer: the tokenizer.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        *,
        num_samples: int,
        max_new_tokens: int,
        temperature: float | None,
        batch_size: int,
        exact: bool,
        images: SampleImages | None = None,
    ) -> None:
        self._images = images
        self._model, self.tokenizer, self._num_samples = model, tokenizer, num_samples
        self._prompts_at_once = max(1, batch_size // num_samples)
        ends = {*token_ids(model, "eos_token_id", None), tokenizer.eos_token_id} - {None}
        self._ends = torch.tensor(sorted(ends), dtype=torch.int64)
        self._padding, self._temperature = padding_token(tokenizer, model.input_vocab_size), temperature
        self._is_exact = exact
        self._generate = partial(
            model.generate,
            max_new_tokens=max_new_tokens,
            eos_token_id=self._ends.tolist(),
            pad_token_id=self._padding,
            use_model_defaults=False,  # completions have the distribution of the policy itself
            return_dict_in_generate=True,
            **({} if temperature is None else {"do_sample": True, "temperature": temperature}),
        )

    def __call__(self, prompts: Sequence[PromptSample], seeds: Sequence[int] | None = None) -> list[SampledCompletion]:
        """Returns the completions of the first prompt, then those of the second, and so on.

        Args:
            seeds: a seed for each completion, such as those of `completion_seeds`. None draws them from torch's default
                generator of the model's device.
        """
        at_once = self._prompts_at_once
        completions: list[SampledCompletion] = []
        with evaluating(self._model):
            for first in range(0, len(prompts), at_once):
                group = slice(first * self._num_samples, (first + at_once) * self._num_samples)
                own = {} if seeds is None else {"seeds": torch.tensor(seeds[group], dtype=torch.int64)}
                completions += self._complete(prompts[first : first + at_once], own)
        return completions

    def _complete(self, prompts: Sequence[PromptSample], seeds: Mapping[str, Tensor]) -> Iterator[SampledCompletion]:
        longest = max(len(prompt.input_ids) for prompt in prompts)
        ids = torch.full((len(prompts), longest), self._padding)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt.input_ids) :] = torch.tensor(prompt.input_ids)
            mask[row, longest - len(prompt.input_ids) :] = 1
        inputs = {"input_ids": ids, "attention_mask": mask}
        has_images = any(prompt.images for prompt in prompts)
        if has_images:  # `generate` repeats texts only
            assert self._images is not None
            prompts = [prompt for prompt in prompts for _ in range(self._num_samples)]
            inputs = {name: rows.repeat_interleave(self._num_samples, 0) for name, rows in inputs.items()}
            inputs |= self._images.inputs([prompt.segments for prompt in prompts], {"input_ids": inputs["input_ids"]})
        copies = len(ids) * self._num_samples // len(inputs["input_ids"])
        device = self._model.device
        given = {name: tensor.to(device) for name, tensor in {**inputs, **seeds}.items()}
        exact = self._is_exact and not has_images
        out = self._generate(**given, num_return_sequences=copies, exact=exact)
        logps = out.logps if self._temperature in (1, None) else out.sampling_logps
        tokens = out.sequences[:, longest:].cpu()
        is_end = torch.isin(tokens, self._ends)
        ends = is_end.int().argmax(1) + 1
        lengths = ends.where(is_end.any(1), tokens.shape[1]).tolist()
        rows = zip(tokens.tolist(), logps.tolist(), lengths, out.finish_reasons, strict=True)
        for row, (all_tokens, all_logps, length, reason) in enumerate(rows):
            prompt, new = prompts[row // copies], all_tokens[:length]
            yield SampledCompletion(
                input_ids=prompt.input_ids + new,
                labels=[UNTRAINED] * len(prompt.input_ids) + new,
                source=prompt.source,
                images=prompt.images,
                prompt=prompt,
                text=self.tokenizer.decode(new, skip_special_tokens=True),
                logps=all_logps[:length],
                finish_reason=reason,
                is_exact=exact,
            )


def sampling_numbers(completions: Sequence[SampledCompletion]) -> dict[str, float]:
    """Returns what a log shows of sampled completions; see docs/reinforcement-learning.md."""
    lengths = [len(one.tokens) for one in completions]
    return {
        "completion_length": statistics.fmean(lengths),
        "completion_length_max": max(lengths),
        "truncated": statistics.fmean(one.finish_reason == "length" for one in completions),
        "entropy": -sum(sum(one.logps) for one in completions) / sum(lengths),
    }


def completion_seeds(seed: int, step: int, count: int) -> list[int]:
    """Returns the seeds of the completions of a step: they depend on neither processes nor earlier steps."""
    source = random.Random(f"{seed}, {step}")
    return [source.getrandbits(62) for _ in range(count)]
