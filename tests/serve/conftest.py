"""Skips the tests of the server where its packages or its client are not installed."""

from importlib.util import find_spec

collect_ignore = [] if all(map(find_spec, ("starlette", "uvicorn", "openai"))) else ["test_app.py"]
