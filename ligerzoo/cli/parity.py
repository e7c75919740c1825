"""The command `parity`."""

from __future__ import annotations

import argparse
import json
import random
from functools import partial
from typing import TYPE_CHECKING

from ligerzoo.checks import TEXT, argument_type
from ligerzoo.cli.checkpoints import ModelChoice, find_device, find_preprocessor, package_of
from ligerzoo.cli.generate import prepare_images
from ligerzoo.cli.options import PATH, Subparsers, add_option, add_parser, add_shared

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_TEXT = """\
The quick brown fox jumps over the lazy dog, 1,234 times in 56 days. def f(x): return [y**2 for y in x if y != 0]
Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 天地玄黃。宇宙洪荒。日月盈昃。辰宿列張。
"""
"""The default text: several scripts, numbers and code."""

RANDOM_TOKENS = 64
"""Number of random tokens for a model without a tokenizer."""


def add_parity(subparsers: Subparsers) -> None:
    parser = add_parser(
        subparsers,
        parity,
        "compare a model with that of another library, module by module, and name the first that differs",
        epilog="""\
examples:
  ligerzoo parity HuggingFaceTB/SmolLM2-135M
  ligerzoo parity path/to/checkpoint --text "Once upon a time" --dtype bfloat16 --device cuda --json
  ligerzoo parity Qwen/Qwen2-VL-2B-Instruct --image cat.png

Loads both models. Exits with 1 if they differ by more than rounding explains. See docs/doctor.md. Needs transformers
(`pip install ligerzoo[integrations]`).""",
    )
    add_shared(parser, "model", "--revision")
    parser.add_argument("--reference", choices=("transformers",), default="transformers", help="the other library")
    add = partial(add_option, parser)
    text = "text to compare on (default: a built-in one; without a tokenizer random tokens)"
    add("--text", argument_type(TEXT), text, metavar="TEXT")
    add("--image", PATH, "image to compare on; may be repeated", metavar="FILE", repeats=True)
    dtypes = ("float32", "bfloat16", "float16")  # norms of transformers are in fp32 in a model of fp64
    parser.add_argument(
        "--dtype", choices=dtypes, default="float32", help="dtype of both models (default: %(default)s)"
    )
    add_shared(parser, "--device")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def parity(options: argparse.Namespace) -> int:
    """Prints how far the hidden states, modules and logits of a model are from those of transformers."""
    import torch

    with package_of("integrations", "transformers", what="the comparison needs", where="--reference"):
        from ligerzoo.integrations.parity import compare

    device, choice = find_device(options.device), ModelChoice.of(options)
    found = compare(
        choice.model,
        find_inputs(choice, DEFAULT_TEXT if options.text is None else options.text, options.image),
        revision=choice.revision,
        dtype=getattr(torch, options.dtype),
        device=device,
    )
    print(json.dumps(found.as_json()) if options.json else found)
    return 0 if found.first is None else 1


def find_inputs(choice: ModelChoice, text: str, images: list[str]) -> dict[str, Tensor]:
    """Returns the model inputs of a text, and images; random tokens for a model without a tokenizer."""
    from ligerzoo.doctor.texts import random_tokens
    from ligerzoo.hub import AutoModel, read_config
    from ligerzoo.vision.processor import tokenizer_of

    if images:
        inputs, _ = prepare_images(text, images, choice)
    elif (preprocessor := find_preprocessor(choice.model, choice.revision)) is not None:
        tokenizer = tokenizer_of(preprocessor)
        inputs = tokenizer([text], return_tensors="pt")
    else:
        model = AutoModel.from_config(read_config(choice.model, revision=choice.revision), device="meta")
        inputs = {"input_ids": random_tokens(model, random.Random(0), 1, RANDOM_TOKENS)}
    return {name: tensor for name, tensor in inputs.items() if name != "attention_mask"}
