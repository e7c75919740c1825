"""Completions with rewards, which all processes sample and score together."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, TypeVar

from ligerzoo.parallel import failing_together
from ligerzoo.train import processes
from ligerzoo.train.completions import CompletionSampler, SampledCompletion
from ligerzoo.train.data import PromptSample
from ligerzoo.train.rewards import RewardFunction
from ligerzoo.train.sampling_model import SamplingModel
from ligerzoo.train.stopwatch import Stopwatch

SHOWN = 2
"""Completions of an evaluation that are shown."""

T = TypeVar("T")


class Rollouts:
    """Samples completions of prompts and scores them; each process does its share.

    Args:
        sampling_model: the model that samples.
        sample: samples completions of it.
        reward: scores them.
        num_samples: completions of each prompt.
    """

    def __init__(
        self, sampling_model: SamplingModel, sample: CompletionSampler, reward: RewardFunction, num_samples: int
    ) -> None:
        self._sampling_model, self._sample, self._reward = sampling_model, sample, reward
        self._num_samples = num_samples

    def __call__(
        self, prompts: Sequence[PromptSample], seeds: Sequence[int] | None = None, watch: Stopwatch | None = None
    ) -> list[SampledCompletion]:
        """Returns the completions of all prompts with rewards, in order. All processes must call it.

        Args:
            prompts: the same in all processes.
            seeds: a seed for each completion of all prompts; None for greedy ones.
            watch: times "sampling" and "reward" of this process.

        Raises:
            LigerzooError: sampling or the reward function failed in a process; all processes raise.
        """
        count, watch = self._num_samples, watch or Stopwatch(self._sampling_model.model.device)
        own_prompts = share_of(prompts)
        own_seeds = None
        if seeds is not None:
            groups = [seeds[first : first + count] for first in range(0, len(seeds), count)]
            own_seeds = [seed for group in share_of(groups) for seed in group]
        with self._sampling_model.current(), failing_together("sampling and the reward function"):
            with watch.time("sampling"):
                completions = self._sample(own_prompts, own_seeds)
            with watch.time("reward"):
                completions = self._reward(completions)
        return [one for part in processes.gather(completions) for one in part]

    def evaluate(self, prompts: Sequence[PromptSample]) -> dict[str, Any]:
        """Returns what a run logs of an evaluation: mean reward and length of a greedy completion of each prompt."""
        completions = self(prompts)
        rewards, lengths = [one.reward for one in completions], [len(one.tokens) for one in completions]
        decode = self._sample.tokenizer.decode
        shown = [{"prompt": decode(one.prompt.input_ids), "continuation": one.text} for one in completions[:SHOWN]]
        return {
            "eval_reward": statistics.fmean(rewards), "eval_completion_length": statistics.fmean(lengths),
            "eval_truncated": statistics.fmean(one.finish_reason == "length" for one in completions),
            "eval_prompts": len(completions), "samples": shown,
        }  # fmt: skip


def share_of(items: Sequence[T]) -> Sequence[T]:
    """Returns the part of a sequence that this process works on: the parts follow each other by rank."""
    rank, count = processes.rank(), processes.world_size()
    return items[len(items) * rank // count : len(items) * (rank + 1) // count]
