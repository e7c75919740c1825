"""Completions of a run with their rewards, in OUTPUT/samples.jsonl.

{"step": 10, "source": "prompts.jsonl:3", "prompt": "...", "completion": "...", "reward": 1.0, "advantage": 0.7,
 "tokens": 25, "finish_reason": "stop"}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.train import processes
from ligerzoo.train.completions import SampledCompletion
from ligerzoo.train.log import cut_log, writing

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
                "reward": one.reward,
                "advantage": one.advantage,
                "tokens": len(one.tokens),
                "finish_reason": one.finish_reason,
            }
            for one in completions
        ]
        if processes.is_main():
            with writing(self._path), self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(entry) + "\n" for entry in entries)

    def describe(self, completions: Sequence[SampledCompletion]) -> str:
        """Returns lines with a prompt, and the completions of it with the highest and the lowest reward."""
        ranked = sorted(completions, key=lambda one: -one.reward)
        prompt = self._tokenizer.decode(ranked[0].prompt.input_ids)[-SHOWN_CHARACTERS:]
        shown = [f"  reward {one.reward:g}: {one.text[:SHOWN_CHARACTERS]!r}" for one in (ranked[0], ranked[-1])]
        return "\n".join([f"{ranked[0].source}: {prompt!r}", *shown])
