"""The methods of `ligerzoo train`: the options and the recipe of each. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ligerzoo.train.completion_options import PreferenceRunOptions, RewardRunOptions, SFTRunOptions
from ligerzoo.train.encoder_options import ContrastiveRunOptions, MLMRunOptions
from ligerzoo.train.rollout_options import GRPORunOptions, OPDRunOptions
from ligerzoo.train.run_options import RunOptions
from ligerzoo.train.teacher_options import DistillRunOptions


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
