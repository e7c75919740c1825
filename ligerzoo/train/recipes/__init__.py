"""Recipes: complete, readable training scripts. `ligerzoo train` runs one, and `--print-recipe` prints it to edit."""

from importlib.util import find_spec
from pathlib import Path

RECIPES = {
    "sft": "ligerzoo.train.recipes.sft",
    "pretrain": "ligerzoo.train.recipes.sft",
    **dict.fromkeys(("dpo", "kto", "orpo", "simpo", "cpo"), "ligerzoo.train.recipes.preference"),
    "distill": "ligerzoo.train.recipes.distill",
    "grpo": "ligerzoo.train.recipes.grpo",
}
"""The module of each method of `ligerzoo train`. It has a dataclass `Options` and a function `main(options)`."""


def recipe_source(method: str) -> str:
    """Returns the source of a method's recipe, without importing it."""
    spec = find_spec(RECIPES[method])
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")
