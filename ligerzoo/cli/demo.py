"""The command `demo`."""

from __future__ import annotations

import argparse

from ligerzoo.arguments import expanded_path
from ligerzoo.cli.options import SEED, Subparsers, add_parser


def add_demo(subparsers: Subparsers) -> None:
    parser = add_parser(
        subparsers,
        demo,
        "load, run, train, save and check a small model, without network or GPU",
        epilog="""\
examples:
  ligerzoo demo
  ligerzoo demo --text my_module.py
  ligerzoo demo --vision --seed 7

The models are part of the package: a Llama trained on Python's standard library and, with --vision, a Qwen2-VL trained
to describe drawings of shapes and digits. The demo checks each of its steps. The exit code is 1 if a check fails.""",
        check=check_seed,
    )
    subject = parser.add_mutually_exclusive_group()
    subject.add_argument(
        "--text", type=expanded_path, metavar="FILE", help="text to train on, at least about 10,000 characters"
    )
    subject.add_argument(
        "--vision", action="store_true", help="run the demo of a model that reads images (needs Pillow)"
    )
    parser.add_argument("--seed", type=SEED, help="seed of the drawings (with --vision)")


def check_seed(options: argparse.Namespace) -> None:
    """Raises SystemExit if --seed is given without --vision."""
    if options.seed is not None and not options.vision:
        options.parser.error("argument --seed: only allowed with --vision")


def demo(options: argparse.Namespace) -> int:
    """Runs the text demo or the vision demo."""
    from ligerzoo.demo import text, vision

    return vision.run(options.seed) if options.vision else text.run(options.text)
