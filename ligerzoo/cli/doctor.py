"""The command `doctor`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from ligerzoo.cli.checkpoints import ModelChoice, find_device, load_model, model_name
from ligerzoo.cli.options import AT_LEAST_1, MODEL_HELP, PATH, SEED, Subparsers, add_option, add_parser, add_shared

if TYPE_CHECKING:
    from ligerzoo.models import CausalLM

TEXTS = 200


def add_doctor(subparsers: Subparsers) -> None:
    parser = add_parser(
        subparsers,
        doctor,
        "check on this machine what a model relies on: kernels against fp64, and the bits of exact sampling",
        epilog="""\
examples:
  ligerzoo doctor
  ligerzoo doctor HuggingFaceTB/SmolLM2-135M --dtype bfloat16
  ligerzoo doctor path/to/checkpoint --json

Exits with 1 if a check fails. Without MODEL, 2 layers each of Llama 3.2 1B, Qwen3 8B and Qwen3 30B-A3B are examined,
with random weights; on a CPU, smaller ones. Takes less than two minutes on a GPU. See docs/doctor.md.""",
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", type=PATH, help=MODEL_HELP)
    add_shared(parser, "--revision", "--import", "--dtype", "--device")
    add = partial(add_option, parser)
    add("--placements", AT_LEAST_1, "texts that are sampled exactly, and computed again as in training", TEXTS)
    add("--seed", SEED, "seed of inputs, lengths and prompts", 0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def doctor(options: argparse.Namespace) -> int:
    """Prints what holds on this machine, what fails, and what is not covered."""
    from tqdm import tqdm

    from ligerzoo.doctor import examine

    certificates = []
    for name, model in models_of(options):
        with tqdm(desc=name, unit=" checks", disable=None, leave=False) as progress:
            found = examine(
                model, name, placements=options.placements, seed=options.seed, report=lambda _: progress.update()
            )
        certificates.append(found)
        if not options.json:
            print(found, end="\n\n")
    holds = all(one.holds for one in certificates)
    if options.json:
        print(json.dumps({"holds": holds, "models": [one.as_json() for one in certificates]}))
    return 0 if holds else 1


def models_of(options: argparse.Namespace) -> Iterator[tuple[str, CausalLM]]:
    """Yields names and models: the one of the options, or those that are examined without one."""
    import torch

    from ligerzoo.doctor import default_models

    if options.model is not None:
        yield model_name(options.model), load_model(ModelChoice.of(options)).eval()
        return
    device = find_device(options.device)
    usual = "float32" if device.type == "cpu" else "bfloat16"
    yield from default_models(device, getattr(torch, usual if options.dtype == "auto" else options.dtype))
