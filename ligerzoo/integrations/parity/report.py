"""What a comparison found: the differences of modules and layers, and what rounding explains."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

ALLOWED = 8.0
"""How many times what an ulp of the inputs changes an error may be: rounding happens within modules, too. For tiny
models of all architectures it is up to 1.3 times."""

ALLOWED_IN_A_TOKEN = 64.0
"""The same for the worst token: up to 3 times for tiny models; where values of a gated delta net cancel, up to 15 on a
CPU and 34 on a GPU."""


@dataclass(frozen=True)
class Difference:
    """How far a tensor is from that of transformers' model.

    Attributes:
        name: the module that computed it; for the input of a module, the module around it.
        what: "output", or the name of the part whose input it is.
        error: mean of the relative errors of the tokens (of their squares, and the root of it).
        rounding: the error that rounding explains.
        worst: the largest relative error of a token.
        worst_rounding: the largest that rounding explains.
    """

    name: str
    what: str
    error: float
    rounding: float
    worst: float
    worst_rounding: float

    @property
    def is_explained(self) -> bool:
        """Whether rounding explains the errors; not if one is NaN."""
        return self._mean_is_explained and self.worst <= ALLOWED_IN_A_TOKEN * self.worst_rounding

    @property
    def _mean_is_explained(self) -> bool:
        return self.error <= ALLOWED * self.rounding

    def as_json(self) -> dict[str, object]:
        """The fields, with None for an error that is not finite, and whether rounding explains it."""
        errors = {name: x if math.isfinite(x) else None for name, x in (("error", self.error), ("worst", self.worst))}
        return {**asdict(self), **errors, "explained": self.is_explained}

    def __str__(self) -> str:
        what = "its output" if self.what == "output" else f"what it passes to {self.what}"
        error, of, rounding = self.error, "", self.rounding
        if self._mean_is_explained and not self.is_explained:
            error, of, rounding = self.worst, " in a token", self.worst_rounding
        return f"{self.name}: {what} has a relative error of {error:.1e}{of}; rounding explains {rounding:.1e}"


@dataclass(frozen=True)
class Parity:
    """The comparison of a model with transformers' model.

    Attributes:
        layers: errors of the embeddings, of the hidden states after each layer and of the logits, when both models run
            unchanged. Errors of a layer are part of all later ones.
        modules: errors of each module for the input of transformers' module, in order of execution.
        skipped: what is not compared: modules with parameters that did not run, such as a vision tower without an
            image; tensors of transformers' modules that ours lack; what the text is too short for, such as a window.
        tokens: of the text.
    """

    layers: tuple[Difference, ...]
    modules: tuple[Difference, ...]
    skipped: tuple[str, ...]
    tokens: int

    @property
    def first(self) -> Difference | None:
        """The first module that differs; the first layer, if none does so alone; None without a difference."""
        differences = (one for one in (*self.modules, *self.layers) if not one.is_explained)
        return next(differences, None)

    def as_json(self) -> dict[str, object]:
        """Returns what `ligerzoo parity --json` prints."""
        return {
            "equal": self.first is None,
            "first": None if self.first is None else self.first.as_json(),
            "layers": [one.as_json() for one in self.layers],
            "modules": [one.as_json() for one in self.modules],
            "skipped": list(self.skipped),
            "tokens": self.tokens,
        }

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.layers)
        lines = [f"{'hidden states after':{width}}  error    of rounding"]
        lines += [f"{row.name:{width}}  {row.error:.1e}  {row.rounding:.1e}" for row in self.layers]
        if self.skipped:
            lines.append(f"not compared: {', '.join(self.skipped)}")
        count = f"{len({row.name for row in self.modules})} modules on {self.tokens} tokens"
        verdict = f"equal up to rounding: {count}" if self.first is None else f"different, of {count}: {self.first}"
        return "\n".join([*lines, verdict])
