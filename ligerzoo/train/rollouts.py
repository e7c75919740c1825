"""Completions, which all processes sample and score together. Some are written to OUTPUT/samples.jsonl.

{"step": 10, "source": "prompts.jsonl:3", "prompt": "...", "completion": "...", "reward": 1.0, "advantage": 0.7,
 "tokens": 25, "finish_reason": "stop"}
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from ligerzoo.convert import architecture_for_config
from ligerzoo.errors import ConfigError
from ligerzoo.layers.exactness import exact_obstacle
from ligerzoo.models import CausalLM
from ligerzoo.parallel import failing_together, unsharded
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.train import processes
from ligerzoo.train.completion_batches import CompletionBatch, pack_completions
from ligerzoo.train.completions import (
    CompletionSampler,
    SampledCompletion,
    completion_seeds,
    sampling_numbers,
)
from ligerzoo.train.data import PromptSample
from ligerzoo.train.data.images import SampleImages
from ligerzoo.train.log import cut_log, writing
from ligerzoo.train.rewards import Score
from ligerzoo.train.rollout_options import RolloutRunOptions
from ligerzoo.train.run import Run
from ligerzoo.train.run_data import RunPrompts, padding_token
from ligerzoo.train.throughput import Stopwatch

SHOWN = 2
"""Completions of an evaluation that are shown."""

T = TypeVar("T")


class SamplingModel:
    """Gives a model that trains the form in which it samples.

    One process samples with the model itself or, in mixed precision, with a copy in bfloat16, whose decode steps can
    run as CUDA graphs without autocast. Several processes gather the whole model in the dtype in which they compute,
    so that each samples alone, and free it afterwards.

    Args:
        model: the model that trains.
        mixed_precision: whether it computes in bfloat16 with weights in float32.

    Attributes:
        model: the model that samples.
    """

    def __init__(self, model: CausalLM, *, mixed_precision: bool) -> None:
        self._source, self._is_sharded = model, processes.world_size() > 1
        self._is_copy = mixed_precision and not self._is_sharded
        self.model: CausalLM = _in_bfloat16(model) if self._is_copy else model

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """In this context, `model` has the current weights and can sample. All processes must enter it."""
        if self._is_sharded:
            with unsharded(self.model):
                yield
            self.model.release_decode_graphs()  # they read the gathered weights, which are freed
            return
        if self._is_copy:
            with torch.no_grad():
                for own, source in zip(_tensors(self.model), _tensors(self._source), strict=True):
                    own.copy_(source)
        yield


def _in_bfloat16(model: CausalLM) -> CausalLM:
    """Returns a copy in bfloat16 without gradients, but for the parameters that loading keeps in fp32."""
    copied = copy.deepcopy(model).requires_grad_(False).bfloat16()
    keeps_fp32 = architecture_for_config(type(model.config)).keeps_fp32
    for name, weight in model.named_parameters():
        if keeps_fp32(name):
            copied.get_parameter(name).data = weight.detach().clone()
    return copied


def _tensors(model: CausalLM) -> Iterator[Tensor]:
    return chain(model.parameters(), model.buffers())


class Rollouts:
    """Samples completions of prompts; each process does its share. Prints whether their log-probabilities are exact.

    Args:
        score: returns the completions of this process with rewards; None without rewards.
        images: reads the images of prompts; None for text only.

    Attributes:
        watch: times "sampling" and "reward" of the last prompts, in this process.

    Raises:
        ConfigError: Exact sampling is asked for, and the model or its device does not support it.
    """

    watch: Stopwatch

    def __init__(
        self,
        run: Run,
        options: RolloutRunOptions,
        score: Score | None = None,
        images: SampleImages | None = None,
    ) -> None:
        self._run, self._options, self._score, self._images = run, options, score, images
        self._model = SamplingModel(run.model, mixed_precision=options.mixed_precision)
        self._samples = SampleLog(run.output, run.tokenizer)
        if not options.dry_run:
            self._samples.cut(run.state.step)
        obstacle = self._exact_obstacle()
        if options.exact == "on" and obstacle is not None:
            raise ConfigError(obstacle, where="option exact", got="on", remedy="Use --exact auto.")
        processes.say(f"Log-probabilities of sampling are {'exact' if obstacle is None else f'not exact: {obstacle}'}")
        sampler = partial(
            CompletionSampler,
            self._model.model,
            run.tokenizer,
            max_new_tokens=options.max_new_tokens,
            batch_size=options.sampling_batch,
            exact=obstacle is None,
            images=images,
        )
        self._sample = sampler(num_samples=options.num_samples, temperature=options.temperature)
        self._sample_greedily = sampler(num_samples=1, temperature=None)

    def _exact_obstacle(self) -> str | None:
        """Returns why sampling does not compute the log-probabilities of the update to the bit; None if it does.

        All processes must call it.
        """
        if self._options.exact == "off":
            return "--exact off"
        if self._options.mixed_precision:
            return "--mixed-precision computes in bfloat16 under autocast; expected --dtype bfloat16"
        if processes.data_ranks() < processes.world_size():
            return "--mesh divides the rows or layers of an update; expected whole ones, as with shard"
        with self._model.current():
            return exact_obstacle(self._model.model)

    def show(self, data: RunPrompts) -> None:
        """Prints completions of the first prompt of the training, in a dry run."""
        processes.say(self._samples.describe(self(data.first(1), step=1)))

    def __call__(self, prompts: Sequence[PromptSample], step: int) -> list[SampledCompletion]:
        """Returns the completions of all prompts of a step, in order.

        All processes must call it.

        Args:
            prompts: the same in all processes.
            step: number of the step, which the seeds of the completions depend on.

        Raises:
            LigerzooError: Sampling or the reward function failed in a process; all processes raise.
        """
        count = self._options.num_samples
        seeds = completion_seeds(self._options.seed, step, len(prompts) * count)
        groups = share_of([seeds[first : first + count] for first in range(0, len(seeds), count)])
        return self._roll_out(self._sample, prompts, [seed for group in groups for seed in group])

    def _roll_out(
        self, sample: CompletionSampler, prompts: Sequence[PromptSample], seeds: Sequence[int] | None
    ) -> list[SampledCompletion]:
        self.watch = Stopwatch(self._model.model.device)
        what = "sampling" if self._score is None else "sampling and the reward function"
        with self._model.current(), failing_together(what):
            with self.watch.time("sampling"):
                completions = sample(share_of(prompts), seeds)
            if self._score is not None:
                with self.watch.time("reward"):
                    completions = self._score(completions)
        return [one for part in processes.gather_tokens(completions) for one in part]

    def write(self, step: int, completions: Sequence[SampledCompletion]) -> None:
        """Writes the completions of a step to the file of samples and prints two, every `sample_every` steps."""
        if step == 1 or step % self._options.sample_every == 0:
            self._samples.write(step, completions)
            self._run.log.say(self._samples.describe(completions[: self._options.num_samples]))

    def pack(self, completions: Sequence[SampledCompletion]) -> list[CompletionBatch]:
        """Returns the batches of this process, of those completions that are trained; see `pack_completions`."""
        options, run = self._options, self._run
        return pack_completions(
            [one for one in completions if one.trained_tokens],
            batch_size=options.batch_size,
            seq_length=options.seq_length,
            pad_token_id=padding_token(run.tokenizer, run.model.input_vocab_size),
            images=self._images,
        )

    def evaluate(
        self,
        prompts: Sequence[PromptSample],
        numbers_of: Callable[[list[SampledCompletion]], Mapping[str, float]],
    ) -> dict[str, object]:
        """Returns what a run logs of an evaluation with a greedy completion of each prompt.

        All processes must call it.

        Args:
            numbers_of: returns numbers of the completions of all processes by name, such as their mean reward.
        """
        completions = self._roll_out(self._sample_greedily, prompts, None)
        sampled = sampling_numbers(completions)
        numbers = {**numbers_of(completions), **{name: sampled[name] for name in ("completion_length", "truncated")}}
        shown = [
            {"prompt": self._run.tokenizer.decode(one.prompt.input_ids), "continuation": one.text}
            for one in completions[:SHOWN]
        ]
        return {
            **{f"eval_{name}": number for name, number in numbers.items()},
            "eval_prompts": len(completions),
            "samples": shown,
        }


def share_of(items: Sequence[T]) -> Sequence[T]:
    """Returns the part of a sequence that this process works on: the parts follow each other by rank."""
    rank, count = processes.token_rank(), processes.token_ranks()
    return items[len(items) * rank // count : len(items) * (rank + 1) // count]


SAMPLES_FILE = "samples.jsonl"
SHOWN_CHARACTERS = 300
"""Characters of the end of a prompt, and of the beginning of a completion, in a printed line."""


class SampleLog:
    """Writes completions of some steps to a file.

    Args:
        output: directory of the run. A file of the same run is continued.
        tokenizer: decodes the prompts.
    """

    def __init__(self, output: Path, tokenizer: Tokenizer) -> None:
        self._path, self._tokenizer = output / SAMPLES_FILE, tokenizer

    def cut(self, step: int) -> None:
        """Deletes the completions of later steps in an existing file, which a run that continues samples again."""
        if processes.is_main():
            cut_log(self._path, step)

    def write(self, step: int, completions: Sequence[SampledCompletion]) -> None:
        """Appends completions of a step to the file."""
        entries = [
            {
                "step": step,
                "source": str(one.source),
                "prompt": self._tokenizer.decode(one.prompt.input_ids),
                "completion": one.text,
                **({} if math.isnan(one.reward) else {"reward": one.reward, "advantage": one.advantage}),
                "tokens": len(one.tokens),
                "finish_reason": one.finish_reason,
            }
            for one in completions
        ]
        if processes.is_main():
            with writing(self._path), self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(entry) + "\n" for entry in entries)

    def describe(self, completions: Sequence[SampledCompletion]) -> str:
        """Returns lines with a prompt, and the completions of it with the highest and the lowest reward.

        Of completions without rewards, it shows the first and the last one.
        """
        ranked = completions
        if not math.isnan(completions[0].reward):
            ranked = sorted(completions, key=lambda one: -one.reward)
        prompt = self._tokenizer.decode(ranked[0].prompt.input_ids)[-SHOWN_CHARACTERS:]
        shown = [
            f"  {'completion' if math.isnan(one.reward) else f'reward {one.reward:g}'}: {one.text[:SHOWN_CHARACTERS]!r}"
            for one in (ranked[0], ranked[-1])[: len(ranked)]
        ]
        return "\n".join([f"{ranked[0].source}: {prompt!r}", *shown])
