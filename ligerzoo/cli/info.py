"""The command `info`."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields

from ligerzoo.checks import POSITIVE, TEXT, argument_type
from ligerzoo.cli.options import MODEL_HELP, PATH, Subparsers, add_option, add_parser, add_shared
from ligerzoo.training_setting import Argument, GPURates, TrainingSetting

_DTYPE = "dtype of the weights (default: that of config.json, or else bfloat16)"
_GPU_MEMORY = "memory of a GPU: also show the setting that fits it (default with several GPUs: 76)"
_MESH = "sizes of the axes, such as 'replicate=64 shard=8' (default: those of the fastest mesh that fits)"

RATES: dict[str, Argument] = {one.name: one.metadata["argument"] for one in fields(GPURates)}
"""The options of --train by the fields of `GPURates`."""

ARGUMENTS: dict[str, Argument] = {
    **{one.name: one.metadata["argument"] for one in fields(TrainingSetting) if one.metadata},
    "mesh": Argument("--mesh", TEXT, "'AXIS=N ...'", _MESH),
    "dtype": Argument("--dtype", TEXT, "DTYPE", _DTYPE),
    "gpu_memory": Argument("--gpu-memory", POSITIVE, "GIB", _GPU_MEMORY),
    **RATES,
}
"""The options of --train, by the arguments of `plan_checkpoint`."""


def add_info(subparsers: Subparsers) -> None:
    parser = add_parser(
        subparsers,
        info,
        "show the architecture, parameters, memory, files and tokenizer of a checkpoint",
        epilog="""\
examples:
  ligerzoo info HuggingFaceTB/SmolLM2-135M
  ligerzoo info path/to/checkpoint
  ligerzoo info path/to/checkpoint --train --batch 4 --seq 8192 --gpu-memory 80
  ligerzoo info path/to/checkpoint --train --batch 1 --seq 4096 --gpus 8 --method lora
  ligerzoo info path/to/checkpoint --train --seq 8192 --gpus 512 --mesh "replicate=64 shard=8"
  ligerzoo info --architectures

Reads the configs, the tokenizer and the headers of the weight files only. With --train, it reads config.json only, and
counts the memory of a training step on an H100 or H200, what GPUs send to each other, and how long that takes; see
docs/memory.md and docs/parallelism.md.""",
        check=check_training,
    )
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("model", metavar="MODEL", nargs="?", type=PATH, help=MODEL_HELP)
    subject.add_argument("--architectures", action="store_true", help="list all supported architectures instead")
    add_shared(parser, "--revision", "--import")
    training = parser.group("training")
    training.add_argument("--train", action="store_true", help="predict the memory and time of training instead")
    training.add_argument("--json", action="store_true", help="print the prediction as JSON")
    for name, one in ARGUMENTS.items():
        kind, choices = str if one.values.parse is str else argument_type(one.values), one.values.choices
        add_option(training, one.flag, kind, one.help, metavar=one.metavar, dest=name, choices=choices or None)


def check_training(options: argparse.Namespace) -> None:
    """Raises SystemExit if an option of --train is given without it, or --train without a model."""
    for name, one in ARGUMENTS.items():
        if getattr(options, name) is not None and not options.train:
            options.parser.error(f"argument {one.flag}: only allowed with --train")
    if options.json and not options.train:
        options.parser.error("argument --json: only allowed with --train")
    if options.lora_rank is not None and options.method == "full":
        options.parser.error("argument --lora-rank: only allowed with --method lora")
    if options.train and options.model is None:
        options.parser.error("argument --train: only allowed with MODEL")


def info(options: argparse.Namespace) -> int:
    """Prints what a checkpoint contains and needs, or what training it needs, or all architectures."""
    from ligerzoo.info import describe, describe_architectures, plan_checkpoint

    if options.train:
        given = {name: value for name in ARGUMENTS if (value := getattr(options, name)) is not None}
        if options.lora_rank is not None:
            given["method"] = "lora"
        rates = GPURates(**{name: given.pop(name) for name in RATES if name in given})
        plan = plan_checkpoint(options.model, revision=options.revision, rates=rates, **given)
        print(json.dumps(plan.as_dict(), indent=1) if options.json else f"{options.model}\n{plan}")
    elif options.architectures:
        print(describe_architectures())
    else:
        print(describe(options.model, revision=options.revision))
    return 0
