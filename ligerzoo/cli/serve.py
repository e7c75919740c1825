"""The command `serve`, and the batches of `generate`, which use the same scheduler."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ligerzoo.cli.checkpoints import (
    ModelChoice,
    embedding_rows,
    find_base_model,
    find_cache_dtype,
    load_embedding_model,
    load_model,
    load_tokenizer,
    model_name,
    package_of,
)
from ligerzoo.cli.options import (
    AT_LEAST_1,
    COUNT,
    DEFAULT_BATCH_SIZE,
    GENERATED_TOKENS,
    PORT,
    Subparsers,
    add_option,
    add_parser,
    add_shared,
)
from ligerzoo.errors import LigerzooError

if TYPE_CHECKING:
    from ligerzoo.generate import Scheduler
    from ligerzoo.models import CausalLM
    from ligerzoo.serve.app import BaseService
    from ligerzoo.serve.engine_thread import ComputeThread
    from ligerzoo.serve.prompts import PromptEncoder
    from ligerzoo.text.tokenizer import Tokenizer

NO_LIMIT = 2**31 - 1
"""The context of a model whose config has no `max_position_embeddings`."""


def add_serve(subparsers: Subparsers) -> None:
    parser = add_parser(
        subparsers,
        serve,
        "serve a model over HTTP, with OpenAI's API for chats and completions, or for embeddings",
        epilog="""\
examples:
  ligerzoo serve HuggingFaceTB/SmolLM2-360M-Instruct
  ligerzoo serve path/to/checkpoint --port 8001 --name my-model --batch-size 64
  ligerzoo serve path/to/base --adapter path/to/adapter
  ligerzoo serve BAAI/bge-small-en-v1.5

A model of sentence-transformers, and one with --pooling, has /v1/embeddings only.

The server is for a laboratory: it has no users, encryption or rate limits, so it listens on this machine only. Whoever
can reach it can use the model, unless it has a key. Needs the packages of `pip install ligerzoo[serve]`. Ctrl-C stops
it.""",
    )
    add_shared(parser, "model", "--revision", "--adapter", "--import", "--dtype", "--cache-dtype", "--device")
    add = partial(add_option, parser.group("server"))
    add("--host", str, "address to listen on", "127.0.0.1", metavar="HOST")
    add("--port", PORT, "port; 0 finds a free one", 8000)
    allowed_host = "further name of the server that clients may use, such as lab.example.org; may be repeated"
    add("--allowed-host", str, allowed_host, metavar="NAME", repeats=True)
    add("--api-key", str, "key that clients must have (default: $LIGERZOO_API_KEY, else no key)", metavar="KEY")
    add("--name", str, "the model's name for clients (default: MODEL, of a directory its last part)", metavar="NAME")
    add_shared(parser, "--chat-template")
    add = partial(add_option, parser.group("requests"))
    add_batching_options(parser.group("requests"), batch_size=DEFAULT_BATCH_SIZE)
    add("--max-queue", COUNT, "continuations, or texts to embed, that may wait; clients get status 503 for more", 256)
    add("--max-context", AT_LEAST_1, "tokens of prompt and continuation, or of a text to embed (default: the model's)")
    add("--max-body-mib", AT_LEAST_1, "largest request in MiB", 10)
    pooling = "embed texts, and pool their hidden states so, such as mean (default: what modules.json says, if any)"
    add_option(parser.group("model"), "--pooling", str, pooling, metavar="MODE")


def serve(options: argparse.Namespace) -> int:
    """Serves a model over HTTP until Ctrl-C."""
    with package_of("serve", "starlette", "uvicorn", what="serving needs"):
        from ligerzoo.serve.access import Access, names_of
        from ligerzoo.serve.server import Server, is_local, listen, url
    from ligerzoo.hub.auto import has_modules

    choice = find_base_model(ModelChoice.of(options))
    embeds = options.pooling is not None or has_modules(choice.model, revision=choice.revision)
    with listen(options.host, options.port) as listener:
        name = options.name or model_name(options.model)
        make_service = embedding_service if embeds else generation_service
        service, engine = make_service(choice, options, name=name, max_body=options.max_body_mib * 2**20)
        hosts = [*names_of(options.host, is_local=is_local(listener)), *options.allowed_host]
        api_key = options.api_key if options.api_key is not None else os.environ.get("LIGERZOO_API_KEY")
        app = Access(service.app(), hosts=hosts, api_key=api_key)
        if not is_local(listener) and api_key is None:
            print("warning: everyone who can reach this address can use the model", file=sys.stderr)
        print(f"{name} at {url(listener)}. Ctrl-C stops the server.", flush=True)
        Server(app, engine, service.bodies, listener).run_until_stopped()
    return 0


def generation_service(
    choice: ModelChoice, options: argparse.Namespace, *, name: str, max_body: int
) -> tuple[BaseService, ComputeThread]:
    """Returns the endpoints of a model that generates text, and the thread that runs it."""
    from ligerzoo.serve.app import Service
    from ligerzoo.serve.engine_thread import EngineThread

    tokenizer = load_tokenizer(choice, options.chat_template)
    model = load_model(choice)
    make_scheduler = scheduler_maker(model, tokenizer, options)
    scheduler = make_scheduler(max_cache_tokens=options.max_cache_tokens)
    encoder = prompt_encoder(model, tokenizer, scheduler.max_length, options.max_context)
    max_requests = options.batch_size + options.max_queue
    # The default of `max_cache_tokens` depends on the memory that is free now.
    engine = EngineThread(
        partial(make_scheduler, max_cache_tokens=scheduler.max_cache_tokens), max_requests=max_requests
    )
    return Service(engine, encoder, name=name, max_body=max_body), engine


def embedding_service(
    choice: ModelChoice, options: argparse.Namespace, *, name: str, max_body: int
) -> tuple[BaseService, ComputeThread]:
    """Returns the endpoints of an embedding model, and the thread that runs it.

    Raises:
        LigerzooError: there are options of generation.
    """
    from ligerzoo.serve.embeddings import EmbeddingService, EmbeddingThread

    given = {"--chat-template": options.chat_template, "--max-cache-tokens": options.max_cache_tokens}
    given["--cache-dtype"] = None if options.cache_dtype == "auto" else options.cache_dtype
    for flag, value in given.items():
        if value is not None:
            expected = "no such option for an embedding model"
            raise LigerzooError("not supported", where=flag, got=value, expected=expected)
    model = load_embedding_model(choice, pooling=options.pooling, max_length=options.max_context)
    max_waiting = options.batch_size + options.max_queue
    engine = EmbeddingThread(model, batch_size=options.batch_size, max_waiting=max_waiting)
    return EmbeddingService(model, engine, name=name, max_body=max_body), engine


def generate_batch(choice: ModelChoice, options: argparse.Namespace) -> int:
    """Continues the prompts of a file, and writes the results to another one."""
    import time

    from tqdm import tqdm

    from ligerzoo.serve import batch
    from ligerzoo.serve.options import VALUES

    defaults = {name: value for name, value in vars(options).items() if name in VALUES and value is not None}
    results = batch.Results(options.output, resumes=options.resume)
    tokenizer = load_tokenizer(choice, options.chat_template)
    model = load_model(choice)
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


def add_batching_options(parser: argparse._ActionsContainer, batch_size: int | None) -> None:
    size = f"prompts that are decoded at a time (default: {DEFAULT_BATCH_SIZE})"
    parser.add_argument("--batch-size", type=AT_LEAST_1, default=batch_size, metavar="N", help=size)
    tokens = "tokens for which KV caches take up memory; longer prompts wait (default: 3/4 of the GPU's free memory)"
    add_option(parser, "--max-cache-tokens", AT_LEAST_1, tokens)


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
