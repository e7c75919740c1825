"""The command `ligerzoo`: arguments in, text out. What it does is done by the functions that Python programs call.

torch takes seconds to import, so everything heavy is imported by the command that needs it: help and mistakes in the
arguments come at once.

Exit codes: 0 done, 1 failed, 2 the arguments are wrong, 130 interrupted, 141 nobody reads the output any more.
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
from ligerzoo.errors import LigerzooError

if TYPE_CHECKING:
    import torch

    from ligerzoo.models import CausalLM
    from ligerzoo.text.conversation import Conversation
    from ligerzoo.text.tokenizer import Tokenizer

    Inputs = dict[str, torch.Tensor]

Command = Callable[[argparse.Namespace], int]

MODEL_HELP = 'a directory with a checkpoint in Hugging Face format, or the id of one on the hub, such as "org/name"'


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: what follows the program's name; those of this process when None.

    Returns:
        The exit code.

    Raises:
        SystemExit: with code 2 when the arguments are wrong, with 0 after help.
    """
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115  (a closed stream is None; print would use stdout)
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's last flush would complain
        return 141
    except Exception as error:
        if debug:
            raise
        is_expected = isinstance(error, LigerzooError | OSError)
        problem = str(error) if is_expected else f"{type(error).__name__}: {error} (--debug shows where)"
        print("ligerzoo: error:", " ".join(problem.split()), file=sys.stderr)
        return 1


def prepare_streams() -> None:
    """Lets text pass that is not valid in the terminal's encoding.

    Raises:
        LigerzooError: standard output is closed.
    """
    if sys.stdout is None:
        raise LigerzooError("standard output is closed", remedy="Send it to /dev/null to discard it.")
    if isinstance(sys.stdout, io.TextIOWrapper):  # a model may write what a narrow terminal cannot show
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):  # the tokenizer refuses what is not valid
        sys.stdin.reconfigure(errors="surrogateescape")


def standard_input() -> TextIO:
    """Raises a LigerzooError if standard input is closed."""
    if sys.stdin is None:
        raise LigerzooError("standard input is closed", remedy="Give the text with --prompt, or in a file or pipe.")
    return sys.stdin


def info(options: argparse.Namespace) -> int:
    from ligerzoo.info import describe, describe_architectures

    about = describe_architectures() if options.architectures else describe(options.model, revision=options.revision)
    print(about)
    return 0


def generate(options: argparse.Namespace) -> int:
    prompt = standard_input().read() if options.prompt == "-" else options.prompt
    inputs, tokenizer = read_with_images(prompt, options) if options.image else read_text(prompt, options)
    model = load(options)
    reply(model, tokenizer, inputs, options, random_numbers(model, options), skip_prompt=bool(options.image))
    return 0


def chat(options: argparse.Namespace) -> int:
    from ligerzoo.text.conversation import Conversation
    from ligerzoo.vision import processor

    conversation = Conversation(processor.load(options.model, revision=options.revision), options.system)
    for file in options.image:
        conversation.show(file)
    model = load(options)
    generator = random_numbers(model, options)
    images = " /image FILE shows an image with the next question." if conversation.sees else ""
    for line in lines("Ctrl-D ends the conversation." + images):
        command, _, file = line.partition(" ")
        if command == "/image":
            show(file.strip(), conversation)
        else:
            inputs = conversation.ask(line)
            conversation.answer(reply(model, conversation.tokenizer, inputs, options, generator))
    return 0


def convert(options: argparse.Namespace) -> int:
    from ligerzoo import hub
    from ligerzoo.files.locate import locate_files
    from ligerzoo.vision import processor

    target: Path = options.target
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        remedy = "Convert into a new directory and then replace the old one."
        raise LigerzooError("is there already", where=target, expected="a new or an empty directory", remedy=remedy)
    reader = None
    if (locate_files(options.model, ["tokenizer.json"], revision=options.revision) / "tokenizer.json").exists():
        reader = processor.load(options.model, revision=options.revision)
    model = hub.AutoModel.from_pretrained(options.model, revision=options.revision, dtype=options.dtype)
    hub.save(model, target, max_shard_size=options.max_shard_size, native=options.to == "native")
    if reader is not None:
        reader.save_pretrained(target)
    size = sum(path.stat().st_size for path in target.iterdir())
    print(f"{target}: {len(list(target.iterdir()))} files, {size:,} bytes")
    return 0


def demo(options: argparse.Namespace) -> int:
    if options.vision:
        from ligerzoo.demo import vision as demo_vision

        return demo_vision.run(options.seed)
    from ligerzoo.demo.text import run

    return run(options.text)


def load(options: argparse.Namespace) -> "CausalLM":
    from ligerzoo.hub import AutoModel

    return AutoModel.from_pretrained(
        options.model, revision=options.revision, dtype=options.dtype, device=device(options.device)
    )


def read_text(prompt: str, options: argparse.Namespace) -> "tuple[Inputs, Tokenizer]":
    """A model's inputs for a text to continue."""
    from ligerzoo.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_pretrained(options.model, revision=options.revision)
    return tokenizer([prompt], return_tensors="pt"), tokenizer


def read_with_images(prompt: str, options: argparse.Namespace) -> "tuple[Inputs, Tokenizer]":
    """A model's inputs for a question about images, or where there is no chat template for a text with their places."""
    from ligerzoo.text.conversation import Conversation
    from ligerzoo.vision.processor import Processor

    processor = Processor.from_pretrained(options.model, revision=options.revision)
    if not processor.tokenizer.chat_templates:
        return processor(prompt, images=options.image), processor.tokenizer
    conversation = Conversation(processor)
    for file in options.image:
        conversation.show(file)
    return conversation.ask(prompt), processor.tokenizer


def device(name: str | None) -> "torch.device":
    """The device of this name; the first GPU, if there is one, when None."""
    import torch

    chosen = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch has one for each missing backend
        gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        raise LigerzooError(
            "no such device", where="--device", got=name, expected=" or ".join(["cpu", *gpus])
        ) from error
    if chosen.startswith("meta"):
        raise LigerzooError("the meta device holds no weights", where="--device", got=name, expected="cpu or cuda")
    return torch.device(chosen)


def random_numbers(model: "CausalLM", options: argparse.Namespace) -> "torch.Generator | None":
    import torch

    return None if options.seed is None else torch.Generator(model.device).manual_seed(options.seed)


def reply(
    model: "CausalLM",
    tokenizer: "Tokenizer",
    inputs: "Inputs",
    options: argparse.Namespace,
    generator: "torch.Generator | None",
    skip_prompt: bool = True,
) -> str:
    """Prints the model's continuation of a prompt as it comes, after the prompt or without it, and returns it."""
    from ligerzoo.generate import TextStreamer

    tokenizer.check_ids(inputs["input_ids"], len(model.get_parameter("model.embed_tokens.weight")))
    sampling = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    given: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
    continued = model.generate(
        **{name: tensor.to(model.device) for name, tensor in inputs.items()},
        max_new_tokens=options.max_new_tokens,
        do_sample=bool(given),
        **given,
        repetition_penalty=options.repetition_penalty,
        stop_strings=options.stop,
        tokenizer=tokenizer,
        generator=generator,
        streamer=TextStreamer(tokenizer, skip_prompt=skip_prompt),
    )
    return tokenizer.decode(continued[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def show(file: str, conversation: "Conversation") -> None:
    """Shows an image with the next question. Whoever types may mistype, and goes on talking."""
    try:
        if not file:
            raise LigerzooError("no image", where="/image", expected="the name of a file behind it")
        conversation.show(Path(file).expanduser())
    except LigerzooError as error:
        if not sys.stdin.isatty():
            raise
        print(error, file=sys.stderr)


def lines(hint: str) -> Iterator[str]:
    """The lines of standard input that are not blank; on a terminal they are asked for, after a hint."""
    invitation = ""
    if standard_input().isatty():
        import readline  # noqa: F401  # gives input() editing and a history

        invitation = "you> "
        print(hint, file=sys.stderr)
    with contextlib.suppress(EOFError):
        while True:
            if line := input(invitation).strip():
                yield line


# The arguments


def value(kind: Callable[[str], Any], expected: str, holds: Callable[[Any], bool]) -> Callable[[str], Any]:
    """The type of an option with a range, checked before anything is loaded."""

    def read(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if holds(number := kind(text)):
                return number
        raise argparse.ArgumentTypeError(f"got {text[:50]!r}; expected {expected}")

    return read


COUNT = value(int, "a whole number from 0 to 2**31 - 1", lambda number: 0 <= number < 2**31)
RANK = value(int, "a whole number from 1 to 2**31 - 1", lambda number: 0 < number < 2**31)
SEED = value(int, "a whole number from 0 to 2**63 - 1", lambda number: 0 <= number < 2**63)
POSITIVE = value(float, "a positive number", lambda number: 0 < number < math.inf)
SHARE = value(float, "a number above 0 and up to 1", lambda number: 0 < number <= 1)
FACTOR = value(float, "a number from 0 to 1", lambda number: 0 <= number <= 1)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of one command; `run` is the function that carries it out."""
    everywhere = argparse.ArgumentParser(add_help=False)
    everywhere.add_argument("--debug", action="store_true", help="show the traceback of an error")
    a_model = argparse.ArgumentParser(add_help=False)
    a_model.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    a_model.add_argument("--revision", help="branch, tag or commit on the hub")

    parser = argparse.ArgumentParser(
        prog="ligerzoo",
        description="Transformers composed from fused layers, from and to checkpoints in Hugging Face format.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""\
Begin with
  ligerzoo demo                                    what it can do, in a minute, with a model that comes along
  ligerzoo info HuggingFaceTB/SmolLM2-135M         what a checkpoint is and needs, before its weights are downloaded
  ligerzoo generate --help                         every command explains itself

Exit codes: 0 done, 1 failed (one line on standard error says why), 2 wrong arguments, 130 interrupted.
Downloads are kept where HF_HOME says; `hf auth login` opens gated repositories; HF_HUB_OFFLINE=1 forbids the
network.""",
    )
    parser.add_argument("--version", action="version", version=f"ligerzoo {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(run: Command, summary: str, *parents: argparse.ArgumentParser, epilog: str) -> argparse.ArgumentParser:
        subparser = commands.add_parser(
            run.__name__,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            parents=[*parents, everywhere],
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog=epilog,
        )
        subparser.set_defaults(run=run)
        return subparser

    about = command(
        info,
        "tell what a checkpoint is: architecture, parameters, memory, files, tokenizer",
        epilog="""\
examples
  ligerzoo info HuggingFaceTB/SmolLM2-135M
  ligerzoo info path/to/checkpoint
  ligerzoo info --architectures

Only configs, the tokenizer and the headers of the weight files are read.""",
    )
    subject = about.add_mutually_exclusive_group(required=True)
    subject.add_argument("model", metavar="MODEL", nargs="?", help=MODEL_HELP)
    subject.add_argument("--architectures", action="store_true", help="tell of all architectures there are instead")
    about.add_argument("--revision", help="branch, tag or commit on the hub")

    text = command(
        generate,
        "continue a text, printed with it as it comes",
        a_model,
        epilog="""\
examples
  ligerzoo generate HuggingFaceTB/SmolLM2-135M --prompt "The capital of France is" --max-new-tokens 20
  ligerzoo generate HuggingFaceTB/SmolLM2-135M --prompt "Once upon a time" --temperature 0.8 --top-p 0.95 --seed 1
  ligerzoo generate path/to/checkpoint --prompt - < prompt.txt
  ligerzoo generate Qwen/Qwen2-VL-2B-Instruct --image cat.png --prompt "What is the cat doing?"

Without a sampling option the likeliest token is taken each time, and the same text comes out every time.

With images the text is a question: the model gets a user's message of the images, in their order, and then the text, as
its chat template writes it, and only its answer is printed. Where there is no chat template, the text itself has to
mark the place of each image, with the token that the model was trained to see there.""",
    )
    text.add_argument("--prompt", required=True, metavar="TEXT", help='the text to continue; "-" reads standard input')
    add_image_option(text, "for a model that sees: an image to ask about; may be repeated")
    add_generation_options(text, max_new_tokens=128)

    conversation = command(
        chat,
        "talk with a model, line by line",
        a_model,
        epilog="""\
examples
  ligerzoo chat HuggingFaceTB/SmolLM2-360M-Instruct
  ligerzoo chat HuggingFaceTB/SmolLM2-360M-Instruct --system "Answer in one sentence." --temperature 0.7
  printf 'What is a liger?\\nHow big is one?\\n' | ligerzoo chat HuggingFaceTB/SmolLM2-360M-Instruct
  ligerzoo chat Qwen/Qwen2-VL-2B-Instruct --image cat.png

The model's tokenizer must have a chat template. The end of the input ends the conversation. To a model that sees, a
line of the conversation that reads
  /image FILE
shows an image with the next question; several such lines show several.""",
    )
    add_image_option(
        conversation, "for a model that sees: an image that is shown with the first question; may be repeated"
    )
    conversation.add_argument("--system", metavar="TEXT", help="instructions that come before the conversation")
    add_generation_options(conversation, max_new_tokens=1024)

    conversion = command(
        convert,
        "write a checkpoint anew: in other files, another dtype, or with our names of tensors",
        a_model,
        epilog="""\
examples
  ligerzoo convert HuggingFaceTB/SmolLM2-135M smollm2                        a copy with the same bytes
  ligerzoo convert HuggingFaceTB/SmolLM2-135M smollm2-fp32 --dtype float32
  ligerzoo convert path/to/checkpoint small-files --max-shard-size 500MB
  ligerzoo convert path/to/checkpoint our-names --to native

The tokenizer comes along, and the processor of a model that sees. The model appears at once, when it is complete.""",
    )
    conversion.add_argument("target", metavar="TARGET", type=Path, help="a new or empty directory")
    conversion.add_argument(
        "--to", choices=("hf", "native"), default="hf", help="tensors under Hugging Face's names (default) or our own"
    )
    conversion.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of one file, default %(default)s")
    add_dtype_option(conversion)

    demonstration = command(
        demo,
        "load, complete, train, save and check a small model, without network or GPU",
        epilog="""\
examples
  ligerzoo demo
  ligerzoo demo --text my_module.py
  ligerzoo demo --vision --seed 7

The models come with the package: a Llama that was trained on Python's standard library, and with --vision a Qwen2-VL
that was trained on drawings of shapes and digits. It describes drawings made on the spot. Every claim that the demo
makes is checked as it runs, and the exit code is 1 if one is false.""",
    )
    either = demonstration.add_mutually_exclusive_group()
    either.add_argument(
        "--text", type=Path, metavar="FILE", help="train on your own text, of some 10,000 characters or more"
    )
    either.add_argument("--vision", action="store_true", help="show a model that sees instead (needs Pillow)")
    demonstration.add_argument("--seed", type=SEED, help="of the drawings, to see the same ones again")

    options = parser.parse_args(arguments)
    if options.run is demo and options.seed is not None and not options.vision:
        demonstration.error("argument --seed: goes with --vision")
    return options


def add_image_option(parser: argparse.ArgumentParser, purpose: str) -> None:
    parser.add_argument("--image", action="append", default=[], metavar="FILE", help=purpose)


def add_dtype_option(parser: argparse.ArgumentParser) -> None:
    names = ("auto", "float32", "bfloat16", "float16", "float64")
    parser.add_argument("--dtype", choices=names, default="auto", help="of the weights; auto, the default, as stored")


def add_generation_options(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    parser.add_argument(
        "--max-new-tokens", type=COUNT, default=max_new_tokens, metavar="N", help="the most to add, default %(default)s"
    )
    add_dtype_option(parser)
    parser.add_argument("--device", help="cpu, cuda, cuda:1; by default a GPU if there is one")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end where this appears; may be repeated")
    sampling = parser.add_argument_group(
        "sampling", "any of the first four draws tokens instead of taking the likeliest"
    )
    sampling.add_argument(
        "--temperature", type=POSITIVE, metavar="T", help="below 1 more predictable, above more varied"
    )
    sampling.add_argument("--top-k", type=RANK, metavar="K", help="draw from the K likeliest tokens")
    sampling.add_argument("--top-p", type=SHARE, metavar="P", help="draw from the likeliest that have P together")
    sampling.add_argument(
        "--min-p", type=FACTOR, metavar="P", help="drop tokens less than P times as likely as the best"
    )
    sampling.add_argument("--seed", type=SEED, help="makes what is drawn repeatable")
    sampling.add_argument(
        "--repetition-penalty",
        type=POSITIVE,
        default=1.0,
        metavar="R",
        help="above 1 discourages tokens seen before",
    )
