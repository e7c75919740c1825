"""The commands: each takes the parsed arguments, prints its results and returns an exit code."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ligerzoo.cli.checkpoints import (
    find_base_model,
    find_cache_dtype,
    find_preprocessor,
    load_drafts,
    load_model,
    load_tokenizer,
    model_name,
    new_directory,
    package_of,
    text_source,
)
from ligerzoo.errors import LigerzooError

if TYPE_CHECKING:
    import torch

    from ligerzoo.generate import ConversationCache, Scheduler
    from ligerzoo.models import CausalLM
    from ligerzoo.serve.prompts import PromptEncoder
    from ligerzoo.text.conversation import Conversation
    from ligerzoo.text.tokenizer import Tokenizer

    Inputs = dict[str, torch.Tensor]


GENERATED_TOKENS, ANSWER_TOKENS = 128, 1024
"""Largest number of new tokens of `generate` and `chat`, unless generation_config.json has one."""

NO_LIMIT = 2**31 - 1
"""The context of a model whose config has no `max_position_embeddings`."""


def standard_input() -> TextIO:
    """Returns standard input; raises LigerzooError if it is closed."""
    if sys.stdin is None:
        remedy = "Pass the text with --prompt, or redirect a file or pipe."
        raise LigerzooError("standard input is closed", remedy=remedy)
    return sys.stdin


def info(options: argparse.Namespace) -> int:
    """Prints what a checkpoint contains and needs, or what training it needs, or all architectures."""
    from ligerzoo.info import describe, describe_architectures, describe_training

    if options.train:
        setting = {name: getattr(options, name) for name, _ in options.training.values()}
        print(describe_training(options.model, revision=options.revision, **setting))
    elif options.architectures:
        print(describe_architectures())
    else:
        print(describe(options.model, revision=options.revision))
    return 0


def generate(options: argparse.Namespace) -> int:
    """Prints the continuation of a prompt or the answer to a question about images, or continues a file of prompts."""
    find_base_model(options)
    if options.batch is not None:
        return generate_batch(options)
    prompt = standard_input().read() if options.prompt == "-" else options.prompt
    inputs, tokenizer = (prepare_images if options.image else prepare_text)(prompt, options)
    printer = ContinuationPrinter(options, tokenizer, GENERATED_TOKENS)
    printer.decoding["cache_dtype"] = find_cache_dtype(options.cache_dtype)
    is_question = bool(options.image or options.chat)
    if not is_question and tokenizer.chat_templates:
        print("The prompt is continued as plain text. --chat applies the model's chat template.", file=sys.stderr)
    printer.print(inputs, skip_prompt=is_question)
    return 0


def generate_batch(options: argparse.Namespace) -> int:
    """Continues the prompts of a file, and writes the results to another one."""
    import time

    from tqdm import tqdm

    from ligerzoo.serve import batch
    from ligerzoo.serve.options import VALUES

    defaults = {name: value for name, value in vars(options).items() if name in VALUES and value is not None}
    results = batch.Results(options.output, resumes=options.resume)
    tokenizer = load_tokenizer(options)
    model = load_model(options)
    defaults.setdefault("max_new_tokens", model.generation_config.get("max_new_tokens") or GENERATED_TOKENS)
    scheduler = scheduler_maker(model, tokenizer, options)(max_cache_tokens=options.max_cache_tokens)
    encoder = prompt_encoder(model, tokenizer, scheduler.max_length)
    entries = results.remaining(batch.read_batch(options.batch, defaults, encoder, scheduler))
    start, new_tokens = time.perf_counter(), 0
    with results, scheduler, tqdm(total=len(entries), unit="prompt", disable=None) as progress:
        try:
            for count, has_finished in batch.run_batch(entries, scheduler, options.batch_size, tokenizer, results):
                new_tokens += count
                rate = new_tokens / (time.perf_counter() - start)
                progress.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
                progress.update(has_finished)
        except KeyboardInterrupt:
            progress.write(f"{options.output} has the finished results; --resume continues.", file=sys.stderr)
            raise
    rate = new_tokens / (time.perf_counter() - start)
    print(f"{options.output}: {len(entries):,} new results, {new_tokens:,} tokens, {rate:,.0f} tokens/s")
    return 0


def serve(options: argparse.Namespace) -> int:
    """Serves a model over HTTP until Ctrl-C."""
    with package_of("serve", "starlette", "uvicorn", what="serving needs"):
        from ligerzoo.serve.access import Access, names_of
        from ligerzoo.serve.app import Service
        from ligerzoo.serve.server import Server, is_local, listen, url
    from ligerzoo.serve.engine_thread import EngineThread
    from ligerzoo.text.chat_template import ChatTemplate, read_template

    find_base_model(options)
    with listen(options.host, options.port) as listener:
        tokenizer = load_tokenizer(options)
        if options.chat_template is not None:
            source = read_template(options.chat_template)
            tokenizer.chat_templates = {"default": ChatTemplate(source, str(options.chat_template))}
        model = load_model(options)
        make_scheduler = scheduler_maker(model, tokenizer, options)
        scheduler = make_scheduler(max_cache_tokens=options.max_cache_tokens)
        encoder = prompt_encoder(model, tokenizer, scheduler.max_length, options.max_context)
        max_requests = options.batch_size + options.max_queue
        # The default of `max_cache_tokens` depends on the memory that is free now.
        engine = EngineThread(
            partial(make_scheduler, max_cache_tokens=scheduler.max_cache_tokens), max_requests=max_requests
        )
        name = options.name or model_name(options.model)
        max_body = options.max_body_mib * 2**20
        service = Service(engine, encoder, name=name, max_body=max_body)
        hosts = [*names_of(options.host, is_local=is_local(listener)), *options.allowed_host]
        api_key = options.api_key if options.api_key is not None else os.environ.get("LIGERZOO_API_KEY")
        app = Access(service.app(), hosts=hosts, api_key=api_key)
        if not is_local(listener) and api_key is None:
            print("warning: everyone who can reach this address can use the model", file=sys.stderr)
        print(f"{name} at {url(listener)}. Ctrl-C stops the server.", flush=True)
        Server(app, engine, service.bodies, listener).run_until_stopped()
    return 0


def chat(options: argparse.Namespace) -> int:
    """Answers the lines of standard input."""
    from ligerzoo.generate import ConversationCache
    from ligerzoo.text.conversation import Conversation
    from ligerzoo.vision.processor import Processor, load_processor_or_tokenizer

    find_base_model(options)
    loaded = load_processor_or_tokenizer(text_source(options), revision=options.revision)
    tokenizer, processor = (loaded.tokenizer, loaded) if isinstance(loaded, Processor) else (loaded, None)
    conversation = Conversation(tokenizer, processor, system=options.system)
    for file in options.image:
        conversation.add_image(file)
    printer = ContinuationPrinter(options, tokenizer, ANSWER_TOKENS)
    cache = ConversationCache(printer.model)
    images = " /image FILE adds an image to the next question." if conversation.reads_images else ""
    for line in input_lines("Ctrl-D ends the conversation." + images):
        command, _, file = line.partition(" ")
        if command == "/image":
            add_image(file.strip(), conversation)
        else:
            conversation.add_answer(printer.print(conversation.ask(line), cache=cache))
    return 0


def convert(options: argparse.Namespace) -> int:
    """Writes a checkpoint to a new directory."""
    from ligerzoo import hub

    with new_directory(options.target, "convert") as target:
        preprocessor = find_preprocessor(options.model, options.revision)
        model = hub.AutoModel.from_pretrained(options.model, revision=options.revision, dtype=options.dtype)
        hub.save(model, target, max_shard_size=options.max_shard_size, native=options.to == "native")
        if preprocessor is not None:
            preprocessor.save_pretrained(target)
    return 0


def fuse(options: argparse.Namespace) -> int:
    """Merges an adapter into its base model, and writes a checkpoint to a new directory."""
    from ligerzoo.adapters import fuse as fuse_adapter

    with new_directory(options.output, "fuse") as target:
        preprocessor = find_preprocessor(options.base, None)
        merged = fuse_adapter(options.base, options.adapter, target, max_shard_size=options.max_shard_size)
        if preprocessor is not None:
            preprocessor.save_pretrained(target)
        print(f"{len(merged)} merged weights")
    return 0


def demo(options: argparse.Namespace) -> int:
    """Runs the text demo or the vision demo."""
    from ligerzoo.demo import text, vision

    return vision.run(options.seed) if options.vision else text.run(options.text)


def prompt_encoder(
    model: CausalLM, tokenizer: Tokenizer, max_length: int | None, max_context: int | None = None
) -> PromptEncoder:
    """Returns an encoder that accepts what the model and the scheduler do.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        max_length: largest number of tokens that the scheduler accepts; None for no limit.
        max_context: largest number of tokens that the user wants; None for the largest possible.

    Raises:
        LigerzooError: `max_context` is more than is possible.
    """
    from ligerzoo.serve.prompts import PromptEncoder

    longest = min(getattr(model.config, "max_position_embeddings", NO_LIMIT), max_length or NO_LIMIT)
    if max_context is not None and max_context > longest:
        expected = f"at most {longest}, which the model and --max-cache-tokens allow"
        raise LigerzooError("invalid value", where="--max-context", got=max_context, expected=expected)
    new_tokens = model.generation_config.get("max_new_tokens")
    return PromptEncoder(tokenizer, embedding_rows(model), max_context or longest, new_tokens)


def scheduler_maker(model: CausalLM, tokenizer: Tokenizer, options: argparse.Namespace) -> Callable[..., Scheduler]:
    """Returns the function that makes the scheduler of a batch or server, given `max_cache_tokens`."""
    from ligerzoo.generate import Scheduler

    cache_dtype = find_cache_dtype(options.cache_dtype)
    return partial(Scheduler, model, batch_size=options.batch_size, cache_dtype=cache_dtype, tokenizer=tokenizer)


def embedding_rows(model: CausalLM) -> int:
    """Returns the number of tokens that the model's embedding has."""
    return len(model.get_parameter("model.embed_tokens.weight"))


def prepare_text(prompt: str, options: argparse.Namespace) -> tuple[Inputs, Tokenizer]:
    """Returns the model inputs of a text to continue, or with --chat, of a question."""
    from ligerzoo.text.conversation import Conversation

    tokenizer = load_tokenizer(options)
    if options.chat:
        return Conversation(tokenizer).ask(prompt), tokenizer
    return tokenizer([prompt], return_tensors="pt"), tokenizer


def prepare_images(prompt: str, options: argparse.Namespace) -> tuple[Inputs, Tokenizer]:
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


class ContinuationPrinter:
    """Prints continuations of prompts as the options say, with the model that they name.

    Args:
        options: of the command.
        tokenizer: the model's tokenizer.
        max_new_tokens: largest number of new tokens, unless the user or generation_config.json has set it.

    Attributes:
        model: the model.
        decoding: options of `generate`.
    """

    def __init__(self, options: argparse.Namespace, tokenizer: Tokenizer, max_new_tokens: int) -> None:
        import torch

        from ligerzoo.generate.options import limits_length
        from ligerzoo.sampling_options import SAMPLING_OPTIONS, infer_do_sample

        self.model, self.tokenizer = load_model(options), tokenizer
        length: int | None = options.max_new_tokens
        if length is None and not limits_length(self.model.generation_config):
            length = max_new_tokens
        seed = options.seed
        self.decoding: dict[str, Any] = {
            **infer_do_sample({name: getattr(options, name, None) for name in SAMPLING_OPTIONS}),
            **load_drafts(options),
            "max_new_tokens": length,
            "stop_strings": options.stop,
            "generator": None if seed is None else torch.Generator(self.model.device).manual_seed(seed),
        }

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
            **self.decoding,
            num_return_sequences=1,
            tokenizer=self.tokenizer,
            streamer=TextStreamer(self.tokenizer, skip_prompt=skip_prompt),
            past_key_values=None if cache is None else cache.shared_with(prompt),
        )
        if cache is not None:
            cache.keep(ids)
        return self.tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True)


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
