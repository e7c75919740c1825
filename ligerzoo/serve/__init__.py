"""Serves a model: over HTTP with an OpenAI-compatible API, or for a file of prompts.

    server         listens on a socket and runs the application until Ctrl-C
    app            the HTTP endpoints: bodies, server-sent events, errors
    protocol       OpenAI's JSON: requests -> calls, continuations -> responses
    tokenization   vLLM's JSON for /tokenize and /detokenize
    fields         checks of JSON fields
    chat_prompt    the fields of a request that make a prompt of messages
    json_text      parses and writes JSON
    engine         the thread that drives the scheduler for asynchronous callers
    batch          continues the prompts of a JSONL file
    prompts        texts and conversations -> checked token ids
    options        sampling options of one request
    continuation   tokens -> text, up to a stop string
    token_texts    the texts of single tokens

Only `server` and `app` need the packages of the extra `[serve]`.
"""
