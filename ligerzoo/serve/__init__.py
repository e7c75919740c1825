"""Serves a model: over HTTP with an OpenAI-compatible API, or for a file of prompts.

    server        listens on a socket and runs the application until Ctrl-C
    app           the HTTP endpoints: bodies, server-sent events, errors
    access        the names of the server, and its key
    limits        what one client cannot take from others: threads, memory, connections
    protocol      JSON of the endpoints: requests -> calls, continuations -> responses
    fields        JSON, and checks of its fields
    tools         functions that the model may call, and its calls of them
    schemas       the JSON schema that an answer must match
    options       sampling options of one request, and what a client may choose
    prompts       texts and conversations -> checked token ids
    engine_thread the thread that drives the scheduler for asynchronous callers
    metrics       counters, as Prometheus reads them
    continuation  tokens -> text, up to a stop string
    batch         continues the prompts of a JSONL file

Only `server`, `access`, `limits` and `app` need the packages of the extra `[serve]`.
"""
