"""Options of one request, from JSON that a client or a user wrote."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import torch

from ligerzoo.checks import Values, instances, integer, is_text
from ligerzoo.entries import is_array
from ligerzoo.sampling_options import OFFERS, infer_do_sample
from ligerzoo.serve.fields import Fields, checked

MAX_STOPS, MAX_STOP_LENGTH = 16, 256

_LARGEST = 2**31 - 1


_STOP = Values("", is_text, lambda value: 0 < len(value) <= MAX_STOP_LENGTH)


def _is_stop(value: object) -> bool:
    strings = value if is_array(value) else [value]
    return len(strings) <= MAX_STOPS and all(map(_STOP.accepts, strings))


VALUES: dict[str, Values] = {
    "max_new_tokens": integer(1, _LARGEST),
    **{name: offer.client for name, offer in OFFERS.items()},
    "seed": integer(-(2**63), 2**63 - 1)._replace(expected="an integer of 64 bits"),
    "stop": instances(f"a string, or up to {MAX_STOPS} strings, each with 1 to {MAX_STOP_LENGTH} characters", _is_stop),
}
"""The options of a request, and the values that a client may choose: some bound the time of others."""


class ClientOptions(NamedTuple):
    """Options of one request.

    Attributes:
        given: options of `Scheduler.add`. Those that are left out follow the model's generation_config.json.
        seed: seed of the random numbers. None draws one from torch's default generator.
        stop: the continuation ends with the first of these strings; `Continuation` looks for them.
    """

    given: Mapping[str, Any]
    seed: int | None = None
    stop: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, fields: Fields, names: Mapping[str, str]) -> Self:
        """Reads the options from a JSON object; the fields without an option are not looked at.

        Args:
            fields: the object. A field that is None counts as absent.
            names: the option of each field that is one.

        Raises:
            LigerzooError: the value of a field is invalid.
        """
        given: dict[str, Any] = {}
        for field, name in names.items():
            if (value := fields.get(field)) is not None:
                given[name] = checked(value, field, VALUES[name])
        stop = given.pop("stop", [])
        return cls(given, given.pop("seed", None), tuple(stop if is_array(stop) else [stop]))

    @property
    def max_new_tokens(self) -> int | None:
        """Largest number of new tokens; None leaves it to the caller."""
        return self.given.get("max_new_tokens")

    def updated(self, **given: Any) -> Self:
        """Returns options with other values."""
        return self._replace(given={**self.given, **given})

    def for_scheduler(self, device: torch.device | str, choice: int = 0) -> dict[str, Any]:
        """Returns the keyword arguments of `Scheduler.add`.

        Args:
            device: the model's device.
            choice: index among several continuations of the prompt, each of which has another seed.
        """
        options = infer_do_sample(self.given)
        if self.seed is not None:
            seed = self.seed if choice == 0 else derived_seed(self.seed, choice)
            options["generator"] = torch.Generator(device).manual_seed(seed)
        return options


def derived_seed(seed: int, index: int) -> int:
    """Returns one of many independent seeds, in [0, 2^63)."""
    return random.Random(f"{seed}/{index}").getrandbits(63)
