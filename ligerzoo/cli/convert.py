"""The commands `convert` and `fuse`, which write checkpoints."""

from __future__ import annotations

import argparse

from ligerzoo.arguments import expanded_path
from ligerzoo.cli.checkpoints import ModelChoice, find_base_model, find_preprocessor, load_tokenizer, new_directory
from ligerzoo.cli.options import MODEL_HELP, PATH, Subparsers, add_parser, add_shared


def add_convert(subparsers: Subparsers) -> None:
    parser = add_parser(
        subparsers,
        convert,
        "write a checkpoint with other file sizes, another dtype, or ligerzoo's tensor names",
        epilog="""\
examples:
  ligerzoo convert HuggingFaceTB/SmolLM2-135M smollm2                        copy, byte for byte
  ligerzoo convert HuggingFaceTB/SmolLM2-135M smollm2-fp32 --dtype float32
  ligerzoo convert path/to/checkpoint small-files --max-shard-size 500MB
  ligerzoo convert path/to/checkpoint native-names --to native

Also copies the tokenizer and the processor. The model's files appear at once, when all of them are complete.""",
    )
    add_shared(parser, "model", "--revision", "--import")
    parser.add_argument("target", metavar="TARGET", type=expanded_path, help="new or empty directory")
    parser.add_argument(
        "--to", choices=("hf", "native"), default="hf", help="tensor names: Hugging Face's (default) or ligerzoo's"
    )
    add_shared(parser, "--max-shard-size", "--dtype")


def convert(options: argparse.Namespace) -> int:
    """Writes a checkpoint to a new directory."""
    from ligerzoo import hub
    from ligerzoo.hub.auto import load_as_saved

    with new_directory(options.target, "convert") as target:
        preprocessor = find_preprocessor(options.model, options.revision)
        model = load_as_saved(options.model, revision=options.revision, dtype=options.dtype)
        hub.save(model, target, max_shard_size=options.max_shard_size, native=options.to == "native")
        if preprocessor is not None:
            preprocessor.save_pretrained(target)
    return 0


def add_fuse(subparsers: Subparsers) -> None:
    parser = add_parser(
        subparsers,
        fuse,
        "merge a LoRA adapter into its base model",
        epilog="""\
examples:
  ligerzoo fuse meta-llama/Llama-3.2-1B path/to/adapter my-model
  ligerzoo fuse path/to/base org/adapter my-model --max-shard-size 1GB

The adapter has PEFT's files, adapter_config.json and adapter_model.safetensors. The sums are computed in fp32 and
rounded once, to the dtype of the base. Also copies the processor of the base, and the tokenizer and the chat template
of the adapter, or of the base if the adapter has none.""",
    )
    parser.add_argument("base", metavar="BASE", type=PATH, help=MODEL_HELP)
    parser.add_argument("adapter", metavar="ADAPTER", type=PATH, help="directory or hub id of an adapter of PEFT")
    parser.add_argument("output", metavar="OUTPUT", type=expanded_path, help="new or empty directory")
    add_shared(parser, "--import", "--max-shard-size")


def fuse(options: argparse.Namespace) -> int:
    """Merges an adapter into its base model, and writes a checkpoint to a new directory."""
    from ligerzoo.adapters import fuse as fuse_adapter

    with new_directory(options.output, "fuse") as target:
        choice = find_base_model(ModelChoice(options.base, adapter=options.adapter))
        preprocessor = find_preprocessor(choice.model, None)
        tokenizer = None if choice.tokenizer is None else load_tokenizer(choice)
        merged = fuse_adapter(choice.model, str(choice.adapter), target, max_shard_size=options.max_shard_size)
        for one in (preprocessor, tokenizer):
            if one is not None:
                one.save_pretrained(target)
        print(f"{len(merged)} merged weights")
    return 0
