"""The commands `generate` and `chat`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligerzoo.arguments import Parser, expanded_path
from ligerzoo.checks import argument_type
from ligerzoo.cli.checkpoints import (
    ModelChoice,
    embedding_rows,
    find_base_model,
    find_cache_dtype,
    load_model,
    load_tokenizer,
    load_weights,
    with_template,
)
from ligerzoo.cli.console import input_lines, standard_input
from ligerzoo.cli.options import (
    ANSWER_TOKENS,
    AT_LEAST_1,
    COUNT,
    DEFAULT_BATCH_SIZE,
    GENERATED_TOKENS,
    PATH,
    SEED,
    STOP,
    Subparsers,
    add_option,
    add_parser,
    add_shared,
)
from ligerzoo.cli.serve import NO_LIMIT, add_batching_options, generate_batch
from ligerzoo.errors import LigerzooError
from ligerzoo.sampling_options import OFFERS, SAMPLING_OPTIONS, infer_do_sample

if TYPE_CHECKING:
    import torch

    from ligerzoo.generate import ConversationCache, Grammar
    from ligerzoo.models import CausalLM
    from ligerzoo.text.conversation import Conversation
    from ligerzoo.text.tokenizer import Tokenizer

    Inputs = dict[str, torch.Tensor]

_MODEL = ("model", "--revision", "--adapter", "--import", "--dtype", "--device", "--chat-template")


def add_generate(subparsers: Subparsers) -> None:
    parser = add_parser(
        subparsers,
        generate,
        "continue a text, or answer a question about images",
        epilog="""\
examples:
  ligerzoo generate HuggingFaceTB/SmolLM2-135M --prompt "The capital of France is" --max-new-tokens 20
  ligerzoo generate HuggingFaceTB/SmolLM2-135M --prompt "Once upon a time" --temperature 0.8 --top-p 0.95 --seed 1
  ligerzoo generate path/to/checkpoint --prompt - < prompt.txt
  ligerzoo generate HuggingFaceTB/SmolLM2-360M-Instruct --chat --prompt "What is a liger?"
  ligerzoo generate Qwen/Qwen2-VL-2B-Instruct --image cat.png --prompt "What is the cat doing?"
  ligerzoo generate path/to/adapter --prompt "The capital of France is"
  ligerzoo generate path/to/checkpoint --import my_model.py --prompt "The capital of France is"
  ligerzoo generate path/to/checkpoint --batch prompts.jsonl --output results.jsonl

Options that are left out have the values of the checkpoint's generation_config.json; many chat models sample by
default. Otherwise, and with --temperature 0, each token is the most likely one.

With --chat, the prompt is a question: the chat template formats it as a user message, and only the answer is printed.
`ligerzoo chat` continues the conversation. Without --chat, the prompt is plain text.

With --image, the prompt is a question. The chat template formats the images and the question as one user message, and
only the answer is printed. Without a chat template, the prompt must contain one placeholder token for each image.

With --batch, each line of the file is one prompt, and many are continued at a time:
  {"prompt": "The capital of France is"}
  {"messages": [{"role": "user", "content": "Hello"}], "id": "greeting", "temperature": 0.7, "max_new_tokens": 50}
A line may have an "id", and options that replace those of the command line. All lines are checked first. Results are
written in the order in which they finish, with the number of the line. After an interruption, --resume continues.""",
        check=check_batch,
    )
    add_shared(parser, *_MODEL, "--cache-dtype")
    inputs = parser.group("prompt")
    prompt = inputs.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help='text to continue; "-" reads standard input')
    prompt.add_argument("--batch", type=expanded_path, metavar="FILE", help="JSONL file with one prompt in each line")
    inputs.add_argument("--chat", action="store_true", help="apply the chat template to the prompt")
    add_option(inputs, "--image", PATH, "image to ask about; may be repeated", metavar="FILE", repeats=True)
    schema = "file with a JSON schema; the continuation is JSON that matches it (needs `pip install ligerzoo[grammar]`)"
    add_option(inputs, "--schema", expanded_path, schema, metavar="FILE")
    add_generation_options(parser, max_new_tokens=GENERATED_TOKENS)
    batch = parser.group("batch", "Options of --batch.")
    batch.add_argument("--output", type=expanded_path, metavar="FILE", help="new JSONL file for the results")
    batch.add_argument("--resume", action="store_true", help="continue the output file of an interrupted run")
    add_batching_options(batch, batch_size=None)


def check_batch(options: argparse.Namespace) -> None:
    """Completes the options of a batch. Raises SystemExit if one is missing, or given without --batch."""
    is_batch = options.batch is not None
    refused: tuple[str, ...]
    if is_batch:
        refused, only = ("chat", "image", "schema", "draft", "prompt_lookup"), "not allowed"
    else:
        refused, only = ("output", "resume", "batch_size", "max_cache_tokens"), "only allowed"
    for name in refused:
        if getattr(options, name):
            options.parser.error(f"argument --{name.replace('_', '-')}: {only} with --batch")
    if is_batch and options.output is None:
        options.parser.error("argument --output: required with --batch")
    options.batch_size = options.batch_size or DEFAULT_BATCH_SIZE


def generate(options: argparse.Namespace) -> int:
    """Prints the continuation of a prompt or the answer to a question about images, or continues a file of prompts."""
    choice = find_base_model(ModelChoice.of(options))
    if options.batch is not None:
        return generate_batch(choice, options)
    prompt = standard_input().read() if options.prompt == "-" else options.prompt
    if options.image:
        inputs, tokenizer = prepare_images(prompt, options.image, choice, options.chat_template)
    else:
        tokenizer = load_tokenizer(choice, options.chat_template)
        inputs = prepare_text(prompt, tokenizer, options.chat)
    constraint = None if options.schema is None else grammar_of(options.schema, tokenizer)
    model = load_model(choice)
    decoding = decoding_options(options, model)
    decoding["cache_dtype"] = find_cache_dtype(options.cache_dtype)
    decoding["constraint"] = constraint
    is_question = bool(options.image or options.chat)
    if not is_question and tokenizer.chat_templates:
        print("The prompt is continued as plain text. --chat applies the model's chat template.", file=sys.stderr)
    ContinuationPrinter(model, tokenizer, decoding, GENERATED_TOKENS).print(inputs, skip_prompt=is_question)
    return 0


def grammar_of(schema: Path, tokenizer: Tokenizer) -> Grammar:
    """Returns the grammar of JSON that matches the schema in a file."""
    from ligerzoo.files.untrusted import read_json
    from ligerzoo.generate import Grammar

    return Grammar.json_schema(read_json(schema), tokenizer, where=str(schema))


def add_chat(subparsers: Subparsers) -> None:
    parser = add_parser(
        subparsers,
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
    parser.other_hint = lambda flag: "Questions are the lines of standard input." if flag == "--prompt" else None
    add_shared(parser, *_MODEL)
    inputs, image = parser.group("prompt"), "image for the first question; may be repeated"
    add_option(inputs, "--image", PATH, image, metavar="FILE", repeats=True)
    inputs.add_argument("--system", metavar="TEXT", help="system message: instructions for the whole conversation")
    add_generation_options(parser, max_new_tokens=ANSWER_TOKENS)


def chat(options: argparse.Namespace) -> int:
    """Answers the lines of standard input."""
    from ligerzoo.generate import ConversationCache
    from ligerzoo.text.conversation import Conversation
    from ligerzoo.vision.processor import Processor, load_processor_or_tokenizer

    choice = find_base_model(ModelChoice.of(options))
    loaded = load_processor_or_tokenizer(choice.text_source, revision=choice.revision)
    tokenizer, processor = (loaded.tokenizer, loaded) if isinstance(loaded, Processor) else (loaded, None)
    with_template(tokenizer, options.chat_template)
    conversation = Conversation(tokenizer, processor, system=options.system)
    for file in options.image:
        conversation.add_image(file)
    model = load_model(choice)
    printer = ContinuationPrinter(model, tokenizer, decoding_options(options, model), ANSWER_TOKENS)
    cache = ConversationCache(model)
    images = " /image FILE adds an image to the next question." if conversation.reads_images else ""
    for line in input_lines("Ctrl-D ends the conversation." + images):
        command, _, file = line.partition(" ")
        if command == "/image":
            add_image(file.strip(), conversation)
        else:
            conversation.add_answer(printer.print(conversation.ask(line), cache=cache))
    return 0


def add_generation_options(parser: Parser, max_new_tokens: int) -> None:
    length = f"largest number of new tokens (default: that of generation_config.json, or else {max_new_tokens})"
    ends = parser.group("length")
    add_option(ends, "--max-new-tokens", COUNT, length)
    ends.add_argument(
        "--stop", action="append", type=STOP, metavar="TEXT", help="stop after this text; may be repeated"
    )
    sampling = parser.group(
        "sampling", "The first four options enable sampling. Defaults are those of generation_config.json."
    )
    for name, offer in OFFERS.items():
        if offer.values is not None:
            flag = f"--{name.replace('_', '-')}"
            add_option(sampling, flag, argument_type(offer.values), offer.help, metavar=offer.metavar)
    add_option(sampling, "--seed", SEED, "seed of the random numbers that sampling draws", metavar="SEED")
    group = parser.group("speculative decoding", "Less time for each token, and the same result.")
    drafts = group.add_mutually_exclusive_group()
    add_option(drafts, "--draft", PATH, "smaller checkpoint of the same vocabulary", metavar="MODEL")
    add_option(drafts, "--prompt-lookup", AT_LEAST_1, "draft N tokens from where the last ones have occurred")


def decoding_options(options: argparse.Namespace, model: CausalLM) -> dict[str, Any]:
    """Returns the options of `generate`, with the model of --draft."""
    import torch

    draft, seed = options.draft, options.seed
    if draft is not None:
        draft = load_weights(ModelChoice(draft, dtype=options.dtype, device=options.device))
    return {
        **infer_do_sample({name: getattr(options, name, None) for name in SAMPLING_OPTIONS}),
        "prompt_lookup_num_tokens": options.prompt_lookup,
        "assistant_model": draft,
        "max_new_tokens": options.max_new_tokens,
        "stop_strings": options.stop,
        "generator": None if seed is None else torch.Generator(model.device).manual_seed(seed),
    }


def prepare_text(prompt: str, tokenizer: Tokenizer, is_question: bool) -> Inputs:
    """Returns the model inputs of a text to continue, or of a question."""
    from ligerzoo.text.conversation import Conversation

    return Conversation(tokenizer).ask(prompt) if is_question else tokenizer([prompt], return_tensors="pt")


def prepare_images(
    prompt: str, images: list[str], choice: ModelChoice, chat_template: Path | None = None
) -> tuple[Inputs, Tokenizer]:
    """Returns the model inputs of a question about images; without a chat template, of a text with placeholders."""
    from ligerzoo.text.conversation import Conversation
    from ligerzoo.vision.processor import Processor

    processor = Processor.from_pretrained(choice.model, revision=choice.revision)
    if not with_template(processor.tokenizer, chat_template).chat_templates:
        return processor(prompt, images=images), processor.tokenizer
    conversation = Conversation(processor.tokenizer, processor)
    for file in images:
        conversation.add_image(file)
    return conversation.ask(prompt), processor.tokenizer


@dataclass(frozen=True)
class ContinuationPrinter:
    """Prints continuations of prompts.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        decoding: options of `generate`.
        default_length: largest number of new tokens, unless `decoding` or generation_config.json has it.
    """

    model: CausalLM
    tokenizer: Tokenizer
    decoding: dict[str, Any]
    default_length: int

    def print(self, inputs: Inputs, *, skip_prompt: bool = True, cache: ConversationCache | None = None) -> str:
        """Prints the continuation during generation, and returns it.

        Args:
            inputs: model inputs of the prompt.
            skip_prompt: print the new tokens only.
            cache: the KV cache of the conversation, which is reused if there are no images.
        """
        from ligerzoo.generate import TextStreamer

        prompt = inputs["input_ids"]
        self.tokenizer.check_ids(prompt, embedding_rows(self.model))
        if cache is not None and inputs.keys() & set(self.model.modalities):
            cache = None
        ids = self.model.generate(
            **{name: tensor.to(self.model.device) for name, tensor in inputs.items()},
            **{**self.decoding, "max_new_tokens": self._max_new_tokens(prompt.shape[1])},
            num_return_sequences=1,
            tokenizer=self.tokenizer,
            streamer=TextStreamer(self.tokenizer, skip_prompt=skip_prompt),
            past_key_values=None if cache is None else cache.shared_with(prompt),
        )
        if cache is not None:
            cache.keep(ids)
        return self.tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True)

    def _max_new_tokens(self, prompt_tokens: int) -> int | None:
        """Returns the largest number of new tokens; None for that of generation_config.json.

        A default ends with the context, as in the server. What the user asks for may be longer, as with transformers'
        `generate`: a line warns of it.
        """
        from ligerzoo.generate.options import limits_length

        context = getattr(self.model.config, "max_position_embeddings", NO_LIMIT)
        room, config = context - prompt_tokens, self.model.generation_config
        length: int | None = self.decoding["max_new_tokens"]
        if length is None:
            length = config.get("max_new_tokens") or (None if limits_length(config) else self.default_length)
            if length is None or room > 0:
                return None if length is None else min(length, room)
        if length > room:
            given = f"{prompt_tokens:,} tokens of the prompt and {length:,} new tokens"
            print(f"warning: {given} exceed the model's context of {context:,} tokens", file=sys.stderr)
        return length


def add_image(file: str, conversation: Conversation) -> None:
    """Adds an image to the next question. On a terminal an error is printed, and the conversation continues."""
    try:
        if not file:
            raise LigerzooError("no file name", where="/image", expected="/image FILE")
        conversation.add_image(Path(file).expanduser())
    except LigerzooError as error:
        if not sys.stdin.isatty():
            raise
        print(error, file=sys.stderr)
