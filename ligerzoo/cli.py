"""The command line interface `ligerzoo`: parses arguments, calls the library, prints.

torch takes seconds to import. So each command imports what it needs, and help and argument errors appear at once.

Exit codes: 0 success, 1 failure, 2 invalid arguments, 130 interrupted, 141 the output pipe was closed.
"""

import argparse
import contextlib
import io
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ligerzoo import __version__
from ligerzoo.errors import LigerzooError, did_you_mean

if TYPE_CHECKING:
    import torch

    from ligerzoo.models import CausalLM
    from ligerzoo.text.conversation import Conversation
    from ligerzoo.text.tokenizer import Tokenizer

    Inputs = dict[str, torch.Tensor]
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

Command = Callable[[argparse.Namespace], int]

MODEL_HELP = 'checkpoint in Hugging Face format: a directory, or a hub id such as "org/name"'


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: the command line without the program name. None uses `sys.argv`.

    Returns:
        The exit code.

    Raises:
        SystemExit: with code 2 if the arguments are invalid, with code 0 after --help and --version.
    """
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115  (None if closed; print would use stdout)
    debug = False
    try:
        try:
            options = parse(arguments)
            debug = options.debug
            prepare_streams()
            code: int = options.run(options)
            return code
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # keeps the last flush from failing
        return 141
    except Exception as error:
        if debug:
            raise
        is_expected = isinstance(error, LigerzooError | OSError)
        problem = str(error) if is_expected else f"{type(error).__name__}: {error} (use --debug for the traceback)"
        print("ligerzoo: error:", " ".join(problem.split()), file=sys.stderr)
        return 1


def prepare_streams() -> None:
    """Sets the error handlers of the standard streams, for text that is invalid in the terminal's encoding.

    Raises:
        LigerzooError: standard output is closed.
    """
    if sys.stdout is None:
        raise LigerzooError("standard output is closed", remedy="Redirect it to /dev/null to discard it.")
    if isinstance(sys.stdout, io.TextIOWrapper):  # replaces what the terminal cannot encode
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):  # the tokenizer refuses invalid text
        sys.stdin.reconfigure(errors="surrogateescape")


def standard_input() -> TextIO:
    """Returns standard input; raises LigerzooError if it is closed."""
    if sys.stdin is None:
        raise LigerzooError(
            "standard input is closed", remedy="Pass the text with --prompt, or redirect a file or pipe."
        )
    return sys.stdin


def info(options: argparse.Namespace) -> int:
    """Prints what a checkpoint contains and needs, or all architectures."""
    from ligerzoo.info import describe, describe_architectures

    print(describe_architectures() if options.architectures else describe(options.model, revision=options.revision))
    return 0


def generate(options: argparse.Namespace) -> int:
    """Prints a prompt and its continuation, or the answer to a question about images."""
    prompt = standard_input().read() if options.prompt == "-" else options.prompt
    inputs, tokenizer = prepare_images(prompt, options) if options.image else prepare_text(prompt, options)
    model = load_model(options)
    print_continuation(
        model, tokenizer, inputs, options, random_generator(model, options), skip_prompt=bool(options.image)
    )
    return 0


def chat(options: argparse.Namespace) -> int:
    """Answers the lines of standard input."""
    from ligerzoo.text.conversation import Conversation
    from ligerzoo.vision.processor import Processor, load_processor_or_tokenizer

    loaded = load_processor_or_tokenizer(options.model, revision=options.revision)
    tokenizer, processor = (loaded.tokenizer, loaded) if isinstance(loaded, Processor) else (loaded, None)
    conversation = Conversation(tokenizer, processor, system=options.system)
    for file in options.image:
        conversation.add_image(file)
    model = load_model(options)
    generator = random_generator(model, options)
    images = " /image FILE adds an image to the next question." if conversation.reads_images else ""
    for line in input_lines("Ctrl-D ends the conversation." + images):
        command, _, file = line.partition(" ")
        if command == "/image":
            add_image(file.strip(), conversation)
        else:
            inputs = conversation.ask(line)
            conversation.add_answer(print_continuation(model, tokenizer, inputs, options, generator))
    return 0


def convert(options: argparse.Namespace) -> int:
    """Writes a checkpoint to a new directory."""
    from ligerzoo import hub
    from ligerzoo.files.locate import locate_files
    from ligerzoo.vision.processor import load_processor_or_tokenizer

    target: Path = options.target
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        remedy = "Choose another directory; convert never overwrites files."
        raise LigerzooError("already exists", where=target, expected="a new or empty directory", remedy=remedy)
    preprocessor = None
    if (locate_files(options.model, ["tokenizer.json"], revision=options.revision) / "tokenizer.json").exists():
        preprocessor = load_processor_or_tokenizer(options.model, revision=options.revision)
    model = hub.AutoModel.from_pretrained(options.model, revision=options.revision, dtype=options.dtype)
    hub.save(model, target, max_shard_size=options.max_shard_size, native=options.to == "native")
    if preprocessor is not None:
        preprocessor.save_pretrained(target)
    size = sum(path.stat().st_size for path in target.iterdir())
    print(f"{target}: {len(list(target.iterdir()))} files, {size:,} bytes")
    return 0


def demo(options: argparse.Namespace) -> int:
    """Runs the text demo or the vision demo."""
    if options.vision:
        from ligerzoo.demo import vision as demo_vision

        return demo_vision.run(options.seed)
    from ligerzoo.demo.text import run

    return run(options.text)


def load_model(options: argparse.Namespace) -> "CausalLM":
    """Loads the model in the dtype and on the device of the options."""
    from ligerzoo.hub import AutoModel

    return AutoModel.from_pretrained(
        options.model, revision=options.revision, dtype=options.dtype, device=find_device(options.device)
    )


def prepare_text(prompt: str, options: argparse.Namespace) -> "tuple[Inputs, Tokenizer]":
    """Returns the model inputs of a text to continue."""
    from ligerzoo.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_pretrained(options.model, revision=options.revision)
    return tokenizer([prompt], return_tensors="pt"), tokenizer


def prepare_images(prompt: str, options: argparse.Namespace) -> "tuple[Inputs, Tokenizer]":
    """Returns the model inputs of a question about images; without a chat template, of a text with placeholders."""
    from ligerzoo.text.conversation import Conversation
    from ligerzoo.vision.processor import Processor

    processor = Processor.from_pretrained(options.model, revision=options.revision)
    if not processor.tokenizer.chat_templates:
        return processor(prompt, images=options.image), processor.tokenizer
    conversation = Conversation(processor.tokenizer, processor)
    for file in options.image:
        conversation.add_image(file)
    return conversation.ask(prompt), processor.tokenizer


def find_device(name: str | None) -> "torch.device":
    """Returns the device with this name. None returns the first GPU or, without one, the CPU.

    Raises:
        LigerzooError: the device does not exist, or is the meta device.
    """
    import torch

    chosen = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:  # depends on the backend
        gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        raise LigerzooError(
            "no such device", where="--device", got=name, expected=" or ".join(["cpu", *gpus])
        ) from error
    if chosen.startswith("meta"):
        raise LigerzooError(
            "the meta device has no memory for weights", where="--device", got=name, expected="cpu or cuda"
        )
    return torch.device(chosen)


def random_generator(model: "CausalLM", options: argparse.Namespace) -> "torch.Generator | None":
    """Returns a random number generator with the seed of the options, or None."""
    import torch

    return None if options.seed is None else torch.Generator(model.device).manual_seed(options.seed)


def print_continuation(
    model: "CausalLM",
    tokenizer: "Tokenizer",
    inputs: "Inputs",
    options: argparse.Namespace,
    generator: "torch.Generator | None",
    skip_prompt: bool = True,
) -> str:
    """Prints the model's continuation of a prompt during generation, and returns it."""
    from ligerzoo.generate import TextStreamer

    tokenizer.check_ids(inputs["input_ids"], len(model.get_parameter("model.embed_tokens.weight")))
    names = ("temperature", "top_k", "top_p", "min_p")
    sampling: dict[str, Any] = {name: value for name in names if (value := getattr(options, name)) is not None}
    ids = model.generate(
        **{name: tensor.to(model.device) for name, tensor in inputs.items()},
        max_new_tokens=options.max_new_tokens,
        do_sample=bool(sampling),
        **sampling,
        repetition_penalty=options.repetition_penalty,
        stop_strings=options.stop,
        tokenizer=tokenizer,
        generator=generator,
        streamer=TextStreamer(tokenizer, skip_prompt=skip_prompt),
    )
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def add_image(file: str, conversation: "Conversation") -> None:
    """Adds an image to the next question. On a terminal an error is printed, and the conversation continues."""
    try:
        if not file:
            raise LigerzooError("no file name", where="/image", expected="/image FILE")
        conversation.add_image(Path(file).expanduser())
    except LigerzooError as error:
        if not sys.stdin.isatty():
            raise
        print(error, file=sys.stderr)


def input_lines(hint: str) -> Iterator[str]:
    """Yields the lines of standard input that are not blank. On a terminal, prints a hint first and prompts."""
    prompt = ""
    if standard_input().isatty():
        import readline  # noqa: F401  # gives input() editing and a history

        prompt = "you> "
        print(hint, file=sys.stderr)
    with contextlib.suppress(EOFError):
        while True:
            if line := input(prompt).strip():
                yield line


# Argument parsing


def number_in_range(
    number_type: Callable[[str], Any], expected: str, is_valid: Callable[[Any], bool]
) -> Callable[[str], Any]:
    """Returns an argparse type that checks a number before anything is loaded."""

    def parse_number(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if is_valid(number := number_type(text)):
                return number
        raise argparse.ArgumentTypeError(f"got {text[:50]!r}; expected {expected}")

    return parse_number


def stop_text(text: str) -> str:
    """An argparse type: a text that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("got ''; expected a text that is not empty")
    return text


COUNT = number_in_range(int, "an integer from 0 to 2**31 - 1", lambda number: 0 <= number < 2**31)
TOP_K = number_in_range(int, "an integer from 1 to 2**31 - 1", lambda number: 0 < number < 2**31)
SEED = number_in_range(int, "an integer from 0 to 2**63 - 1", lambda number: 0 <= number < 2**63)
POSITIVE = number_in_range(float, "a positive number", lambda number: 0 < number < math.inf)
TOP_P = number_in_range(float, "a number greater than 0 and at most 1", lambda number: 0 < number <= 1)
MIN_P = number_in_range(float, "a number from 0 to 1", lambda number: 0 <= number <= 1)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line. `run` of the result is the function that runs the command.

    Args:
        arguments: the command line without the program name. None uses `sys.argv`.

    Raises:
        SystemExit: the arguments are invalid, or ask for help.
    """
    parser = argparse.ArgumentParser(
        prog="ligerzoo",
        description="Load, run and convert transformer checkpoints in Hugging Face format.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""\
examples:
  ligerzoo demo                                    see what ligerzoo does, in a minute, with a small built-in model
  ligerzoo info HuggingFaceTB/SmolLM2-135M         show a checkpoint's size and memory before downloading its weights
  ligerzoo generate --help                         show the options of a command

exit codes:
  0 success, 1 failure (with one line on standard error), 2 invalid arguments, 130 interrupted

environment:
  HF_HOME sets the directory for downloads. HF_HUB_OFFLINE=1 forbids network access.
  Run `hf auth login` to use gated repositories.""",
    )
    parser.add_argument("--version", action="version", version=f"ligerzoo {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add_command in (add_info, add_generate, add_chat, add_convert, add_demo):
        add_command(commands)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        nearest = did_you_mean(unknown[0].partition("=")[0], options.parser._option_string_actions)
        remedy = nearest or f"`{options.parser.prog} --help` lists the options."
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}. {remedy}")
    if options.run is demo and options.seed is not None and not options.vision:
        options.parser.error("argument --seed: only allowed with --vision")
    return options


def add_parser(commands: "Commands", run: Command, summary: str, epilog: str) -> argparse.ArgumentParser:
    """Adds the parser of a command, named after the function that runs it."""
    parser = commands.add_parser(
        run.__name__,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=epilog,
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def add_info(commands: "Commands") -> None:
    parser = add_parser(
        commands,
        info,
        "show the architecture, parameters, memory, files and tokenizer of a checkpoint",
        epilog="""\
examples:
  ligerzoo info HuggingFaceTB/SmolLM2-135M
  ligerzoo info path/to/checkpoint
  ligerzoo info --architectures

Reads the configs, the tokenizer and the headers of the weight files only.""",
    )
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("model", metavar="MODEL", nargs="?", help=MODEL_HELP)
    subject.add_argument("--architectures", action="store_true", help="list all supported architectures instead")
    add_revision_option(parser)


def add_generate(commands: "Commands") -> None:
    parser = add_parser(
        commands,
        generate,
        "continue a text, or answer a question about images",
        epilog="""\
examples:
  ligerzoo generate HuggingFaceTB/SmolLM2-135M --prompt "The capital of France is" --max-new-tokens 20
  ligerzoo generate HuggingFaceTB/SmolLM2-135M --prompt "Once upon a time" --temperature 0.8 --top-p 0.95 --seed 1
  ligerzoo generate path/to/checkpoint --prompt - < prompt.txt
  ligerzoo generate Qwen/Qwen2-VL-2B-Instruct --image cat.png --prompt "What is the cat doing?"

Without a sampling option, each token is the most likely one, and the output is always the same.

With --image, the prompt is a question. The chat template formats the images and the question as one user message, and
only the answer is printed. Without a chat template, the prompt must contain one placeholder token for each image.""",
    )
    add_model_arguments(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help='text to continue; "-" reads standard input')
    add_image_option(parser, "image to ask about; may be repeated")
    add_generation_options(parser, max_new_tokens=128)


def add_chat(commands: "Commands") -> None:
    parser = add_parser(
        commands,
        chat,
        "chat with a model, one line at a time",
        epilog="""\
examples:
  ligerzoo chat HuggingFaceTB/SmolLM2-360M-Instruct
  ligerzoo chat HuggingFaceTB/SmolLM2-360M-Instruct --system "Answer in one sentence." --temperature 0.7
  printf 'What is a liger?\\nHow big is one?\\n' | ligerzoo chat HuggingFaceTB/SmolLM2-360M-Instruct
  ligerzoo chat Qwen/Qwen2-VL-2B-Instruct --image cat.png

The model must have a chat template. The conversation ends with the input. If the model reads images, the line
  /image FILE
adds an image to the next question. Repeat it to add several.""",
    )
    add_model_arguments(parser)
    add_image_option(parser, "image for the first question; may be repeated")
    parser.add_argument("--system", metavar="TEXT", help="system message: instructions for the whole conversation")
    add_generation_options(parser, max_new_tokens=1024)


def add_convert(commands: "Commands") -> None:
    parser = add_parser(
        commands,
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
    add_model_arguments(parser)
    parser.add_argument("target", metavar="TARGET", type=Path, help="new or empty directory")
    parser.add_argument(
        "--to", choices=("hf", "native"), default="hf", help="tensor names: Hugging Face's (default) or ligerzoo's"
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="largest size of a weight file (default: %(default)s)"
    )
    add_dtype_option(parser)


def add_demo(commands: "Commands") -> None:
    parser = add_parser(
        commands,
        demo,
        "load, run, train, save and check a small model, without network or GPU",
        epilog="""\
examples:
  ligerzoo demo
  ligerzoo demo --text my_module.py
  ligerzoo demo --vision --seed 7

The models are part of the package: a Llama trained on Python's standard library and, with --vision, a Qwen2-VL trained
to describe drawings of shapes and digits. The demo checks each of its steps. The exit code is 1 if a check fails.""",
    )
    subject = parser.add_mutually_exclusive_group()
    subject.add_argument("--text", type=Path, metavar="FILE", help="text to train on, at least about 10,000 characters")
    subject.add_argument(
        "--vision", action="store_true", help="run the demo of a model that reads images (needs Pillow)"
    )
    parser.add_argument("--seed", type=SEED, help="seed of the drawings (with --vision)")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_revision_option(parser)


def add_revision_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--revision", help="branch, tag or commit on the hub")


def add_image_option(parser: argparse.ArgumentParser, description: str) -> None:
    parser.add_argument("--image", action="append", default=[], metavar="FILE", help=description)


def add_dtype_option(parser: argparse.ArgumentParser) -> None:
    names = ("auto", "float32", "bfloat16", "float16", "float64")
    parser.add_argument("--dtype", choices=names, default="auto", help="dtype of the weights (default: as stored)")


def add_generation_options(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    parser.add_argument(
        "--max-new-tokens",
        type=COUNT,
        default=max_new_tokens,
        metavar="N",
        help="largest number of new tokens (default: %(default)s)",
    )
    add_dtype_option(parser)
    parser.add_argument("--device", help="cpu, cuda or cuda:1 (default: the first GPU, else cpu)")
    parser.add_argument(
        "--stop", action="append", type=stop_text, metavar="TEXT", help="stop after this text; may be repeated"
    )
    sampling = parser.add_argument_group("sampling", "The first four options enable sampling.")
    sampling.add_argument(
        "--temperature", type=POSITIVE, metavar="T", help="less than 1: more predictable; greater than 1: more varied"
    )
    sampling.add_argument("--top-k", type=TOP_K, metavar="K", help="sample from the K most likely tokens")
    sampling.add_argument(
        "--top-p", type=TOP_P, metavar="P", help="sample from the most likely tokens with total probability P"
    )
    sampling.add_argument(
        "--min-p", type=MIN_P, metavar="P", help="drop tokens less than P times as likely as the most likely one"
    )
    sampling.add_argument("--seed", type=SEED, help="seed of the random numbers that sampling draws")
    sampling.add_argument(
        "--repetition-penalty",
        type=POSITIVE,
        default=1.0,
        metavar="R",
        help="greater than 1: make tokens that have occurred less likely",
    )
